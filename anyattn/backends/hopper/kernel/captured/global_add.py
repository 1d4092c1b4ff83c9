"""Additions and stores of float32 values in global memory; ``add_to`` and ``store_to`` skip a value of 0."""

from __future__ import annotations

from typing import Any

from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = ["add_to", "always_add_to", "moved", "store_to"]

_NOT_ZERO = "setp.neu.f32 p, $1, 0f00000000;"  # true for NaN, too


@dsl_user_op
def add_to(target: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Adds ``value`` to the float32 at address ``target``, unless ``value`` is 0; no thread waits for the result."""
    _run(f"{{ .reg .pred p; {_NOT_ZERO} @p red.relaxed.gpu.global.add.f32 [$0], $1; }}", target, value, loc, ip)


@dsl_user_op
def always_add_to(target: Any, value: Any, *, loc: Any = None, ip: Any = None) -> None:
    """``add_to`` without the test, which takes a branch; for values that are rarely 0."""
    _run("red.relaxed.gpu.global.add.f32 [$0], $1;", target, value, loc, ip)


@dsl_user_op
def store_to(target: Any, value: Any, dtype: Any, offset: int = 0, *, loc: Any = None, ip: Any = None) -> None:
    """Stores a nonzero float32 as ``dtype`` (float32, bfloat16 or float16) ``offset`` entries after the address ``target``."""
    if dtype is Float32:
        text = f"{{ .reg .pred p; {_NOT_ZERO} @p st.global.f32 [$0+{4 * offset}], $1; }}"
    else:
        name = {BFloat16: "bf16", Float16: "f16"}[dtype]
        narrow = f"cvt.rn.{name}.f32 n, $1;"
        text = f"{{ .reg .pred p; .reg .b16 n; {_NOT_ZERO} {narrow} @p st.global.b16 [$0+{2 * offset}], n; }}"
    _run(text, target, value, loc, ip)


@dsl_user_op
def moved(address: Any, step: Any, at: Any, end: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """``address`` plus ``step`` bytes if ``at`` is less than ``end``, else ``address``. Assembly hides the addition from the compiler,
    which would otherwise keep the addresses of all rows in registers."""
    operands = [x.ir_value(loc=loc, ip=ip) for x in (Int64(address), Int64(step), Int32(at), Int32(end))]
    dialect = llvm.AsmDialect.AD_ATT
    text = "{ .reg .pred p; setp.lt.s32 p, $3, $4; mov.b64 $0, $1; @p add.s64 $0, $0, $2; }"
    found = llvm.inline_asm(
        T.i64(), operands, text, "=&l,l,l,r,r", has_side_effects=True, is_align_stack=False, asm_dialect=dialect, loc=loc, ip=ip
    )
    return Int64(found)


def _run(text: str, target: Any, value: Any, loc: Any, ip: Any) -> None:
    operands = [Int64(target).ir_value(loc=loc, ip=ip), Float32(value).ir_value(loc=loc, ip=ip)]
    dialect = llvm.AsmDialect.AD_ATT
    llvm.inline_asm(None, operands, text, "l,f,~{memory}", has_side_effects=True, is_align_stack=False, asm_dialect=dialect, loc=loc, ip=ip)
