"""Bulk copies of contiguous bytes by TMA: loads from global to shared memory, and float32 additions from shared to global memory."""

from __future__ import annotations

from typing import Any

from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

__all__ = ["add_floats", "load_bytes"]


@dsl_user_op
def load_bytes(target: Any, source: Any, size: int, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Loads ``size`` bytes, a multiple of 16, from global ``source`` to ``target``; called by one thread. ``barrier`` counts the bytes."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
        barrier.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
    ]
    text = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    _run(text, operands, "r,l,r,r,~{memory}", loc, ip)


@dsl_user_op
def add_floats(target: Any, source: Any, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Adds ``size`` bytes of float32 at shared ``source`` to global ``target``; called by one thread, which then commits."""
    operands = [
        target.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        source.toint(loc=loc, ip=ip).ir_value(loc=loc, ip=ip),
        Int32(size).ir_value(loc=loc, ip=ip),
    ]
    _run("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$0], [$1], $2;", operands, "l,r,r,~{memory}", loc, ip)


def _run(text: str, operands: list[Any], constraints: str, loc: Any, ip: Any) -> None:
    llvm.inline_asm(
        None, operands, text, constraints, has_side_effects=True, is_align_stack=False, asm_dialect=llvm.AsmDialect.AD_ATT, loc=loc, ip=ip
    )
