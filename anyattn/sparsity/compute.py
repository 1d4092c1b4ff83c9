"""``compute_block_sparsity``: conversion of a mask to tile lists, with FlashAttention's names; ``create_block_mask`` is built on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.tile_classes import classify
from anyattn.mods.analysis.visible_loads import Dense, check_call
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.sparsity import captured
from anyattn.sparsity.arguments import check_many, device_of, has_triton, length, positions, reads_nothing, runs_kernels, without_transforms
from anyattn.sparsity.block_sparse import LISTS, BlockSparseTensors
from anyattn.sparsity.grid import BLOCK_SPARSE, ListForm, TileGrid, lists_of_memory, stacked
from anyattn.sparsity.lists import both_ways, with_partial_tails
from anyattn.sparsity.pytree_nodes import unchecked
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.kinds import not_scriptable, refuse_torchscript

__all__ = [
    "compute_block_sparsity",
    "has_triton",
    "held_for_kernels",
    "lists_of_mask",
    "runs_kernels",
    "tile_lists",
    "tile_lists_both_ways",
]


@not_scriptable
def compute_block_sparsity(
    tile_m: int,
    tile_n: int,
    batch_size: int | None,
    num_heads: int | None,
    seqlen_q: int,
    seqlen_k: int,
    mask_mod: Callable,
    aux_tensors: Sequence[Tensor] | None = None,
    device: torch.device | str | None = None,
    compute_full_blocks: bool = True,
    use_fast_sampling: bool = False,
) -> BlockSparseTensors:
    """The partial and full tiles of a mask, as FlashAttention's function of this name returns them.

    tile_m, tile_n: query rows and keys of a tile. batch_size, num_heads: None if the mask ignores them (the lists then broadcast).
    mask_mod: a function of ``(b, h, q_idx, kv_idx)``, with a trailing ``aux_tensors`` if they are given. device: default as for
    ``create_block_mask``. compute_full_blocks: False lists full tiles as mask blocks and leaves ``full_block_*`` None.
    use_fast_sampling: accepted for compatibility; the classes are exact either way, and only tiles that stay undecided are evaluated.

    A tail tile counts as full if all its pairs *inside the sequences* are visible, as in FlashAttention, whose kernels mask the tail of
    every tile themselves; ``create_block_mask`` counts it as partial, as torch does.

    Raises ``TypeError`` or ``ValueError`` for bad sizes, ``ModError`` for a mask that cannot be expressed, ``ValueError`` for a mask that
    reads a captured tensor out of range.

    >>> compute_block_sparsity(128, 128, 1, 1, 768, 896, lambda b, h, q, k: q + 128 >= k, device="cpu")
    BlockSparseTensors(6 x 7 tiles of 128 x 128, (1, 1) batches x heads: 6 mask, 21 full, 15 skipped)
    """
    if torch.compiler.is_compiling():
        sizes = (batch_size, num_heads, seqlen_q, seqlen_k)
        tensors = captured.entry_points.tile_lists(mask_mod, aux_tensors, sizes, (tile_m, tile_n), device, compute_full_blocks)
        return unchecked(BlockSparseTensors, (*LISTS, "tile", "lengths"), (*tensors, (tile_m, tile_n), (seqlen_q, seqlen_k)))
    return _computed((tile_m, tile_n), (batch_size, num_heads), (seqlen_q, seqlen_k), mask_mod, aux_tensors, device, compute_full_blocks)


@opaque
@without_default_device
def _computed(
    tile: tuple[int, int],
    batch: tuple[int | None, int | None],
    lengths: tuple[int, int],
    mask_mod: Callable,
    aux_tensors: Sequence[Tensor] | None,
    device: torch.device | str | None,
    separate_full: bool,
) -> BlockSparseTensors:
    """``compute_block_sparsity`` outside compiled code: its arguments are checked here. batch: entries and heads."""
    tile = (length("tile_m", tile[0], 1), length("tile_n", tile[1], 1))
    lengths = (positions("seqlen_q", lengths[0]), positions("seqlen_k", lengths[1]))
    counts = (1 if batch[0] is None else length("batch_size", batch[0]), 1 if batch[1] is None else length("num_heads", batch[1]))
    traced = trace(mask_mod, "mask", aux_tensors=aux_tensors)
    where = device_of(device, traced)
    with without_transforms(traced, where):
        form = BLOCK_SPARSE._replace(separate_full=bool(separate_full))
        lists = lists_of_mask(traced, TileGrid(lengths, tile, counts), where, form)
    return BlockSparseTensors(*lists, tile=tile, lengths=lengths)  # type: ignore[misc]


def lists_of_mask(mask: TracedMod, grid: TileGrid, device: torch.device, form: ListForm, stacks: bool = False) -> list[Any]:
    """The four lists of ``compute_block_sparsity``, or the eight of a block mask; None for full tiles if they are not listed separately.

    stacks: return the lists as stacks (``sparsity.grid``), which share no memory.
    """
    refuse_torchscript()
    lists = device_lists(mask, grid, device, form, stacks)
    if lists is not None:
        return lists
    with torch.no_grad():  # a mask may compare learned parameters; tile classes have no gradient
        ((mask,), _) = check_call(Dense(*grid.batch, *grid.lengths), [mask])
        classes = classify(mask, *grid.lengths, *grid.tile, *grid.batch, device)
    classes = classes if form.has_full_tails else with_partial_tails(classes, grid.lengths, grid.tile)
    one_entry = both_ways(classes, form.separate_full, form.wants_columns)
    lists = [None if t is None else t.expand(*grid.batch, *t.shape[2:]).contiguous() for t in one_entry]
    return stacked(lists, form, grid) if stacks else lists


def tile_lists(mask: TracedMod, grid: TileGrid, device: torch.device | str | None = None) -> BlockSparseTensors:
    """The lists of a traced mask for a kernel's own tiles, of any size: ``compute_block_sparsity`` without its checks.

    The caller has checked that the mask reads inside its captured tensors (``analysis.visible_loads``). Only pairs inside the sequences
    count: a tail tile whose pairs are all visible is full. B and H of the lists are 1 if the mask ignores b or h. On a CUDA device the host
    does not wait (see ``device_lists``).
    """
    return BlockSparseTensors(*_tile_lists(mask, grid, device, False), tile=grid.tile, lengths=grid.lengths)  # type: ignore[misc]


def tile_lists_both_ways(
    mask: TracedMod, grid: TileGrid, device: torch.device | str | None = None
) -> tuple[BlockSparseTensors, BlockSparseTensors]:
    """``tile_lists``, and the lists of the row tiles of each key tile, as ``BlockSparseTensors.transposed`` has them: made together."""
    lists = _tile_lists(mask, grid, device, True)
    by_row = BlockSparseTensors(*lists[:4], tile=grid.tile, lengths=grid.lengths)  # type: ignore[misc]
    return by_row, BlockSparseTensors(*lists[4:], tile=grid.tile[::-1], lengths=grid.lengths[::-1])  # type: ignore[misc]


def _tile_lists(mask: TracedMod, grid: TileGrid, device: torch.device | str | None, wants_columns: bool) -> list[Any]:
    where = device_of(device, mask)
    lists = device_lists(mask, grid, where, BLOCK_SPARSE._replace(broadcasts=True, wants_columns=wants_columns))
    if lists is not None:
        return lists
    with torch.no_grad():
        return both_ways(classify(mask, *grid.lengths, *grid.tile, *grid.batch, where), True, wants_columns)


def device_lists(mask: TracedMod, grid: TileGrid, device: torch.device, form: ListForm, stacks: bool = False) -> list[Tensor | None] | None:
    """The lists made by Triton kernels without waiting for the device (``sparsity.kernels.block_lists``); None if they cannot be used.

    stacks: return the allocations that hold the lists. For fake and meta tensors, lists without values.

    Usable on a CUDA device if Triton is installed, unless the mask captures an integer of magnitude 2 ** 40 or more. Raises ``ValueError``
    for a mask that reads outside a captured tensor; an index that is read from another captured tensor is clamped instead.
    """
    if reads_nothing(mask, device):
        memory: list[Any] = [torch.empty(s, dtype=torch.int32, device=device) for s in form.stack_shapes(grid.batch, grid.shape)]
        return memory if stacks else lists_of_memory(memory, 1 + form.separate_full)
    check_many(grid)
    held = held_for_kernels(mask, grid, device)
    if held is None:
        return None
    from anyattn.sparsity.kernels import block_lists as kernels

    return kernels.list_tiles(held, grid, device, form, stacks)


def held_for_kernels(mask: TracedMod, grid: TileGrid, device: torch.device) -> TracedMod | None:
    """The mask with every load inside its tensor, as kernels evaluate it; None if kernels cannot be used. Raises as ``device_lists``.

    No captured tensor is read.
    """
    if not runs_kernels(device):
        return None
    from anyattn.sparsity.kernels import block_lists as kernels

    if not kernels.can_list(mask, grid.lengths):
        return None
    ((held,), _) = check_call(Dense(*grid.batch, *grid.lengths), [mask], reads_values=False)
    return held
