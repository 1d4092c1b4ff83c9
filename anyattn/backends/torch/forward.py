"""Streaming forward pass: for each tile of query rows, online softmax over its visible keys, chunk by chunk.

The recurrence is the online softmax of Milakov and Gimelshein (arXiv:1805.02867) as FlashAttention arranges it (arXiv:2205.14135):
scores are in base 2, so that the exponential is one exp2, and the output is divided by the row sum once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.result import Result
from anyattn.backends.torch.aten_flash import blocks
from anyattn.backends.torch.coverage import Group, RowTile
from anyattn.backends.torch.decode import Decoder
from anyattn.backends.torch.kv_matrices import KeyRows
from anyattn.backends.torch.lower import lowered
from anyattn.backends.torch.mod_runner import Bound, Tile, bind, stage_of
from anyattn.backends.torch.tiles import Call, Chunk, Heads, chunks, row_heads, rows_of_queries, statistic_of_queries, store
from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.problem import Problem, Skip

__all__ = ["Scores", "forward", "sink_logits"]

_FEW_ROWS = 32


class Scores:
    """Modified and masked scores of a tile, in base 2."""

    def __init__(self, call: Call):
        self.call = call
        self.bias: Bound | None = None
        self.mod: Bound | None = None
        self.shift: Bound | None = None  # a bias that is constant along a row: it changes the statistics, but not the probabilities
        problem = call.problem
        score = problem.score
        if score is not None and problem.has_pairs:  # otherwise there are no scores
            bias = additive_bias(score.expr)
            stage = None if bias is None else stage_of(bias, problem.sequences is not None)
            self.bias_factor = LOG2E if stage == "tile" else 1.0  # values of a tile are multiplied where they are added
            expr = additive_bias(score.expr, LOG2E / self.bias_factor) or lowered(score.expr, (LOG2E,), problem.q.element_size() == 2)
            bound = bind(expr, score.scalars, score.tensors, problem)
            if bias is None:
                self.mod = bound
            elif stage in ("per_head", "row") and not _is_cache(problem) and _is_finite(bound):
                self.shift = bound
            else:
                self.bias = bound
        # the bias if it is a slice of a captured tensor in every tile, in the order of the rows of every head
        is_slice = self.bias is not None and self.bias_factor == LOG2E and self.bias.is_plain_load
        in_order = problem.qhead_per_kvhead == 1 and not call.descends and not _is_cache(problem)
        self.in_memory = self.bias if is_slice and in_order else None
        # mods are computed in the statistics' dtype for any input dtype: bfloat16 cannot represent positions and biases
        self.dtype = call.dtype if self.bias is None and self.mod is None else problem.stat_dtype

    def shift_of(self, tile: Tile, like: Tensor) -> Tensor | float:
        """The value that ``shift`` adds to the base-2 scores of each row, shaped as ``like`` (count, stacked rows, 1)."""
        if self.shift is None:
            return 0.0
        value = self.shift.on(tile)[0]
        if not isinstance(value, Tensor):
            return float(value)
        batch, heads, rows, _ = tile.shape
        return value.to(like.dtype).expand(batch, heads, rows, 1).reshape(like.shape)

    def products(self, q: Tensor, keys: Tensor, factor: float, name: str = "scores") -> Tensor:
        """``factor * scale * q k^T`` (count, rows, columns), for keys (count, columns, D); the memory is reused by the next call."""
        out = self.call.workspace.take(name, (q.shape[0], q.shape[1], keys.shape[1]), q.dtype)
        alpha = factor * self.call.problem.scale
        if q.shape[1] <= _FEW_ROWS and q.element_size() == 2:
            # with few rows, 16-bit q K^T runs at a fifth of the speed of K q^T
            flipped = self.call.workspace.take(f"{name}, keys first", (q.shape[0], keys.shape[1], q.shape[1]), q.dtype)
            torch.baddbmm(flipped, keys, q.transpose(1, 2), beta=0, alpha=alpha, out=flipped)
            return out.copy_(flipped.transpose(1, 2))
        return torch.baddbmm(out, q, keys.transpose(1, 2), beta=0, alpha=alpha, out=out)

    def _biased(self, q: Tensor, keys: Tensor, tile: Tile) -> Tensor:
        """Scores with the bias, in base 2: the product is added to it, which saves a pass over the scores."""
        assert self.bias is not None
        bias = self.bias.on(tile)[0]
        scores = self.call.workspace.take("scores", (q.shape[0], q.shape[1], keys.shape[1]), q.dtype)
        view = row_heads(scores, tile)
        view.copy_(bias) if isinstance(bias, Tensor) else view.fill_(bias)
        return scores.baddbmm_(q, keys.transpose(1, 2), beta=self.bias_factor, alpha=LOG2E * self.call.problem.scale)

    def of(self, q: Tensor, keys: Tensor, tile: Tile, chunk: Chunk) -> Tensor:
        starts_biased = self.bias is not None and self.dtype == q.dtype and not _is_cache(self.call.problem)
        scores = self._biased(q, keys, tile) if starts_biased else self.products(q, keys, 1.0 if self.mod else LOG2E)
        if scores.dtype != self.dtype:
            wide = self.call.workspace.take("wide scores", scores.shape, self.dtype)
            scores = wide.copy_(scores)
        if (self.bias is None or starts_biased) and self.mod is None and not chunk.asked:
            return scores
        view = row_heads(scores, tile)
        if self.bias is not None and not starts_biased:
            view.add_(self.bias.on(tile)[0], alpha=self.bias_factor)
        elif self.mod is not None:
            modified = self.mod.on(tile, view, owns_score=True)[0]
            if not isinstance(modified, Tensor) or modified.shape != view.shape:
                modified = view.copy_(modified) if isinstance(modified, Tensor) else view.fill_(modified)  # the mod ignores the score
            view = modified if modified.is_contiguous() else view.copy_(modified)
        self.call.masks.apply(view, tile, chunk.asked)
        return view.view(scores.shape)


def forward(call: Call, out_dtype: torch.dtype | None = None) -> Result:
    """``call.problem``'s results, the output in ``out_dtype`` (default: the inputs')."""
    problem = call.problem
    stat = problem.stat_dtype
    out = rows_of_queries(problem, problem.v.shape[3], out_dtype or problem.q.dtype)
    lse = statistic_of_queries(problem) if problem.wants_lse else None
    highest = statistic_of_queries(problem) if problem.wants_max else None
    scores, decoder, skips = Scores(call), Decoder.of(problem, call.plan) if problem.skip is None else None, Skips.of(problem)
    for group in call.coverage.groups:
        if decoder is not None and decoder.serves(group):
            decoder.attend_group(group, out, lse)
            continue
        heads = Heads(call, group)
        keys, values = heads.keys(problem.k, "k"), heads.keys(problem.v, "v")
        for row_tile, start in _with_starts(call, group, heads, keys, values, scores.in_memory):
            acc, row_max, row_sum = _stream(call, heads, row_tile, scores, keys, values, start, skips)
            tile = heads.tile(row_tile, Chunk(0, 0, ()))
            if scores.shift is not None:
                row_max += scores.shift_of(tile, row_max)
            if highest is not None:
                hidden = (row_max * LN2).masked_fill_(row_sum == 0, -math.inf)
                store(heads.place(highest, row_tile)[..., None], hidden, tile, call.workspace)
            if problem.sink is not None:
                row_max, row_sum = _add_sink(problem.sink, heads, acc, row_max, row_sum, tile)
            # an empty sum is 0, and so is its acc; any other sum is far above the least normal number
            result = acc.div_(row_sum.clamp_min(torch.finfo(stat).tiny))
            if problem.dropout is not None:
                result *= problem.dropout.scale
            store(heads.place(out, row_tile), result, tile, call.workspace)
            if lse is not None:
                store(heads.place(lse, row_tile)[..., None], row_max.mul_(LN2).add_(row_sum.log()), tile, call.workspace)
    return Result(out, lse, highest)


def _with_starts(
    call: Call, group: Group, heads: Heads, keys: KeyRows, values: KeyRows, bias: Bound | None
) -> Iterator[tuple[RowTile, tuple[Tensor, Tensor] | None]]:
    """The row tiles with the normalised output and base-2 log-sum-exp of their rectangles, or None without one."""
    for block in blocks(call, group, bias):
        if block.rectangle is None:
            yield from ((row_tile, None) for row_tile in block.row_tiles)
            continue
        out, lse = block.rectangle.forward(call, heads, keys, values)
        for row_tile in block.row_tiles:
            yield row_tile, (block.rectangle.rows_of(out, row_tile, heads), block.rectangle.rows_of(lse, row_tile, heads))


def _stream(
    call: Call, heads: Heads, row_tile: RowTile, scores: Scores, keys: KeyRows, values: KeyRows, start: tuple[Tensor, Tensor] | None,
    skips: Skips | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Unnormalised output (count, rows, Dv), row maximum in base 2 and row sum (count, rows, 1) of one row tile.

    start: the normalised output and the base-2 log-sum-exp over keys that are not in the tile's segments. A tile is skipped where all of
    its query heads skip it, and hidden from the others of them.
    """
    stat = call.problem.stat_dtype
    lowest = torch.finfo(call.dtype).min / 2  # not -inf: -inf - (-inf) would be NaN
    acc = row_sum = row_max = None
    if start is not None:
        acc, row_max = start
        row_sum, row_max = (row_max > -math.inf).to(stat), row_max.clamp_min(lowest)
        if not row_tile.segments:
            return acc, row_max, row_sum
    q = heads.rows(call.problem.q, row_tile.q_lo, row_tile.q_hi, "q", is_only_read=True)
    shape = (q.shape[0], q.shape[1], 1)
    for chunk in chunks(row_tile, call.plan.tile_n):
        tile = heads.tile(row_tile, chunk)
        s = scores.of(q, keys.run(chunk.lo, chunk.hi), tile, chunk)
        highest = s.amax(-1, keepdim=True)
        if skips is not None and skips.hide(s, highest, row_max, tile):
            continue
        new_max = highest.clamp_min_(lowest) if row_max is None else torch.maximum(row_max, highest)
        p = _exp2(s.sub_(new_max), heads.group.is_small)
        part_sum = p.sum(-1, keepdim=True, dtype=stat)
        call.drops.apply(p, tile)
        name = "first p @ v" if acc is None else "p @ v"
        part = call.workspace.take(name, (*shape[:2], values.shape[-1]), call.dtype)
        torch.bmm(p if p.dtype == call.dtype else _narrow(call, p), values.run(chunk.lo, chunk.hi), out=part)
        if acc is None or row_sum is None or row_max is None:
            acc, row_sum = part.to(stat), part_sum
        else:
            rescale = (row_max - new_max).to(stat).exp2_()
            row_sum, acc = row_sum.mul_(rescale).add_(part_sum), acc.mul_(rescale).add_(part)
        row_max = new_max
    if acc is None or row_sum is None or row_max is None:  # no row of this tile sees a key
        acc = torch.zeros((*shape[:2], values.shape[-1]), dtype=stat, device=q.device)
        return acc, torch.full(shape, lowest, dtype=stat, device=q.device), torch.zeros(shape, dtype=stat, device=q.device)
    return acc, row_max.to(stat), row_sum


class Skips:
    """The tiles, one of each query head, that a call leaves out. below: base-2 logarithms of ``Skip.below``."""

    def __init__(self, skip: Skip):
        self.below, self.counts = skip.below.log2(), skip.counts

    @staticmethod
    def of(problem: Problem) -> Skips | None:
        return None if problem.skip is None else Skips(problem.skip)

    def hide(self, scores: Tensor, highest: Tensor, row_max: Tensor | None, tile: Tile) -> bool:
        """Whether all heads of a tile of scores skip it; else sets the scores and ``highest`` (rows' maxima) of those that do to -inf."""
        batch, heads, rows, _ = tile.shape
        is_skipped = torch.zeros((batch, heads), dtype=torch.bool, device=scores.device)
        if row_max is not None:
            distance = (highest - row_max).view(batch, heads, rows)
            is_skipped = (distance < self.below[tile.h_lo : tile.h_hi, None].to(distance.dtype)).all(-1)
        if self.counts is not None:
            counts = self.counts[tile.b_lo : tile.b_hi, tile.h_lo : tile.h_hi]
            counts[..., 0] += is_skipped
            counts[..., 1] += 1
        if bool(is_skipped.all()):
            return True
        if bool(is_skipped.any()):
            for x in (scores, highest):
                row_heads(x, tile).masked_fill_(is_skipped[..., None, None], -math.inf)
        return False


def _exp2(x: Tensor, is_small: bool) -> Tensor:
    """2^x, in place. torch's exp2 rounds the last elements, which do not fill a vector, differently. exp does not; it takes four times as
    long, which does not matter for small inputs."""
    return x.mul_(LN2).exp_() if is_small else x.exp2_()


def _narrow(call: Call, p: Tensor) -> Tensor:
    return call.workspace.take("narrow", tuple(p.shape), call.dtype).copy_(p)


def _is_cache(problem: Problem) -> bool:
    """Whether an entry's bits must not depend on other entries; then no decision may depend on the whole batch."""
    return problem.sequences is not None and problem.sequences.is_cache


def _is_finite(bound: Bound) -> bool:
    value = bound.hoisted[bound.expr.outputs[0]]
    return bool(torch.isfinite(value).all()) if isinstance(value, Tensor) else math.isfinite(value)


def sink_logits(sink: Tensor, heads: Heads, tile: Tile, like: Tensor) -> Tensor:
    """The sink's base-2 logit for every row, shaped as ``like`` (count, stacked rows, 1)."""
    batch, count, rows, _ = tile.shape
    return (sink[heads.q_heads].to(like.dtype) * LOG2E).view(1, count, 1, 1).expand(batch, count, rows, 1).reshape(like.shape)


def _add_sink(sink: Tensor, heads: Heads, acc: Tensor, row_max: Tensor, row_sum: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Row maximum and row sum with the sink as one more key, with the head's logit as score and 0 as value; rescales ``acc``."""
    logit = sink_logits(sink, heads, tile, row_max)
    new_max = torch.maximum(row_max, logit)
    rescale = _exp2(row_max - new_max, heads.group.is_small)
    acc.mul_(rescale)
    return new_max, row_sum * rescale + _exp2(logit - new_max, heads.group.is_small)
