"""The operators through which ``torch.compile`` and ``torch.export`` see attention.

A compiled graph cannot hold a Python function, so an operator takes a mod as its program's text (``mods/codec.py``), a float64 tensor of
captured numbers and a list of captured tensors. The operators validate, plan and run exactly like an eager call; eager calls do not pass
through here, which saves the dispatcher's overhead. An operator takes no list of strings: mask programs are joined by newlines.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anyattn import autocast, autograd, check, hardware, plan
from anyattn.mods import codec
from anyattn.mods.algebra import Mask, Score
from anyattn.mods.ir import Expr
from anyattn.mods.seen_loads import Dense, check_call, held
from anyattn.mods.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sparsity.block_mask import are_unwritten

__all__ = ["NO_MOD", "attend", "compiled_flex_attention", "frozen_mod", "traced_mod"]

NO_MOD = ""


def traced_mod(kind: str, program: str, scalars: Tensor, tensors: list[Tensor]) -> TracedMod | None:
    if program == NO_MOD:
        return None
    expr = codec.decode(program)
    return TracedMod(kind, expr, _numbers(expr, scalars), tuple(tensors), "compiled mod")


def _numbers(expr: Expr, scalars: Tensor) -> tuple[int | float, ...]:
    kinds = {node.attr: node.dtype for node in expr.nodes if node.op == "scalar"}
    return tuple(kinds[i](x) for i, x in enumerate(scalars.tolist()))  # type: ignore[operator, index]


class _Lists:
    """Stands for the block mask whose lists an operator was given. Its tensors are views: it must not keep alive what it is kept by."""

    def __init__(self, tensors: list[Tensor], facts: tuple):
        views = [t.detach() for t in tensors]
        self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices = [*views, None, None][:4]
        self.BLOCK_SIZE, self.seq_lengths, self.is_exact = facts


# While one lives the memory that it views is nobody else's. It lives as long as the tensor of counts that came first: a backward pass gets
# another one of the same memory, with the same count of writes.
_by_place: WeakValueDictionary[tuple, _Lists] = WeakValueDictionary()
_by_counts: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def _stand_in(tensors: list[Tensor], facts: tuple) -> _Lists:
    """The same one for the same lists: what is found out of a block mask is kept with it."""
    if any(t.is_inference() for t in tensors):  # nobody counts writes to these
        return _Lists(tensors, facts)
    places = (facts, *[(t.data_ptr(), t._version, t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    known = _by_place.get(places)
    if known is None:
        known = _by_place[places] = _by_counts[tensors[0]] = _Lists(tensors, facts)
    return known


def _problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_scalars: list[Tensor],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    wants_max: bool,
) -> Problem:
    check.check_held("scale", scale, q.dtype)
    score = traced_mod("score", score_program, score_scalars, score_tensors)
    predicates, taken = [], 0
    for program, scalars in zip(mask_programs.splitlines(), mask_scalars, strict=True):
        expr = codec.decode(program)
        count = len(expr.tensor_slots)
        predicates.append(TracedMod("mask", expr, _numbers(expr, scalars), tuple(mask_tensors[taken : taken + count]), "compiled mask"))
        taken += count
    blocks, follows = None, False
    if block_lists:
        # of a mask that was exact when the graph was made: nobody may have written to its lists since
        mask = _stand_in(block_lists, (tuple(block_size), (q.shape[2], k.shape[2]), is_exact and are_unwritten(*block_lists)))
        blocks, follows = check.lists_of(mask, predicates[0])
    sizes = (*q.shape[:3], k.shape[2])
    if q.is_cuda:  # looking at what tensors hold would wait, and a CUDA graph must not
        predicates, score = [held(p, *sizes) for p in predicates], None if score is None else held(score, *sizes)
    else:
        scores = [] if score is None else [score]
        predicates, scores = check_call(Dense(*sizes), predicates, scores, None if follows else check.classes_of(blocks))
        score = scores[0] if scores else None
    return Problem(q, k, v, scale, score, tuple(predicates), blocks, sink, True, wants_max, blocks_follow=follows)


@torch.library.custom_op("anyattn::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_scalars: list[Tensor],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    wants_max: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of one attention; max_scores is empty unless wanted. Layouts as in ``flex_attention``."""
    problem = _problem(
        q, k, v, sink, score_program, score_scalars, score_tensors, mask_programs, mask_scalars, mask_tensors, block_lists, block_size,
        is_exact, scale, wants_max,
    )  # fmt: skip
    chosen = plan.choose(problem, hardware.of(q.device.type), backend or None)
    with autocast.disabled():
        result = autograd.backend_of(chosen).forward(problem, chosen)
    return result.out, result.lse, result.max_scores if wants_max else result.lse.new_empty(0)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    wants_max = args[-2]
    rows = q.shape[:3]
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=stat)
    return out, lse, q.new_empty(rows if wants_max else (0,), dtype=stat)


@torch.library.custom_op("anyattn::attend_backward", mutates_args=())
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_scalars: Tensor,
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_scalars: list[Tensor],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    backend: str,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wants: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v, sink and each score tensor; empty where ``wants`` says that none is."""
    # a graph's own tensors, as they come, require none
    asked: list[Any] = [autograd.wanting(t, w) for t, w in zip((q, k, v, sink, *score_tensors), wants, strict=True)]
    q, k, v, sink, *score_tensors = asked
    problem = _problem(
        q, k, v, sink, score_program, score_scalars, score_tensors, mask_programs, mask_scalars, mask_tensors, block_lists, block_size,
        is_exact, scale, False,
    )  # fmt: skip
    chosen = plan.choose(problem, hardware.of(q.device.type), backend or None)
    grads = autograd.backward(problem, chosen, out, lse, dout, dlse)
    return [g if g is not None and w else q.new_empty(0) for g, w in zip(grads, wants, strict=True)]


@attend_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *args: Any) -> list[Tensor]:
    score_tensors, wants = args[2], args[-1]
    dense = partial(torch.empty_like, memory_format=torch.contiguous_format)
    return [dense(t) if w else q.new_empty(0) for t, w in zip((q, k, v, sink, *score_tensors), wants, strict=True)]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sink, program, scalars, tensors, *rest = inputs
    out, lse, highest = output
    mask_programs, mask_scalars, mask_tensors, block_lists, block_size, is_exact, scale, _, backend = rest
    ctx.save_for_backward(q, k, v, sink, scalars, out, lse, *tensors, *mask_scalars, *mask_tensors, *block_lists)
    ctx.counts = (len(tensors), len(mask_scalars), len(mask_tensors), len(block_lists))
    ctx.program, ctx.mask_programs, ctx.scale, ctx.backend = program, mask_programs, scale, backend
    ctx.block_size, ctx.is_exact = block_size, is_exact
    ctx.wants = [t is not None and t.is_floating_point() and t.requires_grad for t in (q, k, v, sink, *tensors)]
    ctx.mark_non_differentiable(highest)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple:
    q, k, v, sink, scalars, out, lse, *lists = ctx.saved_tensors
    parts = []
    for count in ctx.counts:
        parts.append(list(lists[:count]))
        lists = lists[count:]
    tensors, mask_scalars, mask_tensors, block_lists = parts
    if dout is None:
        dout = torch.zeros_like(out)
    grads = attend_backward(
        q, k, v, sink, ctx.program, scalars, tensors, ctx.mask_programs, mask_scalars, mask_tensors, block_lists, ctx.block_size,
        ctx.is_exact, ctx.scale, ctx.backend, out, lse, dout, dlse, ctx.wants,
    )  # fmt: skip
    dq, dk, dv, dsink, *by_tensor = [g if w else None for g, w in zip(grads, ctx.wants, strict=True)]
    # one entry per input of `attend`: a list of tensors takes a list, a list of ints one None unless it is empty (then torch cannot
    # tell it from a list of tensors)
    mask_scalars, mask_tensors, block_lists = ([None] * n for n in ctx.counts[1:])
    block_size: list | None = None if ctx.block_size else []
    return (
        dq,
        dk,
        dv,
        dsink,
        None,
        None,
        by_tensor,
        None,
        mask_scalars,
        mask_tensors,
        block_lists,
        block_size,
        None,
        None,
        None,
        None,
    )


attend.register_autograd(_gradients, setup_context=_save)


def compiled_flex_attention(
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
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flex_attention`` as one operator call, written so that Dynamo can trace it: mods must be wrapped."""
    key, value = check.tensors(query, key, value, enable_gqa)
    frozen = frozen_mod(score_mod, Score, "score_mod", query, aux_tensors) if score_mod is not None else None
    masks, block_lists, block_size, is_exact = [], [], [], False
    if block_mask is not None:
        check.block_lengths(block_mask, query, key)
        masks.append(frozen_mod(block_mask.mask_mod, Mask, "block_mask.mask_mod", query, aux_tensors))
        block_lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
        if block_mask.full_kv_num_blocks is not None:
            block_lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
        block_size, is_exact = list(block_mask.BLOCK_SIZE), getattr(block_mask, "is_exact", False)
    if mask_mod is not None:
        masks.append(frozen_mod(mask_mod, Mask, "mask_mod", query, aux_tensors))
    mask_tensors = []
    for m in masks:
        mask_tensors += m.tensors
    return attend(
        query, key, value, sink,
        NO_MOD if frozen is None else frozen.program, query.new_empty(0, dtype=torch.float64) if frozen is None else frozen.scalars,
        [] if frozen is None else frozen.tensors, "\n".join([m.program for m in masks]), [m.scalars for m in masks], mask_tensors,
        block_lists, block_size, is_exact, query.shape[3] ** -0.5 if scale is None else float(scale), wants_max, backend or "",
    )  # fmt: skip


def frozen_mod(mod: Any, kind: type[Mask] | type[Score], name: str, query: Tensor, aux_tensors: Any) -> Any:
    if not isinstance(mod, kind):
        raise TypeError(
            f"{name} is a plain {type(mod).__name__} inside torch.compile or torch.export; wanted a wrapped mod: make it outside the "
            f"compiled function with anyattn.mod(f)"
        )
    found = mod.frozen.get("torch.float64" if kind is Score and query.dtype is torch.float64 else "torch.float32")
    if found is None or aux_tensors is not None:
        raise TypeError(
            f"{name} takes aux_tensors inside torch.compile or torch.export; wanted a mod that captures its tensors: anyattn.mod(f)"
        )
    return found
