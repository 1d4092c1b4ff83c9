"""Unstreamed forward and backward pass: all visible scores of a row tile at once, for low precision without a score mod.

The scores stay in the products' dtype, as in the plain formula, and torch's fused softmax and its fused backward do the rest: nothing is
rescaled, and the backward needs neither the log-sum-exp nor delta. The keys that a row tile sees may be in several runs; these are gathered
into one buffer, which costs D / tile_m of the tile and gives the products the contiguous
operands that they would otherwise copy themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from anyattn.backends.torch.coverage import RowTile
from anyattn.backends.torch.tiles import Call, Chunk, Heads, chunks, is_finite, row_heads, rows_of_queries, store
from anyattn.backends.torch.workspace import zeros_in_order

__all__ = ["backward", "forward"]


@dataclass(frozen=True)
class _Spans:
    """The runs of keys that a row tile sees, and their common width."""

    runs: tuple[Chunk, ...]
    width: int

    @staticmethod
    def of(row_tile: RowTile, seqlen_k: int) -> _Spans:
        runs = tuple(chunks(row_tile, max(seqlen_k, 1)))
        return _Spans(runs, sum(r.hi - r.lo for r in runs))


class _Rows:
    """A group's operands, and the probabilities of its row tiles."""

    def __init__(self, call: Call, heads: Heads):
        self.call, self.heads = call, heads
        self.keys, self.values = (heads.keys(x, name).whole() for name, x in (("k", call.problem.k), ("v", call.problem.v)))

    def gathered(self, name: str, x: Tensor, spans: _Spans) -> Tensor:
        """(count, width, D): the rows of ``x`` in the runs, contiguous."""
        if len(spans.runs) == 1 and spans.width == x.shape[1] and x.is_contiguous():
            return x
        out = self.call.workspace.take(name, (x.shape[0], spans.width, x.shape[2]), x.dtype)
        at = 0
        for run in spans.runs:
            out[:, at : at + run.hi - run.lo] = x[:, run.lo : run.hi]
            at += run.hi - run.lo
        return out

    def transposed(self, name: str, x: Tensor) -> Tensor:
        out = self.call.workspace.take(name, (x.shape[0], x.shape[2], x.shape[1]), x.dtype)
        return out.copy_(x.transpose(1, 2))

    def probabilities(self, row_tile: RowTile, spans: _Spans, q: Tensor, keys: Tensor) -> Tensor:
        """(count, rows, width), 0 where hidden; the memory is reused by the next call."""
        call = self.call
        scores = call.workspace.take("scores", (q.shape[0], q.shape[1], spans.width), call.dtype)
        torch.baddbmm(scores, q, self.transposed("keys^T", keys), beta=0, alpha=call.problem.scale, out=scores)
        self._each_run(row_tile, spans, scores, call.masks.apply)
        torch.softmax(scores, -1, out=scores)
        # a row without visible keys is NaN now; zeroing hidden entries clears it
        self._each_run(row_tile, spans, scores, call.masks.zero)
        return scores

    def _each_run(self, row_tile: RowTile, spans: _Spans, values: Tensor, action: object) -> None:
        at = 0
        for run in spans.runs:
            width = run.hi - run.lo
            if run.asked:
                tile = self.heads.tile(row_tile, run)
                action(row_heads(values, tile)[..., at : at + width], tile, run.asked)  # type: ignore[operator]
            at += width


def forward(call: Call) -> Tensor:
    """out (B, Hq, Sq, Dv) of ``call.problem``."""
    problem = call.problem
    out = rows_of_queries(problem, problem.v.shape[3], problem.q.dtype)
    for group in call.coverage.groups:
        heads = Heads(call, group)
        rows = _Rows(call, heads)
        for row_tile in group.row_tiles:
            spans = _Spans.of(row_tile, problem.seqlen_k)
            if not spans.width:
                heads.place(out, row_tile).zero_()
                continue
            q = heads.rows(problem.q, row_tile.q_lo, row_tile.q_hi, "q")
            p = rows.probabilities(row_tile, spans, q, rows.gathered("keys", rows.keys, spans))
            result = _product(call, p, rows.gathered("values", rows.values, spans))
            store(heads.place(out, row_tile), result, heads.tile(row_tile, Chunk(0, 0, ())), call.workspace)
    return out


def backward(call: Call, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    problem = call.problem
    dq = zeros_in_order(problem.q, problem.q.dtype)
    dk, dv = (zeros_in_order(t, problem.stat_dtype) for t in (problem.k, problem.v))
    for group in call.coverage.groups:
        heads = Heads(call, group)
        rows = _Rows(call, heads)
        part_dk, part_dv = (torch.zeros(x.shape, dtype=problem.stat_dtype, device=x.device) for x in (rows.keys, rows.values))
        for row_tile in group.row_tiles:
            spans = _Spans.of(row_tile, problem.seqlen_k)
            if spans.width:
                dq_tile = _row_tile(rows, row_tile, spans, dout, part_dk, part_dv)
                store(heads.place(dq, row_tile), dq_tile, heads.tile(row_tile, Chunk(0, 0, ())), call.workspace)
        heads.add_to_keys(dk, part_dk)
        heads.add_to_keys(dv, part_dv)
    return dq, dk.to(problem.kv_grad_dtype), dv.to(problem.kv_grad_dtype)


def _row_tile(rows: _Rows, row_tile: RowTile, spans: _Spans, dout: Tensor, dk: Tensor, dv: Tensor) -> Tensor:
    """dQ (count, rows, D) of one row tile; adds to the group's dK and dV."""
    call, heads = rows.call, rows.heads
    place = (row_tile.q_lo, row_tile.q_hi)
    q, do = heads.rows(call.problem.q, *place, "q"), heads.rows(dout, *place, "dout")
    keys = rows.gathered("keys", rows.keys, spans)
    p = rows.probabilities(row_tile, spans, q, keys)
    if spans.runs and any(r.asked for r in spans.runs) and not (is_finite(q) and is_finite(do)):
        # a row without visible keys may hold any values, and 0 x NaN must not reach dK and dV
        blind = (p.amax(-1, keepdim=True) == 0).expand(-1, -1, 1)
        q, do = q.masked_fill(blind, 0), do.masked_fill(blind, 0)
    wide_q, wide_do, wide_p = (call.workspace.cast(f"wide {name}", x, call.key_sum_dtype) for x, name in ((q, "q"), (do, "dout"), (p, "p")))
    _add_to_runs(dv, _product(call, wide_p.transpose(1, 2), wide_do), spans, 1.0)
    values = rows.gathered("values", rows.values, spans)
    ds = call.workspace.take("ds", tuple(p.shape), call.dtype)
    torch.baddbmm(ds, do, rows.transposed("values^T", values), beta=0, out=ds)
    torch.ops.aten._softmax_backward_data.out(ds, p, -1, call.dtype, grad_input=ds)
    wide_ds = call.workspace.cast("wide ds", ds, call.key_sum_dtype)
    _add_to_runs(dk, _product(call, wide_ds.transpose(1, 2), wide_q), spans, call.problem.scale)
    return _product(call, ds, keys).mul_(call.problem.scale)


def _product(call: Call, x: Tensor, y: Tensor) -> Tensor:
    """``x @ y``, in memory that the next product reuses."""
    return torch.bmm(x, y, out=call.workspace.take("product", (x.shape[0], x.shape[1], y.shape[2]), x.dtype))


def _add_to_runs(total: Tensor, part: Tensor, spans: _Spans, factor: float) -> None:
    at = 0
    for run in spans.runs:
        width = run.hi - run.lo
        total[:, run.lo : run.hi].add_(part[:, at : at + width], alpha=factor)
        at += width
