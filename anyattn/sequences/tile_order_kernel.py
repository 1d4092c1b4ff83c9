"""Triton kernel that sorts the tiles of a varlen batch for scheduling and writes the table of its sequences."""

import triton
import triton.language as tl

__all__ = ["numbered", "order_sequences"]

_NUMBERS = ("batch", "rows_q", "rows_k", "most", "tile", "new", "storage")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def order_sequences(
    order, entries, ends_q, ends_k, used_q, used_k, leftpad, cache_rows, batch: tl.int32, rows_q: tl.int32, rows_k: tl.int32,
    most: tl.int32, tile: tl.int32, new: tl.int32, storage: tl.int32, HAS_ENDS_Q: tl.constexpr, HAS_ENDS_K: tl.constexpr,
    HAS_USED_Q: tl.constexpr, HAS_USED_K: tl.constexpr, HAS_LEFTPAD: tl.constexpr, HAS_ROWS: tl.constexpr, BY_KEY: tl.constexpr,
    IS_CACHE: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Each program finds the places of some tiles by counting the tiles that come before them.
    Grid: enough for ``most`` tiles and ``batch``.

    order: int32 (most, 2), (sequence, tile or -1): tiles of ``tile`` queries, those of sequences with most keys first; with BY_KEY tiles of
    keys, those of sequences with most queries first. entries: int32 (batch, 9). The other tensors are the tables of ``StoredSequences``,
    or with IS_CACHE of a ``StoredCache`` with packed queries: used_k are the rows in use before the step, rows_k its capacity, new the rows
    that it appends to each entry, or -1 for as many as the entry's queries, and storage the cache's rows, or pages.
    Exactly these rows are written for any contents of the tables.
    """
    number = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if BY_KEY:
        entry, base, total = numbered(number, batch, ends_k, used_k, rows_k, tile, HAS_ENDS_K, HAS_USED_K, TILES, ENTRIES)
    else:
        entry, base, total = numbered(number, batch, ends_q, used_q, rows_q, tile, HAS_ENDS_Q, HAS_USED_Q, TILES, ENTRIES, IS_CACHE)
    exists = number < total
    entry = tl.minimum(entry, batch - 1)
    queries, _ = _rows(entry, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q, IS_CACHE)
    if IS_CACHE:
        keys, _, _ = _cached(entry, queries, batch, used_k, leftpad, cache_rows, rows_k, new, storage, HAS_LEFTPAD, HAS_ROWS)
    else:
        keys, _ = _rows(entry, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K, False)
    cost = (queries if BY_KEY else keys)[:, None]
    place, first = number - base, tl.full((), 0, tl.int32)
    rank = place
    while first < batch:
        at = first + tl.arange(0, ENTRIES)
        queries, _ = _rows(at, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q, IS_CACHE)
        if IS_CACHE:
            keys, _, _ = _cached(at, queries, batch, used_k, leftpad, cache_rows, rows_k, new, storage, HAS_LEFTPAD, HAS_ROWS)
        else:
            keys, _ = _rows(at, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K, False)
        tiles, others = _tiles(keys if BY_KEY else queries, tile), (queries if BY_KEY else keys)[None, :]
        is_before = (others > cost) | ((others == cost) & (at[None, :] < entry[:, None]))
        rank += tl.sum(tl.where(is_before, tiles[None, :], 0), 1)
        first += ENTRIES
    # wrong tables may give more tiles than ``most``: then the first ones, in the order of sequences
    to = order + tl.where(exists & (total <= most), rank, number) * 2
    is_inside = number < most
    tl.store(to, entry, mask=is_inside)
    tl.store(to + 1, tl.where(exists, place, -1), mask=is_inside)
    is_entry = number < batch
    queries, start_q = _rows(number, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q, IS_CACHE)
    if IS_CACHE:
        keys, start_k, row_k = _cached(number, queries, batch, used_k, leftpad, cache_rows, rows_k, new, storage, HAS_LEFTPAD, HAS_ROWS)
        first = keys - queries
    else:
        keys, start_k = _rows(number, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K, False)
        row_k, first = number * 0 if HAS_ENDS_K else number, number * 0
    to = entries + number * 9
    tl.store(to, number * 0 if HAS_ENDS_Q else number, mask=is_entry)
    tl.store(to + 1, start_q, mask=is_entry)
    tl.store(to + 2, queries, mask=is_entry)
    tl.store(to + 3, row_k, mask=is_entry)
    tl.store(to + 4, start_k, mask=is_entry)
    tl.store(to + 5, keys, mask=is_entry)
    tl.store(to + 6, first, mask=is_entry)
    for i in tl.static_range(7, 9):
        tl.store(to + i, number * 0, mask=is_entry)


@triton.jit
def numbered(
    number, batch, ends, used, rows, tile, HAS_ENDS: tl.constexpr, HAS_USED: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr,
    IS_CLAMPED: tl.constexpr = False,
):  # fmt: skip
    """(sequence, number of its first tile, tiles of all sequences) for the tiles ``number`` [TILES], numbered over all sequences; sequence
    is ``batch`` for a number beyond the last tile. The other arguments are those of ``_rows``, for the side whose tiles are numbered."""
    entry, base = tl.zeros((TILES,), tl.int32), tl.zeros((TILES,), tl.int32)
    total, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while first < batch:
        at = first + tl.arange(0, ENTRIES)
        length, _ = _rows(at, batch, ends, used, rows, HAS_ENDS, HAS_USED, IS_CLAMPED)
        tiles = _tiles(length, tile)
        end = total + tl.cumsum(tiles, 0)
        is_behind = (end[None, :] <= number[:, None]) & (at < batch)[None, :]
        entry += tl.sum(is_behind.to(tl.int32), 1)
        base = tl.maximum(base, tl.max(tl.where(is_behind, end[None, :], 0), 1))
        total += tl.sum(tiles, 0)
        first += ENTRIES
    return entry, base, total


@triton.jit
def _tiles(length, tile):
    return tl.maximum(length + tile - 1, 0) // tile


@triton.jit
def _rows(at, batch, ends, used, rows, HAS_ENDS: tl.constexpr, HAS_USED: tl.constexpr, IS_CLAMPED: tl.constexpr):
    """The number of rows of sequences on one side, 0 beyond the batch, and their first rows. IS_CLAMPED: ends are inside the storage."""
    is_entry, start = at < batch, at * 0
    length = tl.where(is_entry, rows, 0)
    if HAS_ENDS:
        start = tl.load(ends + at, mask=is_entry, other=0).to(tl.int32)
        end = tl.load(ends + at + 1, mask=is_entry, other=0).to(tl.int32)
        if IS_CLAMPED:
            start, end = tl.minimum(tl.maximum(start, 0), rows), tl.minimum(tl.maximum(end, 0), rows)
            end = tl.maximum(end, start)
        length = end - start
    if HAS_USED:
        length = tl.load(used + at, mask=is_entry, other=0).to(tl.int32)
    return length, start


@triton.jit
def _cached(
    at, queries, batch, cached, leftpad, cache_rows, capacity, new, storage, HAS_LEFTPAD: tl.constexpr, HAS_ROWS: tl.constexpr
):  # fmt: skip
    """(keys of cache entries after a step, 0 beyond the batch; their first rows; their rows of the cache): fields of ``StoredCache``."""
    is_entry = at < batch
    end = tl.load(cached + at, mask=is_entry, other=0).to(tl.int64) + tl.where(new < 0, queries, new)
    start, row = tl.zeros_like(end), at
    if HAS_LEFTPAD:
        start = tl.minimum(tl.maximum(tl.load(leftpad + at, mask=is_entry, other=0).to(tl.int64), 0), capacity)
    keys = tl.maximum(tl.minimum(end, capacity) - start, 0)
    if HAS_ROWS:
        found = tl.load(cache_rows + at, mask=is_entry, other=0).to(tl.int64)
        exists = (found >= 0) & (found < storage)
        row, keys = tl.where(exists, found, 0).to(tl.int32), tl.where(exists, keys, 0)
    return tl.where(is_entry, keys, 0).to(tl.int32), start.to(tl.int32), row
