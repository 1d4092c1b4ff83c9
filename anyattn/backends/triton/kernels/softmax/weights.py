"""Weights of a tile of scores in an online softmax (device code): exponentials, their sums, and the factor of what came before."""

import triton
import triton.language as tl

from anyattn.sequences.sections import LAG

__all__ = ["scaled_weights_of", "sums_of", "weights_of"]

_LAG: tl.constexpr = tl.constexpr(LAG)
_MOST_SHIFT: tl.constexpr = tl.constexpr(60)  # beyond it all of a value's products are 0 or infinite in float16


@triton.jit
def sums_of(p, row_sum):
    """[rows, parts]: the sums of every row's weights, in as many partial sums as row_sum has."""
    PARTS: tl.constexpr = row_sum.shape[1]
    if PARTS == 1:
        return tl.sum(p, 1, keep_dims=True)
    elif p.shape[1] == PARTS:
        return p
    else:
        return tl.sum(tl.reshape(p, (p.shape[0], p.shape[1] // PARTS, PARTS)), 1)


@triton.jit
def weights_of(s, row_sum, row_max, scale, IS_RAW: tl.constexpr, IN_ORDER: tl.constexpr = False):
    """(exponentials of scores, factor for earlier ones, row_sum, row_max).

    With IS_RAW neither scores nor row_max are in base 2: the factor is part of the exponential's argument, and both are one instruction.
    IN_ORDER names it, since the compiler must not choose it, and row_max stays while no exponent is above LAG: so a kernel that knows only
    that a tile's weights are small has the same numbers.
    """
    highest = tl.max(s, 1)
    if IN_ORDER:
        if IS_RAW:  # that of the greatest weight by row_max, with its rounding
            above = tl.fma(highest, scale, -(row_max * scale))
        else:
            above = highest - row_max
        highest = tl.where(above > _LAG, highest, row_max)
    else:
        highest = tl.maximum(row_max, highest)
    if IS_RAW:
        top = highest * scale
        if IN_ORDER:
            p = tl.exp2(tl.fma(s, scale, -top[:, None]))
        else:
            p = tl.exp2(s * scale - top[:, None])
        # a fused multiply-subtract rounds once: for an unchanged maximum the difference might not be 0, and 2 **
        # 100 off in a row that saw no key
        rescale = tl.exp2(tl.where(row_max == highest, 0.0, row_max * scale - top))
    else:
        p = tl.exp2(s - highest[:, None])
        rescale = tl.exp2(row_max - highest)
    return p, rescale, row_sum * rescale[:, None] + sums_of(p, row_sum), highest


@triton.jit
def scaled_weights_of(s, factors, row_sum, row_max, scale, HAS_SCORE: tl.constexpr, IS_RAW: tl.constexpr, IS_NARROW: tl.constexpr):
    """``weights_of``, with exponentials that are multiplied by the factors of the keys' values, [1, TILE_N]; their sums are not.

    IS_NARROW: the products are rounded to float16, whose range is small. Then a row's reference is not its greatest score but that of the
    scores plus the factors' exponents, so that the greatest product is between 1 and 2; it is in base 2, and IS_RAW is False.
    """
    if IS_NARROW:
        if HAS_SCORE:
            s = s * scale
        exponents = (
            factors.to(tl.int32, bitcast=True) >> 23 & 255
        ) - 127  # of a hidden key's factor, which may be anything, it is a number
        shift = tl.minimum(tl.maximum(exponents, -_MOST_SHIFT), _MOST_SHIFT).to(tl.float32)
        highest = tl.maximum(row_max, tl.max(s + shift, 1))
        p = tl.exp2(s - highest[:, None])
        rescale = tl.exp2(row_max - highest)
        row_sum, row_max = row_sum * rescale[:, None] + sums_of(p, row_sum), highest
    else:
        p, rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scale, IS_RAW)
    return tl.where(p == 0, 0.0, p * factors), rescale, row_sum, row_max
