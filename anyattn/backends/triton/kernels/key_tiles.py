"""Tiles of rows in storage (device code): queries; keys and values, dense, in pages or described; factors of 8-bit ones; gradients.

Rows of q and k, and of their gradients, are a block, or with BLOCK_TAIL a pair of blocks: the first columns, and those behind them.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.addressing import key_places, tile_offsets
from anyattn.backends.triton.kernels.eight_bits import unpacked
from anyattn.backends.triton.kernels.paged_kv import paged_places
from anyattn.backends.triton.kernels.tile_iterator import lanes_of
from anyattn.backends.triton.kernels.wrapped_rows import load_wrapped, wrapped_columns
from anyattn.backends.triton.tile_config import FEW

__all__ = [
    "factors_at", "keys_at", "load_rest", "load_rows", "load_tile", "offsets_of", "pairs_at", "rest_of", "rows_at", "store_whole",
    "whole_keys_at", "whole_tile",
]  # fmt: skip

_FEW: tl.constexpr = tl.constexpr(FEW)


@triton.jit
def load_rows(
    base, offsets, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL_ROWS: tl.constexpr, ROW_BYTES: tl.constexpr = 0,
    WRAP: tl.constexpr = 0, wrap=0,
):  # fmt: skip
    """[rows, BLOCK_D]: rows at 64-bit ``offsets`` [rows, 1]; zeros for rows not in ``is_row`` (ALL_ROWS: all are), and beyond HEAD_DIM.
    ROW_BYTES: what their addresses are multiples of, if the offsets do not say so. WRAP, wrap: if not 0, the columns are those of
    ``wrapped_rows``."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if WRAP > 0:
        at = base + offsets + wrapped_columns(wrap, HEAD_DIM, BLOCK_D)[None, :]
        at = tl.max_contiguous(tl.multiple_of(at, (1, min(ROW_BYTES, 8))), (1, 4))
    else:
        at = base + offsets + d
        if ROW_BYTES > 0:
            at = tl.multiple_of(at, (1, ROW_BYTES))
    if ALL_ROWS and HEAD_DIM == BLOCK_D:
        return tl.load(at)
    elif ALL_ROWS:
        return tl.load(at, mask=d < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(at, mask=is_row, other=0.0)
    else:
        return tl.load(at, mask=is_row & (d < HEAD_DIM), other=0.0)


@triton.jit
def rows_at(base, offsets, is_row, c, ROW_BYTES: tl.constexpr = 0, WRAP: tl.constexpr = 0, wrap=0):
    """Rows of q or k at 64-bit ``offsets`` [rows, 1], see ``load_rows``."""
    first = load_rows(base, offsets, is_row, c.HEAD_DIM, c.BLOCK_D, False, ROW_BYTES, WRAP, wrap)
    if c.BLOCK_TAIL > 0:
        return first, load_rows(base + c.HEAD_DIM, offsets, is_row, c.TAIL_DIM, c.BLOCK_TAIL, False, ROW_BYTES)
    else:
        return first


@triton.jit
def whole_keys_at(key, first, end, numbers, c, IS_CUT: tl.constexpr, IS_PLAIN: tl.constexpr):
    """All columns of the keys that ``keys_at`` finds."""
    columns = keys_at(key, first, end, numbers, c, False, IS_CUT, IS_PLAIN)
    if c.BLOCK_TAIL > 0:
        tl.static_assert(c.IS_DESCRIBED == 0 and c.WRAP == 0, "a tail has an address of its own")
        is_key = (lanes_of(first, c) < end)[:, None]
        at = places_at(key, key.k_strides, first, end, numbers, c, IS_CUT)
        return columns, load_rows(key.k + c.HEAD_DIM, at[:, None], is_key, c.TAIL_DIM, c.BLOCK_TAIL, IS_PLAIN, c.KV_BYTES)
    else:
        return columns


@triton.jit
def keys_at(key, first, end, numbers, c, IS_VALUE: tl.constexpr, IS_CUT: tl.constexpr, IS_PLAIN: tl.constexpr):
    """[TILE_N, BLOCK_D]: keys, or with IS_VALUE values, at place ``first``; with IS_CUT nothing beyond the storage is read.

    IS_PLAIN: from ``end`` on they are anything, else zeros. key: ``KeyStorage``. numbers: of the tile's pages.
    """
    source, strides = (key.v, key.v_strides) if IS_VALUE else (key.k, key.k_strides)
    HEAD_DIM: tl.constexpr = c.HEAD_DIM_V if IS_VALUE else c.HEAD_DIM
    BLOCK_D: tl.constexpr = c.BLOCK_DV if IS_VALUE else c.BLOCK_D
    if c.IS_DESCRIBED >= 2:  # these descriptors know the end of the whole storage
        return tl.reshape(source.load([key.row, key.head, first + key.start, 0]), (c.TILE_N, BLOCK_D))
    elif c.IS_DESCRIBED == 1:  # and these the sequence's end
        return source.load([first, 0])
    else:
        is_key = (lanes_of(first, c) < end)[:, None]
        at = places_at(key, strides, first, end, numbers, c, IS_CUT)
        if c.WRAP > 0:
            wrap = key.v_wrap if IS_VALUE else key.k_wrap
            IS_WHOLE: tl.constexpr = c.PAGE_SIZE == 0 or not c.IS_SHARED  # what follows the last key is the last key
            return load_wrapped(source, at[:, None], is_key, wrap, HEAD_DIM, BLOCK_D, IS_WHOLE or IS_PLAIN, c.WRAP, 1, c.IS_NVIDIA)
        return load_rows(source, at[:, None], is_key, HEAD_DIM, BLOCK_D, IS_PLAIN, c.KV_BYTES)


@triton.jit
def pairs_at(key, first, end, numbers, DTYPE: tl.constexpr, c, IS_CUT: tl.constexpr):
    """[TILE_N, BLOCK_DV / 2] twice: 8-bit values as ``keys_at`` finds them, in the dtype of the queries, of even and of odd columns.

    They are loaded as 16-bit pairs: the product needs them transposed, and shared memory transposes 16 bits at once, but 8 bits one by one.
    """
    is_key = (first + tl.arange(0, c.TILE_N) < end)[:, None]
    at = places_at(key, key.v_strides, first, end, numbers, c, IS_CUT) >> 1
    source = key.v.to(tl.pointer_type(tl.int16))
    if c.WRAP > 0:
        wrap = key.v_wrap >> 1
        IS_WHOLE: tl.constexpr = not IS_CUT or c.PAGE_SIZE == 0 or not c.IS_SHARED
        pairs = load_wrapped(source, at[:, None], is_key, wrap, c.HEAD_DIM_V // 2, c.BLOCK_DV // 2, IS_WHOLE, c.WRAP, 2, c.IS_NVIDIA)
    else:
        pairs = load_rows(source, at[:, None], is_key, c.HEAD_DIM_V // 2, c.BLOCK_DV // 2, not IS_CUT, c.KV_BYTES)
    return unpacked(pairs, key.v.dtype.element_ty, DTYPE, c.IS_NVIDIA)


@triton.jit
def places_at(key, strides, first, end, numbers, c, IS_CUT: tl.constexpr):
    """[TILE_N]: 64-bit offsets of the keys at place ``first``; with IS_CUT for those from ``end`` on of the last key, or with even
    shares of some row of its page."""
    if c.PAGE_SIZE > 0:
        return paged_places(first + key.start, end - 1 + key.start, numbers, strides, c, IS_CUT and not c.IS_SHARED)
    elif c.WRAP > 0:  # a tile's rows are less than 2^32 bytes apart
        lane, step = tl.arange(0, c.TILE_N), strides.position
        if IS_CUT:
            lane = tl.minimum(lane, end - 1 - first)
        inside = lane.to(tl.uint32) * step.to(tl.uint32)
        return key.row.to(tl.int64) * strides.rows + (first + key.start).to(tl.int64) * step + inside
    elif c.TILE_M <= _FEW and not IS_CUT and c.JOINS == 0:
        # with few rows there are registers for every row's offset in the tile, so a tile costs one addition per row
        step = strides.position
        return key.row.to(tl.int64) * strides.rows + (first + key.start).to(tl.int64) * step + tl.arange(0, c.TILE_N) * step
    else:
        lane = lanes_of(first, c) + key.start
        if IS_CUT:
            lane = tl.minimum(lane, key.start + end - 1)
        return key_places(lane, key.row, strides)


@triton.jit
def factors_at(key, first, end, numbers, c, IS_VALUE: tl.constexpr, IS_CUT: tl.constexpr):
    """[TILE_N]: the factors of 8-bit keys, or with IS_VALUE of values, from position ``first``; see ``places_at``."""
    source, strides = (key.factors.v, key.factors.v_strides) if IS_VALUE else (key.factors.k, key.factors.k_strides)
    return tl.load(source + places_at(key, strides, first, end, numbers, c, IS_CUT))


@triton.jit
def load_tile(base, offsets, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile whose rows all exist; zeros beyond HEAD_DIM."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(base + offsets)
    else:
        return tl.load(base + offsets, mask=tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM, other=0.0)


@triton.jit
def offsets_of(lane, strides, c):
    """``tile_offsets`` of rows of q or k."""
    if c.BLOCK_TAIL > 0:
        return tile_offsets(lane, strides, c.BLOCK_D, c.IS_NEAR), tile_offsets(lane, strides, c.BLOCK_TAIL, c.IS_NEAR)
    else:
        return tile_offsets(lane, strides, c.BLOCK_D, c.IS_NEAR)


@triton.jit
def whole_tile(base, offsets, c):
    """``load_tile`` of rows of q or k at ``offsets_of``."""
    if c.BLOCK_TAIL > 0:
        first = load_tile(base, offsets[0], c.HEAD_DIM, c.BLOCK_D)
        return first, load_tile(base + c.HEAD_DIM, offsets[1], c.TAIL_DIM, c.BLOCK_TAIL)
    else:
        return load_tile(base, offsets, c.HEAD_DIM, c.BLOCK_D)


@triton.jit
def rest_of(base, offsets, is_row, c):
    """``_load_rest`` of rows of q at ``offsets_of``."""
    if c.BLOCK_TAIL > 0:
        first = load_rest(base + offsets[0], is_row, c.HEAD_DIM, c.BLOCK_D)
        return first, load_rest(base + c.HEAD_DIM + offsets[1], is_row, c.TAIL_DIM, c.BLOCK_TAIL)
    else:
        return load_rest(base + offsets, is_row, c.HEAD_DIM, c.BLOCK_D)


@triton.jit
def store_whole(at, x, scale, is_row, c):
    """Stores rows of a gradient of q or k, times ``scale``, at pointers ``at`` [rows, 1]."""
    d = tl.arange(0, c.BLOCK_D)[None, :]
    if c.BLOCK_TAIL > 0:
        tl.store(at + d, (x[0] * scale).to(at.dtype.element_ty), mask=is_row & (d < c.HEAD_DIM))
        d = tl.arange(0, c.BLOCK_TAIL)[None, :]
        tl.store(at + c.HEAD_DIM + d, (x[1] * scale).to(at.dtype.element_ty), mask=is_row & (d < c.TAIL_DIM))
    else:
        tl.store(at + d, (x * scale).to(at.dtype.element_ty), mask=is_row & (d < c.HEAD_DIM))


@triton.jit
def load_rest(places, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A tile that may reach beyond its sequence; zeros there."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(places, mask=is_row, other=0.0)
    else:
        return tl.load(places, mask=is_row & (tl.arange(0, BLOCK_D)[None, :] < HEAD_DIM), other=0.0)
