"""Device math of the CuTe emitter with torch's semantics: select, integers, shifts, division with remainder, powers, hypot, erfinv."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import dsl_user_op

__all__ = [
    "TYPES", "alike", "divided", "erfinv", "fmod", "hypot", "in_bits", "limit", "narrow", "power", "quotient", "select", "shifted", "whole",
]  # fmt: skip

TYPES = {"float": Float32, "int": Int32, "bool": Boolean}
_FAR = 2**30  # beyond any position; 2 * _FAR - 1 still fits 32 bits
_MOST_PRODUCTS = 16  # largest exponent computed by products; each squaring doubles the rounding error


def _is_long(x: Any) -> bool:
    """Whether an integer takes 64 bits: a run-time one by its type, a literal by its size."""
    return isinstance(x, Int64) or (isinstance(x, int) and not -(2**31) <= x < 2**31)


def whole(x: Any) -> Any:
    """A run-time integer: of 64 bits if ``x`` needs them, else of 32."""
    return x if isinstance(x, Int64) else Int64(x) if _is_long(x) else Int32(x)


def alike(args: list[Any]) -> list[Any]:
    wide = any(_is_long(a) for a in args)
    return [Int64(a) if wide else Int32(a) for a in args]


def select(condition: Any, yes: Any, no: Any, kind: str) -> Any:
    """``yes`` where ``condition`` holds, else ``no``, both of ``kind`` float, int or bool."""
    if isinstance(condition, bool):
        return yes if condition else no
    as_kind = TYPES[kind]
    if kind == "int" and (_is_long(yes) or _is_long(no)):
        as_kind = Int64
    return as_kind(cutlass.select_(condition, as_kind(yes), as_kind(no)))


def narrow(x: Any) -> Any:
    """The lower 32 bits of an integer, run-time or literal."""
    if isinstance(x, int) and not isinstance(x, bool):
        return (x + 2**31) % 2**32 - 2**31
    return Int32(x) if isinstance(x, Int64) else x


def in_bits(x: Any, bits: int, is_signed: bool) -> Any:
    """A run-time integer, wrapped around to fewer than 32 bits."""
    x = narrow(whole(x))
    return (x << (32 - bits)) >> (32 - bits) if is_signed else x & (2**bits - 1)


def limit(x: Any, is_near: bool) -> Any:
    """A limit of a row's keys, clamped to 32 bits beyond any position. is_near: a run-time limit is known to be within 2^30."""
    if isinstance(x, int):
        return max(-_FAR, x) if x < 2 * _FAR else 2 * _FAR - 1
    if is_near and not isinstance(x, Int64):
        return x
    low, high = (Int64(side) if isinstance(x, Int64) else Int32(side) for side in (-_FAR, _FAR))
    return Int32(cutlass.min(cutlass.max(x, low), high))


def shifted(op: str, a: Any, b: Any, bits: int) -> Any:
    """``a << b`` or ``a >> b`` of ``bits``-bit integers. A shift count below 0 or of at least ``bits`` shifts every bit out, and a right
    shift copies the sign in. Values that fit 32 bits are shifted in 32."""
    a, b = alike([a, b]) if not isinstance(b, int) else (whole(a), b)
    width = 64 if isinstance(a, Int64) else 32
    bits = min(bits, width)
    if isinstance(b, int):
        is_inside = 0 <= b < bits
        return a << b if is_inside and op == "shl" else a * 0 if op == "shl" else a >> (b if is_inside else width - 1)
    is_inside = (b >= 0) & (b < bits)
    if op == "shl":
        return select(is_inside, a << select(is_inside, b, 0, "int"), 0, "int")
    return a >> select(is_inside, b, width - 1, "int")


# ---- quotients and remainders


def quotient(a: Any, b: Any, is_whole: bool) -> Any:
    """``a / b``, rounded to nearest. An integer (is_whole) is multiplied by the reciprocal of a literal, and the product corrected once
    (P. Markstein, 1990), which is exact unless a number overflows or all bits of the divisor's significand are 1."""
    if not is_whole or not isinstance(b, (int, float)) or not 2.0**-60 < abs(b) < 2.0**60 or abs(math.frexp(b)[0]) >= 1 - 2.0**-23:
        return Float32(a) / Float32(b)
    a, inverse = Float32(a), Float32(1.0 / ctypes.c_float(b).value)
    first = a * inverse
    if abs(math.frexp(b)[0]) == 0.5:
        return first
    return cute.math.fma(cute.math.fma(-first, Float32(b), a), inverse, first)


def divided(op: str, a: Any, b: Any, kind: str, is_shared: bool = False) -> Any:
    """Python's floor division, or its remainder, which takes the divisor's sign; by a literal power of 2 a shift, or the low bits.
    is_shared: many numbers are divided by a run-time ``b``, which are then multiplied by its reciprocal."""
    if kind == "float":
        rest = fmod(a, b, kind)
        return _signed(rest, b, kind) if op == "mod" else _whole_quotient(Float32(a), b, rest)
    if isinstance(b, int) and b > 0 and b & (b - 1) == 0:
        a = Int64(a) if _is_long(b) else whole(a)
        return a >> (b.bit_length() - 1) if op == "floordiv" else a & (b - 1)
    if is_shared and not isinstance(b, int):
        far = _FAR + 1  # all quotients by greater numbers are those by this one
        return _by_reciprocal(op, Int32(a), Int32(cutlass.min(cutlass.max(b, Int64(-far)), Int64(far)) if isinstance(b, Int64) else b))
    a, b = alike([a, b])
    return _floor_quotient(a, b) if op == "floordiv" else _signed(a % b, b, kind)


def _by_reciprocal(op: str, a: Any, b: Any) -> Any:
    """``divided`` of 31-bit integers in about ten instructions: the upper half of a product by floor((2^32 - 1) / b) is the quotient of
    numbers without sign or one less (T. Granlund and P. Montgomery, 1994), and the remainder tells which."""
    flip = b >> 31  # -1 for a negative divisor: a / b = -a / -b
    size, dividend = select(b == 0, 2**31 - 1, (b ^ flip) - flip, "int"), (a ^ flip) - flip  # quotients by 0 are 0 or -1
    sign = dividend >> 31
    dividend = dividend ^ sign  # floor(-1 - x / b) = -1 - floor(x / b)
    found = _upper_half(dividend, _reciprocal(size))
    found = found + select(dividend - found * size >= size, 1, 0, "int")
    found = found ^ sign
    return found if op == "floordiv" else a - found * b


@dsl_user_op
def _reciprocal(size: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """floor((2^32 - 1) / size), without sign."""
    return Int32(arith.divui(Int32(-1).ir_value(loc=loc, ip=ip), size.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def _upper_half(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The upper 32 bits of the product of two numbers without sign."""
    return Int32(arith.mului_extended(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip)[1])


@dsl_user_op
def _floor_quotient(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Floor division of integers of one type. The front end's ``//`` is not: where an operand comes from a coordinate, as positions do, it
    is layout arithmetic, which rounds towards 0."""
    return type(a)(arith.floordivsi(a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def fmod(a: Any, b: Any, kind: str) -> Any:
    """The remainder with the dividend's sign. For floats it is exact if the quotient is below 2^21; C's fmod is exact beyond, too."""
    if kind == "int":
        a, b = alike([a, b])
        rest = a % b  # the front end may give it the dividend's or the divisor's sign
        return select((rest != 0) & ((rest < 0) != (a < 0)), rest - b, rest, "int")
    a, b = Float32(a), abs(b) if isinstance(b, (int, float)) else cute.math.absf(Float32(b))
    size, inverse = cute.math.absf(a), Float32(_inverse(b)) if isinstance(b, (int, float)) else cute.arch.rcp_approx(b)
    b = Float32(b)
    # the quotient may be off by one in either direction; fma does not round the product before the subtraction
    rest = cute.math.fma(-cute.math.trunc(size * inverse), b, size)
    rest = select(rest < 0.0, rest + b, rest, "float")
    rest = select(rest >= b, rest - b, rest, "float")
    return cute.math.copysign(select(size < b, size, rest, "float"), a)


def _inverse(x: float) -> float:
    return math.inf if x == 0 else 1.0 / x


def _differs(rest: Any, b: Any, zero: Any) -> Any:
    """Whether a remainder is nonzero and its sign is not the divisor's."""
    if isinstance(b, (int, float)):
        return rest > zero if b < 0 else rest < zero
    return (rest != zero) & ((rest < zero) != (b < zero))


def _signed(rest: Any, b: Any, kind: str) -> Any:
    """``rest``, plus one divisor if its sign is not the divisor's."""
    zero, step = (0.0, Float32(b)) if kind == "float" else (0, b)
    return select(_differs(rest, b, zero), rest + step, rest, kind)


def _whole_quotient(a: Any, b: Any, rest: Any) -> Any:
    """``a // b`` from the dividend without the remainder: a / b alone may round up to an integer that is 1 too large."""
    quotient = (a - rest) / Float32(b)
    found = cute.math.roundeven(select(_differs(rest, b, 0.0), quotient - Float32(1.0), quotient, "float"))
    is_nothing = b == 0
    return select(is_nothing, a / Float32(b) if is_nothing is not False else found, found, "float")


# ---- powers


def power(base: Any, exponent: Any, kind: str) -> Any:
    """``base ** exponent``. Literal exponents that are small integers or halves become products and roots, others logarithms.

    A negative base has only integer powers, x ** 0 is 1 for every x, and of integers only 1 and -1 have negative powers.
    """
    if kind == "int":
        return _whole_power(base, exponent)
    if isinstance(exponent, (int, float)):
        doubled = 2 * abs(exponent)
        if doubled <= 2 * _MOST_PRODUCTS and doubled == int(doubled):
            return _small_power(Float32(base), int(doubled), exponent < 0)
        exponent = float(exponent)
    elif isinstance(base, (int, float)) and 0 < base < math.inf:
        return cute.math.exp2(Float32(exponent) * Float32(math.log2(base)), fastmath=True)
    return _any_power(Float32(base), exponent)


def _small_power(base: Any, doubled: int, is_negative: bool) -> Any:
    """The power with exponent ``doubled`` / 2, or its reciprocal."""
    found = _product(base, doubled // 2)
    if doubled == 1 and is_negative:
        return cute.math.rsqrt(base, fastmath=True)
    if doubled % 2:
        # + 0.0 turns -0.0 into 0.0: only reciprocals of integer powers of -0.0 are below 0
        root = cute.math.sqrt(base + Float32(0.0) if is_negative else base, fastmath=True)
        found = root if found is None else found * root
    if found is None:
        return Float32(1.0)
    return cute.arch.rcp_approx(found) if is_negative else found


def _product(base: Any, count: int) -> Any:
    """``base`` to the power ``count`` by squaring; None if ``count`` is 0."""
    found = None
    while count:
        if count % 2:
            found = base if found is None else found * base
        base, count = base * base if count > 1 else base, count // 2
    return found


def _any_power(base: Any, exponent: Any) -> Any:
    """The power by a logarithm. exponent: a literal float or a run-time value."""
    if isinstance(exponent, float):
        is_whole, is_odd, is_nothing = exponent % 1 == 0 or math.isinf(exponent), exponent % 2 == 1, False
        exponent_now = Float32(exponent)
    else:
        exponent_now = exponent = Float32(exponent)
        half = exponent * Float32(0.5)
        is_whole, is_nothing = cute.math.floor(exponent) == exponent, exponent == 0.0
        is_odd = is_whole & (cute.math.floor(half) != half)
    size = cute.math.absf(base)
    grown = cute.math.exp2(exponent_now * cute.math.log2(select(size == 0.0, 1.0, size, "float"), fastmath=True), fastmath=True)
    grown = select(size == 0.0, select(exponent > 0.0, 0.0, math.inf, "float"), grown, "float")
    grown = select(size == 1.0, 1.0, grown, "float")
    even = select(base < 0.0, select(is_whole, grown, math.nan, "float"), grown, "float")
    grown = select(is_odd, cute.math.copysign(Float32(grown), base), even, "float")
    return select(is_nothing, 1.0, select(base == 1.0, 1.0, grown, "float"), "float")


def _whole_power(base: Any, exponent: int) -> Any:
    """The power by a literal exponent, in 64 bits from the third power on, as in torch: a cubed distance soon exceeds 32 bits."""
    if exponent < 0:
        minus_one = -1 if exponent % 2 else 1
        return select(base == 1, 1, select(base == -1, minus_one, 0, "int"), "int")
    found = _product(Int64(base) if exponent > 2 else whole(base), exponent)
    return 1 if found is None else found


# ---- functions that CuTe lacks


def hypot(x: Any, y: Any) -> Any:
    """The square root of x^2 + y^2, scaled so that the squares neither overflow nor underflow."""
    x, y = cute.math.absf(x), cute.math.absf(y)
    most, least = select(x > y, x, y, "float"), select(x > y, y, x, "float")
    slope = least / select(most == 0.0, 1.0, most, "float")
    found = most * cute.math.sqrt(slope * slope + Float32(1.0))
    unknown = select((x != x) | (y != y), math.nan, found, "float")
    return select((x == math.inf) | (y == math.inf), math.inf, unknown, "float")


# Chebyshev polynomials fitted to erfinv(x) / x to 2e-8, lowest power first, in M. Giles' variables: w = -log(1 - x * x), as w - 2.5 if w is
# below 5, else as sqrt(w) - 3.
_ERFINV_CENTRE = (
    1.50140936, 0.246640278, -0.00417738847, -0.00125272523, 0.000218345887, -4.97306967e-06, -3.46309307e-06, 4.68266973e-07,
    2.32648001e-08, -8.94141405e-09,
)  # fmt: skip
_ERFINV_TAIL = (
    2.83297682, 1.00167477, 0.00944424521, -0.00763437481, 0.00569557413, -0.00361036494, 0.00146333532, -3.26567471e-05,
    -0.00029260459, 9.91220266e-05,
)  # fmt: skip


def erfinv(x: Any) -> Any:
    w = -cute.math.log((Float32(1.0) - x) * (Float32(1.0) + x))
    is_near = w < 5.0
    t = select(is_near, w - Float32(2.5), cute.math.sqrt(select(is_near, 5.0, w, "float")) - Float32(3.0), "float")
    found = Float32(0.0)
    for near, far in zip(reversed(_ERFINV_CENTRE), reversed(_ERFINV_TAIL), strict=True):
        found = found * t + select(is_near, near, far, "float")
    return select(cute.math.absf(x) == 1.0, x * Float32(math.inf), x * found, "float")
