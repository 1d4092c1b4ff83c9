"""Rows of 8 bits that do not begin at multiples of 16 bytes (device code), loaded 16 or 8 bytes at a time.

Where scales stand behind each head's bytes, heads begin anywhere among multiples of 4 bytes, but all rows of a head equally far beyond a
multiple of WRAP (8, 16 or 32) bytes if the strides of positions and pages are such multiples. Then column d is loaded from d bytes behind
the multiple of WRAP at or below the row's address. The row ends ``wrap`` bytes later than these columns; what is there stands in the first
``wrap`` columns, where nothing of the row is. Both products work in any order of columns: queries are loaded in that of the keys, and the
output is stored from that of the values.

Only the first columns, the row's front, are loaded in pieces of 4 bytes. Nothing beside the row is read.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.tile_config import LEAST_FRONT

__all__ = ["load_wrapped", "output_columns", "wrap_of", "wrapped_columns", "wraps_of"]

_PIECE: tl.constexpr = tl.constexpr(16)  # most bytes that a thread loads at a time
_LEAST_FRONT: tl.constexpr = tl.constexpr(LEAST_FRONT)
# Two or four numbers of the front, a mask for each of them, of which all are equal, and the rest's numbers.
_JOIN_2: tl.constexpr = tl.constexpr("{ .reg .b32 part; and.b32 part, $1, $2; or.b32 $0, part, $4; }")
_JOIN_4: tl.constexpr = tl.constexpr("{ .reg .b32 part; and.b32 part, $1, $2; or.b32 $0, part, $6; }")


@triton.jit
def wrap_of(base, WRAP: tl.constexpr):
    """By how many bytes, a multiple of 4, rows at ``base`` begin beyond a multiple of WRAP."""
    return base.to(tl.int64).to(tl.int32) & (WRAP - 4)


@triton.jit
def wrapped_columns(wrap, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D]: the places in a row of the columns that ``load_wrapped`` returns; for columns from HEAD_DIM on anything."""
    d = tl.arange(0, BLOCK_D)
    return tl.max_contiguous(tl.multiple_of(tl.where(d < wrap, d + HEAD_DIM, d) - wrap, 4), 4)


@triton.jit
def wraps_of(kv_head, tensors, strides, c):
    """``wrap_of`` the keys and the values of a K/V head; 0 if c.WRAP is."""
    if c.WRAP > 0:
        head = kv_head.to(tl.int64)
        return wrap_of(tensors.k + head * strides.k.head, c.WRAP), wrap_of(tensors.v + head * strides.v.head, c.WRAP)
    else:
        return 0, 0


@triton.jit
def output_columns(kv_head, tensors, strides, c):
    """[BLOCK_DV]: the columns of the output, in the order in which those of a K/V head's values are loaded."""
    if c.WRAP > 0:
        _k_wrap, v_wrap = wraps_of(kv_head, tensors, strides, c)
        return wrapped_columns(v_wrap, c.HEAD_DIM_V, c.BLOCK_DV)
    else:
        return tl.arange(0, c.BLOCK_DV)


@triton.jit
def load_wrapped(
    base, offsets, is_row, wrap, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL_ROWS: tl.constexpr, WRAP: tl.constexpr,
    UNIT: tl.constexpr, IS_NVIDIA: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK_D]: rows at 64-bit ``offsets`` [rows, 1] from ``base``, as ``key_tiles.load_rows``, with wrapped columns.

    UNIT: bytes of an element. wrap, HEAD_DIM and BLOCK_D are numbers of elements, WRAP of bytes.
    """
    ROWS: tl.constexpr = offsets.shape[0]
    FRONT: tl.constexpr = (WRAP if WRAP > _LEAST_FRONT else _LEAST_FRONT) // UNIT
    start = base - wrap + offsets
    d = tl.arange(0, FRONT)[None, None, :]
    at = start[:, :, None] + tl.where(d < wrap, d + HEAD_DIM, d)
    at = tl.max_contiguous(tl.multiple_of(at, (1, 1, 4)), (1, 1, 4 // UNIT))
    if ALL_ROWS:
        front = tl.load(at)
    else:
        front = tl.load(at, mask=is_row[:, :, None], other=0.0)
    if BLOCK_D == FRONT:
        return tl.reshape(front, (ROWS, BLOCK_D))
    else:
        d = tl.arange(0, BLOCK_D)[None, :]
        is_rest = (d >= FRONT) & (d < HEAD_DIM)
        at = tl.multiple_of(start + d, (1, WRAP if WRAP < _PIECE else _PIECE))
        rest = tl.load(at, mask=is_rest if ALL_ROWS else is_row & is_rest, other=0.0)
        return joined(front, rest, base, wrap < 0, UNIT, IS_NVIDIA)


@triton.jit
def joined(front, rest, base, never, UNIT: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """[rows, BLOCK_D]: ``rest`` [rows, BLOCK_D] with ``front`` [rows, 1, FRONT] for its first columns, which are 0.

    never: False, but not to the compiler. Triton loads rows directly in the layout of a product's operand only if all that is computed with
    them before comes from loads too, and if none of these is as large as there are threads (else its own layout counts). So which columns
    are the front's comes from a load that never happens. Front and rest are joined two or four numbers at a time.
    """
    ROWS: tl.constexpr = rest.shape[0]
    BLOCK_D: tl.constexpr = rest.shape[1]
    FRONT: tl.constexpr = front.shape[2]
    FRONTS: tl.constexpr = BLOCK_D // FRONT
    i = tl.arange(0, FRONTS)[None, :, None]
    is_front = tl.load(base.to(tl.pointer_type(tl.int32)) + i, mask=(i >= 0) & never, other=tl.where(i == 0, -1, 0))
    is_front = tl.reshape(tl.broadcast_to(is_front, (ROWS, FRONTS, FRONT)), (ROWS, BLOCK_D))
    front = tl.reshape(tl.broadcast_to(front, (ROWS, FRONTS, FRONT)), (ROWS, BLOCK_D))
    if IS_NVIDIA and UNIT == 1:
        return tl.inline_asm_elementwise(_JOIN_4, "=r,r,r,r,r,r,r", [front, is_front, rest], dtype=rest.dtype, is_pure=True, pack=4)
    elif IS_NVIDIA:
        return tl.inline_asm_elementwise(_JOIN_2, "=r,r,r,r,r", [front, is_front, rest], dtype=rest.dtype, is_pure=True, pack=2)
    else:
        return tl.where(is_front != 0, front, rest)
