"""Triton kernel that writes the class of each listed tile into a grid of classes: lists in any order, with repeated and missing tiles."""

import triton
import triton.language as tl

__all__ = ["store_class"]

_PLAIN = (
    "classes", "index", "count", "rows", "columns", "width", "index_entry", "index_head", "index_row", "index_step", "count_entry",
    "count_head", "count_row",
)  # fmt: skip


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def store_class(
    classes, index, count, rows: tl.int32, columns: tl.int32, width: tl.int32,
    index_entry: tl.int64, index_head: tl.int64, index_row: tl.int64, index_step: tl.int64,
    count_entry: tl.int64, count_head: tl.int64, count_row: tl.int64,
    CLASS: tl.constexpr, HAS_COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes ``CLASS`` for every listed tile. Grid: (blocks of the entries of all rows, heads, batch).

    classes: uint8 [batch][heads][rows][columns]. index: integers (batch, heads, rows, width) of any strides; a tile below 0 or not below
    ``columns`` is read as nothing. count: integers (batch, heads, rows), the entries of a row to read, if HAS_COUNT.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    h, b = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, place = at // width, at % width
    is_listed = row < rows
    if HAS_COUNT:
        entries = tl.load(count + b * count_entry + h * count_head + row * count_row, mask=is_listed, other=0)
        is_listed = is_listed & (place < entries)
    tile = tl.load(index + b * index_entry + h * index_head + row * index_row + place * index_step, mask=is_listed, other=-1).to(tl.int64)
    line = (b * tl.num_programs(1) + h) * rows + row
    is_listed = is_listed & (tile >= 0) & (tile < columns)
    tl.store(classes + line * columns + tile, tl.full((BLOCK,), CLASS, tl.uint8), mask=is_listed)
