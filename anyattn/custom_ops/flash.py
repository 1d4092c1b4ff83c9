"""Operators that ``torch.compile`` and ``torch.export`` record for FlashAttention's entry points.

``flex.py`` describes how mods are passed. The operators take the entry points' arguments; when the graph runs, they check and plan as an
eager call does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache import attention
from anyattn.custom_ops.arguments import Mask, Results, Score
from anyattn.custom_ops.block_sparse_operands import BlockSparse, blocks_of_operands, operands_of_blocks
from anyattn.custom_ops.flex import masks_of_operands, mods_of_operands, operands_of
from anyattn.custom_ops.flops import count_operator, decode_pairs, flash_pairs
from anyattn.custom_ops.operators import called, differentiable, operator, returned
from anyattn.custom_ops.own_lists import own_lists
from anyattn.determinism import backend_and_mode, backend_text
from anyattn.kvcache.quantise import check_saturated, is_written
from anyattn.kvcache.scales import EIGHT_BITS
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.planner import check_backend
from anyattn.problem import Problem
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.tensors import autocast, kinds
from anyattn.tensors.strides import empty_in_order
from anyattn.validate import flex
from anyattn.validate.block_sparse import check_dense, check_varlen
from anyattn.validate.flash import Options, check_dense_storage, heads_first, refuse_8_bit_gradients
from anyattn.validate.kvcache import CacheArguments, check_no_captured_gradients, check_no_gradients
from anyattn.validate.scales import NAMES, check_kind, check_no_gradient

__all__ = ["decode", "decode_with_mods", "flash", "flash_with_mods", "shared_options"]


class Shared(NamedTuple):
    """The arguments that all operators of this module have. window_size: -1 is no limit."""

    alibi_slopes: Tensor | None
    sink: Tensor | None
    score: Score
    mask: Mask
    softmax_scale: float | None
    softcap: float
    causal: bool
    window_size: list[int]
    num_splits: int
    pack_gqa: bool | None


class Flash(NamedTuple):
    """The arguments of ``anyattn::flash``: those of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tables
    shared: Shared
    deterministic: bool
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    validate: bool | None
    backend: str


class Tables(NamedTuple):
    """The tables that locate the sequences of packed, padded or paged rows."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    page_table: Tensor | None


class Decode(NamedTuple):
    """The arguments of ``anyattn::decode``: those of ``flash_attn_with_kvcache``."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    cache_seqlens: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    page_table: Tensor | None
    cu_seqlens_q: Tensor | None
    shared: Shared
    rotary_interleaved: bool
    max_seqlen_q: int | None
    validate: bool | None
    backend: str


class Descales(NamedTuple):
    """The factors of 8-bit keys and values. Operators that take them are separate, so that exported programs without keep their format."""

    k_descale: Tensor | None
    v_descale: Tensor | None


class Counted(NamedTuple):
    """What appending to 8-bit caches writes besides the caches: scales of each row and head, and the number of saturated values."""

    k_scales: Tensor | None
    v_scales: Tensor | None
    saturated: Tensor | None


_NO_DESCALES = Descales(None, None)


def _options(shared: Shared, deterministic: bool | str, is_cuda: bool, descales: Descales, blocks: Any = None) -> Options:
    score = next(iter(mods_of_operands("score", *shared.score)), None)
    masks, dropout = masks_of_operands(*shared.mask)
    return Options(
        shared.softmax_scale, shared.causal, tuple(shared.window_size), shared.softcap, shared.alibi_slopes, shared.sink, score,
        next(iter(masks), None), blocks, None, deterministic, True, shared.num_splits, shared.pack_gqa, dropout, *descales, not is_cuda,
    )  # fmt: skip


def _call(operands: Flash, lists: BlockSparse | None = None, descales: Descales = _NO_DESCALES) -> tuple[Problem, Plan]:
    """The problem and the plan of an operator's call, from the call cache if the call is warm."""
    q, k, v, tables = operands[:4]
    blocks = None if lists is None else blocks_of_operands(lists)
    backend, deterministic = backend_and_mode(operands.backend, operands.deterministic)
    options = _options(operands.shared, deterministic, q.is_cuda, descales, blocks)
    if all(t is None for t in tables) and k.dtype not in EIGHT_BITS:  # which are of a call of ``flash_attn_varlen_func``
        return attention.flash_call(q, k, v, options, backend, is_operator=True)  # type: ignore[return-value]
    places = attention.Places(tuple(tables), (operands.max_seqlen_q, operands.max_seqlen_k), operands.validate)  # type: ignore[arg-type]
    return attention.varlen_call(q, k, v, places, options, backend, is_operator=True)  # type: ignore[return-value]


def _results(problem: Problem, chosen: Plan, is_packed: bool) -> tuple[Tensor, Tensor]:
    result = autograd.forward(problem, chosen)
    return _as_given(result.out, is_packed), result.lse.select(0, 0) if is_packed else result.lse


def _as_given(x: Tensor, is_packed: bool) -> Tensor:
    """The inverse of ``heads_first``."""
    return x.transpose(1, 2).select(0, 0) if is_packed else x.transpose(1, 2)


def _fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kinds.refuse_forward_mode()
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    rows, is_packed = heads_first(q), q.ndim == 3
    lse = q.new_empty(rows.shape[:3], dtype=stat)
    return _as_given(empty_in_order(rows, last=v.shape[-1]), is_packed), lse.select(0, 0) if is_packed else lse


@operator(Flash, fake=lambda operands: _fake(operands.q, operands.v))
def flash(operands: Flash) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``."""
    kinds.refuse_forward_mode()
    return _results(*_call(operands), operands.q.ndim == 3)


@operator(Flash, BlockSparse, fake=lambda operands, _: _fake(operands.q, operands.v))
def flash_block_sparse(operands: Flash, lists: BlockSparse) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call with block lists; a separate operator, so that exported programs without lists keep their format."""
    kinds.refuse_forward_mode()
    return _results(*_call(operands, lists), operands.q.ndim == 3)


@operator(Flash, Descales, fake=lambda operands, _: _fake(operands.q, operands.v))
def flash_8_bits(operands: Flash, descales: Descales) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call with scales of 8-bit keys and values; without gradients."""
    kinds.refuse_forward_mode()
    return _results(*_call(operands, None, descales), operands.q.ndim == 3)


@operator(Flash, BlockSparse, Descales, fake=lambda operands, *_: _fake(operands.q, operands.v))
def flash_block_sparse_8_bits(operands: Flash, lists: BlockSparse, descales: Descales) -> tuple[Tensor, Tensor]:
    """``flash_8_bits`` of a call with block lists."""
    kinds.refuse_forward_mode()
    return _results(*_call(operands, lists, descales), operands.q.ndim == 3)


def _sources(operands: Flash) -> list[Tensor | None]:
    """The tensors that may have gradients, in the order in which ``flash_backward`` returns those."""
    return [*operands[:3], operands.shared.alibi_slopes, operands.shared.sink, *operands.shared.score.score_tensors]


def _fake_backward(operands: Flash, results: Results) -> list[Tensor]:
    rows, others = _sources(operands)[:3], _sources(operands)[3:]
    gradients = [_as_given(empty_in_order(heads_first(t)), t.ndim == 3) for t in rows if t is not None]
    gradients += [None if t is None else t.new_empty(t.shape) for t in others]  # type: ignore[misc]
    return [g if g is not None and w else operands.q.new_empty(0) for g, w in zip(gradients, results.wants, strict=True)]


@operator(Flash, Results, fake=_fake_backward)
def flash_backward(operands: Flash, results: Results) -> list[Tensor]:
    """Gradients of q, k, v, alibi_slopes, sink and each score tensor; empty where ``wants`` is False."""
    return _gradients(operands, None, results)


@operator(Flash, BlockSparse, Results, fake=lambda operands, _, results: _fake_backward(operands, results))
def flash_block_sparse_backward(operands: Flash, lists: BlockSparse, results: Results) -> list[Tensor]:
    """``flash_backward`` of a call with block lists."""
    return _gradients(operands, lists, results)


def _gradients(operands: Flash, lists: BlockSparse | None, results: Results) -> list[Tensor]:
    (out, lse, dout, dlse, wants), shared = results, operands.shared
    captured = [t.detach().requires_grad_(w) for t, w in zip(shared.score.score_tensors, wants[5:], strict=True)]
    slopes = None if shared.alibi_slopes is None else shared.alibi_slopes.detach().requires_grad_(wants[3])
    shared = shared._replace(alibi_slopes=slopes, score=shared.score._replace(score_tensors=captured))
    problem, chosen = _call(operands._replace(shared=shared), lists)
    needed = zip(("q", "k", "v", "sink"), (*wants[:3], wants[4]), strict=True)  # the graph's tensors themselves do not require grad
    problem = problem.like(**{name: autograd.requiring_grad(getattr(problem, name), w) for name, w in needed})
    rows = heads_first(out), lse if lse.ndim == 3 else lse[None]
    douts = heads_first(dout), dlse if dlse is None or dlse.ndim == 3 else dlse[None]
    dq, dk, dv, dsink, *others = autograd.backward(problem, chosen, *rows, *douts)
    by_tensor = {id(t): g for t, g in zip(problem.score.tensors if problem.score else (), others, strict=True)}
    by_rows = [None if g is None else _as_given(g, t.ndim == 3) for g, t in zip((dq, dk, dv), operands[:3], strict=True)]
    gradients = [*by_rows, by_tensor.get(id(slopes)), dsink, *(by_tensor.get(id(t)) for t in captured)]
    return returned(gradients, wants, _sources(operands), operands.q)


for _forward, _backward in ((flash, flash_backward), (flash_block_sparse, flash_block_sparse_backward)):
    differentiable(_forward, _backward, ("q", "k", "v", "alibi_slopes", "sink", "score_tensors"))
    count_operator(_forward, flash_pairs, _backward)


@operator(Decode, fake=lambda operands: _fake(operands.q, operands.v_cache), changed=("k_cache", "v_cache"))
def decode(operands: Decode) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``."""
    return _decoded(operands, _NO_DESCALES)


@operator(Decode, Descales, fake=lambda operands, _: _fake(operands.q, operands.v_cache))
def decode_8_bits(operands: Decode, descales: Descales) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache`` with scales of 8-bit caches, which are only read: scales inside of a cache that an operator
    writes to are more than AOTAutograd takes."""
    return _decoded(operands, descales)


@operator(
    Decode, Descales, Counted, fake=lambda operands, *_: _fake(operands.q, operands.v_cache),
    changed=("k_cache", "v_cache", "k_scales", "v_scales", "saturated"),
)  # fmt: skip
def decode_appending_8_bits(operands: Decode, descales: Descales, counted: Counted) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache`` that appends to 8-bit caches with scales, or counts what saturates."""
    of_k, of_v = (given if own is None else own for own, given in zip(counted[:2], descales, strict=True))
    return _decoded(operands, Descales(of_k, of_v), counted.saturated)


def _decoded(operands: Decode, descales: Descales, saturated: Tensor | None = None) -> tuple[Tensor, Tensor]:
    from anyattn.call_cache.kvcache import decode as decoded

    backend, deterministic = backend_and_mode(operands.backend)
    options = _options(operands.shared, deterministic, operands.q.is_cuda, descales)
    arguments = CacheArguments(*operands[:12], operands.max_seqlen_q, operands.rotary_interleaved, operands.validate, saturated)
    with torch.no_grad():
        out, lse = decoded(arguments, options, backend, is_operator=True)  # type: ignore[misc] # refuses before it writes
    return out, lse  # type: ignore[return-value]


count_operator(decode, decode_pairs)
count_operator(decode_8_bits, decode_pairs)
count_operator(decode_appending_8_bits, decode_pairs)
count_operator(flash_8_bits, flash_pairs)
count_operator(flash_block_sparse_8_bits, flash_pairs)


# ---- calls that pass traced mods


def flash_with_mods(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: tuple,
    options: tuple,
    blocks: tuple | None,
    backend: str | None,
    score: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_func``, or with any table ``flash_attn_varlen_func``, as one operator call with traced mods. places, options: ``Places``
    and ``Options`` without mods and lists. blocks: ``parts_of_blocks``."""
    check_backend(backend)
    (tables, longest, validate), flash_options = places, Options(*options)
    q, k, v = autocast.arguments(q, k, v)
    shared = shared_options(q, flash_options, score, mask)
    most_q, most_k = map(_number, longest)
    text = backend_text(backend, flash_options.deterministic)
    call = Flash(q, k, v, Tables(*tables), shared, bool(flash_options.deterministic), most_q, most_k, validate, text)
    descales = _descales(flash_options, k)
    if k.dtype in EIGHT_BITS and torch.is_grad_enabled():
        _refuse_gradients(call, flash_options)
    if blocks is None:
        return called(flash, call) if descales is None else called(flash_8_bits, call, descales)  # type: ignore[no-any-return]
    operands, lists = operands_of_blocks(blocks)
    if isinstance(lists, BlockSparseTensors):
        check_dense_storage(q, k, v)
        check_dense(lists, q, (q.shape[1], k.shape[1]), (q.shape[0], q.shape[2]), k.shape[-2])
    else:
        check_varlen(lists, q, q.shape[-2], k.shape[-2])
    operands = operands._replace(block_lists=own_lists(operands.block_lists))
    if descales is not None:
        return called(flash_block_sparse_8_bits, call, operands, descales)  # type: ignore[no-any-return]
    return called(flash_block_sparse, call, operands)  # type: ignore[no-any-return]


def _refuse_gradients(call: Flash, options: Options) -> None:
    check_no_gradient(options.k_descale, options.v_descale)
    if any(t is not None and t.requires_grad for t in _sources(call)):
        refuse_8_bit_gradients(call.k.dtype)


def _descales(options: Options, k: Tensor) -> Descales | None:
    """The operators' operands; None if there are none. A number becomes a tensor."""
    found = []
    for name, descale in zip(NAMES, (options.k_descale, options.v_descale), strict=True):
        check_kind(name, descale, k.dtype)
        if descale is None or isinstance(descale, Tensor):
            found.append(descale)
        else:
            found.append(None if descale == 1.0 else torch.full((1, 1), descale, dtype=torch.float32, device=k.device))
    return None if found == [None, None] else Descales(*found)


def _number(longest: Any) -> Any:
    """max_seqlen as a number; None for a tensor, which is not read: max_seqlen changes no result."""
    return None if isinstance(longest, Tensor) else longest


def decode_with_mods(
    arguments: tuple, options: tuple, backend: str | None, score: TracedMod | None, mask: TracedMod | None
) -> tuple[Tensor, Tensor]:
    """``flash_attn_with_kvcache`` as one operator call with traced mods. arguments, options: ``CacheArguments`` and
    ``Options`` without mods."""
    check_backend(backend)
    cache_args = CacheArguments(*arguments)
    if cache_args.rotary_last and cache_args.rotary_cos is not None:
        raise ValueError(
            "rotary_last=True is not an argument of the compiled operator; rotate the last columns of q and k before the call, with "
            "apply_rotary_emb, and pass no rotary_cos and rotary_sin"
        )
    q, k, v = autocast.beside(cache_args.k_cache, cache_args.q, cache_args.k, cache_args.v)
    cache_args = cache_args._replace(q=q, k=k, v=v)
    shared = shared_options(q, Options(*options), score, mask)
    if torch.is_grad_enabled():
        check_no_gradients(cache_args, Options(*options))
        check_no_captured_gradients(score)
    longest = _number(cache_args.max_seqlen_q)
    text = backend_text(backend, Options(*options).deterministic)
    call = Decode(q.detach(), *cache_args[1:12], shared, cache_args.rotary_interleaved, longest, cache_args.validate, text)
    descales = _descales(Options(*options), cache_args.k_cache)
    saturated = cache_args.saturated if cache_args.k_cache.dtype in EIGHT_BITS else None
    if cache_args.k is not None and (descales is not None or saturated is not None):
        check_saturated(saturated, q.device)
        return called(decode_appending_8_bits, call, *_apart(descales or _NO_DESCALES, cache_args, saturated))  # type: ignore[no-any-return]
    return called(decode, call) if descales is None else called(decode_8_bits, call, descales)  # type: ignore[no-any-return]


def _apart(descales: Descales, cache_args: CacheArguments, saturated: Tensor | None) -> tuple[Descales, Counted]:
    """The scales that appending reads, and those that it writes."""
    caches = cache_args.k_cache, cache_args.v_cache
    of_k, of_v = (d if is_written(d, cache) else None for d, cache in zip(descales, caches, strict=True))
    given = [d if own is None else None for d, own in zip(descales, (of_k, of_v), strict=True)]
    return Descales(*given), Counted(of_k, of_v, saturated)


def shared_options(q: Tensor, options: Options, score: TracedMod | None, mask: TracedMod | None) -> Shared:
    for mod in (score, mask):
        if mod is not None:
            flex.captured_devices(mod, q.device)
    left, right = options.window_size
    window = [-1 if left is None else left, -1 if right is None else right]
    scale = None if options.softmax_scale is None else flex.scale_of("softmax_scale", options.softmax_scale, q.shape[-1], q.dtype)
    nothing = q.new_empty(0)  # one for all lists: a compiled graph creates it at every call
    return Shared(
        options.alibi_slopes, options.sink, Score(*operands_of(nothing, score)),
        Mask(*operands_of(nothing, mask, dropout=options.dropout)), scale, float(options.softcap), bool(options.causal), window,
        options.num_splits, options.pack_gqa,
    )  # fmt: skip
