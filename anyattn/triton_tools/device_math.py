"""Device math: Triton functions, called by generated code, for torch operations that Triton lacks or defines differently.

Integer division truncates in Triton, as in C, and floors in torch, as in Python. Every function works elementwise on values of one dtype;
float functions take float32 or float64 and stay accurate to a few ulp near 0, where the textbook formulas cancel.
"""

import triton
import triton.language as tl

from anyattn.triton_tools.exponentials import cosh, divide, exp, expm1, log1p, sigmoid, sinh, tanh  # noqa: F401  generated code's


@triton.jit
def floor_div(a, b):
    quotient = a // b
    rest = a - quotient * b
    return quotient - ((rest != 0) & ((rest < 0) != (b < 0))).to(a.dtype)


@triton.jit
def floor_mod(a, b):
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def divisor_size(b):
    """The magnitude of a divisor; that of 0 is great, so that quotients by 0 are 0 or -1."""
    return tl.where(b == 0, 0x7FFFFFFF, tl.abs(b))


@triton.jit
def reciprocal(b):
    """floor((2^32 - 1) / |b|) of an int32, without sign."""
    return tl.full((), 0xFFFFFFFF, tl.uint32) // divisor_size(b).to(tl.uint32, bitcast=True)


@triton.jit
def floor_div_by(a, b, inverse):
    """``floor_div`` of integers of 31 bits in about ten instructions. inverse: the divisor's ``reciprocal``.

    The upper half of a product by it is the quotient of numbers without sign or one less (T. Granlund and P. Montgomery, 1994), and the
    remainder tells which."""
    flip = b >> 31  # -1 for a negative divisor: a / b = -a / -b
    size, dividend = divisor_size(b), (a ^ flip) - flip
    sign = dividend >> 31
    dividend = dividend ^ sign  # floor(-1 - x / b) = -1 - floor(x / b)
    quotient = tl.umulhi(dividend.to(tl.uint32, bitcast=True), inverse).to(tl.int32, bitcast=True)
    return (quotient + (dividend - quotient * size >= size).to(tl.int32)) ^ sign


@triton.jit
def floor_mod_by(a, b, inverse):
    """``floor_mod``, as ``floor_div_by``."""
    return a - floor_div_by(a, b, inverse) * b


@triton.jit
def fmod(a, b):
    """The remainder of floats with the dividend's sign. Triton's own is negative where the quotient of positive numbers rounds up."""
    rest = a % b
    size = tl.abs(b)
    return tl.where((rest != 0) & ((rest < 0) != (a < 0)), rest + tl.where(a < 0, -size, size), rest)


@triton.jit
def fold(a, b):
    """The lowest 32 bits of both numbers, multiplied without sign; the two halves of the product, combined by xor."""
    x, y = a.to(tl.uint32, bitcast=a.dtype.primitive_bitwidth == 32), b.to(tl.uint32, bitcast=b.dtype.primitive_bitwidth == 32)
    return ((x * y) ^ tl.umulhi(x, y)).to(tl.int32, bitcast=True).to(a.dtype)


@triton.jit
def fold_nvidia(a, b):
    """``fold`` of int32 with one multiplication instead of one for each half."""
    return tl.inline_asm_elementwise(
        "{ .reg .b64 w; .reg .b32 l, h; mul.wide.u32 w, $1, $2; mov.b64 {l, h}, w; xor.b32 $0, l, h; }",
        "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def sqrt(x):
    """The square root rounded to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


@triton.jit
def floor_div_real(a, b):
    """torch's floor division of floats: the remainder is subtracted before dividing, and the quotient is corrected for rounding."""
    rest = a % b
    quotient = divide(a - rest, b)
    quotient = tl.where((rest != 0) & ((rest < 0) != (b < 0)), quotient - 1, quotient)
    down = tl.floor(quotient)
    down = tl.where(quotient - down > 0.5, down + 1, down)
    return tl.where(b == 0, divide(a, b), tl.where(quotient == 0, divide(a, b) * 0, down))


@triton.jit
def trunc(x):
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def round_even(x):
    down = tl.floor(x)
    over = x - down
    is_even = tl.floor(down * 0.5) == down * 0.5
    near = tl.where((over > 0.5) | ((over == 0.5) & ~is_even), down + 1, down)
    return tl.where(over == over, near, x)  # infinities have no fractional part


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def tan(x):
    return divide(tl.sin(x), tl.cos(x))


@triton.jit
def atan(x):
    """A Chebyshev polynomial of x * x, accurate to 2e-8. In float64 a correction follows: the arctangent of a small number, which the
    formula for the tangent of a difference gives."""
    size = tl.abs(x)
    inner = tl.where(size > 1, divide(1, tl.where(size > 1, size, 1)), size)
    u = inner * inner
    p = 0.106226535 + u * (-0.0746577875 + u * (0.0422410353 + u * (-0.0157938357 + u * 0.0027817079)))
    angle = inner * (0.999999982 + u * (-0.33333044 + u * (0.199920174 + u * (-0.141989198 + u * p))))
    if x.dtype == tl.float64:
        rise, run = tl.sin(angle), tl.cos(angle)
        angle += (inner * run - rise) / (run + inner * rise)
    angle = tl.where(size > 1, 1.5707963267948966 - angle, angle)
    return tl.where(x < 0, -angle, tl.where(size > 0, angle, x))


@triton.jit
def atan2(y, x):
    """The arctangent of smaller / larger, mapped to its octant. The sign of a zero counts; it is read from the zero's reciprocal."""
    high, wide = tl.abs(y), tl.abs(x)
    least, most = tl.minimum(high, wide, propagate_nan=tl.PropagateNan.ALL), tl.maximum(high, wide, propagate_nan=tl.PropagateNan.ALL)
    is_one = least == most  # also for two infinities; (0, 0) counts as right of the origin
    ratio = tl.where(is_one, tl.where(most == 0, 0.0, 1.0), divide(least, tl.where(is_one, 1, most)))
    angle = atan(ratio)
    angle = tl.where(high > wide, 1.5707963267948966 - angle, angle)
    angle = tl.where((x < 0) | (divide(1, x) < 0), 3.141592653589793 - angle, angle)
    return tl.where((y < 0) | (divide(1, y) < 0), -angle, angle)


@triton.jit
def hypot(x, y):
    x, y = tl.abs(x), tl.abs(y)
    least, most = tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL), tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)
    slope = divide(least, tl.where(most == 0, 1, most))
    return tl.where((x == float("inf")) | (y == float("inf")), float("inf"), most * sqrt(1 + slope * slope))


@triton.jit
def erfinv(x):
    """M. Giles' method: erfinv(x) / x is a smooth function of w = -log(1 - x * x), and of sqrt(w) for large w. Chebyshev polynomials fit it
    to 2e-8. In float64 a step of Halley's method follows where erf still distinguishes neighbours: accurate to 1e-9 near -1 and 1, to 1e-15
    elsewhere."""
    w = -tl.log((1 - x) * (1 + x))
    t = w - 2.5
    p = 0.000218345887 + t * (-4.97306967e-06 + t * (-3.46309307e-06 + t * (4.68266973e-07 + t * (2.32648001e-08 - t * 8.94141405e-09))))
    near = 1.50140936 + t * (0.246640278 + t * (-0.00417738847 + t * (-0.00125272523 + t * p)))
    root = sqrt(tl.maximum(w, 5))
    t = root - 3
    p = 0.00569557413 + t * (-0.00361036494 + t * (0.00146333532 + t * (-3.26567471e-05 + t * (-0.00029260459 + t * 9.91220266e-05))))
    far = 2.83297682 + t * (1.00167477 + t * (0.00944424521 + t * (-0.00763437481 + t * p)))
    found = x * tl.where(w < 5, near, far)
    if x.dtype == tl.float64:
        t = root - 5
        p = -0.000214298862 + t * (7.71935667e-05 + t * (-2.12534749e-05 + t * 3.86693312e-06))
        found = tl.where(root > 4.15, x * (4.84990642 + t * (1.01030037 + t * (-0.000139143991 + t * p))), found)
        step = (tl.erf(found) - x) * 0.886226925452758 * tl.exp(found * found)
        found = tl.where(w < 16, found - step / (1 + found * step), found)
    found = tl.where(tl.abs(x) < 1, found, float("nan"))  # a maximum has lost the logarithm's NaN
    return tl.where(tl.abs(x) == 1, x * float("inf"), found)


@triton.jit
def tanh_fast(x):
    """Relative error 2 ** -18; uses the series near 0, where the quotient would cancel."""
    whole = 1 - 2 / (1 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.06, x - x * x * x * 0.3333333, whole)


@triton.jit
def reciprocal_nvidia(x):
    """Error of at most 1 ulp, in one instruction; numbers below 2 ** -126 count as 0."""
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def tanh_nvidia(x):
    """Relative error 2 ** -15."""
    whole = 1 - 2 * reciprocal_nvidia(1 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.004, x, whole)


@triton.jit
def product_nvidia(a, b):
    """A separately rounded product, not fused into a following sum: with one rounding 5 * 0.3 - 1 is not 0.5."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_nvidia(x):
    return reciprocal_nvidia(1 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def tanh_coarse(x):
    """Relative error 2 ** -11, in one instruction. By the tests' error budget this is too coarse for results rounded to float16."""
    return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid_fast(x):
    return 1 / (1 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def power_fast(base, exponent):
    """base ** exponent of floats: a negative base needs a whole exponent, and x ** 0 is 1. The error grows with the result."""
    whole = tl.floor(exponent) == exponent
    is_odd = whole & (tl.floor(exponent * 0.5) != exponent * 0.5)
    size = tl.abs(base)
    grown = tl.exp2(exponent * tl.log2(tl.where(size == 0, 1, size)))
    of_zero = tl.where(exponent > 0, 0.0, tl.where(is_odd, 1 / base, float("inf")))
    grown = tl.where(size == 0, of_zero, grown)
    grown = tl.where((base < 0) & is_odd, -grown, grown)
    grown = tl.where((base < 0) & ~whole, float("nan"), grown)
    return tl.where((exponent == 0) | (base == 1), 1.0, grown)


@triton.jit
def power(base, exponent):
    """``power_fast`` computed in float64."""
    return power_fast(base.to(tl.float64), exponent.to(tl.float64)).to(base.dtype)


@triton.jit
def power_whole(base, exponent):
    """base ** exponent of integers, wrapping around as in torch; for a negative exponent only bases 1 and -1 have a nonzero result."""
    result = base * 0 + exponent * 0 + 1
    factor = result * base
    left = tl.where(exponent < 0, 0, exponent + base * 0)
    for _ in range(0, 63):
        result = tl.where((left & 1) != 0, result * factor, result)
        factor = factor * factor
        left = left >> 1
    # base + 1: Triton 3.9 refuses to compare an unsigned number with -1
    below = tl.where(base == 1, 1, tl.where(base + 1 == 0, tl.where((exponent & 1) != 0, -1, 1), 0)).to(result.dtype)
    return tl.where(exponent < 0, below, result)


@triton.jit
def shift_left(a, b, BITS: tl.constexpr):
    inside = (b >= 0) & (b < BITS)
    return tl.where(inside, a << tl.where(inside, b, 0), 0)


@triton.jit
def shift_right(a, b, BITS: tl.constexpr):
    inside = (b >= 0) & (b < BITS)
    found = a >> tl.where(inside, b, BITS - 1)
    return tl.where(inside | (a < 0), found, 0)  # a number that is not negative loses all bits


@triton.jit
def inside(place, size):
    """An index, counted from the end if negative, clamped to 0 .. size - 1."""
    place = tl.where(place < 0, place + size, place)
    return tl.minimum(tl.maximum(place, 0), size - 1)


@triton.jit
def below(place, size):
    """``inside`` for an index that cannot be negative."""
    return tl.minimum(place, size - 1)


@triton.jit
def load_nvidia(place):
    """Loads directly into registers. Triton would pipeline these loads through shared memory, with a whole tile per stage."""
    dtype: tl.constexpr = place.dtype.element_ty
    at = place.to(tl.int64)
    if dtype.primitive_bitwidth == 64:
        bits = tl.inline_asm_elementwise("ld.global.nc.b64 $0, [$1];", "=l,l", [at], tl.int64, is_pure=True, pack=1)
        return bits.to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 32:
        bits = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [at], tl.int32, is_pure=True, pack=1)
        return bits.to(dtype, bitcast=True)
    elif dtype.primitive_bitwidth == 16:
        bits = tl.inline_asm_elementwise("ld.global.nc.u16 $0, [$1];", "=r,l", [at], tl.int32, is_pure=True, pack=1)
        return bits.to(tl.int16).to(dtype, bitcast=True)
    else:  # a bool is one byte
        bits = tl.inline_asm_elementwise("ld.global.nc.u8 $0, [$1];", "=r,l", [at], tl.int32, is_pure=True, pack=1)
        return bits.to(tl.int8).to(tl.uint8, bitcast=True).to(dtype) if dtype == tl.uint8 else bits.to(dtype)


@triton.jit
def load_even(place, kv, size):
    """Loads of a tile whose rows are ``Style.even``: 8 adjacent elements at a time; in a pipelined loop ahead. 0 from ``size`` on."""
    return tl.load(place, mask=kv // 8 < size // 8, other=0)


@triton.jit
def unknown(x, turn, IS_NVIDIA: tl.constexpr):
    """The same 32-bit integers, opaque to the compiler's common-subexpression elimination, which would keep them in registers.
    turn: a number that changes in each iteration and so prevents hoisting out of the loop."""
    if IS_NVIDIA:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [x, turn], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def kept(x, words, byte):
    """Floats, or 0 where bit 7 of a word's byte (0 to 3) is 0. words, byte: of as many elements as x when they are broadcast."""
    words, byte = tl.broadcast(words, byte)
    ones = tl.reshape((words << (24 - byte * 8)) >> 31, x.shape)
    if x.dtype.primitive_bitwidth == 16:
        return (x.to(tl.int16, bitcast=True) & ones.to(tl.int16)).to(x.dtype, bitcast=True)
    else:
        return (x.to(tl.int32, bitcast=True) & ones).to(x.dtype, bitcast=True)


@triton.jit
def kept_nvidia(x, words, byte):
    """``kept`` in two instructions, for two elements of 16 bits. Comparisons would take a predicate for each element of a tile."""
    words, byte = tl.broadcast(words, byte)
    words, byte = tl.reshape(words, x.shape), tl.reshape(byte, x.shape)
    if x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            """{ .reg .b32 s, m; mad.lo.s32 s, $4, 0x11, 0xCC88; mad.lo.s32 s, $5, 0x1100, s;
            prmt.b32 m, $2, $3, s; and.b32 $0, $1, m; }""",
            "=r,r,r,r,r,r", [x, words, byte], dtype=x.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 s, m; mad.lo.s32 s, $3, 0x1111, 0x8888; prmt.b32 m, $2, 0, s; and.b32 $0, $1, m; }",
            "=r,r,r,r", [x, words, byte], dtype=x.dtype, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def limit(place):
    """A limit of a row's keys as int32, clamped to +-2^30, beyond all positions."""
    return tl.minimum(tl.maximum(place, -(2**30)), 2**30).to(tl.int32)


@triton.jit
def between(place, lo, hi):
    """lo <= place < hi in one comparison, for 32-bit integers below 2^30; limits may be 2^30."""
    return (place - lo).to(tl.uint32, bitcast=True) < tl.maximum(hi - lo, 0).to(tl.uint32, bitcast=True)


@triton.jit
def zeros_like(x):
    """Zero offsets that give a pointer the shape of x."""
    return tl.zeros(x.shape, tl.int64)


@triton.jit
def only(x):
    """A scalar, or the element of a block that has only one."""
    if x.type.is_block():
        return tl.max(tl.reshape(x, (1,)), 0)
    else:
        return x


@triton.jit
def send_exact(total, place, x, mask):
    """Adds float32 numbers to the entries ``place`` of a ``deterministic_sum``: each as an integer, to one plane. mask: None for all."""
    planes = tl.cast(total[-1], tl.int32) - 3
    width = (253 + planes) // planes
    bits = x.to(tl.int32, bitcast=True)
    field = (bits >> 23) & 255
    exponent = tl.maximum(field, 1) - 1  # subnormals: the exponent of the least normal number, without the implicit leading 1
    plane = (exponent * (65536 // width + 1)) >> 16  # exponent // width
    whole = (bits & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
    number = whole.to(tl.int64) << (exponent - plane * width).to(tl.int64)
    number = tl.where(bits < 0, -number, number)
    is_finite = field < 255
    kind = tl.where(whole != 0x800000, 2, tl.where(bits < 0, 1, 0))
    plane = tl.where(is_finite, plane, planes + kind)
    number = tl.where(is_finite, number, 1)
    is_sent = number != 0
    if mask is not None:
        is_sent = is_sent & mask
    tl.atomic_add(total[0] + place + plane.to(tl.int64) * total[-2], number, mask=is_sent, sem="relaxed")


@triton.jit
def send_copies(total, place, x, mask, MAY_BE_ONE: tl.constexpr):
    """Adds x [M, N] (M or N may be 1) to the entries ``place`` of a ``privatized_sum``. Each of 32 consecutive rows adds to another copy (a
    warp adds 32 rows of a column at a time, if neither dimension has consecutive places), and programs use different copies. mask: None for
    all. MAY_BE_ONE: if all places are equal, adds the sum of x instead."""
    M: tl.constexpr = x.shape[0]
    lane = tl.arange(0, M)[:, None] if M > 1 else tl.arange(0, x.shape[1])[None, :]
    last = tl.cast(total[-1], tl.int32) - 1
    program = tl.program_id(0) + tl.num_programs(0) * (tl.program_id(1) + tl.num_programs(1) * tl.program_id(2))
    dtype: tl.constexpr = total[0].dtype.element_ty
    is_one = False
    if MAY_BE_ONE:
        least, most = place.to(tl.int32), place.to(tl.int32)  # a tensor with copies is small, so its offsets fit 32 bits
        if mask is not None:
            least, most = tl.where(mask, least, 2147483647), tl.where(mask, most, -1)
        most = tl.max(most)
        is_one = (tl.min(least) == most) & (last > 0)
        if is_one:
            sent = x if mask is None else tl.where(mask, x, 0.0)
            tl.atomic_add(total[0] + most + (program * 32 & last), tl.sum(sent).to(dtype), sem="relaxed")
    if not is_one:
        own = total[0] + (((lane & 31) + program * 32) & last)
        tl.atomic_add(own + place, x.to(dtype), mask=mask, sem="relaxed")


@triton.jit
def send_diagonals(
    x, begin, scalars, tensors, total, PLACES: tl.constexpr, DTYPE: tl.constexpr, IS_EXACT: tl.constexpr, HAS_COPIES: tl.constexpr,
    MAY_BE_ONE: tl.constexpr,
):  # fmt: skip
    """Adds the sums of the diagonals of x [M, N] to ``total``: a pointer, strides and sizes.

    begin: of the tile, see ``captured_gradients.scatter_source``. PLACES: the function that gives a pair's entry. IS_EXACT, HAS_COPIES: add
    by ``send_exact``, ``send_copies``. x is cut into 8 x 8 blocks; the blocks of each diagonal of blocks are summed elementwise, as a
    product of x in DTYPE with a matrix of ones and zeros. About an eighth of the entries remain.
    """
    ROWS: tl.constexpr = x.shape[0] // 8  # rows of blocks
    COLUMNS: tl.constexpr = x.shape[1] // 8
    LINES: tl.constexpr = 2 * max(ROWS, COLUMNS)  # diagonals of blocks, padded to a power of two
    blocks = tl.permute(tl.reshape(x.to(DTYPE), (ROWS, 8, COLUMNS, 8)), (1, 3, 0, 2))
    block, line = tl.arange(0, ROWS * COLUMNS)[:, None], tl.arange(0, LINES)[None, :]
    on_line = (block % COLUMNS - block // COLUMNS + ROWS - 1 == line).to(DTYPE)
    sums = tl.dot(tl.reshape(blocks, (64, ROWS * COLUMNS)), on_line)
    entry = tl.arange(0, 64)[:, None]
    far = (line - (ROWS - 1)) * 8 + entry % 8 - entry // 8  # kv_idx - q_idx, relative to the tile
    # the first pair of each diagonal: if it is outside the sequence, the whole diagonal is
    i, j = tl.maximum(-far, 0), tl.maximum(far, 0)
    is_there = (i < tl.minimum(begin.rows, 8 * ROWS)) & (j < tl.minimum(begin.keys, 8 * COLUMNS))
    q_idx, kv_idx = begin.q_first + tl.minimum(i, begin.rows - 1), begin.k_first + tl.minimum(j, begin.keys - 1)
    place = PLACES(begin.b, begin.h, q_idx, kv_idx, scalars, tensors, total)
    if IS_EXACT:
        send_exact(total, place, sums, is_there)
    elif HAS_COPIES:
        send_copies(total, place, sums, is_there, MAY_BE_ONE)
    else:
        tl.atomic_add(total[0] + place, sums.to(total[0].dtype.element_ty), mask=is_there, sem="relaxed")
