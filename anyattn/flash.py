"""Entry points with FlashAttention's names: whole batches, packed sequences, and decoding with a cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from anyattn import autograd, hardware, planner
from anyattn.backends import backend_module
from anyattn.call_cache import attention, latest
from anyattn.custom_ops import entry_point
from anyattn.mods.dropout import seeded
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.tensors import autocast
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.kinds import has_memory, refuse_torchscript
from anyattn.validate import flash
from anyattn.validate.flash import Options
from anyattn.validate.outputs import check_out, check_out_memory, write_out

if TYPE_CHECKING:
    from anyattn.sparsity.block_sparse import BlockSparseTensors
    from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


@entry_point
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *beyond: Any,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0,  # an int: torch.compile(dynamic=True) makes 0.0 a symbolic float and compiles twice
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: BlockSparseTensors | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    deterministic: bool | str = False,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    dropout_p: float = 0,  # an int, as softcap
    backend: str | None = None,
    **others: Any,
) -> Any:
    """Attention over a batch of sequences of one length.

    q: (B, Sq, Hq, D); k: (B, Sk, Hkv, D); v: (B, Sk, Hkv, Dv); all of one dtype (float64, float32, bfloat16 or float16) and on one device,
    with any strides; Hq is a multiple of Hkv. softmax_scale: default 1 / sqrt(D).
    causal: query i sees the keys up to ``i + Sk - Sq`` (the last query sees the last key). window_size: (left, right), the number of
    visible keys on each side of key ``i + Sk - Sq``; -1 or None is no limit; a number below -1 puts that edge on the key's other side.
    Where causal, window_size and mask_mod are combined, a key must be visible by all of them.
    softcap: ``cap * tanh(score / cap)``, 0 for none; then alibi_slopes, (Hq,) or (B, Hq): minus slope times the distance to the key; then
    score_mod ``(score, b, h, q_idx, kv_idx) -> score``; a result below -1e38 counts as -inf.
    sink: (Hq,), one logit per head in the softmax's denominator.
    mask_mod: ``(b, h, q_idx, kv_idx) -> bool``. block_sparse_tensors: lists of the tiles that mask_mod leaves partial or full; without a
    mask_mod every pair of a partial tile is visible. aux_tensors: the value of a mod's trailing argument.
    On Hopper both mods may be CuTe functions instead, without gradients: docs/cute.md.
    num_splits: split-KV, the number of parts that the keys are divided into, at most 256; 0 lets the plan choose. pack_gqa: whether query
    heads that share K and V share row tiles on a GPU, which pays where queries are few; None lets the plan choose, and the plan may also
    ignore the request. deterministic, dropout_p, backend: as in ``flex_attention``.
    others: FlashAttention's other options, at the value that changes nothing (``return_attn_probs=False``, ``qv=None``, ``sm_margin=0``,
    ...), and ``return_softmax_lse``, its name for return_lse.

    Returns out (B, Sq, Hq, Dv), or with return_lse ``(out, lse)``; lse (B, Hq, Sq) is the natural log-sum-exp in float32 (float64 for
    float64 inputs). A row without visible keys has out 0 and lse -inf. Gradients flow to q, k, v, sink, alibi_slopes, the score mod's
    tensors, and through lse.

    Under ``torch.autocast`` q, k and v are cast as ``scaled_dot_product_attention`` casts them.

    Raises ``TypeError``/``ValueError`` naming the argument, ``ModError`` for a mod that cannot be expressed, ``BackendError`` for a named
    backend that cannot run this.

    >>> import torch, anyattn
    >>> q, k, v = torch.randn(3, 2, 100, 4, 16)
    >>> anyattn.flash_attn_func(q, k, v, causal=True, window_size=(31, 0)).shape
    torch.Size([2, 100, 4, 16])

    Source: FlashAttention-2 and -3 (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608).
    """
    if beyond:
        flash.refuse_positional(flash_attn_func, beyond)
    if others:
        return_lse, _ = flash.other_names("flash_attn_func", others, return_lse)
    option_values = (
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink, score_mod, mask_mod, block_sparse_tensors, aux_tensors,
        deterministic, return_lse, num_splits, pack_gqa, None if dropout_p == 0.0 else seeded(dropout_p, q),
    )  # fmt: skip
    nowhere = ((None, None, None, None, None), (None, None), None)
    if is_compiling():
        from anyattn.custom_ops.entry_points import flash as compiled

        found = compiled(q, k, v, nowhere, option_values, backend)
        return found if return_lse else found[0]
    return _attended(q, k, v, nowhere, option_values, backend, is_varlen=False)


@entry_point
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    *beyond: Any,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: VarlenBlockSparseTensors | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    deterministic: bool | str = False,
    return_lse: bool = False,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    dropout_p: float = 0,  # an int, as softcap
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    out: Tensor | None = None,
    validate: bool | None = None,
    backend: str | None = None,
    **others: Any,
) -> Any:
    """Attention over sequences of different lengths, packed one after the other; takes every option of ``flash_attn_func``, per sequence.

    q: (total_q, Hq, D) with cu_seqlens_q, int32 or int64 (B + 1,), which begins with 0: sequence i is rows ``cu_seqlens_q[i]`` to
    ``cu_seqlens_q[i + 1]``. Without cu_seqlens_q, (B, Sq, Hq, D). k, v: packed by cu_seqlens_k, or (B, Sk, Hkv, D), or pages
    (pages, page_size, Hkv, D) with page_table (or block_table), integers (B, pages per sequence).
    seqused_q, seqused_k: integers (B,), the number of a sequence's rows that are in use; the contents of unused rows never matter. With
    pages, seqused_k is needed, or cu_seqlens_k, whose differences it then is. Lengths may be 0 and may differ between q and k.
    max_seqlen_q, max_seqlen_k: ints or tensors of no dimensions; not needed. No sequence may be longer.
    k and v may have 8 bits (float8_e4m3fn, float8_e5m2 or int8), with k_descale and v_descale as in ``flash_attn_with_kvcache``; packed k
    and v are one row. Such a call has no gradients: no argument may require one in grad mode.
    out: memory for the result, of its shape, in q's dtype, which shares none with the arguments; it is returned. Without gradients. A warm
    call on a GPU writes to it directly if its strides are those of a new result, others copy to it.
    Mods see (sequence, head, query in its sequence, key in its sequence).
    validate: True checks the contents of all tables, and also refuses packed rows behind the last sequence; None checks them where that
    costs nothing (on the CPU); False does not check cu_seqlens. On a GPU, unless validate is True, the host reads no table: the call does
    not synchronise, and a CUDA graph that has captured it reads the tables' contents at each replay. Wrong contents are not detected there:
    a row that is in two sequences gets the result of one of them, rows outside storage are skipped; a page outside the pool, a greatest
    length that is too small and block lists built for other lengths give undefined results. An index of a mod that is read from a captured
    tensor is then clamped instead of checked. Where an index that is computed from positions could leave its tensor at the greatest
    lengths, the host reads the tables after all.

    Returns out, laid out as q with head_dim Dv, or ``(out, lse)``, lse (Hq, total_q), or (B, Hq, Sq) where q is not packed. Rows of no
    sequence have out 0 and lse -inf. Gradients as in ``flash_attn_func``. Raises as ``flash_attn_func``, and ``ValueError`` naming the
    first wrong entry of cu_seqlens, seqused or page_table.

    >>> import torch, anyattn
    >>> q, k, v = torch.randn(3, 150, 4, 16)
    >>> ends = torch.tensor([0, 100, 150])
    >>> anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True).shape
    torch.Size([150, 4, 16])

    Source: FlashAttention-2 and -3 (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608).
    """
    if beyond:
        flash.refuse_positional(flash_attn_varlen_func, beyond)
    if others:
        return_lse, page_table = flash.other_names("flash_attn_varlen_func", others, return_lse, page_table)
    if page_table is not None and cu_seqlens_k is not None:
        seqused_k, cu_seqlens_k = flash.page_lengths(cu_seqlens_k, seqused_k), None
    option_values = (
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink, score_mod, mask_mod, block_sparse_tensors, aux_tensors,
        deterministic, return_lse, num_splits, pack_gqa, None if dropout_p == 0.0 else seeded(dropout_p, q), k_descale, v_descale,
    )  # fmt: skip
    places = ((cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table), (max_seqlen_q, max_seqlen_k), validate)
    if is_compiling():
        from anyattn.custom_ops.entry_points import flash as compiled

        found = compiled(q, k, v, places, option_values, backend)
        result = found[0] if out is None else _written(out, found[0])
        return (result, found[1]) if return_lse else result
    return _attended(q, k, v, places, option_values, backend, is_varlen=True, out=out)


_RETURN_LSE = Options._fields.index("return_lse")


@opaque
@without_default_device
def _attended(
    q: Tensor, k: Tensor, v: Tensor, places: tuple, option_values: tuple, backend: str | None, is_varlen: bool, out: Tensor | None = None
) -> Any:
    """Eager calls of ``flash_attn_func`` and ``flash_attn_varlen_func``. places, option_values: ``Places``, ``Options``."""
    if autocast.is_on():
        q, k, v = autocast.arguments(q, k, v)
    if is_varlen:
        tables, most, validate = places
        found = latest.varlen.results((q, k, v, *tables, *most, validate, *option_values, backend), out)
        if found is not None:
            return found if option_values[_RETURN_LSE] else found[0]
    options = Options(*option_values)
    if out is not None:
        check_out(out, q, v)
        check_out_memory(out, {**dict(zip("qkv", (q, k, v), strict=True)), **options._asdict()}.items())
    results: Any
    if is_varlen:
        results = attention.varlen(q, k, v, attention.Places(*places), options, backend)
    else:
        call = attention.flash_call(q, k, v, options, backend)
        results = None if call is None else flash.laid_out(*autograd.compute(*call)[:2], False)
    if results is None:
        from anyattn.custom_ops import eager_calls

        results = eager_calls.flash(q, k, v, attention.Places(*places), options, backend)
    if out is not None:
        results = write_out(out, results[0]), results[1]
    return results if options.return_lse else results[0]


def _written(out: Tensor, result: Tensor) -> Tensor:
    """``out`` with the result of a compiled call, whose dtype autocast may have chosen."""
    check_out(out, result, result)
    return write_out(out, result)


@entry_point
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *beyond: Any,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    rotary_interleaved: bool = True,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    k_descale: float | Tensor | None = None,
    v_descale: float | Tensor | None = None,
    saturated: Tensor | None = None,
    deterministic: bool | str = False,
    rotary_last: bool = False,
    return_lse: bool = False,
    out: Tensor | None = None,
    validate: bool | None = None,
    backend: str | None = None,
    **others: Any,
) -> Any:
    """Decoding: appends new keys and values to a cache in place, then attends to the whole cache.

    q: (B, Sq, Hq, D), or (total_q, Hq, D) with cu_seqlens_q. k_cache, v_cache: (B_cache, capacity, Hkv, D or Dv); with page_table (or
    block_table), integers (B, pages per sequence), they are pages (pages, page_size, Hkv, D or Dv) of any size and order. k, v: (B, new,
    Hkv, D or Dv) to append, or (total_q, ...) laid out as q.
    cache_seqlens: int or integers (B,), rows of each entry's cache in use before appending, padding included; None means all rows.
    cache_batch_idx: integers (B,), the cache row of each entry; with page_table, the row of the page table, which may then have one row for
    each entry of the cache. cache_leftpad: integers (B,), padding rows at the cache's beginning.
    8 bits: k_cache and v_cache may be float8_e4m3fn, float8_e5m2 or int8 instead, with q of 16 or more bits. k_descale, v_descale: the
    factors of the stored numbers, each None (1.0), a number, or float32: one element; (B, Hkv); or three dimensions that broadcast to
    ``k_cache.shape[:3]``, such as (pages, 1, Hkv) for each page and head and (pages, page_size, Hkv) for each token and head. Strides are
    arbitrary: factors may stand behind the bytes that they belong to. Stored numbers are not rounded: scores are multiplied by k_descale,
    and weights or the output by v_descale, in float32. Factors must be finite and above 0, except where no key is; they are checked
    where the tables are.
    New rows k and v for them have the dtype of q. Factors of each token and head are written with the rows: the row's greatest finite
    magnitude over the dtype's greatest number (448, 57344, 127), at least 2^-126; all other factors are read. Stored is the rotated row
    divided by its factor in float32, rounded to the nearest number, ties to even; beyond the range the nearest end of it. saturated:
    int64 or int32 of one element on the device, to which the number of values beyond the range is added. NaN stays NaN; in int8 it becomes
    0 and counts as beyond the range.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2), applied to the new keys at ``cache_seqlens + j``, and to the queries at
    ``cache_seqlens + i`` if causal or windowed, else to all of them at ``cache_seqlens``. rotary_interleaved: True pairs dimensions
    (0, 1), (2, 3), ...; False pairs (0, rotary_dim / 2), ... rotary_last: the last rotary_dim of D are rotated, not the first (multi-head
    latent attention); not under ``torch.compile``.
    One cache: v_cache may be ``k_cache[..., :Dv]``, a view. Then k is appended once, v is None, and values are what is stored of the keys,
    rotation included; k_descale and v_descale are one, and the Triton kernel reads a tile of 16 bits once.
    validate: None checks the contents of the tables where that costs nothing (on the CPU); True checks them everywhere, and also refuses
    packed rows behind the last entry; False does not check cu_seqlens_q. On a GPU, unless it is True, the Triton backend reads no table on
    the host: the call does not synchronise, and a CUDA graph that has captured it reads the tables' contents at each replay. Wrong contents
    are not detected there: new rows that have no room in the cache, or no page of the pool, are not written, and the entry's results are
    undefined; rotary tables that are too short give NaN; where two entries append to one place, either may win. Indices of mods: as in
    ``flash_attn_varlen_func``; positions may reach the cache's capacity.
    Mods see logical positions: kv_idx counts keys behind the padding, and q_idx is the query's position among them,
    ``seqlen_k - seqlen_q + i``, so that a mod written for training decodes unchanged. The other options are those of ``flash_attn_func``.

    Only the appended rows of the cache, their factors and ``saturated`` are written, and nothing if an error is raised; rows past those in
    use never matter. The output does not depend, bit for bit, on where pages lie, nor, at a given num_splits, on the rest of the batch.
    deterministic: "batch" as in ``flex_attention``: the bits are those that a prefill, or training, gives the same query. A decoding step
    is bitwise equal over reruns in any case. out: memory for the result, as in ``flash_attn_varlen_func``.

    Returns out, laid out as q with head_dim Dv, or ``(out, lse)``, lse (B, Hq, Sq) or (Hq, total_q). There are no gradients: in grad mode
    no argument may require one. Under ``torch.autocast`` q, k and v are cast where the caches have its dtype.

    Raises ``TypeError``/``ValueError`` naming the argument: rows beyond the capacity, a page outside the pool, a cache row appended to
    twice, a cache that is appended to and shares memory with the other cache or with q, k or v, rotary tables that are too short or too
    wide, a tensor that requires grad outside ``torch.no_grad()``, caches of bytes (uint8), wrong descales, descales that would be written
    and share memory, and everything that ``flash_attn_func`` refuses.

    >>> import torch, anyattn
    >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 16)  # room for 64 keys in each of 2 sequences
    >>> q, k, v = torch.randn(3, 2, 1, 4, 16)
    >>> lengths = torch.tensor([5, 9])
    >>> anyattn.flash_attn_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True).shape
    torch.Size([2, 1, 4, 16])

    Source: FlashAttention's function of this name; paged caches: Kwon et al. (arXiv:2309.06180).
    """
    if beyond:
        flash.refuse_positional(flash_attn_with_kvcache, beyond)
    if others:
        return_lse, page_table = flash.other_names("flash_attn_with_kvcache", others, return_lse, page_table)
    option_values = (
        softmax_scale, causal, window_size, softcap, alibi_slopes, sink, score_mod, mask_mod, None, aux_tensors, deterministic, return_lse,
        num_splits, pack_gqa, None, k_descale, v_descale,
    )  # fmt: skip
    if not is_compiling() and autocast.is_on():
        q, k, v = autocast.beside(k_cache, q, k, v)
    cached = (
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q,
        max_seqlen_q, rotary_interleaved, validate, saturated, rotary_last,
    )  # fmt: skip
    if is_compiling():
        from anyattn.custom_ops.entry_points import decode as compiled

        found = compiled(cached, option_values, backend)
        found = found if out is None else (_written(out, found[0]), found[1])
        return found if return_lse else found[0]
    result, lse = _decoded(cached, option_values, backend, out)
    return (result, lse) if return_lse else result


@opaque
@without_default_device
def _decoded(cached: tuple, option_values: tuple, backend: str | None, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Eager calls of ``flash_attn_with_kvcache``. cached, option_values: ``CacheArguments``, ``Options``."""
    found = latest.decoding.results((*cached, *option_values, backend), out)
    if found is not None:
        return found  # type: ignore[return-value]
    from anyattn.call_cache.kvcache import decode
    from anyattn.validate.kvcache import CacheArguments

    arguments, options = CacheArguments(*cached), Options(*option_values)
    if out is not None:
        check_out(out, arguments.q, arguments.v_cache)
        check_out_memory(out, {**arguments._asdict(), **options._asdict()}.items())
    results = decode(arguments, options, backend)
    if results is None:
        from anyattn.custom_ops import eager_calls

        with torch.no_grad():
            results = eager_calls.decode(arguments, options, backend)
    if out is not None:
        with torch.no_grad():  # which out may have for its own
            return write_out(out, results[0]), results[1]  # type: ignore[arg-type]
    return results  # type: ignore[return-value]


@entry_point
def flash_attn_combine(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Merges attention over disjoint parts of the keys into attention over all of them.

    out_partial: float32 (splits, B, S, H, Dv) or (splits, total, H, Dv); also (splits, B, H, S, Dv), as ``flex_attention`` has it.
    lse_partial: the same without Dv, natural logarithm; where it is -inf the part saw no key, and its output is ignored.

    Branches of a layer merge in the same way: each adds its keys to one softmax, once more where branches share a key. A gate g > 0 weighs
    the part of a branch if ``lse + log(g)`` is passed for its lse.

    Returns out and lse without the first dimension, in the arguments' dtypes; 0 and -inf in rows where no part saw a key. Differentiable in
    both arguments, and so in q, k, v and the gates of every part. Raises ``TypeError``/``ValueError`` naming the argument.

    >>> import torch
    >>> out, lse = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    >>> flash_attn_combine(out, lse)[0].shape
    torch.Size([2, 5, 4, 16])

    Source: split-KV decoding, "Flash-Decoding" (Dao, Haziza, Massa, Sizov, 2023).
    """
    return _combined(out_partial, lse_partial)


@opaque
@without_default_device
def _combined(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """``flash_attn_combine`` as ``torch.compile`` inlines it: each backend is made of torch operations, or is an operator."""
    if not is_compiling():
        refuse_torchscript()
    out_partial, lse_partial = flash.combine_arguments(out_partial, lse_partial)
    tensors = (out_partial, lse_partial)
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    dtype = torch.promote_types(*(t.dtype for t in tensors))
    if not all(map(has_memory, tensors)):
        chosen = "torch"  # torch operations work on tensors without memory (fake, meta) too
    else:
        chosen = planner.combiner(hardware.of(out_partial.device.type), dtype, needs_grad)
    return backend_module(chosen).combine(out_partial, lse_partial)


# ---- q, k and v in one tensor


def flash_attn_qkvpacked_func(qkv: Tensor, *, num_heads_q: int | None = None, **options: Any) -> Any:
    """``flash_attn_func`` of q, k and v that are one tensor.

    qkv: (B, S, 3, H, D); or with num_heads_q (B, S, Hq + 2 Hkv, D), the heads of q first, then those of k, then those of v. options: of
    ``flash_attn_func``. The parts are views: nothing is copied, and the gradient is one tensor like qkv. Raises as ``flash_attn_func``.

    >>> import torch, anyattn
    >>> anyattn.flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 16), causal=True).shape
    torch.Size([2, 100, 4, 16])
    """
    return flash_attn_func(*_parts(qkv, num_heads_q, "(batch, length, 3, heads, head_dim)", 5), **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **options: Any) -> Any:
    """``flash_attn_func`` of k and v that are one tensor. q: (B, Sq, Hq, D); kv: (B, Sk, 2, Hkv, D); otherwise as the function above."""
    return flash_attn_func(q, *_split("kv", kv, 2, "(batch, length, 2, heads, head_dim)", 5), **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, *, num_heads_q: int | None = None, **options: Any
) -> Any:
    """``flash_attn_varlen_func`` of q, k and v that are one tensor, and sequences that attend to themselves.

    qkv: (total, 3, H, D); or with num_heads_q (total, Hq + 2 Hkv, D). cu_seqlens, max_seqlen: of q and of k. options: of
    ``flash_attn_varlen_func``.

    >>> import torch, anyattn
    >>> anyattn.flash_attn_varlen_qkvpacked_func(torch.randn(150, 3, 4, 16), torch.tensor([0, 100, 150]), 100).shape
    torch.Size([150, 4, 16])
    """
    parts = _parts(qkv, num_heads_q, "(total, 3, heads, head_dim)", 4)
    return flash_attn_varlen_func(*parts, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    **options: Any,
) -> Any:
    """``flash_attn_varlen_func`` of k and v that are one tensor: kv (total_k, 2, Hkv, D)."""
    k, v = _split("kv", kv, 2, "(total, 2, heads, head_dim)", 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def _parts(qkv: Any, num_heads_q: int | None, shape: str, rank: int) -> tuple[Tensor, ...]:
    if num_heads_q is None:
        return _split("qkv", qkv, 3, shape, rank)
    heads = qkv.shape[-2] - num_heads_q
    if qkv.ndim != rank - 1 or heads < 0 or heads % 2:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}; wanted {shape.replace('3, heads', 'Hq + 2 Hkv')}, without "
            f"num_heads_q {shape}"
        )
    return qkv.split((num_heads_q, heads // 2, heads // 2), -2)


def _split(name: str, packed: Any, count: int, shape: str, rank: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; wanted a torch.Tensor of shape {shape}")
    if packed.ndim != rank or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; wanted {shape}")
    return packed.unbind(-3)
