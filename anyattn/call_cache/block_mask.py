"""Warm calls of ``create_block_mask`` on a GPU: the checks, the trace and the launches of a first call are remembered.

A warm call reads the captured values of its mask, allocates lists, launches the kernels, and makes the block mask from the lists and the
remembered fields.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from anyattn.call_cache.calls import TwoGenerationCache
from anyattn.call_cache.rebind import Recipe
from anyattn.call_cache.signature import Kind, Signature, signature
from anyattn.mods.analysis.load_bounds import doubt
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER
from anyattn.sparsity.arguments import reads_nothing
from anyattn.sparsity.block_mask import LISTS, BlockMask, build_block_mask
from anyattn.sparsity.compute import held_for_kernels
from anyattn.sparsity.grid import BLOCK_MASK, TileGrid
from anyattn.sparsity.made_of import made_of, note
from anyattn.tensors.dynamo import opaque

if TYPE_CHECKING:
    from anyattn.sparsity.kernels.prepared_lists import PreparedLists

__all__ = ["block_mask_call"]

_signature = signature(
    "create_block_mask", mask_mod=Kind.LISTED_MASK, B=Kind.INT_OR_NONE, H=Kind.INT_OR_NONE, Q_LEN=Kind.INT_OR_NONE,
    KV_LEN=Kind.INT_OR_NONE, device=Kind.DEVICE, BLOCK_SIZE=Kind.INTS, separate_full_blocks=Kind.FLAG,
)  # fmt: skip
_is_inference = torch.is_inference_mode_enabled


class RememberedMask(NamedTuple):
    """The common properties of the block masks of one key. fields: those of the block mask, without its lists and its function."""

    fields: dict[str, Any]
    recipe: Recipe
    launches: PreparedLists

    def block_mask(self, signature: Signature, mask_mod: Callable) -> BlockMask:
        """The block mask of a warm call."""
        fields = dict(self.fields)
        fields["mask_mod"] = mask_mod
        fields.update(zip(LISTS, self.launches.lists(*self.recipe.captured(signature))))
        fields["_made_of"] = made_of(signature.readings[0]) if fields["_exact"] else None
        block_mask = BlockMask.of_fields(fields)
        note(block_mask)
        return block_mask


_COLD: Any = object()  # marks a key whose calls all take the slow path
_masks: TwoGenerationCache[RememberedMask] = TwoGenerationCache()


@opaque
@without_default_device
def block_mask_call(
    mask_mod: Any,
    batch: tuple[int | None, int | None],
    lengths: tuple[int, int],
    device: torch.device | str | None,
    block_size: int | tuple[int, int],
    separate_full: bool,
) -> BlockMask:
    """``create_block_mask`` outside compiled code, without a write order, on a device where kernels may make the lists.

    Raises as ``build_block_mask``.
    """
    arguments = (mask_mod, batch, lengths, device, block_size, separate_full, None)
    # lists made in inference mode have to be copied, because torch does not count writes to inference tensors
    if type(mask_mod) is TracedMod or _is_inference():
        return build_block_mask(*arguments)
    call_signature = _signature(mask_mod, *batch, *lengths, device, block_size, separate_full)
    if call_signature is None:
        return build_block_mask(*arguments)
    warm = _masks.get(call_signature.key)
    if warm is None or warm is _COLD:
        block_mask = build_block_mask(*arguments)
        if warm is None:
            _remember(
                call_signature,
                partial(_signature, mask_mod, *batch, *lengths, device, block_size, separate_full),
                block_mask,
                separate_full,
            )
        return block_mask
    return warm.block_mask(call_signature, mask_mod)


def _remember(call_signature: Signature, recompute: Callable[[], Signature | None], block_mask: BlockMask, separate_full: bool) -> None:
    """Remembers a first call; as ``_COLD`` if kernels did not make its lists, or if it captures a far number: a call of the same key may
    capture one for which only torch operations can make the lists.

    recompute: as in ``calls.remember``.
    """
    (reading,) = call_signature.readings
    user = trace(block_mask.mask_mod, "mask")
    has_far = any(type(n) is int and not -NEAR_NUMBER < n < NEAR_NUMBER for n in reading.numbers)
    mask_and_launches = None if user.source is None or has_far else _prepared(user, block_mask, separate_full)
    if user.source is None or mask_and_launches is None:
        _masks.put(call_signature.key, _COLD)
        return
    held, launches = mask_and_launches
    (B, H), (seqlen_q, seqlen_k) = block_mask.kv_num_blocks.shape[:2], block_mask.seq_lengths
    # loads that would leave their tensor are clamped at pairs that the mask hides; which pairs these are may depend on any number
    if held is not user or doubt(user, B, H, seqlen_q, seqlen_k).of_numbers:
        user.source.pattern.fix(user.source.scalars)
    recomputed = recompute()
    if recomputed is None or recomputed.key != call_signature.key:
        return
    fields = {name: None if name in (*LISTS, "mask_mod") else value for name, value in vars(block_mask).items()}
    _masks.put(call_signature.key, RememberedMask(fields, Recipe.of(held, user, 0, ()), launches))


def _prepared(user: TracedMod, block_mask: BlockMask, separate_full: bool) -> tuple[TracedMod, PreparedLists] | None:
    """The mask as the kernels evaluate it, and the kernels' launches for other captured values; None if no kernels made the lists."""
    batch, device = (block_mask.kv_num_blocks.shape[0], block_mask.kv_num_blocks.shape[1]), block_mask.kv_indices.device
    grid = TileGrid(block_mask.seq_lengths, block_mask.BLOCK_SIZE, batch)
    if reads_nothing(user, device) or (held := held_for_kernels(user, grid, device)) is None:
        return None
    from anyattn.sparsity.kernels.prepared_lists import prepared

    launches = prepared(held, grid, device, BLOCK_MASK._replace(separate_full=bool(separate_full)))
    return None if launches is None else (held, launches)
