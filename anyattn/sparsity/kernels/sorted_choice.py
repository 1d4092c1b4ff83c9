"""Triton kernel that sorts the tiles that each row has chosen, and leaves out repeated and missing ones."""

import triton
import triton.language as tl

__all__ = ["store_sorted"]

_PLAIN = (
    "counts", "indices", "index", "count", "rows", "columns", "width", "room", "index_entry", "index_head", "index_row", "index_step",
    "count_entry", "count_head", "count_row",
)  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def store_sorted(
    counts, indices, index, count, rows: tl.int32, columns: tl.int32, width: tl.int32, room: tl.int32,
    index_entry: tl.int64, index_head: tl.int64, index_row: tl.int64, index_step: tl.int64,
    count_entry: tl.int64, count_head: tl.int64, count_row: tl.int64,
    HAS_COUNT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes each row's tiles, ascending, each once, and their number. Grid: (blocks of ROWS rows, heads, batch).

    counts: int32 [batch][heads][rows]. indices: int32 [batch][heads][rows][room]; what follows a row's tiles is not written.
    index: integers (batch, heads, rows, width) of any strides, ``width`` at most WIDTH, a power of two; a tile below 0 or not below
    ``columns`` is read as nothing. count: integers (batch, heads, rows), the entries of a row to read, if HAS_COUNT.
    """
    row, place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    is_row = row < rows
    is_listed = is_row[:, None] & (place < width)
    if HAS_COUNT:
        entries = tl.load(count + b * count_entry + h * count_head + row * count_row, mask=is_row, other=0)
        is_listed = is_listed & (place < entries[:, None])
    at = b * index_entry + h * index_head + row[:, None] * index_row + place * index_step
    tile = tl.load(index + at, mask=is_listed, other=-1).to(tl.int64)
    number = tl.where((tile >= 0) & (tile < columns), tile, columns).to(tl.int32)  # what is no tile comes last
    number = tl.sort(number, 1)
    before = tl.gather(number, tl.broadcast_to(tl.maximum(place - 1, 0), (ROWS, WIDTH)), 1)
    is_tile = (number < columns) & ((place == 0) | (number != before))
    hit = is_tile.to(tl.int32)
    line = (b * tl.num_programs(1) + h) * rows + row
    tl.store(indices + line[:, None] * room + tl.cumsum(hit, 1) - 1, number, mask=is_tile)
    tl.store(counts + line, tl.sum(hit, 1), mask=is_row)
