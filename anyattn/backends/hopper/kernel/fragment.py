"""Fragment layouts: an MMA accumulator viewed as rows and columns, and as the operand of the next MMA."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = ["again", "columns_of", "narrowed", "narrowed_to", "negative", "rows_and_columns"]


def rows_and_columns(x: Any) -> Any:
    """A 64 x n wgmma accumulator, ((2, 2, n / 8), M, N) per thread, viewed as ((2, M), (2, n / 8, N)): row, column."""
    shape, stride = x.layout.shape, x.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
    )
    return cute.make_tensor(x.iterator, layout)


def columns_of(x: Any, part: int, parts: int) -> Any:
    """Part ``part`` of a 64 x n accumulator whose columns are split into ``parts`` runs, as an accumulator."""
    (pair, rows, eights), m, n = x.layout.shape
    layout = cute.make_layout(((pair, rows, eights // parts), m, n), stride=x.layout.stride)
    return cute.make_tensor(x.iterator + part * (eights // parts) * x.layout.stride[0][2], layout)


def narrowed(x: Any, dtype: Any) -> Any:
    """The accumulator's values in 16 bits, in wgmma's order for a first operand in registers; no value changes its thread."""
    ordered = _ordered(x)
    out = cute.make_rmem_tensor(cute.make_layout(ordered.layout.shape), dtype)
    out.store(ordered.load().to(dtype))
    return out


def narrowed_to(out: Any, x: Any, dtype: Any) -> None:
    """Narrows ``x`` into ``out``, pair by pair and at this point of the code: otherwise the compiler postpones the conversion to the point
    where branches join, and keeps all values in 32 bits until then."""
    ordered, pairs = _ordered(x), cute.recast_tensor(out, Int32)
    for i in range(cute.size(pairs)):
        pairs[i] = _pair(ordered[2 * i], ordered[2 * i + 1], dtype)


def _ordered(x: Any) -> Any:
    divided = cute.logical_divide(x.layout, ((None, None, 2), None, None))
    shape, stride = divided.shape, divided.stride
    order = cute.make_layout(
        ((shape[0][0], shape[0][1], shape[0][2][0]), shape[1], (shape[0][2][1], shape[2])),
        stride=((stride[0][0], stride[0][1], stride[0][2][0]), stride[1], (stride[0][2][1], stride[2])),
    )
    return cute.make_tensor(x.iterator, order)


@dsl_user_op
def again(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The same number as a new value for the compiler, which cannot hoist computations with it out of a loop."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip)]
    text, dialect = "mov.b32 $0, $1;", llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r", has_side_effects=True, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


@dsl_user_op
def negative(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """-x, computed at this point of the code: the compiler cannot set a wgmma accumulator that begins at -x between two products in flight,
    which would make ptxas wait for the first one."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip)]
    text, dialect = "neg.f32 $0, $1;", llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.f32(), operands, text, "=f,f", has_side_effects=True, is_align_stack=False, asm_dialect=dialect)
    return Float32(found)


@dsl_user_op
def _pair(low: Any, high: Any, dtype: Any, *, loc: Any = None, ip: Any = None) -> Any:
    name = "bf16x2" if dtype is BFloat16 else "f16x2"
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (high, low)]
    text, dialect = f"cvt.rn.{name}.f32 $0, $1, $2;", llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,f,f", has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)
