"""Row tiles that see a tile of keys (device code), found from the joint row ranges of each row tile, four numbers per range.

A row tile's span of a range is the least lo, the greatest hi, the greatest lo and the least hi of its rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.addressing import slot_of
from anyattn.backends.triton.kernels.tile_iterator import by_lists, full_at, partial_at, place_of_lists

__all__ = ["first_spans", "full_rows_at", "partial_rows_at", "rows_that_see", "store_span"]

_FAR: tl.constexpr = tl.constexpr(2**30)
_CHUNK: tl.constexpr = tl.constexpr(128)  # row tiles whose spans are compared at once


class RowRun(NamedTuple):
    """The row tiles that see a tile of keys: int32. first: the first that sees any key. full: the first that sees all keys."""

    first: Any
    full: Any


@triton.jit
def store_span(place, lo, hi):
    some = lo < hi
    tl.store(place, tl.min(tl.where(some, lo, _FAR)))
    tl.store(place + 1, tl.max(tl.where(some, hi, 0)))
    tl.store(place + 2, tl.max(lo))
    tl.store(place + 3, tl.min(hi))


@triton.jit
def _spans_of(place, m, is_tile, n_first, n_end, RANGES: tl.constexpr):
    """For row tiles m [lanes]: whether some row sees a key of n_first to n_end, and whether every row sees all of them."""
    at = place + m.to(tl.int64) * (4 * RANGES)
    lo, hi = tl.load(at, mask=is_tile, other=_FAR), tl.load(at + 1, mask=is_tile, other=0)
    all_lo, all_hi = tl.load(at + 2, mask=is_tile, other=_FAR), tl.load(at + 3, mask=is_tile, other=0)
    touches = (lo < n_end) & (hi > n_first)
    fills = (all_lo <= n_first) & (all_hi >= n_end)
    if RANGES == 2:
        lo, hi = tl.load(at + 4, mask=is_tile, other=_FAR), tl.load(at + 5, mask=is_tile, other=0)
        all_lo, all_hi = tl.load(at + 6, mask=is_tile, other=_FAR), tl.load(at + 7, mask=is_tile, other=0)
        touches = touches | ((lo < n_end) & (hi > n_first))
        fills = fills | ((all_lo <= n_first) & (all_hi >= n_end))
    return touches, fills


@triton.jit
def first_spans(place, seqlen_q, n_first, n_end, RANGES: tl.constexpr, TILE_M: tl.constexpr):
    """``_spans_of`` for the first ``_CHUNK`` row tiles."""
    m = tl.arange(0, _CHUNK)
    return _spans_of(place, m, m < (seqlen_q + TILE_M - 1) // TILE_M, n_first, n_end, RANGES)


@triton.jit
def _merged(first, end, full, last, count, other_first, other_end, other_full, other_last, other_count):
    return (
        tl.minimum(first, other_first), tl.maximum(end, other_end), tl.minimum(full, other_full), tl.maximum(last, other_last),
        count + other_count,
    )  # fmt: skip


@triton.jit
def _extent(m, seen):
    """For row tiles m: the first and the end of those that see a key, the first and the end of those that
    see all keys, and their numbers."""
    touches, fills = seen
    return tl.reduce(
        (tl.where(touches, m, _FAR), tl.where(touches, m + 1, 0), tl.where(fills, m, _FAR), tl.where(fills, m + 1, 0), fills.to(tl.int32)),
        0, _merged,
    )  # fmt: skip


@triton.jit
def rows_by_spans(early, place, seqlen_q, n_first, n_end, RANGES: tl.constexpr, TILE_M: tl.constexpr):
    """(first, end, first full, end full) of the row tiles that see keys n_first to n_end; some in between may see none.

    Only the first run of full tiles counts as full; later full tiles are treated as partial, and so is a tile that the sequence's end cuts.
    early: ``_spans_of`` for the first ``_CHUNK``.
    """
    tiles = (seqlen_q + TILE_M - 1) // TILE_M
    first, end, full, last, count = _extent(tl.arange(0, _CHUNK), early)
    for start in range(_CHUNK, tiles, _CHUNK):
        m = start + tl.arange(0, _CHUNK)
        more = _extent(m, _spans_of(place, m, m < tiles, n_first, n_end, RANGES))
        first, end, full, last, count = _merged(first, end, full, last, count, *more)
    first = tl.minimum(first, end)
    whole = tl.minimum(end, seqlen_q // TILE_M)
    is_one_run = count == last - full
    full = tl.minimum(full, whole)
    full_end = tl.maximum(tl.minimum(last, whole), full)
    if not is_one_run:
        for start in range(full // _CHUNK * _CHUNK, end, _CHUNK):
            m = start + tl.arange(0, _CHUNK)
            _, fills = _spans_of(place, m, m < tiles, n_first, n_end, RANGES)
            full_end = tl.minimum(full_end, tl.min(tl.where((m >= full) & (fills == 0), m, _FAR)))
    return first, end, full, full_end


@triton.jit
def rows_that_see(early, row_spans, spans, sizes, lists, sequence, b, h, line, n_first, n_end, c):
    """(the row tiles that see keys n_first to n_end, how many see all of them, how many see some).

    The row tiles are a ``RowRun`` by ranges, or ``ListedTiles``. early: the first head's ``first_spans``. row_spans: of
    ``backward.prepare_tile``.
    """
    if c.SEES_ALL:
        fulls = sequence.seqlen_q // c.TILE_M
        return RowRun(first=0, full=0), fulls, (sequence.seqlen_q + c.TILE_M - 1) // c.TILE_M - fulls
    elif c.RANGES > 0:
        place = row_spans + slot_of(sequence, 0, b, h, sizes, c.TILE_M, 4 * c.RANGES)
        tile_end = tl.minimum(n_first + c.TILE_N, n_end)  # n_end is the sequence's end
        if c.IS_GROUPED:
            early = first_spans(place, sequence.seqlen_q, n_first, tile_end, c.RANGES, c.TILE_M)
        first, end, full, full_end = rows_by_spans(early, place, sequence.seqlen_q, n_first, tile_end, c.RANGES, c.TILE_M)
        return RowRun(first=first, full=full), full_end - full, end - first - (full_end - full)
    else:
        counts_at, places_at = place_of_lists(spans.lists, b, h, line, sequence, sequence.seqlen_q, c.LIST_M, c.HAS_ENTRIES)
        runs = by_lists(lists, counts_at, places_at, sequence.seqlen_q, c.TILE_M, c.LIST_M, c.HAS_FULL)
        return runs, runs.full, runs.partial


@triton.jit
def full_rows_at(runs, i, c):
    """The first row of the i-th row tile that sees all keys; runs: of ``rows_that_see``."""
    if c.RANGES > 0:
        return (runs.full + i) * c.TILE_M
    else:
        return full_at(runs, i, 0, c.TILE_M, c.LIST_M)


@triton.jit
def partial_rows_at(runs, i, fulls, seqlen_q, c):
    """(first row, end, whether all keys are visible) of the i-th of the other row tiles."""
    if c.RANGES > 0:
        m = runs.first + i
        return tl.where(m < runs.full, m, m + fulls) * c.TILE_M, seqlen_q, False
    else:
        return partial_at(runs, i, seqlen_q, 0, c.TILE_M, c.LIST_M)
