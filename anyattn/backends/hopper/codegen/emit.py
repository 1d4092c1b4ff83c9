"""CuTe emitter: a mod's expression as CuTe operations on a fragment of scores.

A value that depends on no position is computed once, one that depends on the row once per row (a thread holds two of 64), one that depends
on the column once per column, and only the rest once per score, or once per diagonal. An integer that is linear along the columns, such as
a distance, is converted to float once per row; the address of a load that is indexed by such an integer is computed once per row.

torch's integers have at most 64 bits and wrap around. Values that fit 32 bits for all positions and captured numbers that the kernel
accepts (``score_analysis.is_wide``) are computed in 32; values that may exceed a narrower dtype are wrapped around to it. Addresses have 64
bits, because a tensor's strides do.

Scores may be approximate, but numbers that a comparison or a rounding to integers depends on (``mods.analysis.sharp``) may not: these are
divided, multiplied and rounded as torch does it, at the cost of a few instructions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.backends.hopper.codegen.cute_mod import call_native
from anyattn.backends.hopper.codegen.device_math import (  # fmt: skip
    TYPES,
    alike,
    divided,
    erfinv,
    fmod,
    hypot,
    in_bits,
    limit,
    narrow,
    power,
    quotient,
    select,
    shifted,
    whole,
)
from anyattn.backends.hopper.codegen.score_analysis import (
    divides_many,
    is_modular,
    is_near,
    is_wide,
    lines,
    shared,
    stages,
    straight,
    wraps,
)
from anyattn.mods.analysis.sharp import sharp
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr, Node, category

__all__ = ["emit", "emit_at", "emit_lines", "emit_rows", "holds", "needed_for", "run_stage", "select", "tanh", "wrapped"]


def _instruction(text: str, *operands: Any, loc: Any, ip: Any) -> Any:
    """The float32 result of one PTX instruction on float32 operands."""
    values, constraints = [Float32(x).ir_value(loc=loc, ip=ip) for x in operands], "=f" + ",f" * len(operands)
    dialect = llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.f32(), values, text, constraints, has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Float32(found)


@dsl_user_op
def tanh(x: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """tanh in one MUFU operation, relative error 2^-11: less than the rounding of scores from 16-bit inputs."""
    return _instruction("tanh.approx.f32 $0, $1;", x, loc=loc, ip=ip)


@dsl_user_op
def product(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The product, rounded before it is added to anything: the compiler makes one multiply-add of a plain product and its sum."""
    return _instruction("mul.rn.f32 $0, $1, $2;", a, b, loc=loc, ip=ip)


def _approximate(function: Callable) -> Callable:
    return lambda x: function(Float32(x), fastmath=True)


_EXACT = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "rsqrt", "sin", "cos", "erf")
_FUNCTIONS = (*_EXACT, "floor", "ceil", "trunc")
_UNARY: dict[str, Callable] = {
    **{name: _approximate(getattr(cute.math, name)) for name in _FUNCTIONS},
    **{name: getattr(cute.math, name) for name in ("atan", "sinh", "cosh")},
    "tan": lambda x: cute.math.sin(x, fastmath=True) / cute.math.cos(x, fastmath=True),
    "erfinv": erfinv,
    "round": _approximate(cute.math.roundeven),
    "tanh": tanh,
    "sigmoid": lambda x: tanh(Float32(x) * Float32(0.5)) * Float32(0.5) + Float32(0.5),
    "reciprocal": lambda x: cute.arch.rcp_approx(Float32(x)),
}
_SHARP_UNARY: dict[str, Callable] = {
    **{name: getattr(cute.math, name) for name in _EXACT},
    "tanh": cute.math.tanh,
    "tan": lambda x: cute.math.sin(x) / cute.math.cos(x),
    "sigmoid": lambda x: Float32(1.0) / (Float32(1.0) + cute.math.exp(-x)),
    "reciprocal": lambda x: Float32(1.0) / x,
}
_COMPARE = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_BINARY = {
    **{"add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_, "xor": operator.xor},
    **_COMPARE,
}


def emit(
    expr: Expr,
    scalars: Sequence[Any],
    tensors: Sequence[Any],
    places: dict[str, Any],
    score: Callable[[int, int], Any] | None,
    store: Callable[..., None],
    reads_ahead: bool = False,
) -> None:
    """Calls ``store(r, c, value)`` with the expression's value, or its tuple of values, for every row and column of a fragment.

    places: b and h; q_idx and kv_idx as lists with one position per row and column; apart and steps: the distance of each row and column
    from the first, as literals. score(r, c): the score there. reads_ahead: no index of a straight load is negative or past the end.

    A value that is constant along a diagonal is computed in the lowest row that meets it. For positions past the last, which are clamped
    to it, this may be another diagonal's value; the results there are not used.
    """
    once = run_stage(expr, scalars, tensors, "once", {}, {"b": places["b"], "h": places["h"]})
    rows = [run_stage(expr, scalars, tensors, "row", dict(once), {"q_idx": q}) for q in places["q_idx"]]
    columns = [run_stage(expr, scalars, tensors, "col", dict(once), {"kv_idx": kv}) for kv in places["kv_idx"]]
    along = _along_rows(expr, scalars, tensors, rows, columns[0], places["steps"], reads_ahead)
    seen: dict[int, dict[int, Any]] = {}  # by diagonal
    for c, column in enumerate(columns):
        for r, row in enumerate(rows):
            met = seen.setdefault(places["apart"][r] - places["steps"][c], {})
            known = {i: met[i] if i in met else at[r](c) for i, at in along.items()}
            leaves = {"score": None if score is None else score(r, c)}
            values = run_stage(expr, scalars, tensors, "tile", {**row, **column, **met, **known}, leaves)
            met.update((i, values[i]) for i in shared(expr))
            store(r, c, *(values[o] for o in expr.outputs))


def emit_lines(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any]) -> list[tuple[Any, Any]]:
    """For each row (value at its first column, change per key) of an even value; the change may be a literal, 0.0 for a constant."""
    once = run_stage(expr, scalars, tensors, "once", {}, {"b": places["b"], "h": places["h"]})
    column = run_stage(expr, scalars, tensors, "col", dict(once), {"kv_idx": places["kv_idx"][0]})
    output = expr.outputs[0]
    result = []
    for q in places["q_idx"]:
        row = run_stage(expr, scalars, tensors, "row", dict(once), {"q_idx": q})
        is_line = output in lines(expr)
        result.append(_slanted(expr, scalars, tensors, row, column, straight(expr)[0])[output] if is_line else (Float32(row[output]), 0.0))
    return result


def holds(conditions: Sequence[Expr], scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any]) -> Any:
    """Whether the conditions of a ``piecewise.Piece`` hold at all of a thread's rows and columns."""
    found = None
    for expr in conditions:
        once = run_stage(expr, scalars, tensors, "once", {}, {"b": places["b"], "h": places["h"]})
        column = run_stage(expr, scalars, tensors, "col", dict(once), {"kv_idx": places["kv_idx"][0]})
        output = expr.outputs[0]
        for q in places["q_idx"]:
            row = run_stage(expr, scalars, tensors, "row", dict(once), {"q_idx": q})
            least = _reach(expr, output, places["steps"])[0] + _at_first(expr, scalars, tensors, output, row, column)
            found = least >= 0 if found is None else found & (least >= 0)
    return found


def _along_rows(
    expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], rows: list[dict], first: dict[int, Any], steps: list[int], reads_ahead: bool
) -> dict[int, list[Callable[[int], Any]]]:
    """For each straight node, row by row, its value as a function of the column: one conversion or address
    per row, then literal offsets."""
    casts, reads = straight(expr)
    found: dict[int, list[Callable[[int], Any]]] = {}
    slanted = [_slanted(expr, scalars, tensors, row, first, casts) for row in rows]
    used = [i for i in lines(expr) if i in expr.outputs or any(i in n.args for j, n in enumerate(expr.nodes) if j not in lines(expr))]
    for i in used:
        found[i] = [lambda c, line=line[i]: _on_line(line, steps[c]) for line in slanted]  # type: ignore[misc]
    for i in reads if reads_ahead else ():
        node = expr.nodes[i]
        low, step = _reach(expr, node.args[-1], steps)
        tensor, kind = tensors[node.attr], category(node.dtype)  # type: ignore[index]
        views = []
        for row in rows:
            start = _at_first(expr, scalars, tensors, node.args[-1], row, first) + low
            place = (*_wrapped(expr, node.args[:-1], [row[a] for a in node.args[:-1]], tensor), start)
            offset = cute.crd2idx(place if len(place) > 1 else place[0], tensor.layout)
            views.append(cute.make_tensor(tensor.iterator + offset, cute.make_layout(max(map(abs, steps)) * abs(step) + 1)))
        found[i] = [lambda c, view=view, low=low, step=step, kind=kind: _of_kind(view[step * steps[c] - low], kind) for view in views]  # type: ignore[misc]
    return found


def _slanted(
    expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], row: dict[int, Any], first: dict[int, Any], casts: Sequence[int]
) -> dict[int, tuple[Any, Any]]:
    """(value at the first column, change per key) of a row's float nodes that are linear along it; the change may be a literal."""
    found: dict[int, tuple[Any, Any]] = {}
    for i in lines(expr):
        node = expr.nodes[i]
        if i in casts:
            start = Float32(_at_first(expr, scalars, tensors, node.args[0], row, first))
            found[i] = (start, float(dependence(expr)[node.args[0]].slope[1]))  # type: ignore[index]
            continue
        parts = [found[a] if a in found else (row[a], 0.0) for a in node.args]
        if node.op == "neg":
            found[i] = (-parts[0][0], -parts[0][1])
        elif node.op in ("mul", "div"):
            (line, factor) = (parts[0], parts[1][0]) if node.args[0] in found else (parts[1], parts[0][0])
            if node.op == "div":
                factor = 1.0 / factor if isinstance(factor, (int, float)) else cute.arch.rcp_approx(Float32(factor))
            found[i] = tuple(
                x * factor if isinstance(x, float) and isinstance(factor, float) else Float32(x) * Float32(factor) for x in line
            )  # type: ignore[assignment]
        else:
            operation = _BINARY[node.op]
            found[i] = tuple(  # type: ignore[assignment]
                operation(a, b) if isinstance(a, float) and isinstance(b, float) else operation(Float32(a), Float32(b))
                for a, b in zip(*parts, strict=True)
            )
    return found


def _on_line(line: tuple[Any, Any], step: int) -> Any:
    start, change = line
    return start + (Float32(change * step) if isinstance(change, float) else change * Float32(float(step)))


def _reach(expr: Expr, index: int, steps: list[int]) -> tuple[int, int]:
    """(least offset from the first column's value, change per column) of a straight integer."""
    step = dependence(expr)[index].slope[1]  # type: ignore[index]
    return min(step * s for s in steps), step


def _at_first(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], node: int, row: dict, first: dict) -> Any:
    """An integer's value at a row's first column."""
    return whole(run_stage(expr, scalars, tensors, "tile", {**row, **first}, {}, needed_for(expr, node))[node])


def needed_for(expr: Expr, node: int) -> set[int]:
    """The node and all nodes that it is computed from."""
    needed, pending = set(), [node]
    while pending:
        at = pending.pop()
        if at not in needed:
            needed.add(at)
            pending += expr.nodes[at].args
    return needed


def emit_rows(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], b: Any, h: Any, q_idx: Sequence[Any]) -> list[tuple]:
    """For each row the values of all outputs, which depend on no key and no score; integer outputs are limits of its keys."""
    outputs = [(o, category(expr.nodes[o].dtype) == "int", is_near(expr)[o]) for o in expr.outputs]
    once = run_stage(expr, scalars, tensors, "once", {}, {"b": b, "h": h})
    found = []
    for q in q_idx:
        values = run_stage(expr, scalars, tensors, "row", dict(once), {"q_idx": q})
        found.append(tuple(values[o] if not is_limit else limit(values[o], near) for o, is_limit, near in outputs))
    return found


def emit_at(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> tuple[Any, ...]:
    """The values of all outputs, which depend on no score, at one row and key."""
    values: dict[int, Any] = {}
    for stage, leaves in (("once", {"b": b, "h": h}), ("row", {"q_idx": q_idx}), ("col", {"kv_idx": kv_idx}), ("tile", {})):
        values = run_stage(expr, scalars, tensors, stage, values, leaves)
    return tuple(values[o] for o in expr.outputs)


def wrapped(expr: Expr, values: Sequence[Any], tensor: Any) -> list[Any]:
    """An expression's outputs as indices of a tensor's first dimensions; negative ones count from the end."""
    return _wrapped(expr, expr.outputs, values, tensor)


def run_stage(
    expr: Expr,
    scalars: Sequence[Any],
    tensors: Sequence[Any],
    stage: str,
    values: dict[int, Any],
    leaves: dict[str, Any],
    needed: Collection[int] | None = None,
) -> dict[int, Any]:
    """Adds to ``values`` the nodes of this stage that are not known yet, limited to the ``needed`` ones if given."""
    for i, (node, due) in enumerate(zip(expr.nodes, stages(expr), strict=True)):
        if due != stage or i in values or (needed is not None and i not in needed):
            continue
        if node.op in ("index", "score"):
            values[i] = leaves[node.attr if node.op == "index" else "score"]  # type: ignore[index]
        elif node.op == "scalar":
            values[i] = scalars[node.attr]  # type: ignore[index]
        else:
            values[i] = _operation(i, [values[a] for a in node.args], expr, tensors)
    return values


def _operation(i: int, args: list[Any], expr: Expr, tensors: Sequence[Any]) -> Any:
    """The value of node ``i``; an integer is wrapped around to its dtype."""
    node = expr.nodes[i]
    if category(node.dtype) != "int" or node.op in ("const", "load", "tensor", "native"):
        return _computed(i, args, expr, tensors)
    if is_wide(expr)[i] and node.op != "cast":
        is_whole = (category(expr.nodes[at].dtype) == "int" for at in node.args)  # literals keep their type
        args = [Int64(a) if whole_one and not isinstance(a, int) else a for a, whole_one in zip(args, is_whole, strict=True)]
    elif is_modular(node):
        args = [narrow(a) for a in args]
    found = _computed(i, args, expr, tensors)
    if is_wide(expr)[i] or isinstance(found, int):
        return found
    bits = 32 if node.dtype is int else torch.iinfo(node.dtype).bits  # type: ignore[arg-type]
    if bits < 32 and wraps(expr)[i]:
        return in_bits(found, bits, node.dtype is not torch.uint8)
    return narrow(found)


def _computed(i: int, args: list[Any], expr: Expr, tensors: Sequence[Any]) -> Any:
    """The value of node ``i``, which is rounded as torch rounds it if the node is sharp."""
    node, is_sharp = expr.nodes[i], i in sharp(expr)
    kind = category(node.dtype)
    if node.op == "const":
        return node.attr
    if node.op == "cast":
        return _cast(args[0], category(expr.nodes[node.args[0]].dtype), kind, node.dtype is torch.int64)
    if node.op == "tensor":
        return tensors[node.attr]  # type: ignore[index]
    if node.op == "native":
        return call_native(node, args)
    if node.op == "load":
        return _load(node, args, expr, tensors[node.attr], kind)  # type: ignore[index]
    if node.op in _UNARY:
        return (_SHARP_UNARY if is_sharp and node.op in _SHARP_UNARY else _UNARY)[node.op](Float32(args[0]))
    if node.op == "where":
        return select(*args, kind)
    if node.op in ("min", "max"):
        if kind == "float":
            return (cute.arch.fmin if node.op == "min" else cute.arch.fmax)(*(Float32(a) for a in args), nan=True)  # torch's
        return (cutlass.min if node.op == "min" else cutlass.max)(*alike(args))
    if node.op == "detach":
        return args[0]
    if node.op == "neg":
        return -args[0]
    if node.op == "abs":
        return cute.math.absf(args[0]) if kind == "float" else select(args[0] < 0, -args[0], args[0], "int")
    if node.op == "sign":
        zero, one = (Float32(0.0), Float32(1.0)) if kind == "float" else (whole(args[0]) * 0, whole(args[0]) * 0 + 1)
        return select(args[0] > 0, one, select(args[0] < 0, -one, zero, kind), kind)
    if node.op in ("floordiv", "mod"):
        return divided(node.op, *args, kind, divides_many(expr)[i])
    if node.op in ("atan2", "hypot"):
        return (cute.math.atan2 if node.op == "atan2" else hypot)(*(Float32(a) for a in args))
    if node.op in ("fmod", "pow"):
        return (fmod if node.op == "fmod" else power)(*args, kind)
    if node.op in ("shl", "shr"):
        return shifted(node.op, *args, 64 if node.dtype is int else torch.iinfo(node.dtype).bits)  # type: ignore[arg-type]
    if node.op == "not":
        return select(args[0], False, True, "bool") if kind == "bool" else ~args[0]
    if node.op == "div" and is_sharp:
        dividend = expr.nodes[node.args[0]]
        return quotient(*args, dividend.op == "cast" and category(expr.nodes[dividend.args[0]].dtype) == "int")
    return _binary(node, args, category(expr.nodes[node.args[0]].dtype), is_sharp)


def _binary(node: Node, args: list[Any], operands: str, is_sharp: bool) -> Any:
    a, b = args
    if node.op == "div":  # by the reciprocal; a literal's is computed at build time
        return Float32(a) * (Float32(1.0 / b) if isinstance(b, (int, float)) else cute.arch.rcp_approx(Float32(b)))
    if all(isinstance(x, (int, float, bool)) for x in args):
        return _BINARY[node.op](a, b)
    if operands == "float":
        a, b = Float32(a), Float32(b)
        if node.op == "mul" and is_sharp:
            return product(a, b)
    elif operands == "int":
        a, b = alike([a, b])
    return _BINARY[node.op](a, b)


def _cast(value: Any, source: str, kind: str, is_long: bool) -> Any:
    if isinstance(value, (int, float, bool)):
        return {"float": float, "int": int, "bool": bool}[kind](value)
    if source == kind:
        return value
    if kind == "bool":
        return value != 0
    return (Int64 if is_long and source == "float" else TYPES[kind])(value)


def _load(node: Node, args: list[Any], expr: Expr, tensor: Any, kind: str) -> Any:
    """A captured tensor's entry; a negative index counts from the end, unless the index is a position, which is never negative."""
    if not args:
        return _of_kind(tensor[0], kind)
    place = _wrapped(expr, node.args, args, tensor)
    found = tensor[tuple(place)] if len(place) > 1 else tensor[place[0]]
    return _of_kind(found, kind)


def _wrapped(expr: Expr, nodes: Sequence[int], values: Sequence[Any], tensor: Any) -> list[Any]:
    """Indices of a tensor's first dimensions; those that may be negative count from the end."""
    place = []
    for dim, (arg, value) in enumerate(zip(nodes, values, strict=True)):
        if expr.nodes[arg].op == "index":
            place.append(value)
        elif isinstance(value, int):
            place.append(value if value >= 0 else Int32(tensor.shape[dim]) + value)
        else:
            place.append(select(value < 0, value + Int32(tensor.shape[dim]), value, "int"))
    return place


def _of_kind(found: Any, kind: str) -> Any:
    return found != 0 if kind == "bool" else whole(found) if kind == "int" else Float32(found)
