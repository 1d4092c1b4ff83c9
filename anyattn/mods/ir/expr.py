"""The expression IR that a mod is traced into: a flat list of typed operations, in which equal subexpressions are one node.

Guarantees of an ``Expr``:

* every node comes after its arguments, so a reader is one loop over ``nodes``;
* two equal subexpressions are one node, so equal mods have equal lists and therefore equal keys;
* every node obeys the table ``OPS``, which ``verify`` checks after each pass that builds an expression;
* no run-time value is part of it: captured numbers are ``scalar`` slots and captured tensors ``load`` slots.

An opaque CuTe function (``cute_mod.py``) is one operation, ``native``, whose arguments are those of the mod and whole tensors (``tensor``).

A dtype is a ``torch.dtype``, or Python's ``int`` or ``float`` for a *weak* number (a literal, a captured number, or arithmetic
between such), which takes part in type promotion the way a Python number does in torch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from anyattn.mods.ir.content_key import content_key

__all__ = [
    "HALVES",
    "INDICES",
    "MIRRORED",
    "OPS",
    "Builder",
    "DType",
    "Expr",
    "Node",
    "bool_of",
    "category",
    "is_weak",
    "overflows",
    "verify",
    "wrapped",
]

DType = torch.dtype | type
HALVES = (torch.float16, torch.bfloat16)
INDICES = ("b", "h", "q_idx", "kv_idx")
MIRRORED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}  # the comparison with its operands exchanged


class Node(NamedTuple):
    """One operation: its name, the positions of its arguments, the dtype of its value, and an attribute.

    The attribute of a cast is None, or says that torch converts a number to the dtype before it computes: a whole number must then fit it
    (``weak_captures.unfit``), and the attribute names torch's function; a float is rounded.
    """

    op: str
    args: tuple[int, ...]
    dtype: DType
    attr: Hashable = None


def is_weak(dtype: DType) -> bool:
    return isinstance(dtype, type)


def category(dtype: DType) -> str:
    """``"bool"``, ``"int"`` or ``"float"``: the order in which torch promotes."""
    if dtype is float or (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        return "float"
    return "bool" if dtype is torch.bool else "int"


def wrapped(number: int, dtype: torch.dtype) -> int:
    """``number`` in the range of ``dtype``: the value of its lowest bits, as torch wraps around.

    >>> wrapped(300, torch.uint8), wrapped(2**63, torch.int64) == -(2**63)
    (44, True)
    """
    info = torch.iinfo(dtype)
    return (number - info.min) % 2**info.bits + info.min


def overflows(number: int, dtype: torch.dtype) -> bool:
    """Whether torch refuses ``number`` where it converts numbers to ``dtype`` with a check; unsigned types take the negative numbers whose
    size fits.

    >>> overflows(128, torch.int8), overflows(-1, torch.uint8), overflows(-256, torch.uint8)
    (True, False, True)
    """
    info = torch.iinfo(dtype)
    return not (info.min or -info.max) <= number <= info.max


class OpSpec(NamedTuple):
    """The operands that an operation accepts (count, categories) and its result: ``same`` as the operands or ``bool``."""

    arity: int
    operands: tuple[str, ...]
    result: str
    on_host: Callable[..., int | float | bool] | None  # the operation on Python numbers, for weak values


_NUMBER, _ANY, _BITS, _REAL = ("int", "float"), ("bool", "int", "float"), ("bool", "int"), ("float",)


def _round_half_even(x: float) -> float:
    return float(round(x)) if math.isfinite(x) else x


def _sign(x: float) -> int | float:
    return type(x)((x > 0) - (x < 0))


def _on_finite(f: Callable[[float], int]) -> Callable[[float], float]:
    return lambda x: float(f(x)) if math.isfinite(x) else x


_UNARY_REAL: dict[str, Callable[..., float]] = {
    "exp": math.exp,
    "exp2": math.exp2 if hasattr(math, "exp2") else lambda x: 2.0**x,
    "log": math.log,
    "log2": math.log2,
    "log1p": math.log1p,
    "expm1": math.expm1,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1.0 / math.sqrt(x),
    "sin": math.sin,
    "cos": math.cos,
    "tan": math.tan,
    "atan": math.atan,
    "sinh": math.sinh,
    "cosh": math.cosh,
    "tanh": math.tanh,
    "sigmoid": lambda x: 1.0 / (1.0 + math.exp(-x)),
    "erf": math.erf,
    "reciprocal": lambda x: 1.0 / x,
    "floor": _on_finite(math.floor),
    "ceil": _on_finite(math.ceil),
    "trunc": _on_finite(math.trunc),
    "round": _round_half_even,
}
_COMPARE: dict[str, Callable[..., bool]] = {n: getattr(operator, n) for n in ("eq", "ne", "lt", "le", "gt", "ge")}

OPS: dict[str, OpSpec] = {
    **{name: OpSpec(1, _REAL, "same", f) for name, f in _UNARY_REAL.items()},
    "erfinv": OpSpec(1, _REAL, "same", None),
    "detach": OpSpec(1, _REAL, "same", lambda x: x),  # the value without its derivative
    "neg": OpSpec(1, _NUMBER, "same", operator.neg),
    "abs": OpSpec(1, _NUMBER, "same", abs),
    "sign": OpSpec(1, _NUMBER, "same", _sign),
    "not": OpSpec(1, _BITS, "same", operator.invert),
    "add": OpSpec(2, _NUMBER, "same", operator.add),
    "sub": OpSpec(2, _NUMBER, "same", operator.sub),
    "mul": OpSpec(2, _NUMBER, "same", operator.mul),
    "div": OpSpec(2, _REAL, "same", operator.truediv),
    "floordiv": OpSpec(2, _NUMBER, "same", operator.floordiv),
    "mod": OpSpec(2, _NUMBER, "same", operator.mod),
    "fmod": OpSpec(2, _NUMBER, "same", None),
    "pow": OpSpec(2, _NUMBER, "same", operator.pow),
    "atan2": OpSpec(2, _REAL, "same", math.atan2),
    "hypot": OpSpec(2, _REAL, "same", math.hypot),
    "min": OpSpec(2, _NUMBER, "same", min),
    "max": OpSpec(2, _NUMBER, "same", max),
    "and": OpSpec(2, _BITS, "same", operator.and_),
    "or": OpSpec(2, _BITS, "same", operator.or_),
    "xor": OpSpec(2, _BITS, "same", operator.xor),
    "shl": OpSpec(2, ("int",), "same", operator.lshift),
    "shr": OpSpec(2, ("int",), "same", operator.rshift),
    "fold": OpSpec(2, ("int",), "same", None),  # the halves of the 64-bit product of the lowest 32 bits, combined by xor
    **{name: OpSpec(2, _ANY, "bool", f) for name, f in _COMPARE.items()},
    "where": OpSpec(3, _ANY, "same", None),
    "cast": OpSpec(1, _ANY, "any", None),
}
_LEAVES = ("index", "bound", "score", "const", "scalar", "load", "tensor")


@dataclass(frozen=True, eq=False)
class Expr:
    """A verified, pruned expression: ``nodes`` in order and the positions of its ``outputs``.

    Two expressions are equal when their content is; ``key`` is a hash of that content, the same in every process.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and (self.nodes, self.outputs) == (other.nodes, other.outputs)

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        return content_key(self.nodes, self.outputs)

    @property
    def output(self) -> Node:
        """The only output's node."""
        (position,) = self.outputs
        return self.nodes[position]

    @cached_property
    def tensor_slots(self) -> tuple[int, ...]:
        """The slots of the captured tensors that are read, ascending."""
        return tuple(sorted({node.attr for node in self.nodes if node.op in ("load", "tensor")}))  # type: ignore[type-var, misc]

    @property
    def without_detach(self) -> Expr:
        """The expression without its ``detach`` nodes, for code that takes no more derivatives."""
        return self if self._undetached is None else self._undetached

    @cached_property
    def _undetached(self) -> Expr | None:
        if all(node.op != "detach" for node in self.nodes):
            return None  # a cached reference to itself would be a cycle
        builder = Builder()
        new: list[int] = []
        for node in self.nodes:
            args = [new[a] for a in node.args]
            new.append(args[0] if node.op == "detach" else builder.add(node.op, *args, dtype=node.dtype, attr=node.attr))
        return builder.build(*(new[o] for o in self.outputs))

    def with_numbers(self, numbers: Sequence[int | float]) -> Expr:
        """The expression of the first output with the captured numbers, by slot, as literals."""
        builder = Builder()
        new: list[int] = []
        for node in self.nodes:
            args = [new[a] for a in node.args]
            if node.op == "scalar":
                new.append(builder.const(numbers[node.attr]))  # type: ignore[call-overload]
            else:
                new.append(
                    builder.cast(args[0], node.dtype)
                    if node.op == "cast"
                    else builder.add(node.op, *args, dtype=node.dtype, attr=node.attr)
                )
        return builder.build(new[self.outputs[0]])

    def of_first_output(self) -> Expr:
        """The expression of the first output alone. A builder puts the nodes that only later outputs need behind it."""
        return Expr(self.nodes[: self.outputs[0] + 1], self.outputs[:1])

    def conjuncts(self) -> list[int]:
        """The nodes whose conjunction a mask's output is, in order."""
        found: list[int] = []
        pending = [self.outputs[0]]
        while pending:
            at = pending.pop()
            if self.nodes[at].op == "and" and self.nodes[at].dtype is torch.bool:
                pending += reversed(self.nodes[at].args)
            elif at not in found:
                found.append(at)
        return found

    @cached_property
    def uses_score(self) -> bool:
        return any(node.op == "score" for node in self.nodes)

    def __str__(self) -> str:
        lines = []
        for position, node in enumerate(self.nodes):
            dtype = str(node.dtype).removeprefix("torch.") if not is_weak(node.dtype) else node.dtype.__name__  # type: ignore[union-attr]
            words = [node.op, *([str(node.attr)] if node.attr is not None else []), *(f"%{a}" for a in node.args)]
            lines.append(f"%{position}: {dtype} = {' '.join(words)}")
        return "\n".join([*lines, "-> " + ", ".join(f"%{o}" for o in self.outputs)])


class Builder:
    """Builds an ``Expr`` node by node; equal nodes are shared, and arithmetic on literals is folded."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._position: dict[tuple, int] = {}

    def add(self, op: str, *args: int, dtype: DType | None = None, attr: Hashable = None) -> int:
        """Position of the node ``op(*args)``. dtype: given for leaves and casts, derived for other operations."""
        if op == "cast" and self.nodes[args[0]].dtype == dtype:
            return args[0]
        if dtype is None:
            dtype = torch.bool if OPS[op].result == "bool" else self.nodes[args[-1]].dtype
        node = Node(op, args, dtype, attr)
        simpler = self._simplify(node)
        if simpler is not None:
            return simpler
        # 0.0 == -0.0 and 1 == True in Python, and NaN != NaN, so a literal is identified by its text
        identity = (op, args, dtype, repr(attr))
        if identity not in self._position:
            self._position[identity] = len(self.nodes)
            self.nodes.append(node)
        return self._position[identity]

    def const(self, value: int | float | bool, dtype: DType | None = None) -> int:
        if dtype is None:
            dtype = torch.bool if isinstance(value, bool) else type(value)
        return self.add("const", dtype=dtype, attr=value)

    def cast(self, position: int, dtype: DType) -> int:
        node = self.nodes[position]
        if node.op == "const" and not is_weak(dtype) and node.dtype != dtype:
            kind = category(dtype)
            if kind == "int" and category(node.dtype) != "float":
                return self.const(wrapped(int(node.attr), dtype), dtype)  # type: ignore[arg-type, call-overload]
            if kind == "int" and math.isfinite(node.attr) and wrapped(int(node.attr), dtype) == int(node.attr):  # type: ignore
                return self.const(int(node.attr), dtype)  # type: ignore[call-overload]
            if kind != "int":
                return self.const({"bool": bool, "float": float}[kind](node.attr), dtype)  # type: ignore[arg-type]
        return self.add("cast", position, dtype=dtype)

    def promote(self, *positions: int) -> tuple[int, ...]:
        """The values cast to the dtype in which torch would combine them."""
        dtype = result_dtype([self.nodes[p].dtype for p in positions])
        return tuple(self.cast(p, dtype) for p in positions)

    def copy(self, expr: Expr, position: int | None = None, replace: dict[int, int] | None = None) -> int:
        """Copies the value at ``position`` (default: the only output) of ``expr``; ``replace`` maps positions of ``expr`` to positions
        here."""
        done = dict(replace or {})
        target = expr.outputs[0] if position is None else position
        for old in _reachable(expr.nodes, [target], stop=done):
            node = expr.nodes[old]
            done[old] = self.add(node.op, *(done[a] for a in node.args), dtype=node.dtype, attr=node.attr)
        return done[target]

    def build(self, *outputs: int) -> Expr:
        """The expression of ``outputs`` alone, renumbered in a canonical order, verified."""
        order = _reachable(self.nodes, outputs, stop={})
        new = {old: position for position, old in enumerate(order)}
        nodes = tuple(self.nodes[old]._replace(args=tuple(new[a] for a in self.nodes[old].args)) for old in order)
        expr = Expr(nodes, tuple(new[o] for o in outputs))
        verify(expr)
        return expr

    def _literal(self, position: int) -> int | float | bool | None:
        node = self.nodes[position]
        return node.attr if node.op == "const" else None  # type: ignore[return-value]

    def _simplify(self, node: Node) -> int | None:
        if node.op in _LEAVES or node.op == "native":
            return None
        literals = [self._literal(a) for a in node.args]
        spec = OPS[node.op]
        if spec.on_host and None not in literals and all(is_weak(self.nodes[a].dtype) for a in node.args):
            try:
                return self.const(spec.on_host(*literals))
            except (ArithmeticError, ValueError):
                return None  # torch gives inf or nan here, which run time computes
        if None not in literals and category(node.dtype) != "float" and category(self.nodes[node.args[-1]].dtype) == "int":
            folded = _on_whole_numbers(node, literals)  # type: ignore[arg-type]
            if folded is not None:
                return self.const(folded, node.dtype)
        if node.op in ("and", "or") and node.dtype is torch.bool:
            absorbing = node.op == "or"
            for literal, this, other in ((literals[0], *node.args), (literals[1], *reversed(node.args))):
                if literal is not None:
                    return this if literal is absorbing else other  # type: ignore[return-value]
            return node.args[0] if node.args[0] == node.args[1] else None
        if node.op == "where":
            if literals[0] is not None:
                return node.args[1] if literals[0] else node.args[2]
            return node.args[1] if node.args[1] == node.args[2] else None
        if node.op == "not" and node.dtype is torch.bool:
            if literals[0] is not None:
                return self.const(not literals[0])
            inner = self.nodes[node.args[0]]
            return inner.args[0] if inner.op == "not" else None
        if category(node.dtype) == "int" and node.op in ("add", "sub") and literals[1] == 0:
            return node.args[0]
        if category(node.dtype) == "int" and node.op == "add" and literals[0] == 0:
            return node.args[1]
        if node.op in ("mul", "div", "floordiv") and literals[1] == 1 and (node.op != "floordiv" or category(node.dtype) == "int"):
            return node.args[0]
        if node.op == "mul" and literals[0] == 1:
            return node.args[1]
        return None


def _on_whole_numbers(node: Node, literals: list[int]) -> int | bool | None:
    """The result of an operation on literals of one integer or bool dtype; None if run time computes it."""
    f = OPS[node.op].on_host
    if f is None or is_weak(node.dtype) or node.op == "pow" or (node.op in ("floordiv", "mod") and literals[1] == 0):
        return None
    if node.dtype is torch.bool:
        return bool(f(*literals))
    if node.op in ("shl", "shr"):
        bits = torch.iinfo(node.dtype).bits  # type: ignore[arg-type]
        if not 0 <= literals[1] < bits:  # as in torch: all bits are shifted out, and a right shift fills with the sign bit
            return 0 if node.op == "shl" else -int(literals[0] < 0)
    return wrapped(f(*literals), node.dtype)  # type: ignore[arg-type]


def result_dtype(dtypes: Iterable[DType]) -> DType:
    """torch's type promotion among scalars of these dtypes; weak numbers count as Python numbers."""
    dtypes = list(dtypes)
    strong = [d for d in dtypes if not is_weak(d)]
    weak_float = any(d is float for d in dtypes)
    if not strong:
        return float if weak_float else int
    result = strong[0]
    for dtype in strong[1:]:
        result = torch.promote_types(result, dtype)  # type: ignore[arg-type]
    if weak_float and category(result) != "float":
        return torch.get_default_dtype()
    if result is torch.bool and any(d is int for d in dtypes):
        return torch.int64
    return result


def _reachable(nodes: Iterable[Node], targets: Iterable[int], stop: dict[int, int]) -> list[int]:
    """Positions that ``targets`` need, arguments first, in depth-first order (canonical: independent of dead nodes)."""
    nodes = list(nodes)
    order: list[int] = []
    seen = set(stop)
    stack = [(t, False) for t in reversed(list(targets))]
    while stack:
        position, expanded = stack.pop()
        if position in seen:
            continue
        if expanded:
            seen.add(position)
            order.append(position)
            continue
        stack.append((position, True))
        stack.extend((a, False) for a in reversed(nodes[position].args) if a not in seen)
    return order


def bool_of(expr: Expr, position: int) -> int | None:
    """The bool that the index at ``position`` is cast from; None for any other index."""
    while expr.nodes[position].op == "cast" and category(expr.nodes[position].dtype) == "int":
        position = expr.nodes[position].args[0]
    return position if expr.nodes[position].dtype is torch.bool else None


def verify(expr: Expr) -> None:
    """Asserts that every node obeys ``OPS``; a failure is a bug in the pass that built ``expr``, never a user's mistake."""
    for position, node in enumerate(expr.nodes):
        where = f"%{position} {node}"
        assert all(0 <= a < position for a in node.args), f"{where}: an argument does not stand before it"
        if node.op in _LEAVES:
            _verify_leaf(node, [expr.nodes[a].dtype for a in node.args], where)
            continue
        if node.op == "native":
            assert isinstance(node.attr, str) and node.dtype in (torch.bool, torch.float32), f"{where}: no function's name, or no mod"
            continue
        assert node.op in OPS, f"{where}: unknown operation"
        spec = OPS[node.op]
        assert len(node.args) == spec.arity, f"{where}: takes {spec.arity} arguments"
        dtypes = [expr.nodes[a].dtype for a in node.args]
        if node.op == "cast":
            continue
        if node.op == "where":
            assert dtypes.pop(0) is torch.bool, f"{where}: the condition is not bool"
        assert len(set(dtypes)) == 1, f"{where}: operands of several dtypes {dtypes}"
        assert category(dtypes[0]) in spec.operands, f"{where}: takes {spec.operands} operands, not {dtypes[0]}"
        assert node.dtype == (torch.bool if spec.result == "bool" else dtypes[0]), f"{where}: wrong result dtype"
    assert all(0 <= o < len(expr.nodes) for o in expr.outputs), "an output that is not a node"


def _verify_leaf(node: Node, argument_dtypes: list[DType], where: str) -> None:
    if node.op == "index":
        assert node.attr in INDICES and node.dtype is torch.int64, f"{where}: not an index"
    elif node.op == "bound":
        assert isinstance(node.attr, tuple), f"{where}: not a leaf of bounds.py"
    elif node.op == "score":
        assert node.dtype in (torch.float32, torch.float64), f"{where}: a score is float32 or float64"
    elif node.op == "load":
        assert isinstance(node.attr, int) and all(d is torch.int64 for d in argument_dtypes), f"{where}: indices must be int64"
    elif node.op == "tensor":
        assert isinstance(node.attr, int), f"{where}: not a slot"
    elif node.op == "scalar":
        assert isinstance(node.attr, int) and is_weak(node.dtype), f"{where}: a captured number is weak"
    elif node.op == "const" and category(node.dtype) == "int" and not is_weak(node.dtype):
        assert wrapped(node.attr, node.dtype) == node.attr, f"{where}: a literal outside of its dtype"  # type: ignore[arg-type]
    assert node.op in ("load", "bound") or not node.args, f"{where}: a leaf takes no arguments"
