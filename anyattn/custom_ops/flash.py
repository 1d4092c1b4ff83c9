"""Custom operators of the entry points with FlashAttention's names; ``flex.py`` describes how mods are encoded.

The operators take the entry points' arguments, and check and plan as an eager call does, when the graph runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyattn import autocast, autograd
from anyattn.call_cache import attention
from anyattn.custom_ops.define import operator
from anyattn.custom_ops.flex import mods_of_operands, operands_of
from anyattn.custom_ops.transforms import called
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.tensors import kinds
from anyattn.tensors.strides import empty_in_order
from anyattn.validate import flex
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import Given, check_no_captured_gradients, check_no_gradients, heads_first

__all__ = ["decode", "decode_with_mods", "flash", "flash_with_mods"]

_DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "sink")


def _options(
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_program: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    deterministic: bool,
    is_cuda: bool,
) -> Options:
    score = next(iter(mods_of_operands("score", score_program, score_numbers, score_tensors)), None)
    mask = next(iter(mods_of_operands("mask", mask_program, mask_numbers, mask_tensors)), None)
    return Options(
        softmax_scale, causal, tuple(window_size), softcap, alibi_slopes, sink, score, mask, None, None, deterministic, True, num_splits,
        pack_gqa, not is_cuda,
    )  # fmt: skip


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Any, Any, Any, Any, Any],
    longest: tuple,
    validate: bool | None,
    given: Options,
    backend: str,
) -> tuple[Problem, Plan]:
    """The problem and the plan of an operator's call, from the call cache where it knows the call."""
    if all(t is None for t in tables):
        return attention.flash_call(q, k, v, given, backend or None, is_operator=True)  # type: ignore[return-value]
    places = attention.Places(tables, longest, validate)
    return attention.varlen_call(q, k, v, places, given, backend or None, is_operator=True)  # type: ignore[return-value]


@operator
def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_program: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    deterministic: bool,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    validate: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``; window_size: -1 is no limit."""
    kinds.refuse_forward_mode()
    options = _options(
        alibi_slopes, sink, score_program, score_numbers, score_tensors, mask_program, mask_numbers, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa, deterministic, q.is_cuda,
    )  # fmt: skip
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    problem, chosen = _call(q, k, v, tables, (max_seqlen_q, max_seqlen_k), validate, options, backend)
    return _results(problem, chosen, q.ndim == 3)


def _results(problem: Problem, chosen: Plan, is_packed: bool) -> tuple[Tensor, Tensor]:
    with autocast.disabled():
        result = autograd.backend_of(chosen).forward(problem, chosen)
    return _as_given(result.out, is_packed), result.lse.select(0, 0) if is_packed else result.lse


def _as_given(x: Tensor, is_packed: bool) -> Tensor:
    """The way back from ``heads_first``."""
    return x.transpose(1, 2).select(0, 0) if is_packed else x.transpose(1, 2)


def _fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    kinds.refuse_forward_mode()
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    rows, is_packed = heads_first(q), q.ndim == 3
    lse = q.new_empty(rows.shape[:3], dtype=stat)
    return _as_given(empty_in_order(rows, last=v.shape[-1]), is_packed), lse.select(0, 0) if is_packed else lse


@torch.library.register_fake("anyattn::flash")
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, v)


@operator
def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    page_table: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_program: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    deterministic: bool,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    validate: bool | None,
    backend: str,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wants: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v, alibi_slopes, sink and each score tensor; empty where ``wants`` says that none is."""
    slopes_wanted, captured_wanted = wants[3], wants[5:]
    alibi_slopes = None if alibi_slopes is None else alibi_slopes.detach().requires_grad_(slopes_wanted)
    score_tensors = [t.detach().requires_grad_(w) for t, w in zip(score_tensors, captured_wanted, strict=True)]
    options = _options(
        alibi_slopes, sink, score_program, score_numbers, score_tensors, mask_program, mask_numbers, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa, deterministic, q.is_cuda,
    )  # fmt: skip
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    problem, chosen = _call(q, k, v, tables, (max_seqlen_q, max_seqlen_k), validate, options, backend)
    asked = zip(("q", "k", "v", "sink"), (*wants[:3], wants[4]), strict=True)  # a graph's own tensors, as they come, require none
    problem = problem.like(**{name: autograd.wanting(getattr(problem, name), w) for name, w in asked})
    if chosen.whole_spans:  # which keep no log-sum-exp; here it was kept
        chosen = replace(chosen, whole_spans=False)
    rows = heads_first(out), lse if lse.ndim == 3 else lse[None]
    douts = heads_first(dout), dlse if dlse is None or dlse.ndim == 3 else dlse[None]
    dq, dk, dv, dsink, *captured = autograd.backward(problem, chosen, *rows, *douts)
    by_tensor = {id(t): g for t, g in zip(problem.score.tensors if problem.score else (), captured, strict=True)}
    by_rows = [None if g is None else _as_given(g, t.ndim == 3) for g, t in zip((dq, dk, dv), (q, k, v), strict=True)]
    found = [*by_rows, by_tensor.get(id(alibi_slopes)), dsink, *(by_tensor.get(id(t)) for t in score_tensors)]
    return [q.new_empty(0) if g is None or not w else g for g, w in zip(found, wants, strict=True)]


@torch.library.register_fake("anyattn::flash_backward")
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    of_rows, of_others = (q, k, v), (args[5], args[6], *args[9])
    found: list[Tensor | None] = [_as_given(empty_in_order(heads_first(t)), t.ndim == 3) for t in of_rows]
    found += [None if t is None else t.new_empty(t.shape) for t in of_others]
    return [g if g is not None and w else q.new_empty(0) for g, w in zip(found, args[-1], strict=True)]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    is_tensor = [isinstance(x, Tensor) for x in inputs]
    lists = [x for x in inputs if isinstance(x, list) and (not x or isinstance(x[0], Tensor))]
    ctx.counts = [len(x) for x in lists]
    ctx.is_tensor, ctx.others = is_tensor, [None if t or any(x is y for y in lists) else x for x, t in zip(inputs, is_tensor, strict=True)]
    ctx.is_list = [any(x is y for y in lists) for x in inputs]
    ctx.save_for_backward(*output, *(x for x, t in zip(inputs, is_tensor, strict=True) if t), *(t for x in lists for t in x))
    q, k, v, slopes, sink, score_tensors = *inputs[:3], inputs[8], inputs[9], inputs[12]
    differentiable = [q, k, v, slopes, sink, *score_tensors]
    ctx.wants = [t is not None and t.is_floating_point() and t.requires_grad for t in differentiable]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple:
    out, lse, *saved = ctx.saved_tensors
    inputs = list(ctx.others)
    for i, is_tensor in enumerate(ctx.is_tensor):
        if is_tensor:
            inputs[i] = saved.pop(0)
    lengths = iter(ctx.counts)
    for i, is_list in enumerate(ctx.is_list):
        if is_list:
            count = next(lengths)
            inputs[i], saved = saved[:count], saved[count:]
    if dout is None:
        dout = torch.zeros_like(out)
    grads = called(flash_backward, (*inputs, out, lse, dout, dlse, ctx.wants))
    by_input = [g if w else None for g, w in zip(grads, ctx.wants, strict=True)]
    result: list = [[None] * len(x) if is_list else None for x, is_list in zip(inputs, ctx.is_list, strict=True)]
    result[0], result[1], result[2], result[8], result[9] = by_input[:5]
    result[12] = by_input[5:]
    return tuple(result)


torch.library.register_autograd("anyattn::flash", _gradients, setup_context=_save)
torch.library.register_autograd("anyattn::flash_backward", autograd.refuse_second_derivative)


@torch.library.custom_op("anyattn::decode", mutates_args=("k_cache", "v_cache"))
def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    cache_seqlens: Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_program: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    rotary_interleaved: bool,
    max_seqlen_q: int | None,
    validate: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``."""
    from anyattn.call_cache.kvcache import decode_call

    options = _options(
        alibi_slopes, sink, score_program, score_numbers, score_tensors, mask_program, mask_numbers, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa, False, q.is_cuda,
    )  # fmt: skip
    given = Given(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q,
        max_seqlen_q, rotary_interleaved, validate,
    )  # fmt: skip
    call, chosen = decode_call(given, options, backend or None, is_operator=True)  # type: ignore[misc] # refuses before it writes
    return _results(call.prepared(chosen), chosen, q.ndim == 3)


@decode.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, v_cache)


# ---- calls with traced mods


def flash_with_mods(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: tuple[Tensor | None, ...],
    longest: tuple,
    validate: bool | None,
    options: tuple,
    backend: str | None,
    score: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_func``, or with any table ``flash_attn_varlen_func``, as one operator, of traced mods."""
    given = Options(*options)
    q, k, v = autocast.arguments(q, k, v)
    longest = tuple(None if isinstance(n, Tensor) else n for n in longest)  # max_seqlen changes no result
    operands = (q, k, v, *tables, *_operands(q, given, score, mask), bool(given.deterministic), *longest, validate, backend or "")
    return called(flash, operands, _save, _gradients)  # type: ignore[no-any-return]


def decode_with_mods(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tensors: tuple[Tensor | None, ...],
    interleaved: bool,
    longest: Any,
    validate: bool | None,
    options: tuple,
    backend: str | None,
    score: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_with_kvcache`` as one operator; tensors: its optional ones, from k to cu_seqlens_q, in the operator's order."""
    longest, given = None if isinstance(longest, Tensor) else longest, Options(*options)
    q, *new = autocast.beside(k_cache, q, *tensors[:2])
    tensors = (*new, *tensors[2:])
    operands = _operands(q, given, score, mask)
    if torch.is_grad_enabled():
        check_no_gradients((q, k_cache, v_cache, *tensors), given)
        check_no_captured_gradients(() if score is None else score.tensors)
    return decode(q.detach(), k_cache, v_cache, *tensors, *operands, interleaved, longest, validate, backend or "")


def _operands(q: Tensor, options: Options, score: TracedMod | None, mask: TracedMod | None) -> tuple:
    for mod in (score, mask):
        if mod is not None:
            flex.captured_devices(mod, q.device)
    left, right = options.window_size
    window = [-1 if left is None else left, -1 if right is None else right]
    scale = None if options.softmax_scale is None else flex.scale_of("softmax_scale", options.softmax_scale, q.shape[-1], q.dtype)
    return (
        options.alibi_slopes, options.sink, *operands_of(q, score), *operands_of(q, mask), scale, float(options.softcap),
        bool(options.causal), window, options.num_splits, options.pack_gqa,
    )  # fmt: skip
