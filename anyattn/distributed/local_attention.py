"""The attention of one rank's rows: keys are fetched while rows that need none of them are computed; gradients of keys travel home."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.distributed.channel import Channel
from anyattn.distributed.exchange import Remote, awaited_gradients, awaited_keys, copy_rows, remote_keys, return_gradients, send_keys
from anyattn.distributed.layout import Interval, Segment, local_rows
from anyattn.distributed.placed_mods import placed, tensor_slots
from anyattn.distributed.share import Share
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sparsity.block_mask import BlockMask
from anyattn.tensors.strides import empty_in_order

__all__ = ["Gradients", "Inputs", "Results", "ShardedCall", "backward", "forward"]


class ShardedCall(NamedTuple):
    """A ``flex_attention`` call on a shard, without its tensors. block_masks: of the segments. score, mask: by global positions, without
    the captured tensors of score. keeps_keys: received keys are kept for the backward pass; else they are fetched again."""

    share: Share
    channel: Channel
    block_masks: tuple[BlockMask, ...]
    score: TracedMod | None
    mask: TracedMod | None
    scale: Any
    wants_max: bool
    deterministic: bool
    backend: str | None
    options: Any
    keeps_keys: bool


class Inputs(NamedTuple):
    """The tensors of a call: the rows of this rank, the sink, and the score mod's captured tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    captured: tuple[Tensor, ...]


class Results(NamedTuple):
    """out, lse, max_scores (None unless wanted) of this rank's rows, and the received message (None if it is not kept)."""

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


def forward(call: ShardedCall, inputs: Inputs) -> Results:
    """The attention of this rank's rows; the same call runs on every rank."""
    share, channel, (q, k, v, *_) = call.share, call.channel, inputs
    pending = send_keys(k, v, share.route, channel) if share.has_messages else None
    found: list[Any] = [None] * len(share.segments)
    remote: Remote | None = None
    for at in share.order:
        if pending is not None and remote is None and not share.segments[at].is_local:
            remote = remote_keys(awaited_keys(pending, channel), k, v, share.route)
        problem, plan = _problem(call, at, inputs, *_keys_of(share, at, k, v, remote))
        found[at] = autograd.forward(problem, plan)
    if pending is not None and remote is None:  # every row was computed: the messages are for others
        awaited_keys(pending, channel)
    stat = torch.promote_types(q.dtype, torch.float32)
    out = _rows([r.out for r in found], q, v.shape[3], q.dtype)
    lse = _rows([r.lse for r in found], q[..., 0], None, stat)
    highest = _rows([r.max_scores for r in found], q[..., 0], None, stat) if call.wants_max else None
    return Results(out, lse, highest, pending.received if pending is not None and call.keeps_keys else None)


def backward(call: ShardedCall, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Gradients of ``inputs``, which require grad where one is wanted. Runs on every rank.

    The calls with remote keys run first: the gradients of these keys travel during the others.
    """
    share, channel, (q, k, v, *_) = call.share, call.channel, inputs
    route, has_messages = share.route, share.has_messages
    remote: Remote | None = None
    if has_messages:
        message = awaited_keys(send_keys(k, v, route, channel), channel) if results.message is None else results.message
        remote = remote_keys(message, k, v, route)
    of_own, of_remote = [_Sum() for _ in share.rows], [_Sum() for _ in route.keys]
    dq: list[Any] = [None] * len(share.segments)
    of_others: list[Any] = [None] * (1 + len(inputs.captured))

    def visit(at: int) -> None:
        segment = share.segments[at]
        problem, plan = _problem(call, at, inputs, *_keys_of(share, at, k, v, remote))
        cut = [_cut(t, segment) for t in (results.out, results.lse, dout, dlse)]
        dq[at], dk, dv, *more = autograd.backward(problem.like(wide_kv_grads=True), plan, *cut)
        if dk is not None and dv is not None:
            for intervals, sums in ((share.rows, of_own), (route.keys, of_remote)):
                for interval, total in zip(intervals, sums):
                    total.add(interval, segment.keys, dk, dv)
        of_others[0] = _added(of_others[0], more[0])
        for grad, slot in zip(more[1:], () if call.score is None else tensor_slots(call.score, len(inputs.captured), share.places[at])):
            if slot < len(inputs.captured):  # else the table of rows
                of_others[1 + slot] = _added(of_others[1 + slot], grad)

    for at in reversed(share.order):
        if not share.segments[at].is_local:
            visit(at)
    pending = None
    if has_messages:
        pending = return_gradients([s.total(i, k, v) for s, i in zip(of_remote, route.keys)], k, v, route, channel)
    for at in reversed(share.order):
        if share.segments[at].is_local:
            visit(at)
    returned: Remote = [] if pending is None else awaited_gradients(pending, k, v, route, channel)
    of_q = _rows(dq, q, q.shape[3], q.dtype) if q.requires_grad else None
    of_k = of_v = None
    if k.requires_grad or v.requires_grad:
        of_k, of_v = _home(share, [s.total(i, k, v) for s, i in zip(of_own, share.rows)], returned, k, v)
    return Gradients(of_q, of_k, of_v, of_others[0], tuple(of_others[1:]))


# ---- local attention calls


def _problem(call: ShardedCall, at: int, inputs: Inputs, keys: Tensor, values: Tensor) -> tuple[Problem, Plan]:
    """The problem and the plan of a segment's call, warm ones from the call cache."""
    segment, place = call.share.segments[at], call.share.places[at]
    score = call.score
    if score is not None:
        score = placed(TracedMod.of_fields({**vars(score), "tensors": inputs.captured}), place)
    mask = None if call.mask is None else placed(call.mask, place)
    arguments = FlexCall(
        _cut(inputs.q, segment), keys, values, score, call.block_masks[at], mask, None, call.scale, True, inputs.sink, True,
        call.wants_max, call.deterministic,
    )  # fmt: skip
    return flex_call(arguments, call.backend, call.options, is_operator=True)  # type: ignore[return-value]


def _cut(t: Any, segment: Segment) -> Any:
    """The rows of a segment, in a tensor (B, H, rows of this rank, ...)."""
    if t is None or segment.length == t.shape[2]:
        return t
    requires_grad = t.requires_grad
    t = t.detach().narrow(2, segment.first, segment.length)
    return t.requires_grad_() if requires_grad else t


def _rows(parts: Sequence[Tensor], like: Tensor, last: int | None, dtype: torch.dtype) -> Tensor:
    """Results of all segments as one tensor, in the order of the rows, which is the order of the segments."""
    if len(parts) == 1:
        return parts[0]
    joined = empty_in_order(like, last=last, dtype=dtype) if last is not None else torch.empty(like.shape, dtype=dtype, device=like.device)
    first = 0
    for part in parts:
        copy_rows(joined.narrow(2, first, part.shape[2]), part)
        first += part.shape[2]
    return joined


def _keys_of(share: Share, at: int, k: Tensor, v: Tensor, remote: Remote | None) -> tuple[Tensor, Tensor]:
    """Keys and values of a segment's hull: a view of the rank's own where it has all of them, else a copy of its own and received ones."""
    length, hull = share.segments[at].key_length, share.hulls[at]
    if len(hull) == 2 and isinstance(hull[0], int):
        return _own(k, *hull), _own(v, *hull)  # type: ignore[misc]
    # a hull's gap may lie in what other segments receive; before that has come it is left out
    sources: Any = [source for source in hull if source.message is None or remote is not None]  # type: ignore[union-attr]
    buffers = _keys_in_order(k, length), _keys_in_order(v, length)
    if sum(source.at[1] - source.at[0] for source in sources) < length:  # a tile of a kernel may reach into keys that no row needs
        for buffer in buffers:
            buffer.zero_()
    for (start, stop), message, (first, last) in sources:
        pair = (k.detach(), v.detach()) if message is None else remote[message]  # type: ignore[index]
        for buffer, source in zip(buffers, pair):
            copy_rows(buffer[:, :, start:stop], source[:, :, first:last])
    return buffers[0].requires_grad_(k.requires_grad), buffers[1].requires_grad_(v.requires_grad)


def _own(t: Tensor, start: int, stop: int) -> Tensor:
    return t if (start, stop) == (0, t.shape[2]) else t.detach()[:, :, start:stop].requires_grad_(t.requires_grad)


def _keys_in_order(like: Tensor, length: int) -> Tensor:
    """Memory for ``length`` keys (B, Hkv, length, D), with positions outside of heads if they are so in ``like``."""
    batch, heads, _, width = like.shape
    if like.stride(2) > like.stride(1):
        return torch.empty((batch, length, heads, width), dtype=like.dtype, device=like.device).transpose(1, 2)
    return torch.empty((batch, heads, length, width), dtype=like.dtype, device=like.device)


# ---- gradients


class _Sum:
    """The gradients of an interval of keys and of their values, from several segments, in float32 (float64)."""

    def __init__(self) -> None:
        self._parts: list[tuple[Interval, Tensor, Tensor]] = []  # the interval inside this one

    def add(self, interval: Interval, hull: Interval, dk: Tensor, dv: Tensor) -> None:
        """Adds what a segment's hull has of the interval."""
        start, stop = max(interval[0], hull[0]), min(interval[1], hull[1])
        if start < stop:
            rows = slice(start - hull[0], stop - hull[0])
            self._parts.append(((start - interval[0], stop - interval[0]), dk[:, :, rows], dv[:, :, rows]))

    def total(self, interval: Interval, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The sums: the part that covers the whole interval, which is written to, with the others added; else zeros with all of them."""
        length, parts = interval[1] - interval[0], self._parts
        whole = next((i for i, (at, *_) in enumerate(parts) if at == (0, length)), None)
        if whole is None:
            wide = torch.promote_types(k.dtype, torch.float32)
            x, y = (torch.zeros((*t.shape[:2], length, t.shape[3]), dtype=wide, device=t.device) for t in (k, v))
        else:
            _, x, y = parts.pop(whole)
        for (start, stop), more_x, more_y in parts:
            x[:, :, start:stop] += more_x
            y[:, :, start:stop] += more_y
        self._parts = []
        return x, y


def _home(share: Share, own: list[tuple[Tensor, Tensor]], returned: Remote, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of k and v: own sums and, in the order of the ranks, those that other ranks return, rounded once."""
    places = [local_rows(share.rows, interval) for interval in share.rows]
    for (start, stop), pair in zip(share.route.rows, returned):
        (begin, _), sums = next((place, sums) for place, sums in zip(places, own) if place[0] <= start and stop <= place[1])
        for total, more in zip(sums, pair):
            total[:, :, start - begin : stop - begin] += more
    grads = empty_in_order(k), empty_in_order(v)
    for (start, stop), sums in zip(places, own):
        for grad, total in zip(grads, sums):
            grad[:, :, start:stop].copy_(total)
    return grads


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
