"""Kernel that converts deterministic sums from integer planes to floats (device code)."""

import triton
import triton.language as tl

__all__ = ["read_sums"]

_NUMBERS = ("count", "planes")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def read_sums(sums, totals, count: tl.int64, planes: tl.int64, BLOCK: tl.constexpr):
    """sums: int64 [planes, count]. totals: [count]. Planes are added in float64, from the least power of two on; each conversion is almost
    exact."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = at < count
    powers = planes.to(tl.int32) - 3
    width = (253 + powers) // powers
    total = tl.zeros((BLOCK,), tl.float64)
    for plane in range(0, powers):
        number = tl.load(sums + plane * count + at, mask=is_there, other=0)
        unit = ((1023 - 149 + plane * width).to(tl.int64) << 52).to(tl.float64, bitcast=True)
        total += number.to(tl.float64) * unit
    others = sums + powers * count + at
    is_high = tl.load(others, mask=is_there, other=0) > 0
    is_low = tl.load(others + count, mask=is_there, other=0) > 0
    is_nan = (tl.load(others + 2 * count, mask=is_there, other=0) > 0) | (is_high & is_low)
    total = tl.where(is_high, float("inf"), tl.where(is_low, float("-inf"), total))
    total = tl.where(is_nan, float("nan"), total)
    tl.store(totals + at, total.to(totals.dtype.element_ty), mask=is_there)
