"""Operations of single roundings that the compiler neither fuses nor reorders, by the instructions that Triton's kernel has for them."""

from __future__ import annotations

from typing import Any

from cutlass import Float32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

__all__ = ["difference", "power_of_2", "product", "quotient", "total"]


def _instruction(text: str, operands: tuple[Any, ...], loc: Any, ip: Any) -> Any:
    given = [Float32(x).ir_value(loc=loc, ip=ip) for x in operands]
    constraints, dialect = ",".join(("=f", *("f" for _ in given))), llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(
        T.f32(), given, text, constraints, has_side_effects=False, is_align_stack=False, asm_dialect=dialect, loc=loc, ip=ip
    )
    return Float32(found)


@dsl_user_op
def total(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a + b."""
    return _instruction("add.rn.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def difference(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a - b."""
    return _instruction("sub.rn.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def product(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a * b."""
    return _instruction("mul.rn.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def quotient(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a / b, by the instruction that is off by up to 2 units in the last place."""
    return _instruction("div.full.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def power_of_2(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """2 ** x, approximately; 0 for results below the normal numbers."""
    return _instruction("ex2.approx.ftz.f32 $0, $1;", (x,), loc, ip)
