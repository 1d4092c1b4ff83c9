"""Conversion of 8-bit keys and values to the dtype of the queries (device code); all conversions are exact."""

import triton
import triton.language as tl

from anyattn.triton_tools.exponentials import power_of_two

__all__ = ["halved", "unpacked", "widened", "widened_rows"]

# Of two 16-bit pairs of bytes in one register: the bytes 0 and 2 as two 16-bit numbers, and the bytes 1 and 3.
_E4M3: tl.constexpr = tl.constexpr(
    """
    .reg .b16 low, high;
    prmt.b32 even, $2, 0, 0x4420;
    prmt.b32 odd, $2, 0, 0x4431;
    mov.b32 {low, high}, even;
    cvt.rn.f16x2.e4m3x2 even, low;
    mov.b32 {low, high}, odd;
    cvt.rn.f16x2.e4m3x2 odd, low;
    """
)
_E5M2: tl.constexpr = tl.constexpr(  # the upper halves of float16 numbers
    """
    prmt.b32 even, $2, 0, 0x2404;
    prmt.b32 odd, $2, 0, 0x3414;
    """
)
_INT8: tl.constexpr = tl.constexpr(  # float16 numbers 1024 + 128 + n, minus 1152
    """
    .reg .b32 shifted, thousand, less;
    mov.b32 thousand, 0x64646464;
    mov.b32 less, 0xe480e480;
    xor.b32 shifted, $2, 0x80808080;
    prmt.b32 even, shifted, thousand, 0x4240;
    prmt.b32 odd, shifted, thousand, 0x4341;
    add.rn.f16x2 even, even, less;
    add.rn.f16x2 odd, odd, less;
    """
)
_FOUR_INT8: tl.constexpr = tl.constexpr(
    """
    {
    .reg .b32 shifted, thousand, less;
    mov.b32 thousand, 0x64646464;
    mov.b32 less, 0xe480e480;
    xor.b32 shifted, $2, 0x80808080;
    prmt.b32 $0, shifted, thousand, 0x4140;
    prmt.b32 $1, shifted, thousand, 0x4342;
    add.rn.f16x2 $0, $0, less;
    add.rn.f16x2 $1, $1, less;
    }
    """
)
_BEGIN: tl.constexpr = tl.constexpr("{ .reg .b32 even, odd;")
_FLOAT16: tl.constexpr = tl.constexpr("mov.b32 $0, even; mov.b32 $1, odd; }")
_BFLOAT16: tl.constexpr = tl.constexpr(
    """
    .reg .b16 first, second;
    .reg .f32 wide, wider;
    mov.b32 {first, second}, even;
    cvt.f32.f16 wide, first;
    cvt.f32.f16 wider, second;
    cvt.rn.bf16x2.f32 $0, wider, wide;
    mov.b32 {first, second}, odd;
    cvt.f32.f16 wide, first;
    cvt.f32.f16 wider, second;
    cvt.rn.bf16x2.f32 $1, wider, wide;
    }
    """
)


@triton.jit
def widened(x, DTYPE: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """8-bit keys as numbers of DTYPE; others are left as they are. Two conversions that Triton makes are avoided: they take an instruction
    for each number, which has a fourth to a sixteenth of the usual rate."""
    if x.dtype == DTYPE:
        return x
    elif tl.bfloat16 == DTYPE and x.dtype != tl.int8:
        return x.to(tl.float16).to(tl.float32).to(tl.bfloat16)
    elif tl.float16 == DTYPE and x.dtype == tl.int8 and IS_NVIDIA:
        return tl.inline_asm_elementwise(_FOUR_INT8, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return x.to(DTYPE)


@triton.jit
def widened_rows(k, DTYPE: tl.constexpr, c):
    """``widened`` of rows of keys; with BLOCK_TAIL a pair of blocks."""
    if c.BLOCK_TAIL > 0:
        return widened(k[0], DTYPE, c.IS_NVIDIA), widened(k[1], DTYPE, c.IS_NVIDIA)
    else:
        return widened(k, DTYPE, c.IS_NVIDIA)


@triton.jit
def halved(q, BLOCK_TAIL: tl.constexpr):
    """Queries of bfloat16 as float16, and the powers of two, [rows, 1], that their products with keys are multiplied by: 8-bit keys take
    fewer instructions to become float16 than bfloat16. With BLOCK_TAIL q is a pair of blocks.

    A row's greatest number becomes one from 2^14 to 2^15. Others keep bfloat16's 8 digits down to 2^-29 of it; the last digits of lesser
    ones are below the rounding of the products' float32 sums.
    """
    if BLOCK_TAIL > 0:
        greatest = tl.maximum(tl.max(tl.abs(q[0].to(tl.float32)), 1), tl.max(tl.abs(q[1].to(tl.float32)), 1))
    else:
        greatest = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponents = (greatest.to(tl.int32, bitcast=True) >> 23) - 127
    exponents = tl.minimum(tl.maximum(exponents, -112), 127)[:, None]
    factor, of_rows = power_of_two(14 - exponents), power_of_two(exponents - 14)
    if BLOCK_TAIL > 0:
        return ((q[0].to(tl.float32) * factor).to(tl.float16), (q[1].to(tl.float32) * factor).to(tl.float16)), of_rows
    else:
        return (q.to(tl.float32) * factor).to(tl.float16), of_rows


@triton.jit
def unpacked(pairs, STORED: tl.constexpr, DTYPE: tl.constexpr, IS_NVIDIA: tl.constexpr):
    """Numbers of DTYPE from 16-bit pairs of STORED: those of the lower bytes, then those of the upper ones."""
    if IS_NVIDIA:
        OF_STORED: tl.constexpr = _INT8 if tl.int8 == STORED else _E5M2 if tl.float8e5 == STORED else _E4M3
        if tl.float16 == DTYPE:
            text: tl.constexpr = _BEGIN + OF_STORED + _FLOAT16
            return tl.inline_asm_elementwise(text, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
        else:
            text: tl.constexpr = _BEGIN + OF_STORED + _BFLOAT16
            return tl.inline_asm_elementwise(text, "=r,=r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2)
    else:
        low, high = pairs.to(tl.int8).to(STORED, bitcast=True), (pairs >> 8).to(tl.int8).to(STORED, bitcast=True)
        return widened(low, DTYPE, False), widened(high, DTYPE, False)
