"""The key tiles that a row tile visits in the order of their keys (device code), whole ones and those that are cut alike.

Of lists, ``tables.in_key_order`` has joined full and partial tiles to one line of ascending numbers; ``WHOLE`` marks the full ones.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyattn.backends.triton.tables import WHOLE

__all__ = ["Ascending", "ascending", "visit_at", "visits_before"]

_WHOLE: tl.constexpr = tl.constexpr(WHOLE)
_CHUNK: tl.constexpr = tl.constexpr(128)  # listed tiles that are counted at once


class Ascending(NamedTuple):
    """int32. count: number of visits. With ranges the tiles are ``before`` from ``first`` on, then the others from ``second`` on; whole are
    those from ``whole_0`` to before ``end_0``, and from ``whole_1`` to before ``end_1``. index: of lists, a pointer to the line."""

    count: Any
    first: Any
    before: Any
    second: Any
    whole_0: Any
    end_0: Any
    whole_1: Any
    end_1: Any
    index: Any


@triton.jit
def ascending(runs, full, partial, c):
    """``Ascending`` of the visits that ``tile_iterator.visits_of`` has found."""
    if c.RANGES == 0:
        zero = partial * 0
        return Ascending(
            count=partial, first=zero, before=zero, second=zero, whole_0=zero, end_0=zero, whole_1=zero, end_1=zero,
            index=runs.partial_index,
        )  # fmt: skip
    else:
        # the runs up to the second are adjacent, and so are those from the second full one on, before which a partial one may lie
        before = runs.partial_0.tiles + runs.full_0.tiles + runs.partial_1.tiles
        second = tl.where(runs.full_1.tiles > 0, runs.full_1.first, runs.partial_3.first)
        if c.RANGES == 2:
            second = tl.where((runs.partial_2.tiles > 0) & (runs.full_1.tiles > 0), tl.minimum(second, runs.partial_2.first), second)
            second = tl.where((runs.partial_2.tiles > 0) & (runs.full_1.tiles == 0), runs.partial_2.first, second)
        return Ascending(
            count=full + partial, first=runs.partial_0.first, before=before, second=second,
            whole_0=runs.full_0.first, end_0=runs.full_0.first + runs.full_0.tiles,
            whole_1=runs.full_1.first, end_1=runs.full_1.first + runs.full_1.tiles, index=second,
        )  # fmt: skip


@triton.jit
def visit_at(visits, i, seqlen_k, c):
    """(first key, whether all keys are visible regardless of the mask, whether all exist too) of the i-th tile."""
    if c.RANGES == 0:
        CUT: tl.constexpr = c.LIST_N // c.TILE_N
        tl.static_assert(CUT * c.TILE_N == c.LIST_N, "listed tiles begin at multiples of TILE_N")
        listed = tl.load(visits.index + i // CUT)
        first = (listed % _WHOLE) * c.LIST_N + (i % CUT) * c.TILE_N
        is_shown = listed >= _WHOLE
        return first, is_shown, (is_shown & (first + c.TILE_N <= seqlen_k)).to(tl.int32)
    else:
        tile = tl.where(i < visits.before, visits.first + i, visits.second + i - visits.before)
        is_whole = ((tile >= visits.whole_0) & (tile < visits.end_0)) | ((tile >= visits.whole_1) & (tile < visits.end_1))
        return tile * c.TILE_N, False, is_whole.to(tl.int32)


@triton.jit
def visits_before(visits, key, c):
    """The number of visits of tiles before ``key``, a multiple of TILE_N."""
    if c.RANGES == 0:
        CUT: tl.constexpr = c.LIST_N // c.TILE_N
        found, lane = visits.count * 0, tl.arange(0, _CHUNK)
        for start in range(0, visits.count // CUT, _CHUNK):
            at = start + lane
            listed = tl.load(visits.index + at, mask=at < visits.count // CUT, other=_WHOLE - 1) % _WHOLE
            inside = tl.minimum(tl.maximum(key - listed.to(tl.int64) * c.LIST_N, 0) // c.TILE_N, CUT)
            found += tl.sum(inside, 0).to(tl.int32)
        return found
    else:
        tile = key // c.TILE_N
        early = tl.minimum(tl.maximum(tile - visits.first, 0), visits.before)
        return early + tl.minimum(tl.maximum(tile - visits.second, 0), visits.count - visits.before)
