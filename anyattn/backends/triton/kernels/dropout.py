"""Matrix products of a tile, and dropout of their weights (device code).

Rows of q and k, and their gradients, are a block, or with BLOCK_TAIL a pair of blocks: the first columns, and those behind them.
"""

import triton
import triton.language as tl

__all__ = ["factor_of", "first_block", "first_product", "kept_of", "no_rows", "places", "plus_kept", "plus_product", "plus_rows", "scores"]


@triton.jit
def scores(a, b, end, c):
    """a @ b^T, of rows of queries and of keys in either order. end: see ``first_product``."""
    if c.BLOCK_TAIL > 0:
        return first_product(a[1], b[1], first_product(a[0], b[0], None, end, c), end, c)
    else:
        return first_product(a, b, None, end, c)


@triton.jit
def first_product(a, b, acc, end, c):
    """acc + a @ b^T, from which an operand of a second product is computed. acc: None is 0. end: of a tile, not negative.

    IS_DIVIDED: its columns are divided among warp groups. Triton divides only the rows of a product that another one follows in the same
    block of code, so that both groups of a tile of 64 rows would compute all columns; a branch, even one never taken, ends the block."""
    product = tl.dot(a, tl.trans(b), acc, input_precision=c.PRECISION)
    if c.IS_DIVIDED:  # noqa: SIM102 (the first condition is decided at compile time, the second at run time)
        if end < 0:
            product = -product
    return product


@triton.jit
def first_block(rows, c):
    """The block of the first columns of rows of q or k; with ONE_KV these columns of keys are the values."""
    if c.BLOCK_TAIL > 0:
        return rows[0]
    else:
        return rows


@triton.jit
def no_rows(ROWS: tl.constexpr, c):
    """A gradient of rows of q or k before the first product."""
    if c.BLOCK_TAIL > 0:
        return tl.zeros((ROWS, c.BLOCK_D), tl.float32), tl.zeros((ROWS, c.BLOCK_TAIL), tl.float32)
    else:
        return tl.zeros((ROWS, c.BLOCK_D), tl.float32)


@triton.jit
def plus_rows(acc, p, rows, c):
    """acc + p @ rows, of rows of q or k."""
    if c.BLOCK_TAIL > 0:
        return plus_product(acc[0], None, p, rows[0], c.PRECISION), plus_product(acc[1], None, p, rows[1], c.PRECISION)
    else:
        return plus_product(acc, None, p, rows, c.PRECISION)


@triton.jit
def plus_product(acc, rescale, p, v, PRECISION: tl.constexpr):
    """acc * rescale + p @ v, p in v's dtype. rescale: [rows], None is 1.

    In float32 each tile's product is computed separately and then added: the error of a single running sum grows with the number of keys.
    The addition is an fma, because Triton's compiler would fold a plain addition into the product.
    """
    if v.dtype == tl.float32:
        product = tl.dot(p, v, input_precision=PRECISION)
        if rescale is None:
            return tl.fma(acc, 1.0, product)
        else:
            return tl.fma(acc, rescale[:, None], product)
    elif rescale is None:
        return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        return tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)


@triton.jit
def places(first, COUNT: tl.constexpr, IS_FOUR: tl.constexpr, IS_COLUMN: tl.constexpr):
    """COUNT positions from ``first`` on, down a tile's first dimension or, with IS_COLUMN, along its second.

    IS_FOUR: only the first 8 of every 16, as [COUNT / 16, 1, 8, 1, 1, 1] or [1, 1, 1, COUNT / 16, 1, 8]; ``first`` is a multiple of 16.
    """
    if IS_FOUR:
        # shifted, so that the compiler knows the lowest bits and computes what depends on 16 positions once for them
        four = (first >> 4 << 4) + (tl.arange(0, COUNT // 16) * 16)[:, None] + tl.arange(0, 8)[None, :]
        return four[None, None, None, :, None, :] if IS_COLUMN else four[:, None, :, None, None, None]
    else:
        lane = first + tl.arange(0, COUNT)
        return lane[None, :] if IS_COLUMN else lane[:, None]


@triton.jit
def kept_of(p, b, h, first, rows, dropout, IS_TRANSPOSED: tl.constexpr):
    """``p`` with 0 where dropout drops the pair: [rows, keys], with IS_TRANSPOSED [keys, rows]. first: the tile's first key.
    rows: the part's values of the tile's rows, at ``places`` of one kind.

    One word decides for two rows and two keys 8 apart, which one thread holds in the layouts of the tensor cores, so that a quarter of the
    words is computed and no value changes its thread.
    """
    IS_FOUR: tl.constexpr = len(rows[0].shape) == 6
    TILE_N: tl.constexpr = p.shape[0] if IS_TRANSPOSED else p.shape[1]
    kv = places(first, TILE_N, IS_FOUR, not IS_TRANSPOSED)
    if IS_FOUR:
        two = tl.arange(0, 2)[None, :]
        down, along = two[:, :, None, None, None, None], two[None, None, None, :, :, None]
        byte = down + along * 2 if IS_TRANSPOSED else down * 2 + along
    else:
        byte = (kv // 8 % 2 + rows[0] // 8 % 2 * 2).to(tl.int32)
    return dropout.value(p, byte, b, h, kv, rows, dropout.scalars, dropout.tensors)


@triton.jit
def plus_kept(acc, rescale, p, v, b, h, first, rows, mods, PRECISION: tl.constexpr):
    """``plus_product`` with the weights that dropout keeps: in v's dtype, where two of 16 bits are masked at once."""
    if mods.dropout.exists:
        kept = kept_of(p.to(v.dtype), b, h, first, rows.dropout, mods.dropout, False)
        return plus_product(acc, rescale, kept, v, PRECISION)
    else:
        return plus_product(acc, rescale, p, v, PRECISION)


@triton.jit
def factor_of(mods):
    """The factor of the weights that dropout keeps."""
    return tl.cast(tl.full((), mods.dropout.scalars[1], tl.int64), tl.float64, bitcast=True).to(tl.float32)
