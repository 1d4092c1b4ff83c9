"""Entry points inside ``torch.compile`` and ``torch.export``: arguments in, one ``call_with_mods`` out.

Dynamo traces this module's functions: no arithmetic, no checks (those are in the operator's body), nothing that Dynamo does not know.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.call_cache.attention import FlexCall, Places
from anyattn.custom_ops import dynamo  # noqa: F401 - enters the operator into Dynamo's table
from anyattn.custom_ops.capture import bound, call_with_mods
from anyattn.validate import flex as check
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import Given

__all__ = ["block_lists", "decode", "flash", "flex"]

_OF_MODS = ("score_mod", "mask_mod", "block_mask", "block_sparse_tensors", "aux_tensors")
_BLOCK_MASK_MODS = (("mask", "mask_mod"),)
_FLASH_MODS = (("score", "score_mod"), ("mask", "mask_mod"))
_FLEX_MODS = (("score", "score_mod"), ("mask", "block_mask.mask_mod"), ("mask", "mask_mod"))


def flex(call: FlexCall, backend: str | None, kernel_options: dict[str, Any] | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of ``flex_attention``."""
    lists: tuple = ()
    listing, listed = None, None
    block_mask, aux_tensors = call.block_mask, call.aux_tensors
    if block_mask is not None:
        check.is_block_mask(block_mask)
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        listing = (block_mask.seq_lengths, block_mask.BLOCK_SIZE, getattr(block_mask, "_exact", False))
        listed = block_mask.mask_mod
    operands = (_without_mods(call), lists, listing, backend, kernel_options)
    mods = (bound(call.score_mod, "score", aux_tensors), bound(listed, "mask", aux_tensors), bound(call.mask_mod, "mask", aux_tensors))
    return call_with_mods("flex", call.query, operands, _FLEX_MODS, mods)


def flash(q: Tensor, k: Tensor, v: Tensor, places: Places, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``."""
    _refuse_lists(options)
    operands = (q, k, v, tuple(places), _without_mods(options), backend)
    return call_with_mods("flash", q, operands, _FLASH_MODS, _mods_of(options))


def decode(given: Given, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``."""
    q, ends, lengths = given.q, given.cu_seqlens_q, given.cache_seqlens
    if isinstance(lengths, int):
        lengths = torch.full((len(q) if ends is None else len(ends) - 1,), lengths, device=q.device)
    return call_with_mods("decode", q, (tuple(given), lengths, _without_mods(options), backend), _FLASH_MODS, _mods_of(options))


def _mods_of(options: Options) -> tuple:
    return bound(options.score_mod, "score", options.aux_tensors), bound(options.mask_mod, "mask", options.aux_tensors)


def _without_mods(given: Any) -> tuple:
    """A NamedTuple of arguments as an operand: mods travel beside it, and aux_tensors inside them."""
    return tuple([None if name in _OF_MODS else value for name, value in zip(given._fields, given)])


def _refuse_lists(options: Options) -> None:
    if options.block_sparse_tensors is not None:
        raise TypeError(
            "block_sparse_tensors is given inside torch.compile, torch.export or torch.func; wanted None: pass the mask_mod alone, its "
            "tiles are found"
        )


def block_lists(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any, BLOCK_SIZE: Any, separate_full: bool
) -> tuple[list[Tensor | None], tuple]:
    """The eight lists of ``create_block_mask``, None for full blocks where they are not listed separately, and the block size as a pair."""
    like = torch.empty(0, device=device)
    operands = (B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, bool(separate_full))
    found = call_with_mods("block_mask", like, operands, _BLOCK_MASK_MODS, (mask_mod,))
    lists = list(found) if separate_full else [*found[:2], None, None, *found[2:], None, None]
    return lists, tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
