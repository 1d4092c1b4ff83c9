"""A mod's expression as CuTe operations on a fragment of scores.

What depends on neither position is computed once, on the row once a row (a thread holds two of 64), on the column once a column, and only
the rest once a score. Positions are 32-bit; addresses are not, for a tensor's strides are 64-bit numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr, Node, category

__all__ = ["emit", "emit_rows", "select"]

_TYPES = {"float": Float32, "int": Int32, "bool": Boolean}


@dsl_user_op
def _tanh(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """One MUFU operation, relative error 2^-11: what 16-bit inputs leave of a score is coarser."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip)]
    dialect = llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(
        T.f32(), operands, "tanh.approx.f32 $0, $1;", "=f,f", has_side_effects=False, is_align_stack=False, asm_dialect=dialect
    )
    return Float32(found)


def _approximate(function: Callable) -> Callable:
    return lambda x: function(Float32(x), fastmath=True)


_UNARY: dict[str, Callable] = {
    **{
        name: _approximate(getattr(cute.math, name))
        for name in ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "erf", "floor")
    },
    "tanh": _tanh,
    "sigmoid": lambda x: _tanh(Float32(x) * Float32(0.5)) * Float32(0.5) + Float32(0.5),
    "reciprocal": lambda x: cute.arch.rcp_approx(Float32(x)),
}
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_, **_COMPARE}


def _whole(x: Any) -> Any:
    """A run-time integer of 32 bits, unless a captured tensor made it one of 64."""
    return x if isinstance(x, Int64) else Int32(x)


def select(condition: Any, yes: Any, no: Any, kind: str) -> Any:
    """``yes`` where ``condition``, else ``no``, both of ``kind`` float, int or bool."""
    if isinstance(condition, bool):
        return yes if condition else no
    as_kind = _TYPES[kind]
    if kind == "int" and (isinstance(yes, Int64) or isinstance(no, Int64)):
        as_kind = Int64
    return as_kind(cutlass.select_(condition, as_kind(yes), as_kind(no)))


def emit(
    expr: Expr,
    scalars: Sequence[Any],
    tensors: Sequence[Any],
    places: dict[str, Any],
    score: Callable[[int, int], Any] | None,
    store: Callable[[int, int, Any], None],
) -> None:
    """Calls ``store(r, c, value)`` with the expression's value at every row and column of a fragment.

    places: b and h, and q_idx and kv_idx as lists, one position for each row and column. score(r, c): the score there.
    """
    once = _run(expr, scalars, tensors, "once", {}, {"b": places["b"], "h": places["h"]})
    rows = [_run(expr, scalars, tensors, "row", dict(once), {"q_idx": q}) for q in places["q_idx"]]
    for c, kv in enumerate(places["kv_idx"]):
        column = _run(expr, scalars, tensors, "col", dict(once), {"kv_idx": kv})
        for r, row in enumerate(rows):
            values = _run(expr, scalars, tensors, "tile", {**row, **column}, {"score": None if score is None else score(r, c)})
            store(r, c, values[expr.outputs[0]])


def emit_rows(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], b: Any, h: Any, q_idx: Sequence[Any]) -> list[tuple]:
    """For each row the values of all outputs, which depend on no key and no score."""
    once = _run(expr, scalars, tensors, "once", {}, {"b": b, "h": h})
    found = []
    for q in q_idx:
        values = _run(expr, scalars, tensors, "row", dict(once), {"q_idx": q})
        found.append(tuple(values[o] for o in expr.outputs))
    return found


def _run(
    expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], stage: str, values: dict[int, Any], leaves: dict[str, Any]
) -> dict[int, Any]:
    """Adds to ``values`` those of the nodes that are due at this stage."""
    for i, (node, due) in enumerate(zip(expr.nodes, _stages(expr), strict=True)):
        if due != stage:
            continue
        if node.op in ("index", "score"):
            values[i] = leaves[node.attr if node.op == "index" else "score"]  # type: ignore[index]
        elif node.op == "scalar":
            values[i] = scalars[node.attr]  # type: ignore[index]
        else:
            values[i] = _operation(node, [values[a] for a in node.args], expr, tensors)
    return values


@lru_cache(maxsize=256)
def _stages(expr: Expr) -> tuple[str, ...]:
    return tuple("tile" if d.score or (d.q and d.kv) else "row" if d.q else "col" if d.kv else "once" for d in dependence(expr))


def _operation(node: Node, args: list[Any], expr: Expr, tensors: Sequence[Any]) -> Any:
    kind = category(node.dtype)
    if node.op == "const":
        return node.attr
    if node.op == "cast":
        return _cast(args[0], category(expr.nodes[node.args[0]].dtype), kind)
    if node.op == "load":
        return _load(node, args, expr, tensors[node.attr], kind)  # type: ignore[index]
    if node.op in _UNARY:
        return _UNARY[node.op](args[0])
    if node.op == "where":
        return select(*args, kind)
    if node.op in ("min", "max"):
        if kind == "float":
            return (cute.arch.fmin if node.op == "min" else cute.arch.fmax)(*(Float32(a) for a in args))
        return (cutlass.min if node.op == "min" else cutlass.max)(*_alike(args))
    if node.op == "neg":
        return -args[0]
    if node.op == "abs":
        return cute.math.absf(args[0]) if kind == "float" else select(args[0] < 0, -args[0], args[0], "int")
    if node.op == "not":
        return select(args[0], False, True, "bool") if kind == "bool" else ~args[0]
    return _binary(node, args, category(expr.nodes[node.args[0]].dtype))


def _binary(node: Node, args: list[Any], operands: str) -> Any:
    a, b = args
    if node.op == "div":  # a product with the reciprocal; a number's is made while the kernel is built
        return Float32(a) * (Float32(1.0 / b) if isinstance(b, (int, float)) else cute.arch.rcp_approx(Float32(b)))
    if all(isinstance(x, (int, float, bool)) for x in args):
        return _BINARY[node.op](a, b)
    if operands == "float":
        a, b = Float32(a), Float32(b)
    elif operands == "int":
        a, b = _alike([a, b])
    return _BINARY[node.op](a, b)


def _alike(args: list[Any]) -> list[Any]:
    wide = any(isinstance(a, Int64) for a in args)
    return [Int64(a) if wide else Int32(a) for a in args]


def _cast(value: Any, source: str, kind: str) -> Any:
    if isinstance(value, (int, float, bool)):
        return {"float": float, "int": int, "bool": bool}[kind](value)
    return value if source == kind else _TYPES[kind](value)


def _load(node: Node, args: list[Any], expr: Expr, tensor: Any, kind: str) -> Any:
    """A captured tensor's entry; a negative index counts from the end, which an index that is a position cannot be."""
    if not args:
        return _of_kind(tensor[0], kind)
    place = []
    for dim, (arg, value) in enumerate(zip(node.args, args, strict=True)):
        if expr.nodes[arg].op == "index":
            place.append(value)
        elif isinstance(value, int):
            place.append(value if value >= 0 else Int32(tensor.shape[dim]) + value)
        else:
            place.append(select(value < 0, value + Int32(tensor.shape[dim]), value, "int"))
    found = tensor[tuple(place)] if len(place) > 1 else tensor[place[0]]
    return _of_kind(found, kind)


def _of_kind(found: Any, kind: str) -> Any:
    return found != 0 if kind == "bool" else _whole(found) if kind == "int" else Float32(found)
