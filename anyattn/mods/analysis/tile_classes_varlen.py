"""Tile classes of a varlen batch: many sequences of different lengths at once, without a loop over them.

The methods are those of ``tile_classes.py``: row ranges if the mask has them, else interval arithmetic and exact evaluation. Time and
memory are proportional to rows and tiles, never to the product of the total lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.mods.analysis.row_ranges import MOST_POSITIONS, RowRanges, limits_of_rows, row_ranges
from anyattn.mods.analysis.tile_classes import Boxes, Refiner, connected, coverage, tiles_of_limits
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["classify_ragged", "refine_ragged"]

_BATCH_ROWS = 2**20  # query-row ranges in memory at once, over all heads; a tile counts as one


def classify_ragged(
    mod: TracedMod, seqlens_q: Tensor, seqlens_k: Tensor, tile_m: int, tile_n: int, H: int, q_first: Tensor | None = None
) -> Tensor:
    """The class of every tile of every sequence: uint8 (H or 1, total_tiles), flat in the order [sequence][row tile][key tile].

    seqlens_q, seqlens_k: int64 (B,), rows and keys of each sequence, 0 or more. q_first: int64 (B,), the ``q_idx`` of each sequence's first
    row; default 0. Sequence b has ceil(seqlens_q[b] / tile_m) x ceil(seqlens_k[b] / tile_n) tiles, numbered as in ``RaggedTiles``. The mask
    is evaluated at (b = sequence, h, q_idx, kv_idx), with positions inside the sequence only. Classes are those of
    ``tile_classes.classify`` for each sequence. Dimension 0 is 1 if the mask ignores h.

    >>> from anyattn.mods.tracing.trace import trace
    >>> mask = trace(lambda b, h, q, k: q >= k, "mask")
    >>> classify_ragged(mask, torch.tensor([200, 0, 100]), torch.tensor([200, 50, 300]), 128, 128, 1).tolist()
    [[1, 0, 2, 1, 1, 0, 0]]
    """
    tiles = RaggedTiles(seqlens_q, seqlens_k, (tile_m, tile_n))
    q_first = torch.zeros_like(seqlens_q) if q_first is None else q_first
    heads = H if any(d.h for d in dependence(mod.expr)) else 1
    if heads == 0 or tiles.total_n == 0:
        return torch.zeros(heads, tiles.total_n, dtype=torch.uint8, device=tiles.device)
    ranges = row_ranges(mod) if max(tiles.longest) <= MOST_POSITIONS else None
    if ranges is not None:
        return _of_ranges(ranges, tiles, heads, q_first).expand(heads, -1)
    return refine_ragged(mod, tiles, heads, q_first)


def refine_ragged(mod: TracedMod, tiles: RaggedTiles, heads: int, q_first: Tensor) -> Tensor:
    """``classify_ragged`` for any mask, without row ranges: interval arithmetic, then evaluation of undecided tiles."""
    return Refiner(mod, _RaggedGrid(tiles, heads, q_first)).classes()


# ---- from row ranges


def _of_ranges(ranges: RowRanges, tiles: RaggedTiles, heads: int, q_first: Tensor) -> Tensor:
    """Classes from row ranges, uint8 (heads or 1, total_tiles)."""
    parts = []
    rows = min(tiles.tile[0], tiles.longest[0])  # rows of a row tile that the longest sequence fills
    for window in tiles.windows(_BATCH_ROWS, per_row=heads * rows * ranges.count, per_tile=heads):
        row_tiles = torch.arange(window.rows.start, window.rows.stop, device=tiles.device)
        row_tiles = row_tiles[tiles.num_n[tiles.sequence_of_row[row_tiles]] > 0]
        if len(row_tiles):
            parts.append(_classes_of_rows(ranges, tiles, row_tiles, rows, heads, q_first, window.tiles))
    return torch.cat(parts, 1)


def _classes_of_rows(ranges: RowRanges, tiles: RaggedTiles, row_tiles: Tensor, rows: int, H: int, q_first: Tensor, places: slice) -> Tensor:
    """The classes at ``places`` of the flat list, which are the tiles of ``row_tiles``."""
    b = tiles.sequence_of_row[row_tiles]
    q = tiles.row_in_sequence[row_tiles, None] * tiles.tile[0] + torch.arange(rows, device=tiles.device)
    q = torch.minimum(q, tiles.seqlens_q[b, None] - 1) + q_first[b, None]  # repeats the last row past a sequence's end
    seqlen_k = tiles.seqlens_k[b]
    found = limits_of_rows(ranges, b.repeat_interleave(rows), q.reshape(-1), seqlen_k.repeat_interleave(rows), H)
    assert found is not None
    # (heads, row tiles, n, rows)
    lo, hi = (t[:, 0].unflatten(-1, (len(b), rows)).permute(1, 2, 0, 3) for t in found)
    heads, size = len(lo), places.stop - places.start
    begins = (tiles.row_begins[row_tiles] - places.start)[:, None, None]
    touched, covered = tiles_of_limits(lo, hi, seqlen_k[:, None, None], tiles.num_n[b, None, None], tiles.tile[1])
    empty = hi <= lo
    if connected(*(t.flatten(0, 1) for t in (*touched, empty))):
        touched = touched[0].amin(-1, keepdim=True), touched[1].amax(-1, keepdim=True)
        covered = covered[0].amax(-1, keepdim=True), covered[1].amin(-1, keepdim=True)
        rows = 1
    else:
        touched = touched[0], torch.where(empty, touched[0], touched[1])
    counts = (coverage(*limits, begins, heads, size) for limits in (touched, covered))
    return (next(counts) > 0).to(torch.uint8) + (next(counts) == rows).to(torch.uint8)


# ---- by refinement


class _RaggedGrid:
    """A ``tile_classes.Grid`` of many sequences; maps are (H or 1, tiles)."""

    def __init__(self, tiles: RaggedTiles, heads: int, q_first: Tensor) -> None:
        self.tile, self.longest = tiles.tile, tiles.longest
        self.device: torch.device | str = tiles.device
        self.heads, self.q_first = heads, q_first
        self._squares = {1: tiles}

    def _of(self, size: int) -> RaggedTiles:
        if size not in self._squares:
            self._squares[size] = self._squares[1].with_tile((self.tile[0] * size, self.tile[1] * size))
        return self._squares[size]

    def shape(self, size: int) -> tuple[int, ...]:
        return (self.heads, self._of(size).total_n)

    def cut(self, found: Tensor, size: int, parts: int) -> Tensor:
        return self._of(size).cut(found, self._of(size * parts))

    def boxes(self, where: Tensor, size: int) -> Boxes:
        squares = self._of(size)
        b, m, n = squares.locate(where[:, 1])
        edges = []
        for at, side, lengths in ((m, squares.tile[0], self._squares[1].seqlens_q), (n, squares.tile[1], self._squares[1].seqlens_k)):
            first = at * side
            edges.append((first, torch.minimum(first + side, lengths[b]) - 1))
        (first, last), kv = edges
        return Boxes(b, where[:, 0], (first + self.q_first[b], last + self.q_first[b]), kv)
