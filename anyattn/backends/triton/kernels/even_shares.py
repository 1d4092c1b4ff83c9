"""Even shares of a call's key tiles among programs (device code): where a program's share begins, its parts, and which of them are merged.

All key tiles of the call form one sequence: by item (a row tile of a batch entry), then by group of query heads, then by key. Each program
takes an equal interval of it, so that it may compute the last part of one row tile, whole ones, and the first part of another. Numbers of
tiles follow from the sequences' lengths alone, which every program reads; where a mask hides tiles, a portion of an item is the same
portion of the tiles that it visits.

Source: the division is Stream-K's (Osama et al., arXiv:2301.03598).
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.addressing import sequence_of
from anyattn.backends.triton.kernels.results import places_of_rows
from anyattn.backends.triton.kernels.wrapped_rows import output_columns

__all__ = ["item_at", "next_in_share", "start_of_share", "store_no_rows", "store_part"]

_FAR: tl.constexpr = tl.constexpr(2**62)
_CHUNK: tl.constexpr = tl.constexpr(128)  # items whose tiles are counted at once


@triton.jit
def item_at(item, tensors, cache, sizes, shares, c):
    """(batch entry, row tile, number of key tiles) of an item or a block of items; at least 1 key tile, and 0 for what is no row tile."""
    place = tl.minimum(item, shares.items - 1)
    if c.HAS_ENTRIES:
        b, m = tl.load(tensors.order + place * 2), tl.load(tensors.order + place * 2 + 1)
        b = tl.where(m < 0, 0, b)
    else:
        b = place // sizes.row_tiles
        m = place - b * sizes.row_tiles
    keys = sequence_of(b, tensors, cache, sizes, c).seqlen_k
    tiles = tl.minimum(tl.maximum((keys + c.TILE_N - 1) // c.TILE_N, 1), shares.most)
    return b, m, tl.where((item < shares.items) & (m >= 0), tiles, 0)


@triton.jit
def _sum_and_most(total, most, other_total, other_most):
    return total + other_total, tl.maximum(most, other_most)


@triton.jit
def _first_behind(items, before, end, other_items, other_before, other_end):
    return items + other_items, tl.maximum(before, other_before), tl.minimum(end, other_end)


@triton.jit
def _item_of(at, passed, tiles):
    """(items of a chunk that end at or before tile ``at``, end of the last of them, end of the next). passed: tiles before the chunk."""
    ends = passed + tl.cumsum(tiles, 0)
    is_before = ends <= at
    return tl.reduce((is_before.to(tl.int32), tl.where(is_before, ends, 0), tl.where(is_before, _FAR, ends)), 0, _first_behind)


@triton.jit
def start_of_share(tensors, cache, dealt, sizes, shares, c):
    """(first tile of this program's share, its end, their item, group of heads, tile among the item's, size of a share) in the call's
    sequence of tiles.

    Shares are not smaller than merging their parts is worth, which grows with the number of parts. Where there is a program for each row
    tile, and the longest takes no longer than an even share and merging, none is divided: up to ``shares.saturating`` programs a tile takes
    the same time, with more of them longer in proportion.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    groups = sizes.heads // sizes.ratio * dealt.tiles_each
    lane = tl.arange(0, _CHUNK)
    _b, _m, tiles = item_at(lane, tensors, cache, sizes, shares, c)
    total, most = tl.reduce((tiles.to(tl.int64), tiles), 0, _sum_and_most)
    for first in range(_CHUNK, shares.items, _CHUNK):
        _b, _m, more = item_at(first + lane, tensors, cache, sizes, shares, c)
        more_total, more_most = tl.reduce((more.to(tl.int64), more), 0, _sum_and_most)
        total, most = total + more_total, tl.maximum(most, more_most)
    total = total * groups
    least = tl.maximum(shares.least, tl.sqrt(most.to(tl.float32) / shares.merged).to(tl.int32))
    share = tl.maximum((total + programs - 1) // programs, least)
    whole, divided = shares.items * groups, tl.minimum((total + share - 1) // share, programs).to(tl.int32)
    whole_time = most.to(tl.float32) * tl.maximum(whole, shares.saturating)
    divided_time = share.to(tl.float32) * tl.maximum(divided, shares.saturating) + shares.spared * shares.saturating
    if (whole <= programs) & (whole_time <= divided_time):
        item = program // groups
        head = program - item * groups
        begin = program * 0
        _entry, _tile, own = item_at(item, tensors, cache, sizes, shares, c)
        at = total * 0
        stop = at + own
    else:
        at = program * share
        stop = tl.minimum(at + share, total)
        of_head = at // groups  # an item has begun at tile ``at`` of all heads if it has at this one of a head
        item, before, end = _item_of(of_head, total * 0, tiles)
        passed = tl.sum(tiles.to(tl.int64), 0)
        for first in range(_CHUNK, shares.items, _CHUNK):
            _b, _m, more = item_at(first + lane, tensors, cache, sizes, shares, c)
            more_items, more_before, more_end = _item_of(of_head, passed, more)
            item, before, end = item + more_items, tl.maximum(before, more_before), tl.minimum(end, more_end)
            passed += tl.sum(more.to(tl.int64), 0)
        inside, own = (at - before * groups).to(tl.int32), tl.maximum(end - before, 1).to(tl.int32)
        head = inside // own
        begin = inside - head * own
    return at, stop, item, head, begin, share


@triton.jit
def next_in_share(at, item, head, begin, count, tiles, dealt, sizes):
    """``at``, ``item``, ``head`` and ``begin`` after ``count`` of an item's ``tiles``."""
    is_done = begin + count >= tiles
    head += is_done.to(tl.int32)
    is_last = (tiles == 0) | (head >= sizes.heads // sizes.ratio * dealt.tiles_each)
    return at + count, item + is_last.to(tl.int32), tl.where(is_last, 0, head), tl.where(is_done, 0, begin + count)


@triton.jit
def store_no_rows(tensors, c):
    """Notes that this program ends no row tile that another began."""
    r = tl.arange(0, c.TILE_M)
    tl.store(tensors.part_rows + tl.program_id(0).to(tl.int64) * (c.TILE_M + 1) + r, tl.full((c.TILE_M,), -1, tl.int64))


@triton.jit
def store_part(acc, row_sum, row_max, tile, first, begin, is_end, tensors, strides, sizes, c):
    """Stores a part of a row tile's results: its output times ``row_sum``, ``row_sum`` and ``row_max`` (base 2), for ``combine_shares``.

    A program has at most two: place 0 is of one that continues another program's, place 1 of one that others continue. The last part's
    program notes the tile's rows, by their places among the statistics, or -1, and the program ``first`` that has the first part. acc: its
    columns are in the order of ``output_columns``.
    """
    program, r, d = tl.program_id(0).to(tl.int64), tl.arange(0, c.TILE_M), tl.arange(0, c.BLOCK_DV)[None, :]
    rows, columns = tl.where(tile.is_row, places_of_rows(tile, sizes), -1), output_columns(tile.kv_head, tensors, strides, c)[None, :]
    at = (program * 2 + (begin == 0)) * c.TILE_M + r
    tl.store(tensors.part_sums + at * 2, row_sum, mask=rows >= 0)
    tl.store(tensors.part_sums + at * 2 + 1, row_max, mask=rows >= 0)
    tl.store(tensors.parts + at[:, None] * c.BLOCK_DV + columns, acc, mask=(rows >= 0)[:, None] & (d < c.HEAD_DIM_V))
    if begin > 0:
        table = tensors.part_rows + program * (c.TILE_M + 1)
        tl.store(table + r, tl.where(is_end, rows, -1))
        tl.store(table + c.TILE_M, first)
