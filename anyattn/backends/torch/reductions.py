"""Reductions of the probabilities and scores by torch operations: one more visit of the tiles, with one product each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LN2, LOG2E, ceil_div
from anyattn.backends.torch.backward import ScoreGradients
from anyattn.backends.torch.mod_runner import Tile
from anyattn.backends.torch.tiles import Call, Chunk, Heads, chunks, row_heads

__all__ = ["block_reductions", "key_sums"]


class _Visit(NamedTuple):
    """A tile's scores without ``shift``, the term of the row alone, in base 2, -inf where hidden, and the logarithms of the rows' sums in
    two terms, the second None for 0: (count, stacked rows, n or 1)."""

    tile: Tile
    scores: Tensor
    shift: Tensor | float
    top: Tensor
    log_sum: Tensor | None

    def probabilities(self) -> Tensor:
        """(batch entries, heads, rows, keys), in the memory of the scores."""
        p = self.scores.sub_(self.top)
        return _ascending(p.exp2_() if self.log_sum is None else p.sub_(self.log_sum).exp2_(), self.tile)

    def natural_scores(self) -> Tensor:
        """Shaped as ``probabilities``, of which they are not the memory."""
        return _ascending((self.scores + self.shift) * LN2, self.tile)


def _ascending(x: Tensor, tile: Tile) -> Tensor:
    rows = row_heads(x, tile)
    return rows.flip(2) if tile.descends and rows.shape[2] > 1 else rows


def _visits(call: Call, lse: Tensor, first: int = 0) -> Iterator[_Visit]:
    """The tiles of rows from ``first`` on; a row tile that it cuts is visited whole. The next one may take the memory of one."""
    problem, scores = call.problem, ScoreGradients(call)
    base_2 = (lse * LOG2E).masked_fill_(torch.isneginf(lse), math.inf)[..., None]
    for group in call.coverage.groups:
        heads = Heads(call, group)
        keys = heads.keys(problem.k, "k").whole()
        for row_tile in group.row_tiles:
            if row_tile.q_hi <= first or not row_tile.segments:
                continue
            q = heads.rows(problem.q, row_tile.q_lo, row_tile.q_hi, "q", is_only_read=True)
            of_rows = heads.rows(base_2, row_tile.q_lo, row_tile.q_hi, "lse", problem.stat_dtype)
            top, log_sum = scores.normaliser(q, keys, heads, row_tile, of_rows, is_whole=True)
            shift = scores.scores.shift_of(heads.tile(row_tile, Chunk(0, 0, ())), of_rows)
            for chunk in chunks(row_tile, call.plan.tile_n_backward):
                tile = heads.tile(row_tile, chunk)
                yield _Visit(tile, scores.modified(q, keys, tile, chunk)[0], shift, top, log_sum)


def key_sums(call: Call, lse: Tensor, first: int) -> Tensor:
    """(B, Hq, Sk): the sum of P over the queries from ``first`` on."""
    problem = call.problem
    total = torch.zeros((*problem.q.shape[:2], problem.k.shape[2]), dtype=problem.stat_dtype, device=problem.q.device)
    for visit in _visits(call, lse, first):
        t, p = visit.tile, visit.probabilities()
        total[t.b_lo : t.b_hi, t.h_lo : t.h_hi, t.k_lo : t.k_hi] += p[:, :, max(0, first - t.q_lo) :].sum(2)
    return total


def block_reductions(
    call: Call, lse: Tensor, block: tuple[int, int], wants_sums: bool, wants_max: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(B, Hq, M, N) twice: the sums of P and the greatest scores of blocks of (queries, keys), None if not wanted."""
    problem, (m, n) = call.problem, block
    shape = (*problem.q.shape[:2], ceil_div(problem.q.shape[2], m), ceil_div(problem.k.shape[2], n))
    sums, highest = (
        torch.full(shape, fill, dtype=problem.stat_dtype, device=problem.q.device) if is_wanted else None
        for fill, is_wanted in ((0.0, wants_sums), (-math.inf, wants_max))
    )
    for visit in _visits(call, lse):
        t = visit.tile
        place = (
            slice(t.b_lo, t.b_hi), slice(t.h_lo, t.h_hi), slice(t.q_lo // m, ceil_div(t.q_hi, m)), slice(t.k_lo // n, ceil_div(t.k_hi, n)),
        )  # fmt: skip
        if highest is not None:
            part = _reduced(visit.natural_scores(), t, block, "amax", -math.inf)
            highest[place] = torch.maximum(highest[place], part)
        if sums is not None:
            sums[place] += _reduced(visit.probabilities(), t, block, "sum", 0.0)
    return sums, highest


def _reduced(x: Tensor, tile: Tile, block: tuple[int, int], how: str, fill: float) -> Tensor:
    """A tile's values (batch entries, heads, rows, keys), reduced by blocks; those that the tile cuts have its part of them."""
    for dim, lo, hi, size in ((3, tile.k_lo, tile.k_hi, block[1]), (2, tile.q_lo, tile.q_hi, block[0])):
        shape = list(x.shape)
        shape[dim] = ceil_div(hi, size) - lo // size
        at = (torch.arange(lo, hi, device=x.device) // size - lo // size).view([-1 if d == dim else 1 for d in range(4)])
        x = x.new_full(shape, fill).scatter_reduce_(dim, at.expand(x.shape), x, how)
    return x
