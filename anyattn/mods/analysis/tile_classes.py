"""Tile classes: which tiles (query rows x keys) are empty, partial or full under a mask.

``classify`` never evaluates all pairs. If ``row_ranges.py`` finds row ranges, the classes follow from the limits. Otherwise interval
arithmetic (``intervals.py``) classifies coarse squares of tiles first and refines only undecided ones. Undecided single tiles are evaluated
exactly: a few sample positions prove most of them partial, and the rest are evaluated whole, in batches. Memory is one byte per tile and a
bounded batch, never S x S, and the mod is never evaluated at an index outside its sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.intervals import spans
from anyattn.mods.analysis.range_tables import RangeTables
from anyattn.mods.analysis.row_ranges import LONGEST, RowRanges, limits, row_ranges
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["DOUBT", "EMPTY", "FULL", "PARTIAL", "Boxes", "Grid", "Refiner", "classify", "classify_limits", "coverage", "judge", "refine"]

EMPTY, PARTIAL, FULL = 0, 1, 2
DOUBT = 3  # used in intermediate maps only
_BATCH_BOXES = 2**17  # boxes classified at once
_BATCH_PAIRS = 2**21  # (q, kv) pairs evaluated at once: 16 MB per int64 value
_BATCH_TILES = 2**23  # tiles written at once
_COARSE = 32  # the first grid has at most this many squares each way
_STEP = 4


def classify(
    mod: TracedMod,
    seqlen_q: int,
    seqlen_k: int,
    tile_m: int,
    tile_n: int,
    B: int = 1,
    H: int = 1,
    device: torch.device | str | None = None,
    ranges: RowRanges | None = None,
    among: Tensor | None = None,
) -> Tensor:
    """The class of every tile: uint8 of shape (B or 1, H or 1, ceil(seqlen_q / tile_m), ceil(seqlen_k / tile_n)).

    EMPTY (0): no pair of the tile is visible. FULL (2): all are. PARTIAL (1): some are and some are not. Only pairs inside the sequences
    count, so a tail tile whose pairs inside the lengths are all visible is FULL. A dimension of size 1 is broadcast: the mask ignores b or
    h. ranges: the mask's row ranges, if the caller already has them. among: bool (B, H, M, N), the tiles whose classes are wanted; others
    may be EMPTY, and their pairs are not evaluated.

    >>> from anyattn.mods.tracing.trace import trace
    >>> classify(trace(lambda b, h, q, k: q >= k, "mask"), 300, 256, 128, 128)[0, 0].tolist()
    [[1, 0], [2, 1], [2, 2]]
    """
    if device is None:
        device = mod.tensors[0].device if mod.tensors else "cpu"
    deps = dependence(mod.expr)
    batch, heads = B if any(d.b for d in deps) else 1, H if any(d.h for d in deps) else 1
    # clips the tile size to the lengths: a tile of 2^30 rows costs no more than the sequences
    tile_m, tile_n = min(tile_m, max(seqlen_q, 1)), min(tile_n, max(seqlen_k, 1))
    rows, columns = ceil_div(seqlen_q, tile_m), ceil_div(seqlen_k, tile_n)
    if min(batch, heads, rows, columns) == 0:
        return torch.zeros(batch, heads, rows, columns, dtype=torch.uint8, device=device)
    ranges = ranges if ranges is not None else row_ranges(mod)
    lo_hi = None if ranges is None else limits(ranges, seqlen_q, seqlen_k, B, H, device)
    if lo_hi is not None:
        found = classify_limits(*lo_hi, seqlen_k, tile_m, tile_n)
        return found.expand(batch, heads, -1, -1)
    return Refiner(mod, _Rectangle((seqlen_q, seqlen_k), (tile_m, tile_n), (batch, heads), device)).classes(among)


# ---- from row ranges


def classify_limits(lo: Tensor, hi: Tensor, seqlen_k: int, tile_m: int, tile_n: int) -> Tensor:
    """The classes that follow from ``row_ranges.limits``: (n, B, H, seqlen_q) -> uint8 (B, H, M, N). Exact; O(rows + tiles)."""
    n, batch, heads, seqlen_q = lo.shape
    rows, columns = ceil_div(seqlen_q, tile_m), ceil_div(seqlen_k, tile_n)
    if lo.numel() == 0 or columns == 0:
        return torch.zeros(batch, heads, rows, columns, dtype=torch.uint8, device=lo.device)
    pad = rows * tile_m - seqlen_q
    if pad:  # padding repeats the last row, which does not change the classes
        lo, hi = (torch.cat([t, t[..., -1:].expand(*t.shape[:-1], pad)], -1) for t in (lo, hi))
    # (row tiles of every b and h, n, rows)
    lo, hi = (t.reshape(n, batch * heads * rows, tile_m).transpose(0, 1) for t in (lo, hi))
    (first, last), (from_, until) = tiles_of_limits(lo, hi, seqlen_k, columns, tile_n)
    empty = hi <= lo
    classes = torch.empty(batch * heads * rows, columns, dtype=torch.uint8, device=lo.device)
    is_one = connected(first, last, empty)
    step = max(1, _BATCH_TILES // columns)
    for at in range(0, len(classes), step):
        part = slice(at, at + step)
        if is_one:
            column = torch.arange(columns, dtype=lo.dtype, device=lo.device)
            touched = _between(column, first[part, 0].amin(-1), last[part, 0].amax(-1))
            covered = _between(column, from_[part, 0].amax(-1), until[part, 0].amin(-1))
        else:
            begins = torch.arange(len(first[part]), device=lo.device)[:, None, None] * columns
            end = torch.where(empty[part], first[part], last[part])
            touched = coverage(first[part], end, begins, 1, len(begins) * columns).view(-1, columns) > 0
            covered = coverage(from_[part], until[part], begins, 1, len(begins) * columns).view(-1, columns) == tile_m
        classes[part] = touched.to(torch.uint8) + covered.to(torch.uint8)
    return classes.reshape(batch, heads, rows, columns)


def tiles_of_limits(
    lo: Tensor, hi: Tensor, seqlen_k: int | Tensor, columns: int | Tensor, tile_n: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(first, end) of the tiles that each range ``lo <= kv < hi`` touches, and of those it covers up to their end or the last key."""
    tile_n = min(tile_n, LONGEST)  # limits are int32
    first = torch.div(lo, tile_n, rounding_mode="floor")
    last = torch.div(hi + (tile_n - 1), tile_n, rounding_mode="floor")
    from_ = torch.div(lo + (tile_n - 1), tile_n, rounding_mode="floor")
    until = torch.where(hi == seqlen_k, columns, torch.div(hi, tile_n, rounding_mode="floor"))
    return (first, last), (from_, until)


def connected(first: Tensor, last: Tensor, empty: Tensor) -> bool:
    """Whether in every row tile the tiles of each row are one range that touches the next row's, so that their union is one range.

    first, last, empty: (row tiles, n, rows).
    """
    if first.shape[1] != 1 or bool(empty.any()):
        return False
    apart = (first[..., 1:] > last[..., :-1]) | (first[..., :-1] > last[..., 1:])
    return not bool(apart.any())


def _between(column: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    return (column >= start[:, None]) & (column < stop[:, None])


def coverage(first: Tensor, end: Tensor, begins: Tensor, heads: int, size: int) -> Tensor:
    """int32 (heads, size): the number of ranges that contain each tile, by cumulative sums of starts and ends along a flat list of tiles.

    begins: of each row of tiles in the list. A range that ends with its row of tiles ends where the next row begins, so rows need no gap
    between them. A range whose end is not after its first tile is empty.
    """
    change = torch.zeros(heads, size + 1, dtype=torch.int32, device=first.device)
    one = (end > first).to(torch.int32).reshape(heads, -1)
    change.scatter_add_(1, (begins + first).reshape(heads, -1), one)
    change.scatter_add_(1, (begins + end).reshape(heads, -1), -one)
    return change.cumsum_(1)[:, :size]


# ---- by refinement


def refine(
    mod: TracedMod, lengths: tuple[int, int], tile: tuple[int, int], batch: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """``classify`` for any mask, without row ranges: interval arithmetic, then evaluation of undecided tiles."""
    return Refiner(mod, _Rectangle(lengths, tile, batch, device)).classes()


def judge(
    mod: TracedMod, lengths: tuple[int, int], tile: tuple[int, int], batch: tuple[int, int], device: torch.device | str = "cpu"
) -> Tensor:
    """Classes by interval arithmetic alone: EMPTY and FULL are certain, all others are DOUBT. No pair is evaluated."""
    return Refiner(mod, _Rectangle(lengths, tile, batch, device)).judged()


class Boxes(NamedTuple):
    """Rectangles of pairs, one per tensor entry; first and last q and kv are inclusive and inside their sequence."""

    b: Tensor
    h: Tensor
    q: tuple[Tensor, Tensor]
    kv: tuple[Tensor, Tensor]


class Grid(Protocol):
    """The tiles of one or many sequences as a map of classes; there is a coarser map for squares of any ``size`` x ``size`` tiles.

    tile: (tile_m, tile_n). longest: the greatest numbers of query rows and of keys of a sequence.
    """

    tile: tuple[int, int]
    longest: tuple[int, int]
    device: torch.device | str

    def shape(self, size: int) -> tuple[int, ...]:
        """The shape of the map of squares of ``size``."""

    def cut(self, found: Tensor, size: int, parts: int) -> Tensor:
        """The map of squares of ``size``, refined from the map of squares that are ``parts`` times as large."""

    def boxes(self, where: Tensor, size: int) -> Boxes:
        """The pairs of the squares whose indices in the map are the rows of ``where``."""


class _Rectangle:
    """A ``Grid`` of sequences of equal length; maps are (B, H, M, N)."""

    def __init__(self, lengths: tuple[int, int], tile: tuple[int, int], batch: tuple[int, int], device: torch.device | str) -> None:
        self.longest, self.tile, self.batch, self.device = lengths, tile, batch, device

    def shape(self, size: int) -> tuple[int, ...]:
        return (*self.batch, *(ceil_div(n, size * t) for n, t in zip(self.longest, self.tile, strict=True)))

    def cut(self, found: Tensor, size: int, parts: int) -> Tensor:
        rows, columns = self.shape(size)[2:]
        return found.repeat_interleave(parts, -2)[..., :rows, :].repeat_interleave(parts, -1)[..., :columns].contiguous()

    def boxes(self, where: Tensor, size: int) -> Boxes:
        edges = []
        for axis in (0, 1):
            first = where[:, 2 + axis] * (size * self.tile[axis])
            edges.append((first, (first + size * self.tile[axis] - 1).clamp(max=self.longest[axis] - 1)))
        return Boxes(where[:, 0], where[:, 1], *edges)


class Refiner:
    """Classifies squares of tiles from coarse to fine in a map of classes, then evaluates the undecided tiles."""

    def __init__(self, mod: TracedMod, grid: Grid) -> None:
        self.mod, self.grid, self.device = mod, grid, grid.device
        self.tables = RangeTables(mod.tensors, grid.device)

    def classes(self, among: Tensor | None = None) -> Tensor:
        """The exact classes. among: as in ``classify``."""
        found = self.judged()
        if among is not None:  # entries and heads that share a class are evaluated together
            shared = [dim for dim, n in enumerate(found.shape[:2]) if n == 1]
            found[~(among.any(shared, keepdim=True) if shared else among).expand(found.shape)] = EMPTY
        self.settle(found)
        return found

    def judged(self) -> Tensor:
        size = 1
        while max(ceil_div(n, t) for n, t in zip(self.grid.longest, self.grid.tile, strict=True)) > _COARSE * size:
            size *= _STEP
        found = torch.full(self.grid.shape(size), DOUBT, dtype=torch.uint8, device=self.device)
        self._judge(found, size)
        while size > 1:
            size //= _STEP
            found = self.grid.cut(found, size, _STEP)
            self._judge(found, size)
        return found

    def _doubtful(self, found: Tensor, batch: int) -> Iterator[Tensor]:
        yield from (found == DOUBT).nonzero().split(batch)

    def _write(self, found: Tensor, where: Tensor, classes: Tensor) -> None:
        found[tuple(where.unbind(1))] = classes

    def _judge(self, found: Tensor, size: int) -> None:
        """Applies interval arithmetic to every undecided square."""
        for where in self._doubtful(found, _BATCH_BOXES):
            b, h, q, kv = self.grid.boxes(where, size)
            (span,) = spans(self.mod.expr, {"b": (b, b), "h": (h, h), "q_idx": q, "kv_idx": kv}, self.mod.scalars, self.tables)
            classes = torch.where(span.lo, FULL, torch.where(span.hi, DOUBT, EMPTY)).to(torch.uint8)
            self._write(found, where, classes.expand(len(where)))

    def _values(self, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Any:
        leaves = {"b": b, "h": h, "q_idx": q, "kv_idx": kv}
        value = run(self.mod.expr, leaves, self.mod.scalars, self.mod.tensors)[0]
        return value if isinstance(value, Tensor) else torch.tensor(value, device=self.device)

    def settle(self, found: Tensor) -> None:
        """Finds the exact classes of the undecided tiles. A position past a sequence's end is replaced by the last position inside."""
        extent = tuple(
            max(1, min(t, n)) for t, n in zip(self.grid.tile, self.grid.longest, strict=True)
        )  # the part of a tile that the longest sequence fills
        along_q, along_kv = (t.to(self.device) for t in _samples(*extent))
        for where in self._doubtful(found, max(1, _BATCH_PAIRS // len(along_q))):
            b, h, q, kv = self._positions(where, along_q, along_kv)
            seen = self._values(b[:, None], h[:, None], q, kv).expand(len(where), len(along_q))
            mixed = seen.any(1) & ~seen.all(1)
            self._write(found, where[mixed], torch.tensor(PARTIAL, dtype=torch.uint8, device=self.device))
        at_q, at_kv = (torch.arange(n, device=self.device) for n in extent)
        for where in self._doubtful(found, max(1, _BATCH_PAIRS // (extent[0] * extent[1]))):
            b, h, q, kv = self._positions(where, at_q, at_kv)
            visible = self._values(b[:, None, None], h[:, None, None], q[:, :, None], kv[:, None, :])
            visible = visible.expand(len(where), *visible.shape[1:]) if visible.ndim == 3 else visible.expand(len(where), 1, 1)
            classes = torch.where(visible.all(-1).all(-1), FULL, torch.where(visible.any(-1).any(-1), PARTIAL, EMPTY))
            self._write(found, where, classes.to(torch.uint8))

    def _positions(self, where: Tensor, along_q: Tensor, along_kv: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        b, h, (first_q, last_q), (first_kv, last_kv) = self.grid.boxes(where, 1)
        q, kv = first_q[:, None] + along_q, first_kv[:, None] + along_kv
        return b, h, torch.minimum(q, last_q[:, None]), torch.minimum(kv, last_kv[:, None])


def _samples(m: int, n: int) -> tuple[Tensor, Tensor]:
    """Sample positions in a tile that are likely to include both visible and hidden pairs: corners, then an aperiodic spread."""
    spread = torch.arange(20, dtype=torch.float64, device="cpu")
    q = torch.cat([torch.tensor([0, 0, m - 1, m - 1], device="cpu"), ((spread * 0.7548776662) % 1 * m).to(torch.int64)])
    kv = torch.cat([torch.tensor([0, n - 1, 0, n - 1], device="cpu"), ((spread * 0.5698402910) % 1 * n).to(torch.int64)])
    return q, kv
