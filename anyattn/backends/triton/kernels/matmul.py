"""Sums of products, and what of them is right when a value may be NaN or infinite. Kernel side.

Where a mask hides a key, its weight is 0; but 0 times NaN is NaN, and so is 0 times infinity. A kernel multiplies all the same, looks
once at what its sum has become, and only if that is not finite adds everything up again (``hidden``), from numbers that are finite. What
is not is counted first, for each entry of the sum: by products of ones, where it is seen, with ones and -1 for infinities.
"""

import triton
import triton.language as tl

__all__ = ["TURNS", "finite", "is_finite", "plus_product", "settled", "turned"]

TURNS: tl.constexpr = tl.constexpr(3)
_SOME_UP: tl.constexpr = tl.constexpr(0.25)  # beside as many as 2 ** 22 of the other kind still to be told


@triton.jit
def plus_product(acc, rescale, p, v, PRECISION: tl.constexpr):
    """acc * rescale + p @ v, p in v's dtype. rescale: [rows], None is 1.

    In float32 a tile's product is summed by itself: one sum over all keys is as long as they are many, and its error grows with it. The
    fused addition keeps it so, for a plain one is made part of the product by Triton's compiler.
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
def is_finite(x, y):
    """Whether two blocks of as many rows hold neither NaN nor infinity; y may be None."""
    lost = tl.sum(tl.sum(x * 0.0, 1, keep_dims=True))  # a vector that is summed once more Triton does not compile for Blackwell
    if y is not None:
        lost += tl.sum(tl.sum(y * 0.0, 1, keep_dims=True))
    return lost == 0


@triton.jit
def finite(x):
    """x with zeros for NaN and infinities."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def turned(x, turn):
    """What of x is added in each of ``TURNS``: in the first two +inf and -inf are counted, and NaN in both; in the last is the rest."""
    wide = x.to(tl.float32)
    other = tl.where(turn == 0, float("-inf"), float("inf"))  # NaN is neither
    one = tl.where(turn == 0, 1.0, tl.where(turn == 1, -1.0, 0.0)).to(x.dtype)
    rest = tl.where(turn < 2, 0.0, x).to(x.dtype)
    return tl.where(tl.abs(wide) < float("inf"), rest, tl.where(wide != other, one, 0.0)).to(x.dtype)


@triton.jit
def settled(met, turn):
    """A sum after a turn, from which the next one goes on: after the second it is what meeting infinities and NaN has made of it."""
    some_up = met != tl.floor(met)
    infinite = tl.where(some_up, tl.where(met < 0, float("nan"), float("inf")), tl.where(met < 0, float("-inf"), 0.0))
    return tl.where(turn == 0, tl.where(met > 0, _SOME_UP, 0.0), tl.where(turn == 1, infinite, met))
