"""Tile iteration (device code): the key tiles that a row tile visits, full ones first, then those that a mask or the sequence's end cuts.

The tiles are ``Runs``, or with lists ``ListedTiles``. ``full_at(i)`` and ``partial_at(i)`` give the i-th. So one pair of loops serves a
causal mask, a window, a sink with a window, and block lists.

The place of a tile is the position of its first key. Where a tile gathers listed tiles smaller than itself (JOINS), it is the positions of
all its keys, [TILE_N]: ``lanes_of`` gives them for both.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.arguments import ListedTiles, Run, Runs, TileRange

__all__ = [
    "by_lists", "by_ranges", "clipped", "first_at", "full_at", "inside_of", "lanes_of", "near_keys", "near_rows", "partial_at",
    "place_of_lists", "sure_of", "visits_of",
]  # fmt: skip

_FAR: tl.constexpr = tl.constexpr(2**30)


@triton.jit
def _wider(lo, hi, all_lo, all_hi, other_lo, other_hi, other_all_lo, other_all_hi):
    return tl.minimum(lo, other_lo), tl.maximum(hi, other_hi), tl.maximum(all_lo, other_all_lo), tl.minimum(all_hi, other_all_hi)


@triton.jit
def _spread(lo, hi):
    """(least lo and greatest hi of rows that see a key, greatest lo and least hi of all rows), for one range per row."""
    some = lo < hi
    # one joint reduction: each separate one takes a round through shared memory
    return tl.reduce((tl.where(some, lo, _FAR), tl.where(some, hi, 0), lo, hi), 0, _wider)


@triton.jit
def _run(spread, TILE_N: tl.constexpr):
    """The ``TileRange`` of one range per row."""
    least, most, all_lo, all_hi = spread
    first = least // TILE_N
    end = (most + TILE_N - 1) // TILE_N
    first = tl.minimum(first, end)
    # a row with an empty range has lo >= hi, so no tile is full
    full = tl.maximum((all_lo + TILE_N - 1) // TILE_N, first)
    full_end = tl.maximum(tl.minimum(all_hi // TILE_N, end), full)
    full = tl.minimum(full, full_end)
    return TileRange(first=first, end=end, full=full, full_end=full_end)


@triton.jit
def by_ranges(spread, other, TILE_N: tl.constexpr, RANGES: tl.constexpr):
    """``Runs`` for rows with one range or two, which may overlap.

    spread, other: ``_spread`` of each range, with limits clipped to 0 .. seqlen_k; beyond them tiles would be visited for nothing.
    """
    one = _run(spread, TILE_N)
    if RANGES == 1:
        zero = one.first * 0
        nothing = Run(first=zero, tiles=zero)
        return Runs(
            full_0=Run(first=one.full, tiles=one.full_end - one.full),
            full_1=nothing,
            partial_0=Run(first=one.first, tiles=one.full - one.first),
            partial_1=Run(first=one.full_end, tiles=one.end - one.full_end),
            partial_2=nothing,
            partial_3=nothing,
        )
    else:
        return _joined(one, _run(other, TILE_N))


@triton.jit
def _joined(one, two):
    """The runs of the tiles of two ranges, each tile once."""
    # a is the range that begins first; one without tiles comes second
    swap = (two.first < two.end) & ((two.first < one.first) | (one.first >= one.end))
    a0, a1 = tl.where(swap, two.first, one.first), tl.where(swap, two.end, one.end)
    b0, b1 = tl.where(swap, one.first, two.first), tl.where(swap, one.end, two.end)
    f0, f1 = tl.where(swap, two.full, one.full), tl.where(swap, two.full_end, one.full_end)
    g0, g1 = tl.where(swap, one.full, two.full), tl.where(swap, one.full_end, two.full_end)
    b1 = tl.maximum(b1, b0)
    # full runs in order, the second one without tiles of the first; an empty one is placed where the other begins
    f0, f1 = tl.where(f0 < f1, f0, a0), tl.where(f0 < f1, f1, a0)
    g0, g1 = tl.where(g0 < g1, g0, tl.maximum(b0, f1)), tl.where(g0 < g1, g1, tl.maximum(b0, f1))
    turn = g0 < f0
    f0, g0 = tl.where(turn, g0, f0), tl.where(turn, f0, g0)
    f1, g1 = tl.where(turn, g1, f1), tl.where(turn, f1, g1)
    g0 = tl.maximum(g0, f1)
    g1 = tl.maximum(g1, g0)
    # if the ranges' tiles meet, the tiles between are one run
    apart = (b0 >= a1) & (b0 < b1)
    end = tl.maximum(a1, tl.where(b0 < b1, b1, a1))
    middle = tl.where(apart, a1, g0)
    second = tl.where(apart, b0, end)
    nothing = a0 * 0
    full_0, full_1 = Run(first=f0, tiles=f1 - f0), Run(first=g0, tiles=g1 - g0)
    # together: [a0, f0) [f1, g0) [g1, end);  apart: [a0, f0) [f1, a1) [b0, g0) [g1, b1)
    third = tl.where(apart, second, g1)
    third_end = tl.where(apart, g0, end)
    fourth = tl.where(apart, g1, nothing)
    fourth_end = tl.where(apart, b1, nothing)
    return Runs(
        full_0=full_0,
        full_1=full_1,
        partial_0=Run(first=a0, tiles=f0 - a0),
        partial_1=Run(first=f1, tiles=middle - f1),
        partial_2=Run(first=third, tiles=third_end - third),
        partial_3=Run(first=fourth, tiles=fourth_end - fourth),
    )


@triton.jit
def _ranged_full(runs, i, RANGES: tl.constexpr):
    """The i-th full tile."""
    if RANGES == 1:
        return runs.full_0.first + i
    return tl.where(i < runs.full_0.tiles, runs.full_0.first + i, runs.full_1.first + i - runs.full_0.tiles)


@triton.jit
def _ranged_partial(runs, i, RANGES: tl.constexpr):
    """The i-th partial tile."""
    second = i - runs.partial_0.tiles
    if RANGES == 1:
        return tl.where(second < 0, runs.partial_0.first + i, runs.partial_1.first + second)
    third = second - runs.partial_1.tiles
    fourth = third - runs.partial_2.tiles
    late = tl.where(fourth < 0, runs.partial_2.first + third, runs.partial_3.first + fourth)
    return tl.where(second < 0, runs.partial_0.first + i, tl.where(third < 0, runs.partial_1.first + second, late))


@triton.jit
def by_lists(
    lists, line, place, seqlen_k, TILE_N: tl.constexpr, LIST_N: tl.constexpr, HAS_FULL: tl.constexpr, JOINS: tl.constexpr = 0
):  # fmt: skip
    """``ListedTiles`` of one line of ``lists``, with counts at ``line`` and indices from ``place``.

    A listed tile is divided into the kernel's tiles, or JOINS of them are one. Tiles of full ones that the sequence's end cuts, or that are
    too few for another tile, come after the partial ones.
    """
    CUT: tl.constexpr = (LIST_N + TILE_N - 1) // TILE_N
    partial = tl.load(lists.partial_count + line) * CUT
    if JOINS > 0 and HAS_FULL:
        count = tl.load(lists.full_count + line)
        last = tl.load(lists.full_index + place + count - 1, mask=count > 0, other=0)
        full = (count - ((count > 0) & ((last + 1) * LIST_N > seqlen_k)).to(tl.int32)) // JOINS
        rest = count - full * JOINS
        return ListedTiles(
            full=full, partial=(partial + rest + JOINS - 1) // JOINS, listed=partial, rest=rest,
            full_index=lists.full_index + place, partial_index=lists.partial_index + place,
        )  # fmt: skip
    elif JOINS > 0:
        return ListedTiles(
            full=partial * 0, partial=(partial + JOINS - 1) // JOINS, listed=partial, rest=partial * 0,
            full_index=lists.partial_index, partial_index=lists.partial_index + place,
        )  # fmt: skip
    elif HAS_FULL:
        full = tl.load(lists.full_count + line)
        whole = full * CUT
        if LIST_N % TILE_N == 0:
            last = tl.load(lists.full_index + place + full - 1, mask=full > 0, other=0)
            inside = tl.minimum(tl.maximum((seqlen_k - last * LIST_N) // TILE_N, 0), CUT)
            cut = tl.where(full > 0, CUT - inside, 0)
        else:
            cut = whole
        return ListedTiles(
            full=whole - cut, partial=partial + cut, listed=partial, rest=cut,
            full_index=lists.full_index + place, partial_index=lists.partial_index + place,
        )  # fmt: skip
    else:
        return ListedTiles(
            full=partial * 0, partial=partial, listed=partial, rest=partial * 0,
            full_index=lists.partial_index, partial_index=lists.partial_index + place,
        )  # fmt: skip


@triton.jit
def _listed_full(listed, i, TILE_N: tl.constexpr, LIST_N: tl.constexpr):
    """The first key of the i-th full tile."""
    CUT: tl.constexpr = (LIST_N + TILE_N - 1) // TILE_N
    return tl.load(listed.full_index + i // CUT) * LIST_N + (i % CUT) * TILE_N


@triton.jit
def _listed_partial(listed, i, seqlen_k, TILE_N: tl.constexpr, LIST_N: tl.constexpr):
    """(first key, end, whether all of it is visible) of the i-th partial tile; these include full tiles that are cut."""
    CUT: tl.constexpr = (LIST_N + TILE_N - 1) // TILE_N
    is_full = i >= listed.listed
    at = tl.where(is_full, i - listed.listed + listed.full, i)
    place = tl.where(is_full, listed.full_index + at // CUT, listed.partial_index + at // CUT)
    n = tl.load(place)
    return n * LIST_N + (at % CUT) * TILE_N, tl.minimum((n + 1) * LIST_N, seqlen_k), is_full


@triton.jit
def _joined_full(listed, i, TILE_N: tl.constexpr, LIST_N: tl.constexpr, JOINS: tl.constexpr):
    """[TILE_N]: the keys of the i-th tile of full ones."""
    lane = tl.arange(0, TILE_N)
    return tl.load(listed.full_index + (i * JOINS + lane // LIST_N)) * LIST_N + lane % LIST_N


@triton.jit
def _joined_partial(listed, i, seqlen_k, TILE_N: tl.constexpr, LIST_N: tl.constexpr, JOINS: tl.constexpr):
    """``_listed_partial`` for gathered tiles: keys [TILE_N], ``seqlen_k`` where there is none, and whether each is of a full tile
    [1, TILE_N]."""
    lane = tl.arange(0, TILE_N)
    number = i * JOINS + lane // LIST_N
    is_full = number >= listed.listed
    place = tl.where(is_full, listed.full_index + (listed.full * JOINS + number - listed.listed), listed.partial_index + number)
    exists = number < listed.listed + listed.rest
    keys = tl.load(place, mask=exists, other=0) * LIST_N + lane % LIST_N
    return tl.where(exists, keys, seqlen_k), seqlen_k, is_full[None, :]


@triton.jit
def lanes_of(first, c):
    """[TILE_N]: the positions of a tile's keys, from its place."""
    if c.JOINS > 0:
        return first
    else:
        return first + tl.arange(0, c.TILE_N)


@triton.jit
def _inside(limit, seqlen_k):
    return tl.minimum(tl.maximum(limit, 0), seqlen_k)


@triton.jit
def clipped(limit, seqlen_k, TILE_M: tl.constexpr):
    """[TILE_M] limits of a row's keys, from one limit per row or one for all."""
    return tl.reshape(_inside(limit + tl.zeros((TILE_M, 1), tl.int32), seqlen_k), (TILE_M,))


@triton.jit
def inside_of(limits, seqlen_k, RANGES: tl.constexpr):
    """A row's limits clipped to existing keys, (lo, hi) or (lo, hi, lo, hi), each in its own shape."""
    if RANGES == 1:
        return limits[0], tl.minimum(limits[1], seqlen_k)
    else:
        return limits[0], tl.minimum(limits[1], seqlen_k), limits[2], tl.minimum(limits[3], seqlen_k)


@triton.jit
def sure_of(b, h, q_idx, seqlen_k, mod, c):
    """The least and the end of existing keys that a mask shows to all rows of a tile; 0 and 0 if none are known."""
    if mod.sure is None:
        return 0, 0
    else:
        lo, hi = mod.sure(b, h, q_idx, mod.scalars, mod.tensors)
        return tl.max(clipped(lo, seqlen_k, c.TILE_M)), tl.min(clipped(hi, seqlen_k, c.TILE_M))


@triton.jit
def place_of_lists(strides, b, h, line, sequence, seqlen_k, LIST_N: tl.constexpr, HAS_ENTRIES: tl.constexpr):
    """(the line of counts, the first place of indices) in block lists, dense or of a varlen batch. strides: ``ListStrides``."""
    listed = (h // strides.group).to(tl.int64)
    head = listed * strides.head
    if HAS_ENTRIES:
        at = head + sequence.lists_line + line
        flat = listed * strides.flat + sequence.lists_place + line.to(tl.int64) * ((seqlen_k + LIST_N - 1) // LIST_N)
        return at, tl.where(strides.row > 0, at * strides.row, flat)
    else:
        at = b.to(tl.int64) * strides.entry + head + line
        return at, at * strides.row


@triton.jit
def _spread_of(mask_rows, AT: tl.constexpr, seqlen_k, TILE_M: tl.constexpr, IS_RISING: tl.constexpr):
    """``_spread`` of the range with limits ``mask_rows[AT]`` and the next; with IS_RISING from the first and the last row only."""
    if IS_RISING:
        first, last = mask_rows
        return (
            _inside(first[AT], seqlen_k), _inside(last[AT + 1], seqlen_k), _inside(last[AT], seqlen_k), _inside(first[AT + 1], seqlen_k)
        )  # fmt: skip
    else:
        return _spread(clipped(mask_rows[AT], seqlen_k, TILE_M), clipped(mask_rows[AT + 1], seqlen_k, TILE_M))


@triton.jit
def visits_of(mask_rows, lists, strides, sequence, b, h, line, seqlen_k, c, IS_RISING: tl.constexpr):
    """(the argument of ``full_at`` and ``partial_at``, number of full tiles, of partial tiles) of a row tile: by its limits, or by lists
    (RANGES of 0).

    mask_rows: the mask's row values of every row. With IS_RISING, where limits never decrease, only of the first and the last row: a
    program that reduces over all rows waits for shared memory twice before it can load keys."""
    if c.RANGES == 0:
        counts_at, places_at = place_of_lists(strides, b, h, line, sequence, seqlen_k, c.LIST_N, c.HAS_ENTRIES)
        runs = by_lists(lists, counts_at, places_at, seqlen_k, c.TILE_N, c.LIST_N, c.HAS_FULL, c.JOINS)
        return runs, runs.full, runs.partial
    else:
        spread = _spread_of(mask_rows, 0, seqlen_k, c.TILE_M, IS_RISING)
        if c.RANGES == 1:
            runs = by_ranges(spread, spread, c.TILE_N, 1)
        else:
            runs = by_ranges(spread, _spread_of(mask_rows, 2, seqlen_k, c.TILE_M, IS_RISING), c.TILE_N, 2)
        full = runs.full_0.tiles + runs.full_1.tiles
        return runs, full, runs.partial_0.tiles + runs.partial_1.tiles + runs.partial_2.tiles + runs.partial_3.tiles


@triton.jit
def full_at(runs, i, RANGES: tl.constexpr, TILE_N: tl.constexpr, LIST_N: tl.constexpr, JOINS: tl.constexpr = 0):
    """The place of the i-th full tile."""
    if RANGES > 0:
        return _ranged_full(runs, i, RANGES) * TILE_N
    elif JOINS > 0:
        return _joined_full(runs, i, TILE_N, LIST_N, JOINS)
    else:
        return _listed_full(runs, i, TILE_N, LIST_N)


@triton.jit
def partial_at(runs, i, seqlen_k, RANGES: tl.constexpr, TILE_N: tl.constexpr, LIST_N: tl.constexpr, JOINS: tl.constexpr = 0):
    """(place, end, whether all of it is visible regardless of the mask) of the i-th partial tile."""
    if RANGES > 0:
        return _ranged_partial(runs, i, RANGES) * TILE_N, seqlen_k, False
    elif JOINS > 0:
        return _joined_partial(runs, i, seqlen_k, TILE_N, LIST_N, JOINS)
    else:
        return _listed_partial(runs, i, seqlen_k, TILE_N, LIST_N)


@triton.jit
def first_at(runs, i, full, seqlen_k, c):
    """The first key of the i-th tile, with full tiles before partial ones."""
    partial, _, _ = partial_at(runs, i - full, seqlen_k, c.RANGES, c.TILE_N, 0)
    return tl.where(i < full, full_at(runs, i, c.RANGES, c.TILE_N, 0), partial)


# ---- far sides


@triton.jit
def _whole_tiles(positions, TILE: tl.constexpr):
    """The tiles that end at or before a position, which may be negative: then none."""
    return tl.maximum(positions, 0) // TILE


@triton.jit
def near_keys(score, q_first, q_last, tile, begin, stop, TILE_N: tl.constexpr):
    """(begin, end) of the near ones among the consecutive full tiles ``begin`` to ``stop``, of which number 0 is ``tile``, counted from key
    0: ``score.after`` holds in those before, ``score.before`` in those behind. q_first, q_last: the rows' positions."""
    first, end = begin, stop
    if score.has_after:
        far = _whole_tiles(q_first - score.after.reach(score.scalars) + 1, TILE_N) - tile
        first = tl.minimum(tl.maximum(far, begin), stop)
    if score.has_before:
        far = _whole_tiles(q_last + score.before.reach(score.scalars) + TILE_N - 1, TILE_N) - tile
        end = tl.minimum(tl.maximum(far, first), stop)
    return first, end


@triton.jit
def near_rows(score, q_first, k_first, k_last, tile, count, TILE_M: tl.constexpr):
    """(begin, end) of the near ones among ``count`` consecutive full row tiles, of which number 0 is ``tile``: ``score.before`` holds in
    those before, ``score.after`` in those behind. q_first: the position of the sequence's first row. k_first, k_last: of the keys."""
    first, end = count * 0, count
    if score.has_before:
        far = _whole_tiles(k_first - score.before.reach(score.scalars) + 1 - q_first, TILE_M) - tile
        first = tl.minimum(tl.maximum(far, 0), count)
    if score.has_after:
        far = _whole_tiles(k_last + score.after.reach(score.scalars) - q_first + TILE_M - 1, TILE_M) - tile
        end = tl.minimum(tl.maximum(far, first), count)
    return first, end
