"""Streaming backward pass on the forward's tiles, with probabilities recomputed from the saved log-sum-exp.

With P the probabilities of a row, dP = dO V^T and delta = rowsum(dO * O), the derivative by the modified score is
dS = P * (dP - delta + dLSE) (FlashAttention, arXiv:2205.14135, appendix B). Every query row tile is visited once, which completes its dQ;
dK, dV and the captured tensors' gradients are summed over the tiles in a fixed order, so that reruns agree bitwise.

A product in 16 bits rounds its result, and dP - delta of a row that sees one key is 0: dP rounded alone would leave all of its rounding
error. So dO has three more columns, delta in three 16-bit parts, and V has -1 there: the product sums dP - delta in float32 and rounds it
once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.backends.torch.aten_flash import blocks
from anyattn.backends.torch.captured_gradients import CapturedGradients
from anyattn.backends.torch.compiled import backward as compiled
from anyattn.backends.torch.compiled.backward import Gradients
from anyattn.backends.torch.compiled.work import Work
from anyattn.backends.torch.coverage import Group, RowTile
from anyattn.backends.torch.forward import Scores, sink_logits
from anyattn.backends.torch.mod_runner import Bound, Tile
from anyattn.backends.torch.tiles import Call, Chunk, Heads, chunks, finite_or_zero, is_finite, row_heads, rows_of_queries, store
from anyattn.backends.torch.workspace import zeros_in_order

__all__ = ["backward"]

_COLUMNS = 8  # added to dO and V: three parts of delta, and zeros up to a multiple of 16 bytes
_FAR = 1024.0  # beyond this a base-2 log-sum-exp cannot represent the sum to 2^-13


@dataclass(frozen=True, eq=False)
class _Statistics:
    """Per query row: base-2 log-sum-exp (+inf in a row without visible keys,
    so that its probabilities are 0), delta, the gradient of the natural log-sum-exp, and cleaned inputs."""

    lse: Tensor  # (B, Hq, Sq, 1)
    delta: Tensor  # (B, Hq, Sq, 1)
    dlse: Tensor | None  # (B, Hq, Sq, 1)
    q: Tensor
    dout: Tensor

    @staticmethod
    def of(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> _Statistics:
        stat, q = call.problem.stat_dtype, call.problem.q
        blind = torch.isneginf(lse)
        idle = blind if call.problem.sink is None else blind | _sees_only_the_sink(call.problem.sink, q, out, lse, dout)
        if bool(idle.any()):  # 0 x NaN: a row without visible keys has zero probabilities
            # finite values are kept: a row whose 16-bit output only looks like the sink alone has keys with nonzero weights
            dout, q = (torch.where(idle[..., None], finite_or_zero(t), t) for t in (dout, q))
        delta = (dout.to(stat) * out).sum(-1).masked_fill_(blind, 0.0)[..., None]
        by_lse = None if dlse is None else dlse.to(stat).masked_fill(blind, 0.0)[..., None]
        return _Statistics((lse * LOG2E).masked_fill_(blind, math.inf)[..., None], delta, by_lse, q, dout)


def _sees_only_the_sink(sink: Tensor, q: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """(B, Hq, Sq): rows that see no key and have a non-finite value in q or dout; for rows without such a value the result is arbitrary."""
    if is_finite(q) and is_finite(dout):
        return torch.zeros_like(lse, dtype=torch.bool)
    logit = sink.to(lse.dtype)[:, None]
    rounding = 4 * torch.finfo(lse.dtype).eps * logit.abs()  # the logit was converted to base 2 and back
    return ((lse - logit).abs() <= rounding) & (out == 0).all(-1)


def backward(
    call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, work: Work | None = None
) -> tuple[Tensor | None, ...]:
    """work: of compiled loops, where they compute what they can."""
    problem = call.problem
    stat = problem.stat_dtype
    statistics = _Statistics.of(call, out, lse, dout, dlse)
    dq = rows_of_queries(problem, problem.q.shape[3], problem.q.dtype)
    if work is not None and (found := _by_loops(call, statistics, dq, work)) is not None:
        captured = () if problem.score is None else [found.captured.get(i) for i in range(len(problem.score.tensors))]
        return found.q, found.k, found.v, _dsink(call, statistics), *captured
    dk, dv = (zeros_in_order(t, stat) for t in (problem.k, problem.v))
    scores = ScoreGradients(call)
    bias = scores.scores.in_memory
    is_near = bias is None or statistics.lse.abs().amax().item() <= _FAR  # no row is hidden by its bias either
    rows = (dout, out, lse) if dlse is None and not scores.captured.loads and is_near else None
    for group in call.coverage.groups:
        heads = Heads(call, group)
        operands = _Operands(call, heads)
        for row_tile, start in _with_starts(call, group, heads, statistics, operands, rows, bias):
            dq_tile = _row_tile(call, heads, row_tile, statistics, operands, scores, start)
            store(heads.place(dq, row_tile), dq_tile, heads.tile(row_tile, Chunk(0, 0, ())), call.workspace)
        heads.add_to_keys(dk, operands.dk)
        heads.add_to_keys(dv, operands.dv)
    return dq, dk.to(problem.kv_grad_dtype), dv.to(problem.kv_grad_dtype), _dsink(call, statistics), *scores.captured.results()


def _dsink(call: Call, statistics: _Statistics) -> Tensor | None:
    """The sink's probability in a row is exp2(sink - lse); its value is 0, so dP - delta + dLSE is dLSE - delta."""
    sink = call.problem.sink
    if sink is None:
        return None
    share = torch.exp2(sink.to(call.problem.stat_dtype)[:, None, None] * LOG2E - statistics.lse)
    net = statistics.delta if statistics.dlse is None else statistics.delta - statistics.dlse
    return (share * net).sum((0, 2, 3)).neg_().to(sink.dtype)


def _by_loops(call: Call, statistics: _Statistics, dq: Tensor, work: Work) -> Gradients | None:
    """The gradients by compiled loops; None where they do not compute them, as where a log-sum-exp is far from 0 (``_far``)."""
    if _far(statistics.lse) is not None:
        return None
    net = statistics.delta.neg() if statistics.dlse is None else statistics.dlse - statistics.delta
    dk, dv = (zeros_in_order(t, call.problem.kv_grad_dtype) for t in (call.problem.k, call.problem.v))
    return compiled.backward(call.problem, work, statistics.q, statistics.dout, statistics.lse, net, (dq, dk, dv))


def _with_starts(
    call: Call,
    group: Group,
    heads: Heads,
    statistics: _Statistics,
    operands: _Operands,
    rows: tuple[Tensor, Tensor, Tensor] | None,
    bias: Bound | None,
) -> Iterator[tuple[RowTile, Tensor | None]]:
    """The row tiles with their rectangles' contributions to dQ; the rectangles' dK and dV are added to the group's.

    rows: dout, out and lse as given; None if lse or the bias has a gradient, or is far from 0, which ATen's kernel does not support.
    """
    if rows is None:
        yield from ((row_tile, None) for row_tile in group.row_tiles)
        return
    for block in blocks(call, group, bias):
        if block.rectangle is None:
            yield from ((row_tile, None) for row_tile in block.row_tiles)
            continue
        r = block.rectangle
        dq, dk, dv = r.backward(call, heads, operands.keys, operands.values, statistics.q, (statistics.dout, *rows[1:]))
        operands.dk[:, r.lo : r.hi] += dk
        operands.dv[:, r.lo : r.hi] += dv
        yield from ((row_tile, r.rows_of(dq.contiguous(), row_tile, heads)) for row_tile in block.row_tiles)


class _Operands:
    """A group's K and V as matrices, and the sums of their gradients."""

    def __init__(self, call: Call, heads: Heads):
        stat, device = call.problem.stat_dtype, call.problem.q.device
        self.keys, self.values = (heads.keys(x, name).whole() for name, x in (("k", call.problem.k), ("v", call.problem.v)))
        self.dk = torch.zeros(self.keys.shape, dtype=stat, device=device)
        self.dv = torch.zeros(self.values.shape, dtype=stat, device=device)
        if call.dtype != stat:
            self.values = torch.nn.functional.pad(self.values, (0, _COLUMNS))
            self.values[..., -_COLUMNS : 3 - _COLUMNS] = -1.0


class ScoreGradients:
    """Scores and their derivatives on a tile, the rows' normalisers, and the gradients of the score mod's captured tensors."""

    def __init__(self, call: Call):
        self.call, self.scores = call, Scores(call)
        self.captured = CapturedGradients(call, is_additive=self.scores.mod is None)
        self.dtype = call.problem.stat_dtype

    def modified(self, q: Tensor, keys: Tensor, tile: Tile, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """(count, rows, columns) masked scores in base 2, and their derivative by the score; None if that is 1."""
        if self.scores.mod is None:
            return self._wide(self.scores.of(q, keys[:, chunk.lo : chunk.hi], tile, chunk)), None
        score = self._wide(self.scores.products(q, keys[:, chunk.lo : chunk.hi], 1.0))
        modified, by_score = self.captured.modified(row_heads(score, tile), tile)
        self.call.masks.apply(modified, tile, chunk.asked)
        return modified.view(score.shape), by_score

    def normaliser(
        self, q: Tensor, keys: Tensor, heads: Heads, row_tile: RowTile, lse: Tensor, is_whole: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The terms to subtract from a row's base-2 scores to get the logarithms of its probabilities, two tensors (count, rows, 1).

        Far from 0 the log-sum-exp cannot represent the logarithm of the sum: 1,000 scores of -1e9 would each get probability 1. There the
        row maximum and the logarithm of the sum are recomputed and kept as two terms. is_whole: the row tile contains all keys that its
        rows see. Otherwise some are in a rectangle, where such scores do not occur.
        """
        shift = self.scores.shift_of(heads.tile(row_tile, Chunk(0, 0, ())), lse)
        far = _far(lse) if is_whole else None
        if far is None:
            return lse - shift, None
        top = torch.full_like(lse, torch.finfo(lse.dtype).min / 2)
        total = torch.zeros_like(lse)
        for chunk in chunks(row_tile, self.call.plan.tile_n_backward):
            s = self.modified(q, keys, heads.tile(row_tile, chunk), chunk)[0]
            higher = torch.maximum(top, s.amax(-1, keepdim=True))
            total = total * (top - higher).exp2_() + s.sub_(higher).exp2_().sum(-1, keepdim=True)
            top = higher
        sink = self.call.problem.sink
        if sink is not None:
            logit = sink_logits(sink, heads, heads.tile(row_tile, Chunk(0, 0, ())), lse) - shift
            higher = torch.maximum(top, logit)
            total, top = total * (top - higher).exp2_() + (logit - higher).exp2_(), higher
        return torch.where(far, top, lse - shift), torch.where(far, total.log2_(), 0.0)

    def _wide(self, scores: Tensor) -> Tensor:
        return self.call.workspace.cast("wide scores", scores, self.dtype)


def _far(lse: Tensor) -> Tensor | None:
    """Where a base-2 log-sum-exp cannot represent the logarithm of the sum; None if nowhere."""
    size = lse.abs()
    if size.amax().item() <= _FAR:  # one number decides most calls
        return None
    far = torch.isfinite(lse) & (size > _FAR)
    return far if bool(far.any()) else None


def _row_tile(
    call: Call, heads: Heads, row_tile: RowTile, statistics: _Statistics, operands: _Operands, scores: ScoreGradients, start: Tensor | None
) -> Tensor:
    """dQ of one row tile (count, rows, D); adds to the group's dK and dV and to the captured tensors' gradients."""
    stat, scale, dropout = call.problem.stat_dtype, call.problem.scale, call.problem.dropout
    factor = 1.0 if dropout is None else dropout.scale
    rows = (row_tile.q_lo, row_tile.q_hi)
    q, dout = (heads.rows(x, *rows, name, is_only_read=True) for x, name in ((statistics.q, "q"), (statistics.dout, "dout")))
    lse = heads.rows(statistics.lse, *rows, "lse", stat, is_only_read=True)
    with_delta, rest = _with_delta(call, heads, statistics, rows, dout)
    wide_q, wide_dout = (call.workspace.cast(f"wide {name}", x, call.key_sum_dtype) for x, name in ((q, "q"), (dout, "dout")))
    top, log_sum = scores.normaliser(q, operands.keys, heads, row_tile, lse, is_whole=start is None)
    dq = call.workspace.take("dq", tuple(q.shape), stat).zero_() if start is None else start.clone()
    for chunk in chunks(row_tile, call.plan.tile_n_backward):
        tile = heads.tile(row_tile, chunk)
        here = slice(chunk.lo, chunk.hi)
        modified, by_score = scores.modified(q, operands.keys, tile, chunk)
        p = modified.sub_(top).sub_(log_sum).exp2_() if log_sum is not None else modified.sub_(top).exp2_()
        kept = p if dropout is None else call.workspace.take("kept", tuple(p.shape), p.dtype).copy_(p)
        call.drops.apply(kept, tile)
        _accumulate(operands.dv[:, here], call.workspace.cast("p", kept, call.key_sum_dtype), wide_dout, factor)
        dp = call.workspace.take("dp", tuple(p.shape), call.dtype)
        values = operands.values[:, here, : with_delta.shape[-1]].transpose(1, 2)
        torch.baddbmm(dp, with_delta, values, beta=0, alpha=factor, out=dp)
        call.drops.apply(dp, tile)
        dp = call.workspace.cast("wide dp", dp, stat)
        dscore = p.mul_(dp if rest is None else dp.add_(rest))
        scores.captured.add(row_heads(dscore, tile), tile, chunk.asked)
        if by_score is not None:
            dscore = row_heads(dscore, tile).mul_(by_score)
            call.masks.zero(dscore, tile, chunk.asked)  # the derivative at a hidden score is arbitrary
            dscore = dscore.view(p.shape)
        _accumulate(operands.dk[:, here], call.workspace.cast("ds", dscore, call.key_sum_dtype), wide_q, scale)
        dq = _add_product(dq, call.workspace.cast("ds", dscore, call.dtype), operands.keys[:, here], scale)
    return dq


def _with_delta(call: Call, heads: Heads, statistics: _Statistics, rows: tuple[int, int], dout: Tensor) -> tuple[Tensor, Tensor | None]:
    """The left operand of the product dP, and what is then added to get dP - delta + dLSE (count, rows, 1; None for 0)."""
    stat = call.problem.stat_dtype
    delta = heads.rows(statistics.delta, *rows, "delta", stat)
    dlse = None if statistics.dlse is None else heads.rows(statistics.dlse, *rows, "dlse", stat)
    if call.dtype == stat or call.problem.dropout is not None:  # dropout changes dP before delta is subtracted
        return dout, delta.neg() if dlse is None else dlse.sub_(delta)
    width = dout.shape[-1]
    wide = call.workspace.take("dout with delta", (*dout.shape[:-1], width + _COLUMNS), call.dtype)
    wide[..., :width] = dout
    wide[..., width:] = 0.0
    for at in range(width, width + 3):
        part = delta.to(call.dtype)
        wide[..., at : at + 1] = part
        delta = delta.sub_(part)
    return wide, dlse  # apart: dLSE may be larger than float16 can hold, and delta no larger than dP


def _accumulate(total: Tensor, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
    """``total += factor * x^T y`` for each matrix."""
    if total.dtype == x.dtype:
        total.baddbmm_(x.transpose(1, 2), y, alpha=factor)
    else:
        total.add_(torch.bmm(x.transpose(1, 2), y), alpha=factor)


def _add_product(total: Tensor, x: Tensor, y: Tensor, factor: float) -> Tensor:
    return total.baddbmm_(x, y, alpha=factor) if total.dtype == x.dtype else total.add_(torch.bmm(x, y), alpha=factor)
