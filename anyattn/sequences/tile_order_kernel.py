"""Triton kernel that sorts the tiles of a varlen batch for scheduling and writes the table of its sequences."""

import triton
import triton.language as tl

__all__ = ["numbered", "order_sequences"]

_NUMBERS = ("batch", "rows_q", "rows_k", "most", "tile")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def order_sequences(
    order, entries, ends_q, ends_k, used_q, used_k, batch: tl.int32, rows_q: tl.int32, rows_k: tl.int32, most: tl.int32, tile: tl.int32,
    HAS_ENDS_Q: tl.constexpr, HAS_ENDS_K: tl.constexpr, HAS_USED_Q: tl.constexpr, HAS_USED_K: tl.constexpr, BY_KEY: tl.constexpr,
    TILES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Each program finds the places of some tiles by counting the tiles that come before them.
    Grid: enough for ``most`` tiles and ``batch``.

    order: int32 (most, 2), (sequence, tile or -1): tiles of ``tile`` queries, those of sequences with most keys first; with BY_KEY tiles of
    keys, those of sequences with most queries first. entries: int32 (batch, 9). The other tensors are the tables of ``StoredSequences``.
    Exactly these rows are written for any contents of the tables.
    """
    number = tl.program_id(0) * TILES + tl.arange(0, TILES)
    if BY_KEY:
        entry, base, total = numbered(number, batch, ends_k, used_k, rows_k, tile, HAS_ENDS_K, HAS_USED_K, TILES, ENTRIES)
    else:
        entry, base, total = numbered(number, batch, ends_q, used_q, rows_q, tile, HAS_ENDS_Q, HAS_USED_Q, TILES, ENTRIES)
    exists = number < total
    entry = tl.minimum(entry, batch - 1)
    queries, _ = _rows(entry, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q)
    keys, _ = _rows(entry, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K)
    cost = (queries if BY_KEY else keys)[:, None]
    place, first = number - base, tl.full((), 0, tl.int32)
    rank = place
    while first < batch:
        at = first + tl.arange(0, ENTRIES)
        queries, _ = _rows(at, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q)
        keys, _ = _rows(at, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K)
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
    queries, start_q = _rows(number, batch, ends_q, used_q, rows_q, HAS_ENDS_Q, HAS_USED_Q)
    keys, start_k = _rows(number, batch, ends_k, used_k, rows_k, HAS_ENDS_K, HAS_USED_K)
    to = entries + number * 9
    tl.store(to, number * 0 if HAS_ENDS_Q else number, mask=is_entry)
    tl.store(to + 1, start_q, mask=is_entry)
    tl.store(to + 2, queries, mask=is_entry)
    tl.store(to + 3, number * 0 if HAS_ENDS_K else number, mask=is_entry)
    tl.store(to + 4, start_k, mask=is_entry)
    tl.store(to + 5, keys, mask=is_entry)
    for i in tl.static_range(6, 9):
        tl.store(to + i, number * 0, mask=is_entry)


@triton.jit
def numbered(
    number, batch, ends, used, rows, tile, HAS_ENDS: tl.constexpr, HAS_USED: tl.constexpr, TILES: tl.constexpr, ENTRIES: tl.constexpr
):  # fmt: skip
    """(sequence, number of its first tile, tiles of all sequences) for the tiles ``number`` [TILES], numbered over all sequences; sequence
    is ``batch`` for a number beyond the last tile. The other arguments are those of ``_rows``, for the side whose tiles are numbered."""
    entry, base = tl.zeros((TILES,), tl.int32), tl.zeros((TILES,), tl.int32)
    total, first = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while first < batch:
        at = first + tl.arange(0, ENTRIES)
        length, _ = _rows(at, batch, ends, used, rows, HAS_ENDS, HAS_USED)
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
def _rows(at, batch, ends, used, rows, HAS_ENDS: tl.constexpr, HAS_USED: tl.constexpr):
    """The number of rows of sequences on one side, 0 beyond the batch, and their first rows."""
    is_entry, start = at < batch, at * 0
    length = tl.where(is_entry, rows, 0)
    if HAS_ENDS:
        start = tl.load(ends + at, mask=is_entry, other=0).to(tl.int32)
        length = tl.load(ends + at + 1, mask=is_entry, other=0).to(tl.int32) - start
    if HAS_USED:
        length = tl.load(used + at, mask=is_entry, other=0).to(tl.int32)
    return length, start
