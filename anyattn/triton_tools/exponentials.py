"""Exponential and hyperbolic functions, and the logarithm of 1 + x, for Triton: in float32 within 1 ulp of the rounded true value.

They take float32 or float64. In float32 they use sums, products, quotients and polynomials alone, since Triton's own exponentials and
logarithms are approximate: by 2 ulp on a GPU, by up to 4 in the interpreter, where they are NumPy's.
"""

import triton
import triton.language as tl


@triton.jit
def divide(a, b):
    """The quotient rounded to nearest; Triton's own float32 quotient is off by up to 2 ulp."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(tl.cast(a, tl.float32), b)


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL), high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def with_sign(size, x):
    """The numbers ``size``, of no sign, with the sign of x; x itself where it is 0."""
    return tl.where(x < 0, -size, tl.where(x == 0, x, size))


@triton.jit
def power_of_two(n):
    """2.0 ** n in float32 for a 32-bit integer from -126 to 127."""
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def reduced(x):
    """exp(x) = 2 ** n * (1 + rest + tail) for float32: an integer, and numbers of which the tail is the less. rest is at most log(2) / 2;
    n * 0.693359375 is exact, and so is the difference (the reduction of W. Cody and W. Waite, 1980). A minimax polynomial to 0.05 ulp."""
    n = tl.floor(x * 1.4426950408889634 + 0.5)
    high, low = x - n * 0.693359375, n * 2.12194440e-4
    rest = high + low
    series = 0.5 + rest * (0.16666518 + rest * (0.041666202 + rest * (0.00836897 + rest * 0.0013950631)))
    return tl.where(n == n, n, 0).to(tl.int32), rest, rest * rest * series + ((high - rest) + low)


@triton.jit
def exp(x):
    """exp(x) as 2 ** n * exp(rest). Triton's own rounds x * log2(e), which costs 1 float32 ulp for every 2 of x's distance from 0."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        n, rest, tail = reduced(clamped(x, -104.0, 89.0))
        half = n >> 1  # in two parts: 2 ** n may be no normal number where the result is one
        return (1 + (rest + tail)) * power_of_two(half) * power_of_two(n - half)


@triton.jit
def expm1(x):
    """exp(x) - 1. In float64 by W. Kahan's method: the logarithm of the rounded exp(x) corrects its rounding error. In float32 as
    2 ** n * (exp(rest) - 1) + (2 ** n - 1)."""
    if x.dtype == tl.float64:
        grown = tl.exp(x)
        less = grown - 1
        corrected = less * (x / tl.log(tl.where(grown == 1, 2, grown)))
        return tl.where(grown == 1, x, tl.where((less == -1) | (grown == float("inf")), less, corrected))
    else:
        n, rest, tail = reduced(clamped(x, -30.0, 89.0))
        half = power_of_two(n - 1)  # of 2 ** n, which may overflow where the result does not
        return tl.where(x == 0, x, 2 * ((rest * half + (half - 0.5)) + tail * half))


@triton.jit
def log1p(x):
    """log(1 + x), where the rounding error of 1 + x is added to the logarithm, divided by 1 + x. In float32 the logarithm is
    k * log(2) + log(1 + f) with 1 + f from sqrt(1 / 2) to sqrt(2), a minimax polynomial to 0.1 ulp."""
    moved = 1 + x
    error = (x - (moved - 1)) / moved
    if x.dtype == tl.float64:
        found = tl.log(moved) + error
    else:
        bits = moved.to(tl.int32, bitcast=True) - 0x3F3504F3  # sqrt(1 / 2)
        k, f = (bits >> 23).to(tl.float32), ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True) - 1
        p = 0.14181192 + f * (-0.13128754 + f * (0.12881649 + f * -0.07859615))
        p = 0.33333316 + f * (-0.2500081 + f * (0.20002286 + f * (-0.16624554 + f * p)))
        tail = (f * f * f * p + (error - k * 2.12194440e-4)) - 0.5 * f * f
        found = k * 0.693359375 + (f + tail)
    special = tl.where(moved == 0, -float("inf"), tl.where(moved < 0, float("nan"), moved))
    return tl.where(moved == 1, x, tl.where((moved > 0) & (moved < float("inf")), found, special))


@triton.jit
def sigmoid(x):
    return divide(1, 1 + exp(-x))


@triton.jit
def tanh(x):
    """Far from 0 by its difference from 1, which loses no digits; near 0, where that would cancel, by Kahan's method in float64 and by a
    minimax polynomial to 0.1 ulp in float32."""
    size = tl.abs(x)
    if x.dtype == tl.float64:
        less, grown = expm1(-2 * size), exp(-2 * size)
        return with_sign(tl.where(size > 0.5, 1 - 2 * grown / (1 + grown), divide(-less, less + 2)), x)
    else:
        n, rest, tail = reduced(2 * clamped(size, 0.0, 10.0))
        scale = power_of_two(n)
        far = 1 - divide(2, (1 + scale) + scale * (rest + tail))
        u = x * x
        p = -0.33333284 + u * (0.13331491 + u * (-0.053743497 + u * (0.020650588 + u * -0.005717045)))
        return with_sign(tl.where(size < 0.625, size + size * u * p, far), x)


@triton.jit
def quarter_exps(size):
    """exp(size) / 4, as three float32 numbers to be added from the last, and exp(-size) / 4: finite wherever cosh(size) is."""
    n, rest, tail = reduced(clamped(size, 0.0, 89.5))
    scale = power_of_two(n - 2)
    return scale, scale * rest, scale * tail, 0.25 * exp(-size)


@triton.jit
def sinh(x):
    """Near 0, where exponentials cancel, by ``expm1`` in float64 and by a minimax polynomial in float32; elsewhere by halves or quarters of
    exponentials, which are finite wherever the result is."""
    size = tl.abs(x)
    if x.dtype == tl.float64:
        less, root = expm1(tl.minimum(size, 1)), exp(size * 0.5)
        far = root * (0.5 * root) - divide(0.5, root * root)
        return with_sign(tl.where(size < 1, 0.5 * (less + divide(less, less + 1)), far), x)
    else:
        scale, rest, tail, falling = quarter_exps(size)
        far = 2 * (scale + (rest + (tail - falling)))
        u = x * x
        near = size + size * u * (0.16666667 + u * (0.00833335 + u * (0.00019836066 + u * 2.8174395e-06)))
        return with_sign(tl.where(size < 1, near, far), x)


@triton.jit
def cosh(x):
    if x.dtype == tl.float64:
        root = exp(tl.abs(x) * 0.5)
        return root * (0.5 * root) + divide(0.5, root * root)
    else:
        scale, rest, tail, falling = quarter_exps(tl.abs(x))
        return 2 * (scale + (rest + (tail + falling)))
