"""Quantisation of lines to 8-bit caches (device code): the bits of ``kvcache.quantise``.

The conversion is integer arithmetic on the bits of float32: Triton has no float8_e4m3 before compute capability 8.9, and whether its own
conversions saturate depends on the target.
"""

import torch
import triton
import triton.language as tl

from anyattn.backends.triton.kernels.append_arguments import EightBits, ScaleForm
from anyattn.kvcache.quantise import LIMITS

__all__ = ["bytes_of_lines"]

_WRITTEN, _NUMBER = tl.constexpr(int(ScaleForm.WRITTEN)), tl.constexpr(int(ScaleForm.NUMBER))
_E4M3, _INT8 = tl.constexpr(int(EightBits.FLOAT8_E4M3)), tl.constexpr(int(EightBits.INT8))
_by_format = [LIMITS[torch.float8_e4m3fn], *(LIMITS[t] for t in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))]  # NONE has any
_LEAST, _GREATEST, _ROW_MAX, _BELOW, _ABOVE = (tl.constexpr(tuple(numbers)) for numbers in zip(*_by_format, strict=True))


@triton.jit
def bytes_of_lines(x, there, exists, scales, FORM: tl.constexpr, FORMAT: tl.constexpr, COUNTS: tl.constexpr):
    """uint8: float32 lines ``x`` divided by their scales and converted; a line's own scale is stored too. there: which elements exist;
    exists: which lines. scales: ``LineScales``. FORM: ``ScaleForm``. FORMAT: ``EightBits``. COUNTS: counts saturated values."""
    least: tl.constexpr = _LEAST[FORMAT]
    greatest: tl.constexpr = _GREATEST[FORMAT]
    row_max: tl.constexpr = _ROW_MAX[FORMAT]
    below: tl.constexpr = _BELOW[FORMAT]
    above: tl.constexpr = _ABOVE[FORMAT]
    if FORM == _WRITTEN:
        magnitude = tl.abs(x)
        magnitude = tl.where(there & (magnitude < float("inf")), magnitude, 0.0)  # False for NaN
        scale = tl.maximum(tl.div_rn(tl.max(magnitude, 1), tl.full((), row_max, tl.float32)), 2.0**-126)
        tl.store(scales.at, scale, mask=exists)
    elif FORM == _NUMBER:
        scale = tl.full((x.shape[0],), 1.0, tl.float32) * scales.number
    else:
        scale = tl.load(scales.at, mask=exists, other=1.0)
    exact = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    is_nan = exact != exact
    if COUNTS:
        is_out = there & ((exact > above) | (exact < below) | (is_nan & (FORMAT == _INT8)))
        count = tl.sum(tl.sum(is_out.to(tl.int32), 1), 0)
        tl.atomic_add(scales.saturated, count.to(scales.saturated.dtype.element_ty), mask=count > 0, sem="relaxed")
    inside = tl.where(is_nan, 0.0, tl.minimum(tl.maximum(exact, least), greatest))
    if FORMAT == _INT8:
        return _integer(inside)
    elif FORMAT == _E4M3:
        return _float8(inside, exact, is_nan, 3, 7)
    else:
        return _float8(inside, exact, is_nan, 2, 15)


@triton.jit
def _integer(x):
    """The two's complement of float32 between -128 and 127, rounded to the nearest integer, ties to even."""
    # a float32 from 2^23 to 2^24 has no fraction: the sum is rounded as wanted, and its last bits are the integer
    return ((x + 12582912.0).to(tl.int32, bitcast=True) & 0xFF).to(tl.uint8)


@triton.jit
def _float8(x, exact, is_nan, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The bits of float32 within the range of a float8, rounded to nearest, ties to even. exact: ``x`` with its sign and NaN."""
    DROPPED: tl.constexpr = 23 - MANTISSA  # bits of the mantissa
    LEAST_NORMAL: tl.constexpr = 1.0 * 2.0 ** (1 - BIAS)
    STEP: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)  # in float32 above it, numbers are apart as float8 below LEAST_NORMAL
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + ((1 << (DROPPED - 1)) - 1) + is_odd) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    small = (tl.abs(x) + STEP).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(tl.abs(x) < LEAST_NORMAL, small, normal)
    code = tl.where(is_nan, 0x7F, code)
    return (code | ((exact.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
