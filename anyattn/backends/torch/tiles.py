"""Tile operands shared by the forward and backward pass: matrices per group, chunks of keys, scores and masks of one tile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.result import Result
from anyattn.backends.torch.coverage import Coverage, Group, RowTile, Segment
from anyattn.backends.torch.drops import Drops
from anyattn.backends.torch.kv_matrices import KeyRows, PoolRows
from anyattn.backends.torch.mod_runner import Bound, Tile, bind, has_diagonals
from anyattn.backends.torch.plan import TorchPlan
from anyattn.backends.torch.workspace import Workspace, empty, empty_in_order
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.problem import Problem

__all__ = [
    "Call",
    "Chunk",
    "Drops",
    "Heads",
    "Masks",
    "blank_unused_rows",
    "chunks",
    "finite_or_zero",
    "is_finite",
    "row_heads",
    "rows_of_queries",
    "store",
]

_ALIGNED = 64  # bytes: alignment of torch's CPU allocations
_BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_MINUS_INF = {dtype: int(torch.tensor(-math.inf, dtype=dtype, device="cpu").view(bits)) for dtype, bits in _BITS.items()}


@dataclass(frozen=True)
class Chunk:
    """Adjacent keys ``lo:hi`` that are computed at once; ``asked`` are the segments in which predicates must be evaluated."""

    lo: int
    hi: int
    asked: tuple[Segment, ...]


def chunks(row_tile: RowTile, width: int) -> list[Chunk]:
    """The row tile's segments, with adjacent ones joined, cut evenly to at most ``width`` keys."""
    found: list[Chunk] = []
    segments = row_tile.segments
    start = 0
    while start < len(segments):
        end = start
        while end + 1 < len(segments) and segments[end + 1].lo == segments[end].hi:
            end += 1
        run = segments[start : end + 1]
        lo, hi = run[0].lo, run[-1].hi
        pieces = ceil_div(hi - lo, width)
        for p in range(pieces):
            a, b = lo + (hi - lo) * p // pieces, lo + (hi - lo) * (p + 1) // pieces
            asked = tuple(Segment(max(s.lo, a), min(s.hi, b), s.predicates) for s in run if s.predicates and s.lo < b and s.hi > a)
            found.append(Chunk(a, b, asked))
        start = end + 1
    return found


class Heads:
    """A group's tensors as batches of matrices: one per (batch entry, K/V head), with the query heads that share K/V stacked as rows."""

    def __init__(self, call: Call, group: Group):
        problem, ratio = call.problem, call.problem.qhead_per_kvhead
        self.problem, self.group, self.dtype, self.workspace, self.descends = problem, group, call.dtype, call.workspace, call.descends
        self.kv_heads = slice(group.h_lo // ratio, (group.h_hi - 1) // ratio + 1)
        self.q_heads = slice(group.h_lo, group.h_hi)
        self.q_rows, self.q_start = slice(group.b_lo, group.b_hi), 0
        self.k_rows, self.keys_used = slice(group.b_lo, group.b_hi), slice(None)
        self._place: tuple[int, int, int, int | None, int | None] = (0, 0, 0, None, None)
        if problem.sequences is not None:
            host, b, entries = problem.sequences.on_host, group.b_lo, group.b_hi - group.b_lo
            self.q_rows, self.q_start = slice(host.q_row[b], host.q_row[b] + entries), host.q_start[b]
            self.k_rows = slice(host.k_row[b], host.k_row[b] + entries)
            self.keys_used = slice(host.k_start[b], host.k_start[b] + host.seqlens_k[b])
            self._place = (host.q_first[b], host.row_base[b], host.key_base[b], host.seqlens_q[b], host.seqlens_k[b])
        self.count = (group.b_hi - group.b_lo) * (self.kv_heads.stop - self.kv_heads.start)

    def keys(self, x: Tensor, name: str) -> KeyRows:
        """(count, keys, D) of the keys or values ``x``, in the dtype of the products."""
        is_read_once, factors = len(self.group.row_tiles) == 1, self._factors(name)
        if self.pool_rows is not None:
            return KeyRows(x, self.dtype, self.workspace, name, is_read_once, self.pool_rows, factors)
        rows = x[self.k_rows, self.kv_heads, self.keys_used]
        return KeyRows(rows, self.dtype, self.workspace, name, is_read_once, factors=factors)

    def _factors(self, name: str) -> Tensor | None:
        """(count, keys or 1): the factors of 8-bit keys ("k") or values ("v")."""
        scales = self.problem.kv_scales
        factors = None if scales is None else scales.k if name == "k" else scales.v
        if factors is None:
            return None
        if factors.ndim == 2:
            return factors[self.group.b_lo : self.group.b_hi, self.kv_heads].reshape(self.count, 1)
        if self.pool_rows is None:
            return factors[self.k_rows, self.kv_heads, self.keys_used].flatten(0, 1)
        rows, size = self.pool_rows.storage_rows, factors.shape[2]
        return factors.transpose(1, 2)[rows // size, rows % size][..., self.kv_heads].transpose(1, 2).flatten(0, 1)

    @cached_property
    def pool_rows(self) -> PoolRows | None:
        """The rows of the sequences' keys in page pools; None without pages."""
        sequences = self.problem.sequences
        if sequences is None or sequences.page_table is None:
            return None
        return PoolRows(sequences.storage_rows(self.group.b_lo, self.group.b_hi), self.kv_heads, self.group.is_small)

    def by_entry(self, x: Tensor) -> Tensor:
        """A (count, n, D) tensor seen as (batch entries, K/V heads, n, D)."""
        return x.unflatten(0, (self.group.b_hi - self.group.b_lo, -1))

    def add_to_keys(self, total: Tensor, part: Tensor) -> None:
        """Adds ``part`` (count, keys, D) to this group's part of ``total``, which is stored as the keys are."""
        if self.pool_rows is None:
            target = total[self.k_rows, self.kv_heads, self.keys_used]
            target += part.view(target.shape)
            return
        rows = self.pool_rows.storage_rows
        page, slot = rows // total.shape[2], rows % total.shape[2]
        per_key = part.view(len(page), self.count // len(page), *part.shape[1:]).transpose(1, 2)  # (entries, keys, K/V heads, D)
        # a page that several sequences share gets the sum of their gradients
        total.transpose(1, 2)[:, :, self.kv_heads].index_put_((page, slot), per_key, accumulate=True)

    def place(self, x: Tensor, row_tile: RowTile) -> Tensor:
        """The view of a row tile in ``x`` (B, Hq, Sq, ...), stored as the queries are."""
        return x[self.q_rows, self.q_heads, self.q_start + row_tile.q_lo : self.q_start + row_tile.q_hi]

    def rows(self, x: Tensor, lo: int, hi: int, name: str, dtype: torch.dtype | None = None, is_only_read: bool = False) -> Tensor:
        """(count, query heads per K/V head x rows, D) of a (B, Hq, Sq, D) tensor, in the order of ``Call.descends``.

        The memory is reused by the next call with the same ``name``. is_only_read: the result may be a view of ``x``.
        """
        part = x[self.q_rows, self.q_heads, self.q_start + lo : self.q_start + hi]
        is_in_order = hi - lo == 1 or not self.descends
        # such rows have the same layout as their copy, and the same alignment, on which last bits may depend
        if is_only_read and is_in_order and x.dtype == (dtype or self.dtype) and part.is_contiguous() and part.data_ptr() % _ALIGNED == 0:
            return part.view(self.count, -1, part.shape[-1])
        out = self.workspace.take(f"rows of {name}", tuple(part.shape), dtype or self.dtype)
        return (out.copy_(part) if is_in_order else _reverse_rows(part, out)).view(self.count, -1, part.shape[-1])

    def tile(self, row_tile: RowTile, chunk: Chunk) -> Tile:
        g = self.group
        return Tile(g.b_lo, g.b_hi, g.h_lo, g.h_hi, row_tile.q_lo, row_tile.q_hi, chunk.lo, chunk.hi, *self._place, self.descends)


def rows_of_queries(problem: Problem, width: int, dtype: torch.dtype) -> Tensor:
    """(B, Hq, Sq, width), stored as the queries are; uninitialised, except that storage rows of no sequence are 0."""
    out = empty_in_order(problem.q, width, dtype)
    return out.zero_() if _has_unused_rows(problem) else out


def statistic_of_queries(problem: Problem) -> Tensor:
    """(B, Hq, Sq), contiguous; uninitialised, except that storage rows of no sequence are -inf."""
    out = empty(tuple(problem.q.shape[:3]), problem.stat_dtype, problem.q.device)
    return out.fill_(-math.inf) if _has_unused_rows(problem) else out


def results_of(problem: Problem) -> Result:
    """Tensors for the results, uninitialised except in storage rows of no sequence."""
    out = rows_of_queries(problem, problem.v.shape[3], problem.q.dtype)
    return Result(out, *(statistic_of_queries(problem) if wanted else None for wanted in (problem.wants_lse, problem.wants_max)))


def blank_unused_rows(problem: Problem, lse: Tensor) -> None:
    """Sets ``lse`` (B, Hq, Sq) to -inf in storage rows that belong to no sequence."""
    if _has_unused_rows(problem):
        assert problem.sequences is not None
        s = problem.sequences
        used = torch.zeros(lse.shape[0], lse.shape[2], dtype=torch.bool, device=lse.device)
        within = torch.arange(len(s.row_entry), device=lse.device) - s.row_base[s.row_entry]
        used[s.q_row[s.row_entry], s.q_start[s.row_entry] + within] = True
        lse.masked_fill_(~used[:, None], -math.inf)


def _has_unused_rows(problem: Problem) -> bool:
    sequences = problem.sequences
    return sequences is not None and sum(sequences.on_host.seqlens_q) < problem.q.shape[0] * problem.q.shape[2]


def row_heads(x: Tensor, tile: Tile) -> Tensor:
    """A (count, stacked rows, n) tensor seen as (batch entries, query heads, rows, n), in the same order."""
    batch, heads, rows, _ = tile.shape
    return x.view(batch, heads, rows, x.shape[-1])


def is_finite(x: Tensor) -> bool:
    """Whether ``x`` contains neither NaN nor infinity, judged by its sum,
    in its own dtype if that cannot overflow (which avoids a copy)."""
    return math.isfinite(x.sum(dtype=torch.float32 if x.dtype is torch.float16 else None).item())


def finite_or_zero(x: Tensor) -> Tensor:
    return x.masked_fill(~torch.isfinite(x), 0.0)


def _reverse_rows(x: Tensor, out: Tensor) -> Tensor:
    """Writes ``x`` (b, h, rows, n) with reversed rows to ``out``. flip would allocate memory, whose page faults cost more than the copy."""
    backwards = torch.arange(x.shape[2] - 1, -1, -1, device=x.device)
    return torch.index_select(x, 2, backwards, out=out) if x.dtype == out.dtype else out.copy_(x.index_select(2, backwards))


def store(target: Tensor, x: Tensor, tile: Tile, workspace: Workspace) -> None:
    """Writes a (count, stacked rows, n) result into ``target`` (b, h, rows, n), whose rows ascend with q_idx."""
    rows = row_heads(x, tile)
    if rows.shape[2] == 1 or not tile.descends:
        target.copy_(rows)
        return
    target.copy_(_reverse_rows(rows, workspace.take("ascending", tuple(rows.shape), rows.dtype)))


@dataclass(frozen=True)
class _Cover:
    """Visible pairs as bit patterns of a score dtype: ``keep`` is all ones where visible and 0
    elsewhere, ``fill`` is the reverse with -inf.

    ``score & keep | fill`` hides any value, NaN included, in two passes of integer arithmetic; masked_fill takes about 15
    times as long (1.85 against 0.11 ns per element).
    """

    keep: Tensor
    fill: Tensor

    @staticmethod
    def of(visible: Tensor, dtype: torch.dtype) -> _Cover:
        bits = _BITS[dtype]
        keep = visible.to(bits).neg_()
        return _Cover(keep, keep.bitwise_not().bitwise_and_(_MINUS_INF[dtype]))

    def hide(self, scores: Tensor) -> None:
        scores.view(self.keep.dtype).bitwise_and_(self.keep).bitwise_or_(self.fill)

    def zero(self, values: Tensor) -> None:
        values.view(self.keep.dtype).bitwise_and_(self.keep)


class Masks:
    """The predicates of a call: as row ranges if they have them, else evaluated."""

    def __init__(self, problem: Problem, coverage: Coverage):
        self.problem, self.coverage = problem, coverage
        self._bound: dict[int, Bound] = {}
        # a predicate of q - kv alone is the same in all tiles on the same diagonals, so its cover is cached
        self._is_diagonal = tuple(_sees_distance_only(p.expr) for p in problem.predicates)
        self._known: dict[tuple, _Cover] = {}

    def apply(self, scores: Tensor, tile: Tile, asked: tuple[Segment, ...]) -> None:
        """Sets ``scores`` (b, h, rows, columns) of ``tile`` to -inf where a predicate of ``asked`` hides them."""
        for target, cover in self._covers(scores, tile, asked):
            cover.hide(target)

    def zero(self, values: Tensor, tile: Tile, asked: tuple[Segment, ...]) -> None:
        """Sets ``values`` to 0 where a predicate of ``asked`` hides them, NaN included."""
        for target, cover in self._covers(values, tile, asked):
            cover.zero(target)

    def _covers(self, values: Tensor, tile: Tile, asked: tuple[Segment, ...]) -> Iterator[tuple[Tensor, _Cover]]:
        for segment in asked:
            part = tile.columns(segment.lo, segment.hi)
            target = values[..., segment.lo - tile.k_lo : segment.hi - tile.k_lo]
            for predicate in segment.predicates:
                yield target, self._cover(predicate, part, values.dtype)

    def _cover(self, predicate: int, tile: Tile, dtype: torch.dtype) -> _Cover:
        if not self._is_diagonal[predicate]:
            return _Cover.of(self._visible(predicate, tile), dtype)
        place = (predicate, dtype, tile.q_first + tile.q_hi - tile.k_lo, tile.q_hi - tile.q_lo, tile.k_hi - tile.k_lo)
        if place not in self._known:
            if len(self._known) >= 16:
                self._known.clear()
            self._known[place] = _Cover.of(self._visible(predicate, tile._replace(b_hi=tile.b_lo + 1)), dtype)
        return self._known[place]

    def _visible(self, predicate: int, tile: Tile) -> Tensor:
        ranges = self.coverage.ranges[predicate]
        if ranges is None:
            if predicate not in self._bound:
                mod = self.problem.predicates[predicate]
                self._bound[predicate] = bind(mod.expr, mod.scalars, mod.tensors, self.problem)
            value = self._bound[predicate].on(tile)[0]
            return value if isinstance(value, Tensor) else torch.full((1, 1, 1, 1), bool(value), device=self.problem.q.device)
        columns = torch.arange(tile.k_lo, tile.k_hi, device=self.problem.q.device, dtype=ranges[0].dtype)
        visible = None
        for lo, hi in zip(*(self._rows_of(r, tile) for r in ranges), strict=True):
            inside = (columns >= lo).logical_and_(columns < hi)
            visible = inside if visible is None else visible.logical_or_(inside)
        assert visible is not None
        return visible

    @staticmethod
    def _rows_of(limit: Tensor, tile: Tile) -> Tensor:
        limit = limit if limit.shape[1] == 1 else limit[:, tile.b_lo : tile.b_hi]
        limit = limit if limit.shape[2] == 1 else limit[:, :, tile.h_lo : tile.h_hi]
        rows = tile.rows_of(limit, 3)[..., None]  # (n, b, h, rows, 1)
        return rows.flip(3) if tile.descends else rows


def _sees_distance_only(expr: Expr) -> bool:
    dep = dependence(expr)[expr.outputs[0]]
    return dep.diagonal and not dep.b and not dep.h


@dataclass(frozen=True, eq=False)
class Call:
    """One pass over a problem: its plan, tiles, masks, dropout, scratch memory and the dtype of its products."""

    problem: Problem
    plan: TorchPlan
    coverage: Coverage
    masks: Masks
    workspace: Workspace
    drops: Drops

    @property
    def dtype(self) -> torch.dtype:
        return self.plan.product_dtype

    @property
    def key_sum_dtype(self) -> torch.dtype:
        """The dtype of the products that add up to the gradients of k and v: rounding each to 16 bits would show in wide ones."""
        return self.problem.stat_dtype if self.problem.wide_kv_grads else self.dtype

    @cached_property
    def descends(self) -> bool:
        """Whether a tile's rows are in descending order of q_idx, which makes vectors along diagonals views (``mod_runner``); without such
        vectors they ascend, as storage does. Words of dropout are for rows that descend."""
        mods = [p.expr for p, limit in zip(self.problem.predicates, self.coverage.ranges, strict=True) if limit is None]
        mods += [] if self.problem.score is None else [self.problem.score.expr]
        return self.drops.dropout is not None or any(map(has_diagonals, mods))
