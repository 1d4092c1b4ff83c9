"""Triton kernels that classify tiles as empty, partial or full and write their lists, without any read on the host.

A program classifies one row of tiles, or one column: interval bounds of the mask decide most tiles, eight sample pairs show most of the
others to be partial, and the rest is evaluated pair by pair. Then it writes the row's lists. Time is proportional to the number of tiles
for a usual mask, and to the number of pairs in the worst case.

``tables`` of the kernels' arguments: None for sequences of equal lengths, which have a grid axis of their own; for a varlen batch
(``SequenceTables``, their stride, which is the number of sequences). A program of a varlen batch finds its sequence by a binary search.
"""

import triton
import triton.language as tl

from anyattn.sparsity.kernels.arguments import SequenceTables

__all__ = ["list_tiles", "store_hulls", "store_places"]

_EMPTY: tl.constexpr = tl.constexpr(0)
_PARTIAL: tl.constexpr = tl.constexpr(1)
_FULL: tl.constexpr = tl.constexpr(2)
_DOUBT: tl.constexpr = tl.constexpr(3)
_FEW_DOUBTS: tl.constexpr = tl.constexpr(2)
# row numbers of ``SequenceTables``
_ROW_ENDS: tl.constexpr = tl.constexpr(SequenceTables._fields.index("row_ends"))
_COLUMN_ENDS: tl.constexpr = tl.constexpr(SequenceTables._fields.index("column_ends"))
_SEQLENS_Q: tl.constexpr = tl.constexpr(SequenceTables._fields.index("seqlens_q"))
_SEQLENS_K: tl.constexpr = tl.constexpr(SequenceTables._fields.index("seqlens_k"))
_Q_FIRST: tl.constexpr = tl.constexpr(SequenceTables._fields.index("q_first"))
_FIRST_ROW: tl.constexpr = tl.constexpr(SequenceTables._fields.index("first_row"))
_FIRST_ENTRY: tl.constexpr = tl.constexpr(SequenceTables._fields.index("first_entry"))


@triton.jit
def store_hulls(
    hulls, scalars, tensors, sizes, tables,
    STORE_ROW: tl.constexpr, STORE_COLUMN: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the least and the greatest value of every leaf over one tile's rows or columns. Grid: (rows + columns, heads, batch).

    sizes: ``TileSizes``. hulls: int64 [2 * row leaves][batch * heads][rows], and from ``column_hulls_at`` [2 * column leaves][batch *
    heads][columns]. With tables the grid's last axis is 1, and so is ``batch`` here.
    """
    place, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh, count = b * sizes.heads + h, tl.num_programs(2) * sizes.heads
    if place < sizes.rows:
        if tables is None:
            entry, first, end = b, place * TILE_M, sizes.seqlen_q
        else:
            entry, m, exists = _located(_ROW_ENDS, tables, place)
            start = _number(_Q_FIRST, tables, entry)
            first = start + m * TILE_M
            end = tl.where(exists, start + _number(_SEQLENS_Q, tables, entry), first)
        last = tl.minimum(first + TILE_M, end) - 1
        STORE_ROW(entry, h, first, last, hulls + bh * sizes.rows + place, count * sizes.rows, scalars, tensors, BLOCK)
    else:
        place -= sizes.rows
        if tables is None:
            entry, first, end = b, place * TILE_N, sizes.seqlen_k
        else:
            entry, n, exists = _located(_COLUMN_ENDS, tables, place)
            first = n * TILE_N
            end = tl.where(exists, _number(_SEQLENS_K, tables, entry), first)
        last = tl.minimum(first + TILE_N, end) - 1
        at = hulls + sizes.column_hulls_at + bh * sizes.columns + place
        STORE_COLUMN(entry, h, first, last, at, count * sizes.columns, scalars, tensors, BLOCK)


@triton.jit
def list_tiles(
    row_lists, column_lists, hulls, scalars, tensors, sizes, tables, given, choice,
    VALUE: tl.constexpr, VERDICT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEPARATE_FULL: tl.constexpr, HAS_FULL_TAILS: tl.constexpr,
):  # fmt: skip
    """Writes the lists of one row of tiles, or of one column. Grid: (rows, or rows + columns, heads, batch); with tables (rows, heads, 1).

    sizes: ``TileSizes``. row_lists: ``Lists`` with counts [batch * heads][rows], indices [batch * heads][rows][columns]. column_lists: the
    same with rows and columns exchanged. hulls: as ``store_hulls`` writes them.
    With tables, row_lists have counts [heads][rows], indices [heads][rows * width], with ``width`` key tiles of ``seqlen_k`` keys: a
    sequence's indices begin at ``width`` times its first row of tiles, and each of its rows takes as many as the sequence has key tiles.
    Rows of tiles that belong to no sequence list nothing.
    given: None, or (classes, row step, column step, room): a uint8 class for each tile, which is the most that the tile's class can be.
    [batch * heads], then rows and columns by their steps; with tables laid out as the indices, and the steps and the room are not used.
    choice: None, or (counts, indices, room): ascending lists, laid out as the rows', of the tiles that are classified; all others are
    empty. There are no columns then. room: the entries of a row's list, in place of ``columns``.
    HAS_FULL_TAILS: a tail tile with all its pairs inside the sequences visible is full; without this option it is partial.
    """
    place, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    bh, count = b * sizes.heads + h, tl.num_programs(2) * sizes.heads
    if tables is None:
        start, q_end, kv_end = 0, sizes.seqlen_q, sizes.seqlen_k
        is_row = place < sizes.rows
        line = tl.where(is_row, place, place - sizes.rows)
        length = tl.where(is_row, sizes.columns, sizes.rows)
        lines = tl.where(is_row, sizes.rows, sizes.columns)
        rows_at, columns_at = bh * sizes.rows, bh * sizes.columns
        counts_at = bh * lines + line
        entries = length
        if given is not None:
            entries = tl.where(is_row, given[3], length)
        if choice is not None:
            entries = choice[2]
            length = tl.load(choice[0] + counts_at)
        list_at = counts_at.to(tl.int64) * entries
    else:
        is_row = tl.full((), True, tl.int1)
        b, line, exists = _located(_ROW_ENDS, tables, place)
        start, kv_end = _number(_Q_FIRST, tables, b), _number(_SEQLENS_K, tables, b)
        q_end = start + _number(_SEQLENS_Q, tables, b)
        length = tl.where(exists, (kv_end + TILE_N - 1) // TILE_N, 0)
        counts_at = h * sizes.rows + place
        rows_at, columns_at = counts_at - line, h * sizes.columns + _number(_COLUMN_ENDS, tables, b) - length
        width = (sizes.seqlen_k + TILE_N - 1) // TILE_N
        list_at = rows_at.to(tl.int64) * width + line.to(tl.int64) * length
        entries = length
    if given is not None:
        most_of, row_step, column_step, _room = given
        if tables is None:
            most_of += bh.to(tl.int64) * sizes.rows * sizes.columns
        else:
            most_of, row_step, column_step = most_of + list_at, 0, 1
    if is_row:
        partial_count, partial_index, full_count, full_index = row_lists
    else:
        partial_count, partial_index, full_count, full_index = column_lists
    partial, full = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    first = line * 0  # while loops, because loops over a range fail in Triton's interpreter with NumPy 2.4
    while first < length:
        lane = tl.arange(0, CHUNK)
        is_tile = first + lane < length
        along = tl.minimum(first + lane, length - 1)
        if choice is not None:
            along = tl.load(choice[1] + list_at + along)
        m, n = tl.where(is_row, line, along), tl.where(is_row, along, line)
        q_first, kv_first = start + m * TILE_M, n * TILE_N
        q_last, kv_last = tl.minimum(q_first + TILE_M, q_end) - 1, tl.minimum(kv_first + TILE_N, kv_end) - 1
        row_hulls, column_hulls = hulls + rows_at + m, hulls + sizes.column_hulls_at + columns_at + n
        certain, possible = VERDICT(
            b, h, q_first, q_last, kv_first, kv_last, row_hulls, count * sizes.rows, column_hulls, count * sizes.columns, scalars, tensors,
            TILE_M, TILE_N,
        )  # fmt: skip
        classes = tl.where(certain, _FULL, tl.where(possible, _DOUBT, _EMPTY))
        classes = tl.where(is_tile, classes, _EMPTY).to(tl.int32)
        if given is not None:
            most = tl.load(most_of + m.to(tl.int64) * row_step + n * column_step, mask=is_tile, other=0).to(tl.int32)
            classes = tl.where(most == _EMPTY, _EMPTY, classes)
        doubts = tl.sum((classes == _DOUBT).to(tl.int32), 0)
        if doubts > 0:
            if given is None and choice is None:  # noqa: SIM114 - the other is decided at run time
                classes = _sampled(classes, b, h, q_first, q_last, kv_first, kv_last, scalars, tensors, VALUE)
            elif doubts > _FEW_DOUBTS:  # samples of all tiles take longer than all pairs of a tile or two
                classes = _sampled(classes, b, h, q_first, q_last, kv_first, kv_last, scalars, tensors, VALUE)
            doubtful = tl.min(tl.where(classes == _DOUBT, lane, CHUNK), 0)
            while doubtful < CHUNK:
                at = first + doubtful
                if choice is not None:
                    at = tl.sum(tl.where(lane == doubtful, along, 0), 0)
                q, kv = start + tl.where(is_row, line, at) * TILE_M, tl.where(is_row, at, line) * TILE_N
                q_to, kv_to = tl.minimum(q + TILE_M, q_end) - 1, tl.minimum(kv + TILE_N, kv_end) - 1
                settled = _settled(b, h, q, q_to, kv, kv_to, scalars, tensors, VALUE, BLOCK_M, BLOCK_N)
                classes = tl.where(lane == doubtful, settled, classes)
                doubtful = tl.min(tl.where(classes == _DOUBT, lane, CHUNK), 0)
        if given is not None:
            classes = tl.minimum(classes, most)
        if not HAS_FULL_TAILS:
            is_cut = (q_last - q_first + 1 < TILE_M) | (kv_last - kv_first + 1 < TILE_N)
            classes = tl.where((classes == _FULL) & is_cut, _PARTIAL, classes)
        if SEPARATE_FULL:
            partial = _appended(partial_index + list_at, partial, classes == _PARTIAL, along)
            full = _appended(full_index + list_at, full, classes == _FULL, along)
        else:
            partial = _appended(partial_index + list_at, partial, classes != _EMPTY, along)
        first += CHUNK
    _ended(partial_count + counts_at, partial_index + list_at, partial, entries, CHUNK)
    if SEPARATE_FULL:
        _ended(full_count + counts_at, full_index + list_at, full, entries, CHUNK)


@triton.jit
def _appended(index, size, listed, along):
    """Appends the listed tiles to a list of ``size`` entries; returns its new size."""
    hit = listed.to(tl.int32)
    tl.store(index + size + tl.cumsum(hit, 0) - 1, along, mask=listed)
    return size + tl.sum(hit, 0)


@triton.jit
def _ended(count, index, size, length, CHUNK: tl.constexpr):
    """Stores a list's size, and zeros after its entries."""
    tl.store(count, size)
    first = size * 0
    while first < length:
        along = first + tl.arange(0, CHUNK)
        tl.store(index + along, 0, mask=(along >= size) & (along < length))
        first += CHUNK


@triton.jit
def _sampled(classes, b, h, q_first, q_last, kv_first, kv_last, scalars, tensors, VALUE: tl.constexpr):
    """Classifies undecided tiles as partial if samples show a visible and a hidden pair: four corners, then aperiodic positions."""
    some, every = classes < 0, classes >= 0
    for sample in range(0, 8):
        along_q = tl.where(sample < 4, (sample >> 1) * 65536, (sample * 49473) & 65535).to(tl.int64)
        along_kv = tl.where(sample < 4, (sample & 1) * 65536, (sample * 37334) & 65535).to(tl.int64)
        q = q_first + (((q_last - q_first) * along_q) >> 16).to(tl.int32)
        kv = kv_first + (((kv_last - kv_first) * along_kv) >> 16).to(tl.int32)
        seen = VALUE(b, h, q, kv, scalars, tensors)
        some, every = some | seen, every & seen
    return tl.where((classes == _DOUBT) & some & (every == 0), _PARTIAL, classes)


@triton.jit
def _settled(b, h, q_first, q_last, kv_first, kv_last, scalars, tensors, VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The class of one tile, by evaluating its pairs until a visible and a hidden one are found."""
    some, every = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32)
    q, kv = q_first, kv_first
    while (q <= q_last) & (some <= every):
        q_idx = tl.minimum(q + tl.arange(0, BLOCK_M), q_last)[:, None]
        kv_idx = tl.minimum(kv + tl.arange(0, BLOCK_N), kv_last)[None, :]
        seen = tl.broadcast_to(VALUE(b, h, q_idx, kv_idx, scalars, tensors).to(tl.int32), (BLOCK_M, BLOCK_N))
        most, least = tl.max(seen), tl.min(seen)
        some, every = tl.maximum(some, most), tl.minimum(every, least)
        kv += BLOCK_N
        q = tl.where(kv > kv_last, q + BLOCK_M, q)
        kv = tl.where(kv > kv_last, kv_first, kv)
    return tl.where(every == 1, _FULL, tl.where(some == 1, _PARTIAL, _EMPTY))


# ---- varlen


@triton.jit
def store_places(
    places, seqlens_q, seqlens_k, q_first, batch, most_rows, width, bound_q, bound_k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the tables of each sequence's tiles; one program. places: int64 [7][batch], ``SequenceTables``.

    Lengths are clamped to 0 .. bound_q and bound_k, and no sequence's rows of tiles end after ``most_rows``.
    """
    rows, columns = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    first = tl.full((), 0, tl.int32)
    while first < batch:
        at = first + tl.arange(0, CHUNK)
        is_inside = at < batch
        q = tl.minimum(tl.maximum(tl.load(seqlens_q + at, mask=is_inside, other=0), 0), bound_q).to(tl.int64)
        k = tl.minimum(tl.maximum(tl.load(seqlens_k + at, mask=is_inside, other=0), 0), bound_k).to(tl.int64)
        of_rows, of_columns = (q + TILE_M - 1) // TILE_M, (k + TILE_N - 1) // TILE_N
        row_ends, column_ends = rows + tl.cumsum(of_rows, 0), columns + tl.cumsum(of_columns, 0)
        begin = tl.minimum(row_ends, most_rows) - of_rows
        to = places + at
        tl.store(to + _ROW_ENDS * batch, row_ends, mask=is_inside)
        tl.store(to + _COLUMN_ENDS * batch, column_ends, mask=is_inside)
        tl.store(to + _SEQLENS_Q * batch, q, mask=is_inside)
        tl.store(to + _SEQLENS_K * batch, k, mask=is_inside)
        tl.store(to + _Q_FIRST * batch, tl.load(q_first + at, mask=is_inside, other=0), mask=is_inside)
        tl.store(to + _FIRST_ROW * batch, begin, mask=is_inside)
        tl.store(to + _FIRST_ENTRY * batch, begin * width, mask=is_inside)
        rows += tl.sum(of_rows, 0)
        columns += tl.sum(of_columns, 0)
        first += CHUNK


@triton.jit
def _located(ends: tl.constexpr, tables, number):
    """(sequence, tile number within it, whether it exists) of tile ``number``, counted over all sequences in order. ends: the row of
    ``SequenceTables`` with the sequences' ends."""
    places, batch = tables
    low, high = number * 0, number * 0 + batch
    while low < high:
        middle = (low + high) // 2
        is_behind = tl.load(places + ends * batch + middle) > number
        high = tl.where(is_behind, middle, high)
        low = tl.where(is_behind, low, middle + 1)
    exists = low < batch
    entry = tl.minimum(low, batch - 1)
    before = tl.where(entry > 0, tl.load(places + ends * batch + tl.maximum(entry - 1, 0)), 0).to(tl.int32)
    return entry, number - before, exists


@triton.jit
def _number(row: tl.constexpr, tables, entry):
    """A sequence's value in one row of ``SequenceTables``."""
    places, batch = tables
    return tl.load(places + row * batch + entry).to(tl.int32)
