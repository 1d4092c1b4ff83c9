"""Symbolic values: the operands that a mod computes with while it is traced.

A ``Value`` is one number inside the mod: an index, the score, a captured number, or a result computed from them. It implements Python's
operators, torch's functions (through ``__torch_function__``) and the tensor methods of the table below, and records each as a node. A
``View`` is a captured tensor with some dimensions still to be indexed; in arithmetic it is a row (``vectors.py``). Code that has no meaning
for one number per (q, kv), such as a Python ``if``, raises ``ModError`` with the user's line and the cure.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch

from anyattn.mods.ir.expr import HALVES, OPS, Builder, category, is_weak, result_dtype
from anyattn.mods.tracing.activations import ACTIVATIONS, rounded_to
from anyattn.mods.tracing.arguments import check_call, fitting, refuse_bare
from anyattn.mods.tracing.diagnostics import mod_error, truth_cure
from anyattn.mods.tracing.random_numbers import is_random, refuse_random
from anyattn.mods.tracing.vectors import Row, Vector, as_vector, cuts, from_values, refuse_many, spelled_out
from anyattn.mods.tracing.weak_captures import NeedsNumber, ask_for_truths, scalar_slots

__all__ = ["FUNCTIONS", "Value", "View", "binary", "builder_in", "cast"]


class View(Row):
    """A captured tensor with some dimensions indexed: ``indices[d]`` is a node, or None while dimension d is not indexed."""

    def __init__(self, builder: Builder, slot: int, tensor: torch.Tensor, indices: tuple[int | None, ...]):
        self.builder, self.slot, self.tensor, self.indices = builder, slot, tensor, indices
        self.dtype, self.device = tensor.dtype, tensor.device

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS:
            return lambda *args, **kwargs: _call(name, self, *args, **kwargs)
        raise mod_error(f"a mod cannot use .{name} of a captured tensor indexed in part", "index every dimension, as in table[h, q_idx]")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return Value.__torch_function__(func, types, args, kwargs)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size([n for n, i in zip(self.tensor.shape, self.indices, strict=True) if i is None])

    def components(self) -> Vector:
        """The remaining row, one value per element."""
        refuse_many(self.shape)
        made = [self[place] for place in itertools.product(*map(range, self.shape))]
        return from_values(made, self.shape)

    def __getitem__(self, key: Any) -> Any:
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is None or cuts(k) for k in keys):
            keys = spelled_out(keys, self.ndim)
            whole = self[tuple(slice(None) if isinstance(k, slice) else k for k in keys if k is not None)]
            return as_vector(whole, self.builder)[tuple(k for k in keys if k is None or isinstance(k, slice))]
        rank = len(self.shape)
        if Ellipsis in [k for k in keys if not isinstance(k, (Value, View, torch.Tensor))]:
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (rank - len(keys) + 1)
        if len(keys) > rank:
            raise mod_error(
                f"a captured tensor of shape {tuple(self.tensor.shape)} is indexed with {len(keys)} indices where {rank} dimensions are "
                f"left",
                "give one index per dimension",
            )
        indices = list(self.indices)
        open_dims = [d for d, i in enumerate(indices) if i is None]
        for dim, item in zip(open_dims, keys, strict=False):
            if not (isinstance(item, slice) and item == slice(None)):
                indices[dim] = self._index(item, dim)
        return View(self.builder, self.slot, self.tensor, tuple(indices)).settled()

    def _index(self, item: Any, dim: int) -> int:
        size = self.tensor.shape[dim]
        if hasattr(item, "__index__") and not isinstance(item, (bool, Value, torch.Tensor)):
            item = operator.index(item)
            if not -size <= item < size:
                raise mod_error(f"index {item} is out of range for dimension {dim} of size {size}", f"use {-size} to {size - 1}")
            return self.builder.const(item if item >= 0 else int(item + size), torch.int64)  # size may be a compiler's symbolic int
        if isinstance(item, torch.Tensor) and item.ndim == 0:
            item = Value.lift(self.builder, item)
        if isinstance(item, View):
            item = item.settled(required=True)
        if not isinstance(item, Value):
            raise mod_error(
                f"a captured tensor is indexed with {type(item).__name__} {item!r}",
                "use an integer, or an integer computed from b, h, q_idx, kv_idx, one per dimension (slices other than : are taken "
                "outside the mod)",
            )
        if item.kind not in (int, torch.int32, torch.int64):
            meant = ", which torch reads as a mask" if item.kind in (torch.bool, torch.uint8) else ""
            raise mod_error(f"a captured tensor is indexed with a {item.kind} value{meant}", "convert it: table[x.long()]")
        return self.builder.cast(item.node, torch.int64)

    def settled(self, required: bool = False) -> Any:
        """The loaded ``Value`` once every dimension is indexed; before that the view itself (an error if ``required``)."""
        if None not in self.indices:
            load = self.builder.add("load", *self.indices, dtype=self.tensor.dtype, attr=self.slot)  # type: ignore[arg-type]
            return Value(self.builder, load)
        if required:
            raise mod_error(
                f"a captured tensor of shape {tuple(self.tensor.shape)} still has shape {self.shape} where one number is needed",
                "index every dimension, as in table[h, q_idx]",
            )
        return self


class Value:
    """One number per (b, h, q_idx, kv_idx), as a node of ``builder``."""

    def __init__(self, builder: Builder, node: int):
        self.builder, self.node = builder, node

    # -- attributes of a tensor of rank 0
    shape, ndim = torch.Size(()), 0
    is_shared = False  # whether torch would have a view of this tensor, or this be one

    @property
    def kind(self) -> torch.dtype | type:
        return self.builder.nodes[self.node].dtype

    @property
    def dtype(self) -> torch.dtype:
        if self.kind is float:
            return torch.get_default_dtype()
        return torch.int64 if self.kind is int else self.kind  # type: ignore[return-value]

    @property
    def device(self) -> torch.device:
        return self.builder.device  # type: ignore[attr-defined]

    @property
    def is_tensor(self) -> bool:
        """Whether this is a tensor of rank 0 rather than a Python number."""
        return not is_weak(self.kind)

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size(())

    def is_floating_point(self) -> bool:
        return category(self.kind) == "float"

    @staticmethod
    def lift(builder: Builder, item: Any) -> Value:
        """``item`` as a value: a ``Value`` itself, a literal, or a captured tensor of rank 0."""
        if isinstance(item, Value):
            if item.builder is not builder:
                raise mod_error("a value of one mod's trace is used in that of another", "capture what the mod needs, and compute it there")
            return item
        if isinstance(item, Vector):
            cure = "index every dimension, as in table[h, q_idx], or reduce the row: .sum(-1), .any(-1)"
            raise mod_error(f"a row of shape {tuple(item.shape)} stands where one number is needed", cure, item.made_at)
        if isinstance(item, View):
            return item.settled(required=True)
        if isinstance(item, torch.Tensor):
            return builder.capture(item).settled(required=True)  # type: ignore[attr-defined]
        if hasattr(item, "item") and getattr(item, "shape", None) == ():  # NumPy scalars; np.float64 is a float too
            item = item.item()
        if isinstance(item, int) and not -(2**63) <= item < 2**64:
            raise mod_error(f"the number {item} has more than the 64 bits of torch's whole numbers", "use one of 64 bits, or a float")
        for number in (bool, int, float):
            if isinstance(item, number):  # an IntEnum member is an int; the IR has exact types only
                return Value(builder, builder.const(number.__pos__(item) if number is not bool else item))  # type: ignore[arg-type]
        cure = "use numbers, indices, the score and captured tensors"
        if type(item).__module__ == "numpy":
            cure += "; wrap an array outside the mod: table = torch.from_numpy(array)"
        raise mod_error(f"a mod cannot compute with a {type(item).__name__}", cure)

    # -- Python's number protocol
    def python_number(self, use: str, cure: str = "") -> Any:
        """Requests a new trace in which this is a Python number; ``ModError`` if it depends on more than captured numbers."""
        scalars = scalar_slots(self.builder.nodes, self.node)
        if scalars:
            raise NeedsNumber(scalars)
        if scalars is not None and (node := self.builder.nodes[self.node]).op == "const":
            return node.attr
        raise mod_error(f"{use} needs one Python number, but this value differs per (b, h, q_idx, kv_idx)", cure or truth_cure())

    def __bool__(self) -> bool:
        return self.python_number("a truth value")

    def __int__(self) -> int:
        return self.python_number("int()")

    def __index__(self) -> int:
        cure = "a table is a tensor made outside the mod: table = torch.tensor(a_list); range() and sizes take captured numbers"
        return self.python_number("a Python index or range()", cure)

    def __array__(self, *_: Any, **__: Any) -> Any:
        """NumPy calls this when a value indexes an array or is passed to one of NumPy's functions."""
        cure = "wrap a table outside the mod, table = torch.from_numpy(array), and use torch's functions"
        return self.python_number("NumPy", cure)

    def __float__(self) -> float:
        return self.python_number("float()")

    def item(self) -> Any:
        return self.python_number(".item()")

    def tolist(self) -> Any:
        return self.python_number(".tolist()")

    def __contains__(self, item: Any) -> bool:
        raise mod_error("`in` has no meaning per (q, kv)", "write it with == and |")

    def _need_number(self) -> None:
        """Requests a new trace if this is computed from captured numbers alone: hash and text must be those of a Python number."""
        if is_weak(self.kind) and (scalars := scalar_slots(self.builder.nodes, self.node)):
            raise NeedsNumber(scalars)

    def __hash__(self) -> int:
        self._need_number()
        return id(self)

    def __repr__(self) -> str:
        self._need_number()
        return f"<a {self.kind} value that differs per (b, h, q_idx, kv_idx)>"

    def __round__(self, digits: int | None = None) -> Any:
        if is_weak(self.kind):
            return round(self.python_number("round()"), digits)  # rounds a float to an int, or counts decimal digits as Python does
        return _call("round", self) if digits is None else _call("round", self, decimals=digits)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS and hasattr(torch.Tensor, name):
            function = "where of a tensor" if name == "where" else name
            return lambda *args, **kwargs: _call(function, self, *args, **kwargs)
        if is_random(name):
            refuse_random(f"torch.Tensor.{name}")
        if hasattr(self.kind, name) and is_weak(self.kind):  # such as n.bit_length() of a captured number
            return getattr(self.python_number(f".{name}"), name)
        raise mod_error(f"tensor method or attribute .{name} has no meaning inside a mod", _supported())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        raw = getattr(func, "__name__", str(func))
        name = raw.strip("_") if raw.startswith("__") else raw
        if func is torch.Tensor.where:
            name = "where of a tensor"
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)) and not str(func).startswith("aten."):
            raise mod_error(f"torch.ops.{func} is a custom operator, and a mod may use torch's own operators only", _supported())
        if name.endswith("_") and name[:-1] in FUNCTIONS:
            raise mod_error(f"torch.{name} writes into a tensor, and a mod has none", f"use what {name[:-1]} returns")
        if name not in FUNCTIONS:
            _ask_for_numbers((*args, *(kwargs or {}).values()))
            raise mod_error(f"torch.{name} has no meaning inside a mod", _supported())
        return _call(name, *args, **(kwargs or {}))


def _ask_for_numbers(items: Any) -> None:
    """Requests the captured numbers in ``items`` as Python numbers if nothing else there is symbolic, as in ``torch.arange(n)``."""
    values = [item for given in items for item in (given if isinstance(given, (list, tuple)) else (given,))]
    slots = [scalar_slots(item.builder.nodes, item.node) for item in values if isinstance(item, Value)]
    if slots and None not in slots and not any(isinstance(item, View) for item in values):
        raise NeedsNumber(frozenset().union(*slots))  # type: ignore[arg-type]


# ---- the functions a mod may call, by the name that torch and Tensor share; functions.py adds to them


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Calls our version of torch's function ``name``, after checking that it supports every argument."""
    function = FUNCTIONS[name]
    return function(*args, **check_call(name, function, args, kwargs))


def builder_in(items: Any) -> Builder | None:
    """The builder of the first symbolic value among ``items``, including nested lists and tuples."""
    for item in items:
        if isinstance(item, (Value, View)):
            return item.builder
        if isinstance(item, (list, tuple)) and (found := builder_in(item)) is not None:
            return found
    return None


def _values(*items: Any) -> tuple[Builder, list[Value]]:
    builder = builder_in(items)
    assert builder is not None, "called without a symbolic value"
    return builder, [Value.lift(builder, i) for i in items]


def _real(builder: Builder, value: Value) -> int:
    """The value's node in the float dtype in which torch would compute it."""
    if category(value.kind) == "float":
        return value.node
    return builder.cast(value.node, float if value.kind is int else torch.get_default_dtype())


def _unary(op: str) -> Callable[..., Value]:
    def apply(input: Any) -> Value:
        builder, (value,) = _values(input)
        refuse_bare(value)
        ask_for_truths(builder.nodes, op, value.node)
        is_cut = op in ("floor", "ceil", "trunc", "round")
        if is_cut and category(value.kind) == "int":
            return value  # already a whole number
        if category(value.kind) not in OPS[op].operands and OPS[op].operands == ("float",) and not is_cut:
            return Value(builder, builder.add(op, _real(builder, value)))
        if category(value.kind) not in OPS[op].operands:
            raise mod_error(f"`{op}` does not apply to a {value.kind} value", "convert it first, as in x.to(torch.int64)")
        return Value(builder, builder.add(op, value.node))

    return apply


def binary(op: str, swapped: bool = False, tie: str | None = None) -> Callable[..., Value]:
    """A function of two values. tie: the argument that gets an extreme's derivative at a float tie, ``"first"`` or ``"second"``; None: half
    each."""

    def apply(input: Any, other: Any) -> Value:
        if isinstance(input, (str, type(None))) or isinstance(other, (str, type(None))):
            raise mod_error(f"a mod cannot compute with {input!r} and {other!r}", "use numbers, indices, the score and captured tensors")
        builder, (a, b) = _values(*((other, input) if swapped else (input, other)))
        refuse_bare(a, b)
        ask_for_truths(builder.nodes, op, a.node, b.node)
        left, right = builder.promote(a.node, b.node)
        sides = builder.nodes[left], builder.nodes[right]
        if sides[0].dtype is int and any(isinstance(n.attr, int) and n.attr >= 2**63 for n in sides):  # Python's arithmetic
            raise NeedsNumber(scalar_slots(builder.nodes, left) | scalar_slots(builder.nodes, right))  # type: ignore[operator]
        name = op
        if builder.nodes[left].dtype is torch.bool:
            name = {"add": "or", "mul": "and", "max": "or", "min": "and"}.get(op, op)  # + and * of bools, as in torch
        kind = category(builder.nodes[left].dtype)
        if name in ("div", "atan2") and kind != "float":
            left, right = _real(builder, Value(builder, left)), _real(builder, Value(builder, right))
        elif kind not in OPS[name].operands:
            raise mod_error(f"`{op}` does not apply to {a.kind} and {b.kind}", "convert one side, as in x.to(torch.int64)")
        return Value(builder, builder.add(name, left, right, attr=tie if kind == "float" else None))

    return apply


def _quotient(input: Any, other: Any) -> Value:
    """``input / other``. torch's quotient of a number and a tensor is the number times the reciprocal, which rounds twice."""
    is_number = is_weak(input.kind) if isinstance(input, Value) else isinstance(input, (bool, int, float))
    if not is_number or not isinstance(other, Value) or is_weak(other.kind):
        return binary("div")(input, other)
    inverse = _unary("reciprocal")(other)
    return inverse if type(input) in (int, float) and input == 1 else binary("mul")(inverse, input)


def _div(input: Any, other: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return binary("div")(input, other)
    if rounding_mode == "floor":
        return binary("floordiv")(input, other)
    if rounding_mode != "trunc":
        raise mod_error(f"div is given rounding_mode={rounding_mode!r}", "use None, 'trunc' or 'floor'")
    _, (a, b) = _values(input, other)
    whole = category(result_dtype([a.kind, b.kind])) != "float"
    if not whole:
        dtype: Any = result_dtype([a.kind, b.kind])
        if dtype in HALVES and is_weak(
            b.kind
        ):  # torch rounds the quotient of two 16-bit tensors to 16 bits first, but not that by a number
            a = cast(a, torch.float32)
        return cast(_unary("trunc")(binary("div")(a, b)), dtype)
    return binary("floordiv")(binary("sub")(a, binary("fmod")(a, b)), b)  # subtracting the remainder first makes the quotient exact


def _where(condition: Any, input: Any, other: Any) -> Value:
    builder, (c, x, y) = _values(condition, input, other)
    if c.kind is not torch.bool:
        raise mod_error(f"torch.where's condition is a {c.kind} value", "compare it: torch.where(x != 0, a, b)")
    refuse_bare(x, y)
    kind = result_dtype([x.kind, y.kind])
    left, right = builder.promote(*(fitting(value, kind, "torch.where").node for value in (x, y)))
    if is_weak(builder.nodes[left].dtype):  # torch.where(c, 1, 0) returns a tensor, not a Python number
        strong = torch.get_default_dtype() if builder.nodes[left].dtype is float else torch.int64
        left, right = builder.cast(left, strong), builder.cast(right, strong)
    return Value(builder, builder.add("where", c.node, left, right))


def cast(value: Any, dtype: torch.dtype) -> Value:
    builder, (value,) = _values(value)
    return Value(builder, builder.cast(value.node, dtype))


def _logical(op: str) -> Callable[..., Value]:
    def apply(input: Any, other: Any) -> Value:
        _, (a, b) = _values(input, other)
        return binary(op)(cast(a, torch.bool), cast(b, torch.bool))

    return apply


def _getitem(x: Any, key: Any) -> Any:
    if isinstance(x, torch.Tensor):
        x = builder_in((key,)).capture(x)  # type: ignore[union-attr]
    if isinstance(x, Value):
        if x.is_tensor and all(k is None or k is Ellipsis for k in (key if isinstance(key, tuple) else (key,))):
            return as_vector(x, x.builder)[key]
        raise mod_error("a mod's index or score is one number and cannot be indexed", "index the captured tensor instead")
    return x[key]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in OPS if OPS[name].arity == 1 and name not in ("not", "cast", "detach")},
    **{name: binary(op) for op in ("add", "sub", "mul", "floordiv", "mod", "fmod") for name in (op,)},
    **{name: binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor")},
    **{"r" + name: binary(name, swapped=True) for name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor")},
    "fix": _unary("trunc"),
    "sgn": _unary("sign"),
    "negative": _unary("neg"),
    "absolute": _unary("abs"),
    "special_expit": _unary("sigmoid"),
    **{f"special_{name}": _unary(name) for name in ("erf", "erfinv", "exp2", "expm1", "log1p")},
    "arctan": _unary("atan"),
    **dict.fromkeys(("atan2", "arctan2"), binary("atan2")),
    "hypot": binary("hypot"),
    **dict.fromkeys(("round", "special_round"), rounded_to(_unary("round"))),
    **ACTIVATIONS,
    "invert": _unary("not"),
    "bitwise_not": _unary("not"),
    "logical_not": lambda input: _unary("not")(cast(input, torch.bool)),
    "pos": lambda x: x,
    "multiply": binary("mul"),
    "div": _div,
    "divide": _div,
    "truediv": _quotient,
    "rtruediv": lambda input, other: _quotient(other, input),
    "true_divide": binary("div"),
    "rdiv": lambda input, other: _quotient(other, input),
    "floor_divide": binary("floordiv"),
    "remainder": binary("mod"),
    "pow": binary("pow"),
    "minimum": binary("min"),
    "maximum": binary("max"),
    "where": _where,
    "bitwise_and": binary("and"),
    "bitwise_or": binary("or"),
    "bitwise_xor": binary("xor"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "lshift": binary("shl"),
    "rshift": binary("shr"),
    "rlshift": binary("shl", swapped=True),
    "rrshift": binary("shr", swapped=True),
    "bitwise_left_shift": binary("shl"),
    "bitwise_right_shift": binary("shr"),
    **{name: binary(op) for name, op in {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"}.items()},
    "not_equal": binary("ne"),
    "getitem": _getitem,
}  # fmt: skip


def _supported() -> str:
    names = ", ".join(sorted(name for name in FUNCTIONS if " " not in name))
    return f"a mod is arithmetic on single numbers; it may use Python's operators and: {names}"
