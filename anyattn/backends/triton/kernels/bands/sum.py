"""Gradients of tables by row and distance, summed from what ``bands.keep`` has stored (device code).

All rows of a head have a distance's entry at the same place of theirs, so a tile of the band is summed by a product with a matrix of ones
and zeros, which is exact in float32. A program computes a tile of the table's rows and places, and loads only steps of distances some of
which belong to its places.
"""

import triton
import triton.language as tl

from anyattn.triton_tools import device_math

__all__ = ["store_places", "sum_band"]

_NUMBERS = ("rows", "of_head", "reach", "heads", "table_heads", "table_rows", "width")


@triton.jit
def _place(score, b, h, row, column, width, BY_KEY: tl.constexpr):
    """The places of pairs in their row of the table."""
    q_idx, kv_idx = (column, row) if BY_KEY else (row, column)
    rows = score.rows(b, h, q_idx, score.scalars, score.tensors)
    place = score.value(0.0, 0.0, b, h, kv_idx, rows, score.scalars, score.tensors)[0] + row * 0  # a literal becomes a number of the kernel
    return device_math.inside(place.to(tl.int32), width)


@triton.jit
def store_places(places, bounds, heads, rows, columns, reach, width, lists, scale, mods, c):
    """Stores the places of STEP distances of one head: int32 ``places`` (B, H, 2 reach + 2), of columns from ``reach`` below the row's
    number to as many above it, -1 where there is no such pair, and of far pairs below and above it; and their least and greatest:
    ``bounds`` (B, H, steps, 2). 2 reach is a multiple of STEP.

    rows, columns: of the pairs. width: places of the table's rows. ``mods.score``: its only value is the place of a pair.
    """
    step, head = tl.program_id(0), tl.program_id(1)
    b, h = head // heads, head % heads
    apart = step * c.STEP - reach + tl.arange(0, c.STEP)
    low, high = tl.maximum(-apart, 0), tl.maximum(apart, 0)  # row and column of the diagonal's first pair
    is_there = (low < rows) & (high < columns) & (apart > -reach)
    place = _place(mods.score, b, h, tl.minimum(low, rows - 1), tl.minimum(high, columns - 1), width, c.BY_KEY)
    own = places + head.to(tl.int64) * (2 * reach + 2)
    tl.store(own + reach + apart, tl.where(is_there, place, -1))
    own_bounds = bounds + 2 * (head * tl.num_programs(0) + step)
    tl.store(own_bounds, tl.min(tl.where(is_there, place, width), 0))
    tl.store(own_bounds + 1, tl.max(tl.where(is_there, place, -1), 0))
    if step == 0:
        after = _place(mods.score.after, b, h, b * 0, b * 0, width, c.BY_KEY)
        before = _place(mods.score.before, b, h, b * 0, b * 0, width, c.BY_KEY)
        tl.store(own + 2 * reach, before if c.BY_KEY else after)
        tl.store(own + 2 * reach + 1, after if c.BY_KEY else before)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def sum_band(
    out, band, sums, places, bounds, rows: tl.int32, of_head: tl.int64, reach: tl.int32, heads: tl.int32, table_heads: tl.int32,
    table_rows: tl.int32, width: tl.int32, ROWS: tl.constexpr, PLACES: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Stores the gradient of a table (B, table_heads, table_rows, width) at one tile of rows and places of one head. Grid: (tiles of places
    * tiles of rows * B * heads,).

    band: its row 0, column 0; a row takes 2 reach entries, a head ``of_head``. sums: float32 (2, B, heads, rows), of far columns below and
    above the row's number. places, bounds: see ``store_places``.
    """
    tiles, row_tiles = (width + PLACES - 1) // PLACES, (rows + ROWS - 1) // ROWS
    first, row_tile, head = tl.program_id(0) % tiles * PLACES, tl.program_id(0) // tiles % row_tiles, tl.program_id(0) // tiles // row_tiles
    row, wanted = row_tile * ROWS + tl.arange(0, ROWS), first + tl.arange(0, PLACES)
    is_row, steps = row < rows, 2 * reach // STEP
    line = band + head * of_head + row.to(tl.int64) * (2 * reach + 1) - reach
    own_places, own_bounds = places + head.to(tl.int64) * (2 * reach + 2), bounds + 2 * head * steps
    acc = tl.zeros((ROWS, PLACES), tl.float32)
    for step in range(0, steps):
        if (tl.load(own_bounds + 2 * step) < first + PLACES) & (tl.load(own_bounds + 2 * step + 1) >= first):
            column = step * STEP + tl.arange(0, STEP)
            part = tl.load(line[:, None] + column[None, :], mask=is_row[:, None], other=0.0)  # 0 where there is no pair
            place = tl.load(own_places + column)
            acc = tl.dot(part, (place[:, None] == wanted[None, :]).to(part.dtype), acc)
    far = sums + head.to(tl.int64) * rows + row
    below, above = tl.load(own_places + 2 * reach), tl.load(own_places + 2 * reach + 1)
    acc += tl.where(wanted[None, :] == below, tl.load(far, mask=is_row, other=0.0)[:, None], 0.0)
    far += tl.num_programs(0) // tiles // row_tiles * rows.to(tl.int64)
    acc += tl.where(wanted[None, :] == above, tl.load(far, mask=is_row, other=0.0)[:, None], 0.0)
    b, h = head // heads, head % heads
    at = ((b.to(tl.int64) * table_heads + h) * table_rows + row)[:, None] * width + wanted[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (wanted < width)[None, :])
