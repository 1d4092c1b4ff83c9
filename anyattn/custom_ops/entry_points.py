"""The entry points inside ``torch.compile`` and ``torch.export``: arguments in, one ``call_with_mods`` out.

Dynamo traces this module's functions: no arithmetic, no checks (those are in the operator's body), nothing that Dynamo does not know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyattn import check
from anyattn.custom_ops import dynamo  # noqa: F401 - enters the operator into Dynamo's table
from anyattn.custom_ops.capture import bound, call_with_mods

__all__ = ["flex"]

_FLEX_MODS = (("score", "score_mod"), ("mask", "block_mask.mask_mod"), ("mask", "mask_mod"))


def flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    mask_mod: Any,
    aux_tensors: Any,
    scale: float | None,
    enable_gqa: bool,
    sink: Tensor | None,
    wants_max: bool,
    deterministic: bool,
    backend: str | None,
    kernel_options: dict[str, Any] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of ``flex_attention``."""
    lists: tuple = ()
    listing, listed = None, None
    if block_mask is not None:
        check.is_block_mask(block_mask)
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        listing = (block_mask.seq_lengths, block_mask.BLOCK_SIZE, getattr(block_mask, "is_exact", False))
        listed = block_mask.mask_mod
    operands = (
        query, key, value, lists, listing, scale, bool(enable_gqa), sink, wants_max, bool(deterministic), backend, kernel_options,
    )  # fmt: skip
    mods = (bound(score_mod, "score", aux_tensors), bound(listed, "mask", aux_tensors), bound(mask_mod, "mask", aux_tensors))
    return call_with_mods("flex", query, operands, _FLEX_MODS, mods)
