"""Triton kernels for documents: find runs of equal ids and whether each id has one run; sort the runs' row tiles."""

import triton
import triton.language as tl

from anyattn.sequences.tile_order_kernel import numbered

__all__ = ["find_documents", "order_documents"]

_OF_IDS = ("ids_row", "ids_at", "given", "length", "rows", "places")
_OF_ORDER = ("batch", "places", "most", "tile_m")


@triton.jit(do_not_specialize=_OF_IDS, do_not_specialize_on_alignment=_OF_IDS)
def find_documents(
    ids, starts, lengths, holds, state, ids_row: tl.int64, ids_at: tl.int64, given: tl.int32, length: tl.int32, rows: tl.int32,
    places: tl.int32, BLOCK: tl.constexpr, PAIRS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program finds the runs of one row of ids; the last program to finish combines the results. Grid: ``given``, 1 or ``rows``.

    starts, lengths: int64 (rows, places). holds: int32 (1,). state: zeros, int32 (2 + given,): number of rows whose ids are not documents,
    number of finished programs, and the runs of each row.
    """
    row = tl.program_id(0)
    mine, table = ids + row.to(tl.int64) * ids_row, starts + row * places
    runs, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while first < length:
        at = first + tl.arange(0, BLOCK)
        is_inside = at < length
        here = tl.load(mine + at * ids_at, mask=is_inside, other=0)
        before = tl.load(mine + (at - 1) * ids_at, mask=is_inside & (at > 0), other=0)
        begins = is_inside & ((at == 0) | (here != before))
        place = runs + tl.cumsum(begins.to(tl.int32), 0) - 1
        tl.store(table + place, at.to(tl.int64), mask=begins & (place < places))
        runs += tl.sum(begins.to(tl.int32), 0)
        first += BLOCK
    tl.debug_barrier()  # starts that other threads have stored are read below
    known = tl.minimum(runs, places)
    again = _repeated(mine, ids_at, table, known, PAIRS)
    tl.store(state + 2 + row, known)
    tl.debug_barrier()
    tl.atomic_add(state, ((runs > places) | (again > 0)).to(tl.int32))
    ended = tl.atomic_add(state + 1, 1)
    if ended == given - 1:
        is_right = tl.atomic_add(state, 0) == 0
        tl.store(holds, is_right.to(tl.int32))
        first = tl.full((), 0, tl.int32)
        while first < rows * places:
            i = first + tl.arange(0, CHUNK)
            is_inside = i < rows * places
            source, place = tl.where(given > 1, i // places, 0), i % places
            # another program wrote it: .cg bypasses this multiprocessor's L1 cache
            count = tl.load(state + 2 + source, mask=is_inside, other=0, cache_modifier=".cg")
            begin = starts + source * places + place
            start = tl.load(begin, mask=is_inside & (place < count), other=length, cache_modifier=".cg")
            end = tl.load(begin + 1, mask=is_inside & (place + 1 < count), other=length, cache_modifier=".cg")
            tl.store(lengths + i, tl.where(is_right, end - start, 0), mask=is_inside)
            tl.store(starts + i, start, mask=is_inside)
            first += CHUNK


@triton.jit
def _repeated(mine, ids_at, table, known, PAIRS: tl.constexpr):
    """The number of pairs of runs, among the first ``known``, with the same id."""
    found, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while first < known:
        i = first + tl.arange(0, PAIRS)
        of_i = tl.load(mine + tl.load(table + i, mask=i < known, other=0) * ids_at)
        second = first
        while second < known:
            j = second + tl.arange(0, PAIRS)
            of_j = tl.load(mine + tl.load(table + j, mask=j < known, other=0) * ids_at)
            is_same = (of_i[:, None] == of_j[None, :]) & (i[:, None] < j[None, :]) & (j[None, :] < known)
            found += tl.sum(tl.sum(is_same.to(tl.int32), 1), 0)
            second += PAIRS
        first += PAIRS
    return found


@triton.jit(do_not_specialize=_OF_ORDER, do_not_specialize_on_alignment=_OF_ORDER)
def order_documents(
    order, entries, starts, lengths, batch: tl.int32, places: tl.int32, most: tl.int32, tile_m: tl.int32,
    ENDS_WITH_ROW: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Each program finds the ranks of some row tiles by counting the tiles that come before them. Grid: enough for ``most + 1`` tiles.

    order: int32 (most + 1, 3). entries: int32 (batch, 9), with batch <= most. starts, lengths: int64 (batch,).
    """
    number = tl.program_id(0) * TILES + tl.arange(0, TILES)
    entry, base, total = numbered(number, batch, lengths, lengths, 0, tile_m, False, True, TILES, ENTRIES)
    exists = number < total
    entry = tl.minimum(entry, batch - 1)
    m_block = number - base
    cost = tl.load(lengths + entry, mask=exists, other=0).to(tl.int32)
    if ENDS_WITH_ROW:
        cost = tl.minimum(cost, (m_block + 1) * tile_m)
    rank = _before(lengths, batch, tile_m, entry, m_block, cost, ENDS_WITH_ROW, TILES, ENTRIES)
    to = order + tl.where(exists, rank, number) * 3
    is_inside = number < most
    tl.store(to, tl.where(exists, m_block, -1), mask=is_inside)
    tl.store(to + 1, entry * 0, mask=is_inside)
    tl.store(to + 2, entry, mask=is_inside)
    last = order + number * 3
    for i in tl.static_range(3):
        tl.store(last + i, total if i == 0 else total * 0, mask=number == most)
    is_inside = number < batch
    start = tl.load(starts + number, mask=is_inside, other=0).to(tl.int32)
    length = tl.load(lengths + number, mask=is_inside, other=0).to(tl.int32)
    to = entries + number * 9
    for i in tl.static_range(2):  # queries, keys
        tl.store(to + 3 * i, number // places, mask=is_inside)
        tl.store(to + 3 * i + 1, start, mask=is_inside)
        tl.store(to + 3 * i + 2, length, mask=is_inside)
    for i in tl.static_range(6, 9):
        tl.store(to + i, number * 0, mask=is_inside)


@triton.jit
def _before(
    lengths, batch, tile_m, entry, m_block, cost, ENDS_WITH_ROW: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """For each tile the number of row tiles with a greater cost, or with the same cost and a lower number."""
    found, first = tl.zeros((TILES,), tl.int32), tl.full((), 0, tl.int32)
    c = cost[:, None]
    while first < batch:
        at = first + tl.arange(0, ENTRIES)
        n = tl.load(lengths + at, mask=at < batch, other=0).to(tl.int32)
        n, tiles = n[None, :], ((n + tile_m - 1) // tile_m)[None, :]
        if ENDS_WITH_ROW:
            # a document's last tile costs its length, an earlier tile m costs (m + 1) * tile_m
            whole = c // tile_m
            more = tl.maximum(tiles - 1 - whole, 0) + (n > c).to(tl.int32)
            same = (((c % tile_m == 0) & (whole < tiles)) | (n == c)).to(tl.int32)
        else:
            more, same = tl.where(n > c, tiles, 0), tl.where(n == c, tiles, 0)
        found += tl.sum(more + tl.where(at[None, :] < entry[:, None], same, 0), 1)
        first += ENTRIES
    return found if ENDS_WITH_ROW else found + m_block
