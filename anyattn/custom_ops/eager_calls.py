"""Eager calls that run as custom operators; ``tensors.kinds`` decides which calls these are.

They have fake or meta tensors, tensors of ``torch.func.grad`` and ``vjp`` or of subclasses that dispatch, or are under graph capture.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from anyattn.call_cache.attention import FlexCall, Places
from anyattn.custom_ops import entry_points
from anyattn.kvcache.scales import EIGHT_BITS
from anyattn.reductions.request import Reductions
from anyattn.tensors import kinds
from anyattn.tensors.dynamo import opaque
from anyattn.validate import block_sparse, kvcache, scales, sequences
from anyattn.validate import flash as check_flash
from anyattn.validate import flex as check
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments

__all__ = ["decode", "flash", "flex", "reductions", "skipping"]


@opaque
def flex(call: FlexCall, backend: str | None, options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of a ``flex_attention`` call; max_scores is empty unless wanted. options: ``kernel_options``."""
    check.tensors(call.query, call.key, call.value, call.enable_gqa)
    check.aux_list(call.aux_tensors, call.query.device)
    with _among((call.query, call.key, call.value)):
        return entry_points.flex(call, backend, options)


@opaque
def skipping(call: FlexCall, backend: str | None, options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, max_scores, skipped) of a call with a threshold; the last two are empty unless wanted."""
    check.tensors(call.query, call.key, call.value, call.enable_gqa)
    check.aux_list(call.aux_tensors, call.query.device)
    assert call.skip is not None
    with _among((call.query, call.key, call.value)):
        return entry_points.skipping(call[:14], backend, options, call.skip.below, call.skip.counts is not None)


@opaque
def reductions(call: FlexCall, backend: str | None, options: Any, lse: Tensor, wanted: Reductions) -> list[Tensor]:
    """The reductions of a call of ``flex``. lse: its result."""
    with _among((call.query, call.key, call.value)):
        return entry_points.reductions(call._replace(dropout=None, skip=None), backend, options, lse, wanted)


@opaque
def flash(q: Tensor, k: Tensor, v: Tensor, places: Places, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a ``flash_attn_func`` call, or with any table of a ``flash_attn_varlen_func`` call."""
    cu_q, cu_k, used_q, used_k, pages = places.tables
    if all(t is None for t in places.tables) and getattr(k, "dtype", None) not in EIGHT_BITS:
        check_flash.check_dense_storage(q, k, v)
    else:
        check_flash.check_varlen_storage(q, k, v, cu_q, cu_k, pages)
    tables = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "seqused_q": used_q, "seqused_k": used_k, "page_table": pages}
    _check_options(q, k, sequences.batch_of(q, cu_q, cu_k, k, pages), options, tables)
    if options.block_sparse_tensors is not None and kinds.are_fake((q, k, v)) and not kinds.is_recorded():
        _check_blocks(q, k, options.block_sparse_tensors, is_varlen=any(t is not None for t in places.tables))
        options = options._replace(block_sparse_tensors=None)  # may have memory, and do not affect result shapes
    with _among((q, k, v)):
        return entry_points.flash(q, k, v, places, options, backend)


@opaque
def decode(arguments: CacheArguments, options: Options, backend: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a ``flash_attn_with_kvcache`` call."""
    if active := kinds.transforms():
        raise TypeError(f"flash_attn_with_kvcache is called inside torch.func.{active[-1]}, and has no gradients; call it outside of it")
    arguments = kvcache.with_values(arguments)
    rows = (arguments.q, arguments.k_cache, arguments.v_cache)
    kvcache.check_storage(*rows, arguments.k, arguments.v, arguments.cu_seqlens_q, arguments.page_table)
    others = {n: t for n, t in arguments._asdict().items() if isinstance(t, Tensor)}
    batch = arguments.q.shape[0] if arguments.cu_seqlens_q is None else sequences.batch_of_ends("cu_seqlens_q", arguments.cu_seqlens_q)
    _check_options(arguments.q, arguments.k_cache, batch, options, others)
    with _among(rows):
        return entry_points.decode(arguments, options, backend)


def _check_blocks(q: Tensor, k: Tensor, blocks: Any, is_varlen: bool) -> None:
    block_sparse.check_class(blocks, is_varlen)
    if is_varlen:
        block_sparse.check_varlen(blocks, q, q.shape[-2], k.shape[-2])
    else:
        block_sparse.check_dense(blocks, q, (q.shape[1], k.shape[1]), (q.shape[0], q.shape[2]), k.shape[-2])


def _among(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """Context in which new tensors are fake if the call's tensors are."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(tensors) if kinds.are_fake(tensors) else None
    return nullcontext() if mode is None else mode


def _check_options(q: Tensor, k: Tensor, batch: int, options: Options, tables: dict[str, Any]) -> None:
    """The checks of FlashAttention's arguments besides q, k and v that read no values."""
    check.sink_logits(options.sink, check_flash.heads_first(q))
    check.aux_list(options.aux_tensors, q.device)
    check_flash.softcap_score(options.softcap, q.dtype)
    scales.scales_of(options.k_descale, options.v_descale, check_flash.heads_first(k), batch)
    if options.alibi_slopes is not None:
        check_flash.check_slopes(options.alibi_slopes, batch, q.shape[-2], q.device)
    for name, table in tables.items():
        sequences.check_device(name, table, q.device)
