"""Polynomial exp2 and tanh on the FMA pipes, for part of the scores, to relieve the special-function unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

__all__ = ["FAR_FROM_CAP", "TANH", "bits", "exp2", "exp2_of_product", "polynomial", "sum_of"]

# 2^x for -1/2 <= x <= 1/2, exact at 0; relative error 1.1e-4, a fortieth of a probability's rounding error in bfloat16
_EXP2 = (1.0, 0.69328293, 0.24221096, 0.05500893)
_ROUNDS = 1.5 * 2**23  # adding this to a float puts its integer part in the low bits
# tanh(x) / x as a polynomial in x^2 (Remez) for |x| <= FAR_FROM_CAP; relative error 2.4e-4, half of tanh.approx's
TANH = (0.9997628, -0.31769619)
FAR_FROM_CAP = 0.35


@dsl_user_op
def bits(x: Any, kind: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A 32-bit value's bits as a value of type ``kind``."""
    return kind(llvm.bitcast(kind.mlir_type, x.ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def exp2(x: Any) -> Any:
    """2^x; 0 at -127 and below.

    Source: Cody and Waite's reduction (Software Manual for the Elementary Functions, 1980).
    """
    x = cute.arch.fmax(x, Float32(-127.0))
    shifted = x + Float32(_ROUNDS)
    return _grown(x - (shifted - Float32(_ROUNDS)), shifted)


def exp2_of_product(x: Any, factor: Any) -> Any:
    """2^(x * factor), for products within -126 .. 126."""
    shifted = cute.math.fma(x, factor, Float32(_ROUNDS))
    return _grown(cute.math.fma(x, factor, -(shifted - Float32(_ROUNDS))), shifted)


def _grown(part: Any, shifted: Any) -> Any:
    """2^part times 2 to the integer in the low bits of ``shifted``."""
    value = polynomial([Float32(x) for x in _EXP2], part)
    return bits(bits(value, Int32) + (bits(shifted, Int32) << 23), Float32)


def polynomial(coefficients: Sequence[Any], x: Any) -> Any:
    """The polynomial's value; coefficients from the lowest power on."""
    value = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        value = cute.math.fma(value, x, coefficient)
    return value


def sum_of(s: Any, r: int) -> Any:
    """The sum of row ``r`` of a fragment."""
    return s[r, None].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
