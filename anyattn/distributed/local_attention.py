"""The attention of one rank's rows: keys are fetched while rows that need none of them are computed; gradients of keys travel home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd, planner
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.call_cache.signature import NotCacheable, identical, tensor_key
from anyattn.determinism import mode_of
from anyattn.distributed.by_documents import DocumentRows
from anyattn.distributed.channel import Channel
from anyattn.distributed.exchange import Pending, Piece, awaited, key_moves
from anyattn.distributed.layout import Segment
from anyattn.distributed.placed_mods import placed, tensor_slots
from anyattn.distributed.row_moves import Move, RowMoves, part_of
from anyattn.distributed.share import LocalCalls, Share, is_interval
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sparsity.block_mask import BlockMask
from anyattn.tensors.strides import empty_in_order, innermost
from anyattn.validate import flex

__all__ = ["Gradients", "Inputs", "Results", "ShardedCall", "backward", "forward"]


class ShardedCall(NamedTuple):
    """A ``flex_attention`` call on a shard, without its tensors. share: ``Share``, or ``head_share.CallShare`` where heads travel. calls:
    the local ones. block_masks: of the segments; none of documents. score, mask: by global positions, without the captured tensors of
    score. keeps_keys: what is received is kept for the backward pass; else it is sent again. wire: the dtype in which sums of keys'
    gradients travel, where keys do; torch.float32: float64 for float64 tensors."""

    share: Any
    channel: Channel
    calls: LocalCalls
    block_masks: tuple[BlockMask, ...]
    score: TracedMod | None
    mask: TracedMod | None
    scale: Any
    wants_lse: bool
    wants_max: bool
    deterministic: bool
    backend: str | None
    options: Any
    keeps_keys: bool
    wire: torch.dtype


class Inputs(NamedTuple):
    """The tensors of a call: the rows of this rank, the sink, and the score mod's captured tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captured: tuple[Tensor, ...]


class Results(NamedTuple):
    """out, lse, max_scores (None unless wanted) of this rank's rows, and what was received (None if it is not kept)."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor | None
    message: Tensor | None


class Gradients(NamedTuple):
    """Gradients of ``Inputs``. Those of sink and captured tensors are this rank's share; None where none is wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    sink: Tensor | None
    captured: tuple[Tensor | None, ...]


def forward(call: ShardedCall, inputs: Inputs, early: Pending | None = None) -> Results:
    """The attention of this rank's rows; the same call runs on every rank. early: its exchange of keys, if that was started before."""
    share: Share = call.share
    channel, calls, (q, k, v, *_) = call.channel, call.calls, inputs
    moves = key_moves(share, calls, k, v)
    pending = moves.send(k, v, channel) if share.messages and early is None else early
    keys = moves.local.made(k, v, None)
    message: Tensor | None = None
    found: list[Any] = [None] * len(calls.segments)
    for at in calls.order:
        if pending is not None and message is None and not calls.segments[at].is_local:
            message = moves.keys(pending, channel)
            keys |= moves.remote.made(k, v, message)
        found[at] = autograd.forward(*_problem(call, at, inputs, *_keys_of(calls, at, k, v, keys)))
    if pending is not None and message is None:  # every row was computed: the messages are for others
        message = moves.keys(pending, channel)
    out = _rows(call, [r.out for r in found], q, v.shape[3])
    lse, highest = (_statistics(parts, q) for parts in ([r.lse for r in found], [r.max_scores for r in found]))
    return Results(out, lse, highest if call.wants_max else None, message if call.keeps_keys else None)


def backward(call: ShardedCall, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Gradients of ``inputs``, which require grad where one is wanted. Runs on every rank.

    The calls with remote keys run first: the gradients of these keys travel during the others.
    """
    share: Share = call.share
    channel, calls, (q, k, v, *_) = call.channel, call.calls, inputs
    moves, message = key_moves(share, calls, k, v), results.message
    if share.messages and message is None:
        message = moves.keys(moves.send(k, v, channel), channel)
    keys = moves.remote.made(k, v, message)
    keys |= moves.local.made(k, v, None)
    wants_keys = k.requires_grad or v.requires_grad
    pieces: list[Piece] = []
    dq: list[Any] = [None] * len(calls.segments)
    of_others: list[Any] = [None] * (1 + len(inputs.captured))

    def visit(at: int) -> None:
        segment = calls.segments[at]
        of_k, of_v = _keys_of(calls, at, k, v, keys)
        if wants_keys:  # both: their sums travel together
            of_k, of_v = autograd.requiring_grad(of_k, True), autograd.requiring_grad(of_v, True)  # type: ignore[assignment]
        problem, plan = _problem(call, at, inputs, of_k, of_v)
        cut = [_cut(t, segment) for t in (results.out, results.lse, dout, dlse)]
        dq[at], dk, dv, *more = autograd.backward(problem.like(wide_kv_grads=True), plan, *cut)
        if dk is not None and dv is not None:
            pieces.append(Piece(segment.spans, innermost(dk), innermost(dv)))
        of_others[0] = _added(of_others[0], more[0])
        for grad, slot in zip(more[1:], _slots(call, at, len(inputs.captured))):
            if slot < len(inputs.captured):  # else a table of rows
                of_others[1 + slot] = _added(of_others[1 + slot], grad)

    for at in reversed(calls.order):
        if not calls.segments[at].is_local:
            visit(at)
    pending = None
    if share.messages:
        wide = torch.promote_types(k.dtype, torch.float32)
        pending = moves.return_gradients(pieces, k, wide if call.wire is torch.float32 else call.wire, channel)
    for at in reversed(calls.order):
        if calls.segments[at].is_local:
            visit(at)
    returned = None if pending is None else awaited(pending, channel, "gradients").to(wide)
    of_q = _rows(call, dq, q, q.shape[3]) if q.requires_grad else None
    of_k = of_v = None
    if wants_keys:
        of_k, of_v = empty_in_order(k), empty_in_order(v)
        moves.home(pieces, returned, (of_k, of_v))
    if not calls.segments:  # a rank without rows
        of_others = [None if t is None or not t.requires_grad else torch.zeros_like(t) for t in (inputs.sink, *inputs.captured)]
    return Gradients(of_q, of_k, of_v, of_others[0], tuple(of_others[1:]))


# ---- local attention calls


def _problem(call: ShardedCall, at: int, inputs: Inputs, keys: Tensor, values: Tensor) -> tuple[Problem, Plan]:
    """The problem and the plan of a local call, warm ones from the call cache."""
    segment, score = call.calls.segments[at], call.score
    if score is not None:
        score = TracedMod.of_fields({**vars(score), "tensors": inputs.captured})
    if isinstance(segment, DocumentRows):
        return _over_documents(call, segment, score, inputs, keys, values)
    place = call.calls.places[at]
    score = None if score is None else placed(score, place)
    mask = None if call.mask is None else placed(call.mask, place)
    arguments = FlexCall(
        _cut(inputs.q, segment), keys, values, score, call.block_masks[at], mask, None, call.scale, True, inputs.sink, True,
        call.wants_max, call.deterministic,
    )  # fmt: skip
    return flex_call(arguments, call.backend, call.options, is_operator=True)  # type: ignore[return-value]


def _over_documents(
    call: ShardedCall, rows: DocumentRows, score: TracedMod | None, inputs: Inputs, keys: Tensor, values: Tensor
) -> tuple[Problem, Plan]:
    """The problem of a call over documents. A share keeps its plan, for the properties on which that depends."""
    q, sink = inputs.q, inputs.sink
    rows.wait()
    score = None if score is None else rows.inside(score)
    predicates = () if rows.rest is None else (rows.rest,)
    scale = flex.scale_of("scale", call.scale, q.shape[3], q.dtype)
    problem = Problem(q, keys, values, scale, score, predicates, None, sink, True, False, mode_of(call.deterministic), rows.sequences)
    key = _plan_key(problem)
    plan = None if key is None else call.share.kept.get(key)
    if plan is None:
        plan = planner.planned(problem, None, {})
        if key is not None and plan.is_reusable:
            call.share.keep(key, plan)
    return problem, plan


def _plan_key(problem: Problem) -> tuple | None:
    """What the plan of a call over a share's documents depends on; None if it cannot be kept, for a subclass of ``Tensor``."""
    score = problem.score
    numbers, tensors = ((), ()) if score is None else ((score.expr, score.scalars), score.tensors)
    given = problem.q, problem.k, problem.v, problem.sink, *tensors
    try:
        return "plan", *map(tensor_key, given), identical(tensors), numbers, problem.scale, problem.deterministic
    except NotCacheable:
        return None


def _slots(call: ShardedCall, at: int, tensors: int) -> list[int]:
    """Which captured tensor each tensor of a local call's score mod is; a number beyond them for a table of rows."""
    segment = call.calls.segments[at]
    if call.score is None:
        return []
    if isinstance(segment, DocumentRows):
        return segment.slots(call.score, tensors)
    return tensor_slots(call.score, tensors, call.calls.places[at])


def _cut(t: Any, segment: Segment | DocumentRows) -> Any:
    """The rows of a segment, in a tensor (B, H, rows of this rank, ...)."""
    if t is None or segment.length == t.shape[2]:
        return t
    requires_grad = t.requires_grad
    t = t.detach().narrow(2, segment.first, segment.length)
    return t.requires_grad_() if requires_grad else t


def _rows(call: ShardedCall, parts: Sequence[Tensor], q: Tensor, width: int) -> Tensor:
    """Results of all segments (B, H, rows, width) as one tensor, in the order of the rows, which is that of the segments."""
    if len(parts) == 1:
        return parts[0]
    parts, joined = [*map(innermost, parts)], empty_in_order(q, last=width, dtype=q.dtype)
    key = "rows", call.calls.name, joined.shape, joined.stride(), *[part.stride() for part in parts]
    found = call.share.kept.get(key)
    if found is None:
        firsts = [segment.first for segment in call.calls.segments]
        moves = [
            Move(part_of(0, joined, first), (part_of(i, part),), part.shape[2], width) for i, (first, part) in enumerate(zip(firsts, parts))
        ]
        found = call.share.keep(key, RowMoves(moves, *q.shape[:2]))
    found.run(parts, (joined,))
    return joined


def _statistics(parts: Sequence[Tensor | None], q: Tensor) -> Any:
    """The same for a statistic (B, H, rows) that a segment may lack, in float32 (float64)."""
    if not parts:
        return torch.empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, 2)  # type: ignore[arg-type]


def _keys_of(calls: LocalCalls, at: int, k: Tensor, v: Tensor, made: dict[int, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Keys and values of a segment's hull: a view of the rank's own where it has all of them, else memory with own and received ones."""
    hull = calls.hulls[at]
    if is_interval(hull):
        return _own(k, *hull), _own(v, *hull)  # type: ignore[misc, arg-type]
    of_k, of_v = made[at]
    return of_k.requires_grad_(k.requires_grad), of_v.requires_grad_(v.requires_grad)


def _own(t: Tensor, start: int, stop: int) -> Tensor:
    return t if (start, stop) == (0, t.shape[2]) else t.detach()[:, :, start:stop].requires_grad_(t.requires_grad)


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
