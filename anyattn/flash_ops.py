"""The operators through which ``torch.compile`` and ``torch.export`` see FlashAttention's doors; see ``ops.py`` for how mods travel.

The operators take what the doors take, and check and plan as an eager call does, when the graph runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyattn import autocast, autograd, check_flash, hardware, plan
from anyattn.check_cache import Given, cache_call, check_no_captured_gradients, check_no_gradients
from anyattn.check_flash import Options
from anyattn.mods.algebra import Mask, Score
from anyattn.ops import NO_MOD, frozen_mod, traced_mod
from anyattn.problem import Problem

__all__ = ["compiled_decode", "compiled_flash", "decode", "flash"]

_DIFFERENTIABLE = ("q", "k", "v", "alibi_slopes", "sink")


def _options(
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    score_program: str,
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_program: str,
    mask_scalars: Tensor,
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
) -> Options:
    score = traced_mod("score", score_program, score_scalars, score_tensors)
    mask = traced_mod("mask", mask_program, mask_scalars, mask_tensors)
    window = tuple(window_size)
    return Options(
        softmax_scale, causal, window, softcap, alibi_slopes, sink, score, mask, return_lse=True, num_splits=num_splits, pack_gqa=pack_gqa
    )


def _problem(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor | None, ...], options: Options) -> Problem:
    if all(t is None for t in tables):
        return check_flash.dense_problem(q, k, v, options)
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table = tables
    return check_flash.varlen_problem(q, k, v, cu_seqlens_q, cu_seqlens_k, None, None, seqused_q, seqused_k, page_table, None, options)


@torch.library.custom_op("anyattn::flash", mutates_args=())
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
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_program: str,
    mask_scalars: Tensor,
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_func``, or with any table of ``flash_attn_varlen_func``; window_size: -1 is no limit."""
    options = _options(
        alibi_slopes, sink, score_program, score_scalars, score_tensors, mask_program, mask_scalars, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa,
    )  # fmt: skip
    problem = _problem(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table), options)
    return _run(problem, backend, q.ndim == 3)


def _run(problem: Problem, backend: str, is_packed: bool) -> tuple[Tensor, Tensor]:
    return _results(problem, plan.choose(problem, hardware.of(problem.q.device.type), backend or None), is_packed)


def _results(problem: Problem, chosen: plan.Plan, is_packed: bool) -> tuple[Tensor, Tensor]:
    with autocast.disabled():
        result = autograd.backend_of(chosen).forward(problem, chosen)
    out = result.out.transpose(1, 2)
    return (out[0], result.lse[0]) if is_packed else (out, result.lse)


def _fake(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    batch, (seqlen, heads) = q.shape[0] if q.ndim == 4 else 1, q.shape[-3:-1]
    out, lse = q.new_empty((batch, heads, seqlen, v.shape[-1])).transpose(1, 2), q.new_empty((batch, heads, seqlen), dtype=stat)
    return (out, lse) if q.ndim == 4 else (out[0], lse[0])


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, v)


@torch.library.custom_op("anyattn::flash_backward", mutates_args=())
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
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_program: str,
    mask_scalars: Tensor,
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
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
        alibi_slopes, sink, score_program, score_scalars, score_tensors, mask_program, mask_scalars, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa,
    )  # fmt: skip
    problem = _problem(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table), options)
    asked = zip(("q", "k", "v", "sink"), (*wants[:3], wants[4]), strict=True)  # a graph's own tensors, as they come, require none
    problem = problem.like(**{name: autograd.wanting(getattr(problem, name), w) for name, w in asked})
    # a plan of whole spans keeps no log-sum-exp; here it was kept
    chosen = replace(plan.choose(problem, hardware.of(q.device.type), backend or None), whole_spans=False)
    rows = (out if out.ndim == 4 else out[None]).transpose(1, 2), lse if lse.ndim == 3 else lse[None]
    douts = (dout if dout.ndim == 4 else dout[None]).transpose(1, 2), dlse if dlse is None or dlse.ndim == 3 else dlse[None]
    dq, dk, dv, dsink, *captured = autograd.backward(problem, chosen, *rows, *douts)
    by_tensor = {id(t): g for t, g in zip(problem.score.tensors if problem.score else (), captured, strict=True)}
    found = [*(_as(g, t) for g, t in zip((dq, dk, dv), (q, k, v), strict=True)), by_tensor.get(id(alibi_slopes)), dsink]
    found += [by_tensor.get(id(t)) for t in score_tensors]
    return [q.new_empty(0) if g is None or not w else g.contiguous() for g, w in zip(found, wants, strict=True)]


def _as(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """A gradient (B or 1, H, S, D) laid out as the door's argument was."""
    if grad is None:
        return None
    return grad.transpose(1, 2) if like.ndim == 4 else grad.transpose(1, 2)[0]


@flash_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> list[Tensor]:
    slopes, sink, score_tensors, wants = args[5], args[6], args[9], args[-1]
    inputs = [q, k, v, slopes, sink, *score_tensors]
    dense = torch.contiguous_format
    return [torch.empty_like(t, memory_format=dense) if w else q.new_empty(0) for t, w in zip(inputs, wants, strict=True)]


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
    grads = flash_backward(*inputs, out, lse, dout, dlse, ctx.wants)
    by_input = [g if w else None for g, w in zip(grads, ctx.wants, strict=True)]
    result: list = [[None] * len(x) if is_list else None for x, is_list in zip(inputs, ctx.is_list, strict=True)]
    result[0], result[1], result[2], result[8], result[9] = by_input[:5]
    result[12] = by_input[5:]
    return tuple(result)


flash.register_autograd(_gradients, setup_context=_save)


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
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_program: str,
    mask_scalars: Tensor,
    mask_tensors: list[Tensor],
    softmax_scale: float | None,
    softcap: float,
    causal: bool,
    window_size: list[int],
    num_splits: int,
    pack_gqa: bool | None,
    rotary_interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of ``flash_attn_with_kvcache``."""
    options = _options(
        alibi_slopes, sink, score_program, score_scalars, score_tensors, mask_program, mask_scalars, mask_tensors, softmax_scale, softcap,
        causal, window_size, num_splits, pack_gqa,
    )  # fmt: skip
    given = Given(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, page_table, cu_seqlens_q, None,
        rotary_interleaved,
    )  # fmt: skip
    call = cache_call(given, options)
    chosen = plan.choose(call.problem, hardware.of(q.device.type), backend or None)  # which refuses before anything is written
    return _results(call.prepared(chosen), chosen, q.ndim == 3)


@decode.register_fake
def _(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _fake(q, v_cache)


# ---- the doors inside a compiled graph


def compiled_flash(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor | None, ...], options: Options, backend: str | None
) -> tuple[Tensor, Tensor]:
    """``flash_attn_func`` or ``flash_attn_varlen_func`` as one operator call, so that Dynamo can trace it: mods must be wrapped."""
    if options.block_sparse_tensors is not None:
        raise TypeError(
            "block_sparse_tensors is given inside torch.compile or torch.export; wanted None: pass the mask_mod alone, its tiles are found"
        )
    return flash(q, k, v, *tables, *_operands(q, options), backend or "")


def compiled_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tensors: tuple[Tensor | None, ...],
    interleaved: bool,
    options: Options,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """``flash_attn_with_kvcache`` as one operator call; tensors: its optional ones, from k to cu_seqlens_q, in the operator's order."""
    operands = _operands(q, options)
    if torch.is_grad_enabled():
        check_no_gradients((q, k_cache, v_cache, *tensors), options)
        check_no_captured_gradients(operands[4])
    return decode(q.detach(), k_cache, v_cache, *tensors, *operands, interleaved, backend or "")


def _operands(q: Tensor, options: Options) -> tuple:
    score = frozen_mod(options.score_mod, Score, "score_mod", q, options.aux_tensors) if options.score_mod is not None else None
    mask = frozen_mod(options.mask_mod, Mask, "mask_mod", q, options.aux_tensors) if options.mask_mod is not None else None
    programs = []
    for mod in (score, mask):
        programs += [NO_MOD, q.new_empty(0, dtype=torch.float64), []] if mod is None else [mod.program, mod.scalars, mod.tensors]
    left, right = options.window_size
    window = [-1 if left is None else left, -1 if right is None else right]
    scale = None if options.softmax_scale is None else float(options.softmax_scale)
    return (
        options.alibi_slopes, options.sink, *programs, scale, float(options.softcap), bool(options.causal), window, options.num_splits,
        options.pack_gqa,
    )  # fmt: skip
