"""Entry points inside ``torch.compile`` and ``torch.export``: convert their arguments into one ``call_with_mods``.

Dynamo traces this module's functions, so they do no arithmetic and no checks (those are in the operator's body) and use only constructs
that Dynamo supports. Dynamo guards everything that is read here besides the arguments (functions, classes, a module's tuples) before every
call of the compiled graph, for some tenths of a microsecond each: so arguments are plain tuples in the order of ``FlexCall``, ``Places``,
``Options`` and ``CacheArguments``, and constants are written inline.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from anyattn.custom_ops import entry_point, run_uncompiled
from anyattn.custom_ops.capture import bound, call_with_mods
from anyattn.sparsity import captured, compute, varlen_block_sparse
from anyattn.sparsity.chosen_blocks import has_columns, mask_inside
from anyattn.validate.block_sparse import parts_of_blocks
from anyattn.validate.flex import is_block_mask

try:
    from anyattn.custom_ops import dynamo  # noqa: F401 - enters the operator into Dynamo's table
except (ImportError, AttributeError) as _error:  # private names of Dynamo, which another torch may not have
    run_uncompiled()
    warnings.warn(f"torch.compile of torch {torch.__version__} cannot capture attention, which runs uncompiled: {_error}", stacklevel=2)

__all__ = ["block_lists", "decode", "flash", "flex", "reductions", "skipping", "tile_lists", "topk_lists", "varlen_tile_lists"]


def flex(call: tuple, backend: str | None, kernel_options: dict[str, Any] | None) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of ``flex_attention``. call: a ``FlexCall``."""
    query, key, value, score_mod, block_mask, mask_mod, aux_tensors, *others = call
    if getattr(block_mask, "handle", None) is not None:  # of a plan
        operands: tuple = ((query, key, value, None, None, None, None, *others), block_mask.handle, backend, kernel_options)
        both = (bound(score_mod, "score", aux_tensors), bound(mask_mod, "mask", aux_tensors))
        return call_with_mods("sharded", query, operands, (("score", "score_mod"), ("mask", "mask_mod")), both)
    operands, kinds, mods = _parts_of_flex(call, backend, kernel_options)
    return call_with_mods("flex", query, operands, kinds, mods)


def skipping(
    call: tuple, backend: str | None, kernel_options: dict[str, Any] | None, skip_below: Tensor, counts_tiles: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, max_scores, skipped) of ``flex_attention`` with ``skip_below``. call: a ``FlexCall`` without a plan."""
    operands, kinds, mods = _parts_of_flex(call, backend, kernel_options)
    return call_with_mods("skipping", call[0], (*operands, skip_below, counts_tiles), kinds, mods)


def reductions(call: tuple, backend: str | None, kernel_options: dict[str, Any] | None, lse: Tensor, wanted: tuple) -> list[Tensor]:
    """The reductions of a ``flex`` call without dropout. lse: its result. wanted: ``reductions.request.Reductions``."""
    operands, kinds, mods = _parts_of_flex(call, backend, kernel_options)
    return call_with_mods("reductions", call[0], (*operands, lse, (*wanted,)), kinds, mods)


def _parts_of_flex(call: tuple, backend: str | None, kernel_options: dict[str, Any] | None) -> tuple[tuple, tuple, tuple]:
    """The last three arguments of ``call_with_mods`` for a ``FlexCall`` without a plan."""
    query, key, value, score_mod, block_mask, mask_mod, aux_tensors, *others = call
    lists: tuple = ()
    listing, listed = None, None
    if block_mask is not None:
        is_block_mask(block_mask)
        lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        leaves_heads = getattr(block_mask, "_leaves_heads", False)
        listing = (block_mask.seq_lengths, block_mask.BLOCK_SIZE, getattr(block_mask, "_exact", False), leaves_heads)
        listed = block_mask.mask_mod
    operands = ((query, key, value, None, None, None, None, *others), lists, listing, backend, kernel_options)
    mods = (bound(score_mod, "score", aux_tensors), bound(listed, "mask", aux_tensors), bound(mask_mod, "mask", aux_tensors))
    kinds = (("score", "score_mod"), ("mask", "block_mask.mask_mod"), ("mask", "mask_mod"))
    return operands, kinds, mods


def flash(q: Tensor, k: Tensor, v: Tensor, places: tuple, options: tuple, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``. places, options: ``Places``, ``Options``."""
    others, blocks, mods = _mods_apart(options)
    if blocks is not None:
        cu_q, cu_k, used_q, used_k, pages = places[0]
        is_dense = cu_q is None and cu_k is None and used_q is None and used_k is None and pages is None
        blocks = parts_of_blocks(blocks, not is_dense)
    operands = (q, k, v, (*places,), others, blocks, backend)
    return call_with_mods("flash", q, operands, (("score", "score_mod"), ("mask", "mask_mod")), mods)


def decode(arguments: tuple, options: tuple, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``. arguments, options: ``CacheArguments``, ``Options``."""
    q, k_cache, v_cache, k, v, cos, sin, lengths, rows, padding, pages, ends, *others = arguments
    if isinstance(lengths, int):
        lengths = torch.full((len(q) if ends is None else len(ends) - 1,), lengths, device=q.device)
    tensors = (q, k_cache, v_cache, k, v, cos, sin, lengths, rows, padding, pages, ends)
    without, _, mods = _mods_apart(options)
    operands = ((*tensors, *others), without, backend)
    return call_with_mods("decode", q, operands, (("score", "score_mod"), ("mask", "mask_mod")), mods)


def _mods_apart(options: tuple) -> tuple[tuple, Any, tuple]:
    """``Options`` as operands, block_sparse_tensors, and the mods, which are passed separately and have aux_tensors bound."""
    scale, causal, window, softcap, slopes, sink, score_mod, mask_mod, blocks, aux_tensors, *others = options
    without = (scale, causal, window, softcap, slopes, sink, None, None, None, None, *others)
    return without, blocks, (bound(score_mod, "score", aux_tensors), bound(mask_mod, "mask", aux_tensors))


def block_lists(
    mask_mod: Any, B: Any, H: Any, Q_LEN: Any, KV_LEN: Any, device: Any, BLOCK_SIZE: Any, separate_full: bool
) -> tuple[list[Tensor | None], tuple]:
    """The eight lists of ``create_block_mask``, None for full blocks that are not listed separately, and the block size as a pair."""
    like = torch.empty(0, device=device)
    operands = (B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, bool(separate_full))
    tensors = call_with_mods("block_mask", like, operands, (("mask", "mask_mod"),), (mask_mod,))
    lists = list(tensors) if separate_full else [*tensors[:2], None, None, *tensors[2:], None, None]
    return lists, tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)


def tile_lists(mask_mod: Any, aux_tensors: Any, sizes: tuple, tile: tuple, device: Any, separate_full: bool) -> list[Tensor | None]:
    """The four lists of ``compute_block_sparsity``. sizes: batch_size, num_heads, seqlen_q, seqlen_k."""
    like = torch.empty(0, device=device)
    operands = (sizes, tile, device, bool(separate_full))
    tensors = call_with_mods("tile_lists", like, operands, (("mask", "mask_mod"),), (bound(mask_mod, "mask", aux_tensors),))
    return list(tensors) if separate_full else [*tensors, None, None]


def topk_lists(
    indices: Any, counts: Any, BLOCK_SIZE: Any, seq_lengths: Any, causal: Any, mask_mod: Any, compute_q_blocks: Any
) -> tuple[list[Tensor | None], Any, tuple, tuple]:
    """``BlockMask.from_topk``: the lists, the mask inside the blocks, the lengths and the block size."""
    inner = mask_inside(causal, mask_mod, seq_lengths)
    wants_columns = bool(compute_q_blocks) and has_columns(BLOCK_SIZE)
    operands = ((indices, counts), BLOCK_SIZE, seq_lengths, wants_columns)
    tensors = call_with_mods("topk_lists", indices, operands, (("mask", "mask_mod"),), (inner,))
    if len(tensors) == 8 or (len(tensors) == 4 and not wants_columns):
        lists = list(tensors)
    elif wants_columns:
        lists = [*tensors[:2], None, None, *tensors[2:], None, None]
    else:
        lists = [*tensors, None, None]
    tile = tuple(BLOCK_SIZE) if isinstance(BLOCK_SIZE, (tuple, list)) else (BLOCK_SIZE, BLOCK_SIZE)
    return lists, noop_mask if inner is None else inner, (seq_lengths[0], seq_lengths[1]), tile


def varlen_tile_lists(
    mask_mod: Any, aux_tensors: Any, tables: tuple, num_heads: Any, tile: tuple, device: Any, separate_full: bool, layout: str
) -> list[Tensor | None]:
    """The four lists and the four tables of ``compute_varlen_block_sparsity``. tables: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k."""
    like = torch.empty(0, device=device)
    operands = (tables, num_heads, tile, device, bool(separate_full), layout)
    tensors = call_with_mods("varlen_tile_lists", like, operands, (("mask", "mask_mod"),), (bound(mask_mod, "mask", aux_tensors),))
    return list(tensors) if separate_full else [*tensors[:2], None, None, *tensors[2:]]


captured.entry_points = sys.modules[__name__]
entry_point(compute.compute_block_sparsity)
entry_point(varlen_block_sparse.compute_varlen_block_sparsity)
