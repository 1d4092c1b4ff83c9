"""A mod's expression as Triton source: one line per operation, in the dtypes and with the meaning that torch gives it.

The text computes on whatever shapes its leaves have: give ``q_idx`` as [BLOCK_M, 1] and ``kv_idx`` as [1, BLOCK_N], and what depends on
the row alone has one value a row. Lines come in stages (once, row, column, tile), so that a caller can put each where it runs as rarely
as its meaning allows. No value of a call is part of the text: captured numbers and tensors are the arguments ``scalars`` and ``tensors``,
packed by ``packed_scalars`` and ``packed_tensors``, and equal expressions have equal text.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.dependence import Dep, dependence
from anyattn.mods.ir import DType, Expr, Node, category, is_weak

__all__ = ["LEAVES", "Lines", "emit", "function", "packed_scalars", "packed_tensors", "triton_dtype"]

LEAVES = {name: name for name in ("b", "h", "q_idx", "kv_idx", "score")}
_HALVES = (torch.float16, torch.bfloat16)
_TEMPLATES = {
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "log1p": "functions.log1p({0})",
    "expm1": "functions.expm1({0})",
    "sqrt": "functions.sqrt({0})", "rsqrt": "functions.divide(1, functions.sqrt({0}))", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "tanh": "functions.tanh({0})", "sigmoid": "functions.sigmoid({0})", "erf": "tl.erf({0})", "reciprocal": "functions.divide(1, {0})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "functions.trunc({0})", "round": "functions.round_even({0})",
    "sign": "functions.sign({0})", "abs": "tl.abs({0})", "neg": "-{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "functions.divide({0}, {1})", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "eq": "{0} == {1}", "ne": "{0} != {1}",
    "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})",
}  # fmt: skip
_BY_KIND = {
    ("not", "bool"): "{0} == 0",
    ("not", "int"): "~{0}",
    ("floordiv", "int"): "functions.floor_div({0}, {1})",
    ("floordiv", "float"): "functions.floor_div_real({0}, {1})",
    ("mod", "int"): "functions.floor_mod({0}, {1})",
    ("mod", "float"): "functions.floor_mod({0}, {1})",
    ("fmod", "int"): "{0} % {1}",
    ("fmod", "float"): "{0} % {1}",
    ("pow", "int"): "functions.power_whole({0}, {1})",
    ("pow", "float"): "functions.power({0}, {1})",
    ("min", "int"): "tl.minimum({0}, {1})",
    ("max", "int"): "tl.maximum({0}, {1})",
    ("min", "float"): "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    ("max", "float"): "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}


class Lines(NamedTuple):
    """Source lines by how often they run, without indentation, and the variables that hold the outputs."""

    once: list[str]
    row: list[str]
    column: list[str]
    tile: list[str]
    outputs: tuple[str, ...]

    def all(self) -> list[str]:
        return [*self.once, *self.row, *self.column, *self.tile]


def emit(expr: Expr, leaves: Mapping[str, str] = LEAVES, prefix: str = "v") -> Lines:
    """The lines that compute ``expr.outputs`` from the variables that ``leaves`` names and from ``scalars`` and ``tensors``.

    leaves: names of the variables for b, h, q_idx, kv_idx (integers of any width, scalars or blocks) and score. prefix: of the names made.

    >>> from anyattn.mods.trace import trace
    >>> print(*emit(trace(lambda b, h, q, k: q >= k, "mask").expr).all(), sep="\\n")
    v0 = tl.cast(q_idx, tl.int64)
    v1 = tl.cast(kv_idx, tl.int64)
    v2 = v0 >= v1
    """
    found = Lines([], [], [], [], tuple(f"{prefix}{o}" for o in expr.outputs))
    by_stage = {"once": found.once, "row": found.row, "column": found.column, "tile": found.tile}
    for position, (node, dep) in enumerate(zip(expr.nodes, dependence(expr), strict=True)):
        by_stage[_stage(dep)].append(f"{prefix}{position} = {_value(node, expr, leaves, prefix)}")
    return found


def function(name: str, expr: Expr) -> str:
    """The source of a Triton function ``name(b, h, q_idx, kv_idx, score, scalars, tensors)`` of the expression's only output.

    ``score`` is an argument only where the expression reads it.
    """
    lines = emit(expr)
    arguments = "b, h, q_idx, kv_idx, " + ("score, " if expr.uses_score else "") + "scalars, tensors"
    body = "\n".join(f"    {line}" for line in [*lines.all(), f"return {lines.outputs[0]}"])
    return f"@triton.jit\ndef {name}({arguments}):\n{body}\n"


def _stage(dep: Dep) -> str:
    if dep.score or (dep.q and dep.kv):
        return "tile"
    return "row" if dep.q else "column" if dep.kv else "once"


def triton_dtype(dtype: DType) -> str:
    """Triton's name of a dtype; weak numbers are as exact as Python's."""
    if is_weak(dtype):
        return "tl.int64" if dtype is int else "tl.float64"
    return "tl.int1" if dtype is torch.bool else f"tl.{str(dtype).removeprefix('torch.')}"


def _value(node: Node, expr: Expr, leaves: Mapping[str, str], prefix: str) -> str:
    if node.op in ("index", "score"):
        return f"tl.cast({leaves[node.attr if node.op == 'index' else 'score']}, {triton_dtype(node.dtype)})"  # type: ignore[index]
    if node.op == "const":
        return f"tl.full((), {_literal(node.attr)}, {triton_dtype(node.dtype)})"  # type: ignore[arg-type]
    if node.op == "scalar":
        bits = f"tl.full((), scalars[{node.attr}], tl.int64)"
        return f"tl.cast({bits}, tl.float64, bitcast=True)" if node.dtype is float else bits
    if node.op == "load":
        return _load(node, expr, prefix)
    args = [f"{prefix}{a}" for a in node.args]
    operands = expr.nodes[node.args[-1]].dtype
    if node.op == "cast":
        return _cast(args[0], operands, node.dtype)
    if node.op == "pow":
        return _power(node, expr, args)
    if operands in _HALVES and node.op != "where":  # torch computes in float32 and rounds
        args = [f"{a}.to(tl.float32)" for a in args]
    text = _operation(node, args, operands)
    return f"({text}).to({triton_dtype(node.dtype)})" if node.dtype in _HALVES and node.op != "where" else text


def _operation(node: Node, args: list[str], operands: DType) -> str:
    if node.op in ("shl", "shr"):
        bits = 64 if is_weak(operands) else torch.iinfo(operands).bits  # type: ignore[arg-type]
        return f"functions.shift_{'left' if node.op == 'shl' else 'right'}({args[0]}, {args[1]}, {bits})"
    if node.op == "not" and operands is torch.uint8:
        return f"255 - {args[0]}"
    return (_TEMPLATES.get(node.op) or _BY_KIND[node.op, category(operands)]).format(*args)


def _literal(value: int | float | bool) -> str:
    text = repr(value)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


def _cast(arg: str, source: DType, target: DType) -> str:
    if target is torch.bool:
        return f"{arg} != 0"
    return f"{arg}.to({triton_dtype(target)})"


def _power(node: Node, expr: Expr, args: list[str]) -> str:
    """Small whole powers are products, as in torch; the rest is a function."""
    exponent, kind = expr.nodes[node.args[1]], category(node.dtype)
    name = triton_dtype(node.dtype)
    if node.dtype in _HALVES:
        args = [f"{a}.to(tl.float32)" for a in args]
    if exponent.op == "const" and exponent.attr in (1, 2, 3):
        text = " * ".join([args[0]] * int(exponent.attr))  # type: ignore[call-overload]
    elif exponent.op == "const" and exponent.attr == 0.5 and kind == "float":
        text = f"functions.sqrt({args[0]})"
    else:
        text = _BY_KIND["pow", kind].format(*args)
    return f"({text}).to({name})"


def _load(node: Node, expr: Expr, prefix: str) -> str:
    """A captured tensor's entry, at a 64-bit offset."""
    slot = f"tensors[{node.attr}]"
    offset = []
    for dim, arg in enumerate(node.args):
        place, index = f"{prefix}{arg}", expr.nodes[arg]
        if index.op != "index" or index.attr == "q_idx":  # others are never negative, and the caller keeps them inside
            place = f"functions.inside({place}, {slot}[{2 + 2 * dim}])"
        offset.append(f"{place} * {slot}[{1 + 2 * dim}]")
    return f"tl.load({' + '.join([f'{slot}[0]', *offset])})"


# ---- arguments


def packed_scalars(scalars: Sequence[int | float]) -> tuple[int, ...]:
    """Captured numbers as integers of 64 bits: a float as its bits, for Triton would round it to 32."""
    return tuple(s if isinstance(s, int) else struct.unpack("<q", struct.pack("<d", s))[0] for s in scalars)


def packed_tensors(tensors: Sequence[Tensor]) -> tuple[tuple, ...]:
    """Captured tensors as (tensor, stride 0, size 0, stride 1, size 1, ...)."""
    return tuple((t, *(n for pair in zip(t.stride(), t.shape, strict=True) for n in pair)) for t in tensors)
