"""Keeping a tile's derivatives for ``bands.sum``, in the pass whose programs own the table's rows (device code).

A tile is [rows, columns], where rows are those of the table: queries in the dq kernel, keys in the dk and dv kernel. Derivatives of near
pairs are stored in a band, one entry for each row and each distance of less than ``reach``; those of pairs farther apart share one entry
of a row on either side, and are summed in registers over all tiles. So nothing is added atomically.
"""

import triton
import triton.language as tl

__all__ = ["kept", "no_sums", "store_sums"]


@triton.jit
def no_sums(score, ROWS: tl.constexpr):
    """(sums of a row's derivatives at columns far below the row's number, and far above), 0 if the kernel keeps no band."""
    if score.band is not None:
        return tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    else:
        return 0, 0


@triton.jit
def kept(sums, part, is_row, is_column, b, h, row_first, column_first, score, IS_LOW_AFTER: tl.constexpr, IS_WHOLE: tl.constexpr):
    """``sums`` with one tile of derivatives ``part`` [rows, columns], whose near pairs are stored.

    is_row, is_column: which exist, [rows, 1] and [1, columns]. row_first, column_first: the tile's first. IS_LOW_AFTER: columns below the
    row's number are keys before the query. IS_WHOLE: all columns exist, and the tile is near or far as a whole.
    """
    low, high = sums
    if score.side > 0:
        if (score.side == 1) == IS_LOW_AFTER:
            low += tl.sum(part, 1)
        else:
            high += tl.sum(part, 1)
    else:
        band: tl.constexpr = len(score.totals) - 2
        pointer, pitch = score.totals[band][0], score.totals[band][5] // 8 * 8  # so that the compiler knows the factor
        of_head = b.to(tl.int64) * score.totals[band][1] + h.to(tl.int64) * score.totals[band][3]
        start = tl.multiple_of(of_head + row_first.to(tl.int64) * pitch + column_first, 8)
        row, column = tl.arange(0, part.shape[0])[:, None], tl.arange(0, part.shape[1])[None, :]
        at = tl.multiple_of(pointer + start, 16) + (row * pitch + column)
        value = part.to(pointer.dtype.element_ty)
        if IS_WHOLE:
            tl.store(at, value, mask=is_row)
        else:
            reach = (pitch // 2).to(tl.int32)
            apart = column_first - row_first + column - row
            tl.store(at, value, mask=is_row & is_column & (apart > -reach) & (apart < reach))
            low += tl.sum(tl.where(apart <= -reach, part, 0.0), 1)
            high += tl.sum(tl.where(apart >= reach, part, 0.0), 1)
    return low, high


@triton.jit
def store_sums(sums, b, h, row, is_row, score):
    """Stores the sums of a tile's rows. row: [rows], their numbers."""
    if score.band is not None:
        far: tl.constexpr = len(score.totals) - 1
        at = score.totals[far][0] + b.to(tl.int64) * score.totals[far][3] + h.to(tl.int64) * score.totals[far][5] + row
        tl.store(at, sums[0], mask=is_row)
        tl.store(at + score.totals[far][1], sums[1], mask=is_row)
