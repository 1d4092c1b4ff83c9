"""Attention of whole sequences for some heads on each rank (Ulysses, arXiv 2309.14509): rows are exchanged for heads, and results back.

A message is a table: one row of bytes for each position and batch entry, with some heads of one tensor beside those of the next. So what
arrives from all ranks lies in the order of the sequence, and the local call reads it where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.distributed.channel import Channel
from anyattn.distributed.head_share import CallShare
from anyattn.distributed.local_attention import Gradients, Inputs, Results, ShardedCall
from anyattn.distributed.placed_mods import placed, tensor_slots
from anyattn.distributed.row_moves import Move, Part, RowMoves
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.tensors.strides import empty_in_order, innermost

__all__ = ["backward", "forward"]

_ALIGNMENT = 16  # bytes, of each part of a row: what kernels load at once


def forward(call: ShardedCall, inputs: Inputs) -> Results:
    """The attention of this rank's rows; the same call runs on every rank. A kept message has q, k, v, out and lse of the rank's heads."""
    share: CallShare = call.share
    q, k, v, *_ = inputs
    tables = _of_inputs(share, q, k, v), _of_results(share, q, v, True, call.wants_max)
    kept = _memory(tables, q.device) if call.keeps_keys else None
    to, source = (None, None) if kept is None else _divided(kept, tables)
    local = _to_heads((q, k, v), tables[0], call.channel, to)
    needs_grad = any(t is not None and t.requires_grad for t in (*inputs[:4], *inputs.captured))
    found = autograd.forward(*_problem(call, inputs, [t.requires_grad_(needs_grad) for t in local]))
    stats = [found.lse, found.max_scores] if call.wants_max else [found.lse]
    out = empty_in_order(q, last=v.shape[3])
    lse, *highest = [torch.empty(q.shape[:3], dtype=t.dtype, device=q.device) for t in stats]
    columns = [[t[..., None] for t in of] for of in (stats, (lse, *highest))]
    _to_rows((found.out, *columns[0]), tables[1], (out, *columns[1]), call.channel, source)
    return Results(out, lse, highest[0] if call.wants_max else None, kept)


def backward(call: ShardedCall, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Gradients of ``inputs``, which require grad where one is wanted. Runs on every rank.

    Those of q, k and v are computed even where this rank wants none: other ranks may want theirs. Raises ``RuntimeError`` if the mask's
    lists, which the local call reads, were written to since the forward pass.
    """
    share: CallShare = call.share
    if not share.is_unwritten:
        raise RuntimeError(
            "the block mask's lists have been modified by an inplace operation after the attention call whose gradients are computed; "
            "wanted backward() first, or a plan of its own for each mask"
        )
    q, k, v, sink, captured = inputs
    sent = [dout]
    if call.wants_lse:  # whether this rank's loss uses it, other ranks do not know
        sent.append((torch.zeros_like(results.lse) if dlse is None else dlse)[..., None])
    of_inputs, of_grads = _of_inputs(share, q, k, v), _of_results(share, q, v, call.wants_lse, False)
    if results.message is None:
        table = _Table(share, q.shape[0], (*of_inputs.parts, *_of_results(share, q, v, True, False).parts, *of_grads.parts))
        found = _to_heads((q, k, v, results.out, results.lse[..., None], *sent), table, call.channel)
        local, came = found[:5], found[5:]
    else:
        tables = of_inputs, _of_results(share, q, v, True, call.wants_max)
        local = [t for table, memory in zip(tables, _divided(results.message, tables)) for t in table.heads_of(memory)]
        came = _to_heads(sent, of_grads, call.channel)
    lse, *of_lse = [t[..., 0].contiguous() for t in (local[4], *came[1:])]
    problem, plan = _problem(call, inputs, [t.requires_grad_() for t in local[:3]])
    if share.copies > 1:  # the gradients of a K/V head are sums over ranks
        problem = problem.like(wide_kv_grads=True)
    grads = _gradients(problem, plan, (local[3], lse, came[0], of_lse[0] if of_lse else None))
    of_qkv, of_sink = grads[:3], grads[3]
    back = _Table(share, q.shape[0], [_Part(t.shape[1], t.shape[3], t.dtype) for t in of_qkv])
    dq, dk, dv = [empty_in_order(t) if t.requires_grad else None for t in (q, k, v)]
    _to_rows(of_qkv, back, (dq, dk, dv), call.channel)
    if of_sink is not None and sink is not None:
        of_sink, part = of_sink.new_zeros(sink.shape), of_sink
        of_sink[share.first : share.first + share.heads] = part
    of_mods: list[Tensor | None] = [None] * len(captured)
    if call.score is not None:
        for grad, slot in zip(grads[4:], tensor_slots(call.score, len(captured), share.place(call.score))):
            of_mods[slot] = grad
    return Gradients(dq, dk, dv, of_sink, tuple(of_mods))


# ---- the local call


def _problem(call: ShardedCall, inputs: Inputs, local: Sequence[Tensor]) -> tuple[Problem, Plan]:
    """The problem and the plan of the rank's heads, warm ones from the call cache. local: q, k, v (B, heads, S, D or Dv)."""
    share, score, mask, sink = call.share, call.score, call.mask, inputs.sink
    if score is not None:
        score = placed(TracedMod.of_fields({**vars(score), "tensors": inputs.captured}), share.place(score))
    if mask is not None:
        mask = placed(mask, share.place(mask))
    if sink is not None:
        sink = sink.detach()[share.first : share.first + share.heads].requires_grad_(sink.requires_grad)
    q, k, v = local
    arguments = FlexCall(q, k, v, score, call.block_masks[0], mask, None, call.scale, True, sink, True, call.wants_max, call.deterministic)
    return flex_call(arguments, call.backend, call.options, is_operator=True)  # type: ignore[return-value]


def _gradients(problem: Problem, plan: Plan, results: Sequence[Tensor | None]) -> list[Any]:
    """Gradients of q, k and v, zeros where the mods let none through; of the sink; and of what the score mod captures."""
    grads = [*autograd.backward(problem, plan, *results)]
    for i, t in enumerate((problem.q, problem.k, problem.v)):
        if grads[i] is None:
            grads[i] = torch.zeros_like(t, dtype=problem.kv_grad_dtype if i else t.dtype)
    return grads


# ---- messages


class _Part(NamedTuple):
    """heads: of one rank, at each position and batch entry. width: of one head."""

    heads: int
    width: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.heads * self.width * self.dtype.itemsize


class _Table:
    """The format of a message. row: bytes of one position and batch entry. starts: where each part begins in it."""

    def __init__(self, share: CallShare, batch: int, parts: Sequence[_Part]):
        self.share, self.batch, self.parts = share, batch, tuple(parts)
        ends = [0]
        for part in parts:
            ends.append(ends[-1] + -(-part.bytes // _ALIGNMENT) * _ALIGNMENT)
        self.row, self.starts = ends.pop(), ends

    def size(self, rows: int) -> int:
        """Bytes of so many positions."""
        return rows * self.batch * self.row

    def heads_of(self, memory: Tensor) -> list[Tensor]:
        """(batch, heads, S, width) of each part, in a message that has all positions."""
        table = memory.view(self.share.layout.length, self.batch, self.row)
        found = [table[..., at : at + p.bytes].view(p.dtype) for at, p in zip(self.starts, self.parts)]
        return [t.unflatten(-1, (p.heads, p.width)).permute(1, 2, 0, 3) for t, p in zip(found, self.parts)]


def _of_inputs(share: CallShare, q: Tensor, k: Tensor, v: Tensor) -> _Table:
    heads = (share.heads, share.key_heads, share.key_heads)
    return _Table(share, q.shape[0], [_Part(n, t.shape[3], t.dtype) for n, t in zip(heads, (q, k, v))])


def _of_results(share: CallShare, q: Tensor, v: Tensor, has_lse: bool, has_max: bool) -> _Table:
    """Of out, lse and max_scores, or of the gradients of the first two."""
    stat = _Part(share.heads, 1, torch.promote_types(q.dtype, torch.float32))
    return _Table(share, q.shape[0], [_Part(share.heads, v.shape[3], q.dtype), *[stat] * (has_lse + has_max)])


def _memory(tables: Sequence[_Table], device: torch.device) -> Tensor:
    """Bytes for all positions in several tables."""
    return torch.empty(sum(t.size(t.share.layout.length) for t in tables), dtype=torch.uint8, device=device)


def _divided(memory: Tensor, tables: Sequence[_Table]) -> tuple[Tensor, ...]:
    return memory.split([t.size(t.share.layout.length) for t in tables])


def _to_heads(sources: Sequence[Tensor], table: _Table, channel: Channel, to: Tensor | None = None) -> list[Tensor]:
    """All rows of this rank's heads, (B, heads, S, width), for this rank's rows of all heads, (B, H, rows, width). to: memory for them."""
    share, ranks = table.share, len(table.share.lengths)
    own = table.size(share.length)
    sent = torch.empty(own * ranks, dtype=torch.uint8, device=sources[0].device)
    _move(table, sent, sources, True, True)
    to = _memory([table], sent.device) if to is None else to
    channel.finish(channel.exchange(sent, [own] * ranks, to, [*map(table.size, share.lengths)]), "attention's exchange of heads")
    return table.heads_of(to)


def _to_rows(
    sources: Sequence[Tensor], table: _Table, targets: Sequence[Tensor | None], channel: Channel, sent: Tensor | None = None
) -> None:
    """Fills the targets, (B, H, rows, width), with this rank's rows of all heads, for all rows of its heads, (B, heads, S, width): with the
    sums, in the order of the ranks, where several have a head. sent: memory for what is sent, in which it is kept."""
    share, ranks = table.share, len(table.share.lengths)
    own = table.size(share.length)
    sent = _memory([table], sources[0].device) if sent is None else sent
    _move(table, sent, sources, False, True)
    received = torch.empty(own * ranks, dtype=torch.uint8, device=sent.device)
    channel.finish(channel.exchange(sent, [*map(table.size, share.lengths)], received, [own] * ranks), "attention's exchange of results")
    _move(table, received, targets, True, False)


def _move(table: _Table, memory: Tensor, tensors: Sequence[Tensor | None], by_rank: bool, packs: bool) -> None:
    """Moves rows between a message and a tensor for each of its parts, None for one that is left out.

    by_rank: the message has a block for each rank, of this rank's rows, and the tensors have all heads; else it has all rows, and they have
    this rank's heads. packs: into the message; else out of it.
    """
    made = [None if t is None else innermost(t) if packs else t for t in tensors]
    key = (by_rank, packs, table.batch, table.parts, *[None if t is None else (t.shape, t.stride(), t.dtype) for t in made])
    found = table.share.kept.get(key)
    if found is None:
        found = table.share.keep(key, _moves(table, made, by_rank, packs))
    for (dtype, _), (numbers, moves) in found.items():
        message, chosen = (memory.view(dtype),), [made[i] for i in numbers]
        moves.run(*((chosen, message) if packs else (message, chosen)))


def _moves(table: _Table, tensors: Sequence[Tensor | None], by_rank: bool, packs: bool) -> dict[Any, tuple[list[int], RowMoves]]:
    """By the dtypes of a part and its tensor: the numbers of such parts, and their moves, one for each head."""
    share = table.share
    rows, ranks = (share.length, len(share.lengths)) if by_rank else (share.layout.length, 1)
    moves: dict[Any, tuple[list[int], list[Move]]] = {}
    for i, (part, start, t) in enumerate(zip(table.parts, table.starts, tensors, strict=True)):
        if t is None:
            continue
        size = part.dtype.itemsize
        numbers, found = moves.setdefault((part.dtype, t.dtype), ([], []))
        copies = ranks * part.heads // t.shape[1]
        for head in range(t.shape[1]):
            of_tensor = Part(len(numbers), head * t.stride(1), (t.stride(0), 0, t.stride(2)))
            in_message = []
            for rank, at in (divmod(head * copies + copy, part.heads) for copy in range(copies)):
                offset = (rank * table.size(rows) + start) // size + at * part.width
                in_message.append(Part(0, offset, (table.row // size, 0, table.batch * table.row // size)))
            if packs:
                found += [Move(each, (of_tensor,), rows, part.width) for each in in_message]
            else:
                found.append(Move(of_tensor, tuple(in_message), rows, part.width))
        numbers.append(i)
    return {dtypes: (numbers, RowMoves(found, table.batch, 1)) for dtypes, (numbers, found) in moves.items()}
