"""Triton kernel that moves and sums rows of several tensors in one launch."""

import triton
import triton.language as tl

__all__ = ["move_rows"]

_OFFSETS = tuple([f"{side}{i}" for side in "st" for i in range(16)])
_RUNTIME = (*_OFFSETS, "heads")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_RUNTIME)
def move_rows(
    table, source, target,
    s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64, s4: tl.int64, s5: tl.int64, s6: tl.int64, s7: tl.int64,
    s8: tl.int64, s9: tl.int64, s10: tl.int64, s11: tl.int64, s12: tl.int64, s13: tl.int64, s14: tl.int64, s15: tl.int64,
    t0: tl.int64, t1: tl.int64, t2: tl.int64, t3: tl.int64, t4: tl.int64, t5: tl.int64, t6: tl.int64, t7: tl.int64,
    t8: tl.int64, t9: tl.int64, t10: tl.int64, t11: tl.int64, t12: tl.int64, t13: tl.int64, t14: tl.int64, t15: tl.int64,
    heads: tl.int32, STEP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, UNIT_FROM: tl.constexpr, UNIT_TO: tl.constexpr,
):  # fmt: skip
    """A program moves ROWS rows of one head. Grid: (blocks of rows, batch entries x heads, moves).

    table: int64 (moves, STEP): tensor, offset and three strides of the target, rows, width, number of sources, then the same five numbers
    of each source. s0 to s15, t0 to t15: distances in elements of each tensor from ``source`` and ``target``. UNIT_FROM, UNIT_TO: of which
    all distances, offsets, strides and widths are multiples, in elements of the sources and of the targets.
    """
    line = table + tl.program_id(2) * STEP
    rows, width, count = tl.load(line + 5), tl.load(line + 6), tl.load(line + 7)
    first = tl.program_id(0).to(tl.int64) * ROWS
    if first >= rows:
        return
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    row, column = first + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    wide: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((ROWS, WIDTH), wide)
    for i in range(count):
        at = line + 8 + i * 5
        base = _chosen(tl.load(at), s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)
        places = _places(base + tl.load(at + 1), at + 2, b, h, row, column, UNIT_FROM)
        is_inside = _inside(row, rows, column, width, UNIT_FROM)
        part = tl.load(source + places, mask=is_inside, other=0.0).to(wide)
        total = tl.where(i == 0, part, total + part)  # 0 + -0 is 0
    base = _chosen(tl.load(line), t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15)
    places = _places(base + tl.load(line + 1), line + 2, b, h, row, column, UNIT_TO)
    tl.store(target + places, total.to(target.dtype.element_ty), mask=_inside(row, rows, column, width, UNIT_TO))


@triton.jit
def _places(offset, strides, b, h, row, column, UNIT: tl.constexpr):
    """Elements of rows, from an offset and the table's strides of B, H and rows."""
    begin = offset + b * tl.load(strides) + h * tl.load(strides + 1)
    step = tl.load(strides + 2)
    return tl.multiple_of((begin + row * step)[:, None] + column[None, :], (1, UNIT))


@triton.jit
def _inside(row, rows, column, width, UNIT: tl.constexpr):
    is_inside = (row < rows)[:, None] & (column < width)[None, :]
    return tl.max_constancy(is_inside, (1, UNIT))


@triton.jit
def _chosen(number, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15):
    found = n0
    found = tl.where(number == 1, n1, found)
    found = tl.where(number == 2, n2, found)
    found = tl.where(number == 3, n3, found)
    found = tl.where(number == 4, n4, found)
    found = tl.where(number == 5, n5, found)
    found = tl.where(number == 6, n6, found)
    found = tl.where(number == 7, n7, found)
    found = tl.where(number == 8, n8, found)
    found = tl.where(number == 9, n9, found)
    found = tl.where(number == 10, n10, found)
    found = tl.where(number == 11, n11, found)
    found = tl.where(number == 12, n12, found)
    found = tl.where(number == 13, n13, found)
    found = tl.where(number == 14, n14, found)
    found = tl.where(number == 15, n15, found)
    return found
