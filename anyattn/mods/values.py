"""The symbolic values that a mod computes with while it is traced.

A ``Value`` stands for one number inside the mod: an index, the score, a captured number, or anything computed from them. It answers to
Python's operators, to torch's functions (through ``__torch_function__``) and to the tensor methods of the table below, and records each
as a node. A ``View`` is a captured tensor of which some dimensions are still to be indexed; computed with as it is, it is a short row of
values (``vectors.py``).

What has no meaning as one number per (q, kv), such as a Python ``if``, raises ``ModError`` with the user's line and the cure.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from anyattn.mods.activations import ACTIVATIONS, rounded_to
from anyattn.mods.ir import OPS, Builder, category, is_weak, result_dtype
from anyattn.mods.reductions import with_rows
from anyattn.mods.source import mod_error, truth_cure
from anyattn.mods.vectors import Vector, as_vector, cuts, from_values, refuse_many, spelled_out

__all__ = ["FUNCTIONS", "NeedsNumber", "Value", "View"]


class NeedsNumber(Exception):
    """The mod's body needs these captured numbers as Python numbers (``range(n)``): trace again with them as constants."""

    def __init__(self, slots: frozenset[int]):
        self.slots = slots


class View:
    """A captured tensor with some dimensions indexed: ``indices[d]`` is a node, or None while dimension d is still whole."""

    def __init__(self, builder: Builder, slot: int, tensor: torch.Tensor, indices: tuple[int | None, ...]):
        self.builder, self.slot, self.tensor, self.indices = builder, slot, tensor, indices
        self.dtype, self.device = tensor.dtype, tensor.device

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in FUNCTIONS:
            return lambda *args, **kwargs: FUNCTIONS[name](self, *args, **kwargs)
        raise mod_error(f"a mod cannot use .{name} of a captured tensor indexed in part", "index every dimension, as in table[h, q_idx]")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return Value.__torch_function__(func, types, args, kwargs)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(n for n, i in zip(self.tensor.shape, self.indices, strict=True) if i is None)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        raise mod_error("a mod cannot loop over a captured tensor", "index it: table[q_idx], or loop over range(n)")

    def components(self) -> Vector:
        """The row that is left, element by element."""
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
        if isinstance(item, int) and not isinstance(item, bool):
            if not -size <= item < size:
                raise mod_error(f"index {item} is out of range for dimension {dim} of size {size}", f"use {-size} to {size - 1}")
            return self.builder.const(item % size, torch.int64)
        if isinstance(item, torch.Tensor) and item.ndim == 0 and not item.is_floating_point() and item.dtype is not torch.bool:
            item = Value.lift(self.builder, item)
        if isinstance(item, View):
            item = item.settled(required=True)
        if not isinstance(item, Value):
            raise mod_error(
                f"a captured tensor is indexed with {type(item).__name__} {item!r}",
                "use an integer, or an integer computed from b, h, q_idx, kv_idx, one per dimension (slices other than : are taken "
                "outside the mod)",
            )
        if category(item.kind) != "int":
            raise mod_error(f"a captured tensor is indexed with a {item.kind} value", "convert it: table[x.to(torch.int64)]")
        return self.builder.cast(item.node, torch.int64)

    def settled(self, required: bool = False) -> Any:
        """The loaded ``Value`` once every dimension is indexed, before that the view itself (an error if ``required``)."""
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

    # -- what a tensor of rank 0 says of itself
    shape, ndim = torch.Size(()), 0

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
        """Whether a tensor of rank 0, and not a Python number."""
        return not is_weak(self.kind)

    def dim(self) -> int:
        return 0

    def size(self) -> torch.Size:
        return torch.Size(())

    def is_floating_point(self) -> bool:
        return category(self.kind) == "float"

    @staticmethod
    def lift(builder: Builder, item: Any) -> Value:
        """``item`` as a value: itself, a literal, or a captured tensor of rank 0."""
        if isinstance(item, Value):
            return item
        if isinstance(item, Vector):
            cure = "index every dimension, as in table[h, q_idx], or reduce the row: .sum(-1), .any(-1)"
            raise mod_error(f"a row of shape {tuple(item.shape)} stands where one number is needed", cure, item.made_at)
        if isinstance(item, View):
            return item.settled(required=True)
        if isinstance(item, torch.Tensor):
            return builder.capture(item).settled(required=True)  # type: ignore[attr-defined]
        if hasattr(item, "item") and getattr(item, "shape", None) == ():  # numpy scalars; np.float64 is a float as well
            item = item.item()
        for number in (bool, int, float):
            if isinstance(item, number):  # an IntEnum member is an int: the IR knows exact types only
                return Value(builder, builder.const(number(item)))
        raise mod_error(f"a mod cannot compute with a {type(item).__name__}", "use numbers, indices, the score and captured tensors")

    # -- what Python asks of a number
    def _python_number(self, use: str) -> Any:
        scalars = _scalar_slots(self.builder, self.node)
        if scalars is not None:
            raise NeedsNumber(scalars)
        raise mod_error(f"{use} needs one Python number, but this value differs per (b, h, q_idx, kv_idx)", truth_cure())

    def __bool__(self) -> bool:
        return self._python_number("a truth value")

    def __int__(self) -> int:
        return self._python_number("int()")

    def __index__(self) -> int:
        return self._python_number("a Python index or range()")

    def __float__(self) -> float:
        return self._python_number("float()")

    def item(self) -> Any:
        return self._python_number(".item()")

    def tolist(self) -> Any:
        return self._python_number(".tolist()")

    def __iter__(self) -> Any:
        raise mod_error("a mod's index or score is one number and cannot be looped over", "loop over range(n) with a Python number n")

    def __len__(self) -> int:
        raise mod_error("a mod's index or score is one number and has no len()", "use captured tensor.shape for sizes")

    def __contains__(self, item: Any) -> bool:
        raise mod_error("`in` has no meaning per (q, kv)", "write it with == and |")

    def __hash__(self) -> int:
        return id(self)

    def __round__(self, digits: int | None = None) -> Value:
        return _unary("round")(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "where":  # x.where(condition, other): the one method whose self is not the function's first argument
            return lambda condition, other: _where(condition, self, other)
        if name in FUNCTIONS:
            return lambda *args, **kwargs: FUNCTIONS[name](self, *args, **kwargs)
        raise mod_error(f"tensor method or attribute .{name} has no meaning inside a mod", _SUPPORTED)

    def __array_ufunc__(self, ufunc: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """numpy's functions, which ``np.float64(2) * q_idx`` calls too."""
        name = {"power": "pow", "left_shift": "lshift", "right_shift": "rshift"}.get(ufunc.__name__, ufunc.__name__)
        if method != "__call__" or kwargs or name not in FUNCTIONS:
            raise mod_error(f"numpy's {ufunc.__name__} has no meaning inside a mod", _SUPPORTED)
        x, *rest = args
        return FUNCTIONS[name](x if isinstance(x, Value) else Value.lift(self.builder, x), *rest)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        if name not in FUNCTIONS:
            raise mod_error(f"torch.{name} has no meaning inside a mod", _SUPPORTED)
        return FUNCTIONS[name](*args, **(kwargs or {}))


def _scalar_slots(builder: Builder, node: int) -> frozenset[int] | None:
    """The captured numbers that ``node`` is computed from, None if it depends on anything else."""
    slots, stack = set(), [node]
    while stack:
        current = builder.nodes[stack.pop()]
        if current.op in ("index", "score", "load"):
            return None
        if current.op == "scalar":
            slots.add(current.attr)
        stack.extend(current.args)
    return frozenset(slots)  # type: ignore[arg-type]


# ---- the functions a mod may call, by the name that torch and Tensor share


def _values(*items: Any) -> tuple[Builder, list[Value]]:
    builder = next(i.builder for i in items if isinstance(i, (Value, View)))
    return builder, [Value.lift(builder, i) for i in items]


def _real(builder: Builder, value: Value) -> int:
    """The value's node in the float dtype that torch computes it in."""
    if category(value.kind) == "float":
        return value.node
    return builder.cast(value.node, float if value.kind is int else torch.get_default_dtype())


def _unary(op: str) -> Callable[..., Value]:
    def apply(x: Any) -> Value:
        builder, (value,) = _values(x)
        if category(value.kind) not in OPS[op].operands and OPS[op].operands == ("float",):
            if op in ("floor", "ceil", "trunc", "round"):
                return value  # whole already
            return Value(builder, builder.add(op, _real(builder, value)))
        if category(value.kind) not in OPS[op].operands:
            raise mod_error(f"`{op}` does not apply to a {value.kind} value", "convert it first, as in x.to(torch.int64)")
        return Value(builder, builder.add(op, value.node))

    return apply


def _binary(op: str, swapped: bool = False) -> Callable[..., Value]:
    def apply(x: Any, y: Any, alpha: Any = None) -> Value:
        if isinstance(x, (str, type(None))) or isinstance(y, (str, type(None))):
            raise mod_error(f"a mod cannot compute with {x!r} and {y!r}", "use numbers, indices, the score and captured tensors")
        builder, (a, b) = _values(*((y, x) if swapped else (x, y)))
        if alpha is not None and alpha != 1:
            b = _binary("mul")(b, alpha)
        left, right = builder.promote(a.node, b.node)
        name = op
        if builder.nodes[left].dtype is torch.bool:
            name = {"add": "or", "mul": "and", "max": "or", "min": "and"}.get(op, op)  # torch's meaning of + and * on bools
        kind = category(builder.nodes[left].dtype)
        if name in ("div", "atan2") and kind != "float":
            left, right = _real(builder, Value(builder, left)), _real(builder, Value(builder, right))
        elif kind not in OPS[name].operands:
            raise mod_error(f"`{op}` does not apply to {a.kind} and {b.kind}", "convert one side, as in x.to(torch.int64)")
        return Value(builder, builder.add(name, left, right))

    return apply


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _binary("div")(x, y)
    if rounding_mode == "floor":
        return _binary("floordiv")(x, y)
    _, (a, b) = _values(x, y)
    whole = category(result_dtype([a.kind, b.kind])) != "float"
    if not whole:
        return _unary("trunc")(_binary("div")(a, b))
    magnitude = _binary("floordiv")(_unary("abs")(a), _unary("abs")(b))
    return _binary("mul")(magnitude, _binary("mul")(_unary("sign")(a), _unary("sign")(b)))


def _clamp(x: Any, min: Any = None, max: Any = None) -> Value:
    if min is not None:
        x = _binary("max")(x, min)
    return x if max is None else _binary("min")(x, max)


def _where(condition: Any, a: Any, b: Any) -> Value:
    builder, (c, x, y) = _values(condition, a, b)
    if c.kind is not torch.bool:
        raise mod_error(f"torch.where's condition is a {c.kind} value", "compare it: torch.where(x != 0, a, b)")
    left, right = builder.promote(x.node, y.node)
    if is_weak(builder.nodes[left].dtype):  # torch.where(c, 1, 0) is a tensor, no longer a Python number
        strong = torch.get_default_dtype() if builder.nodes[left].dtype is float else torch.int64
        left, right = builder.cast(left, strong), builder.cast(right, strong)
    return Value(builder, builder.add("where", c.node, left, right))


def _to(x: Any, *args: Any, dtype: Any = None, **_: Any) -> Value:
    builder, (value,) = _values(x)
    for a in args:
        dtype = a if isinstance(a, torch.dtype) else a.dtype if isinstance(a, (torch.Tensor, Value)) else dtype
    return value if dtype is None else Value(builder, builder.cast(value.node, dtype))


def _cast(dtype: torch.dtype) -> Callable[..., Value]:
    return lambda x: _to(x, dtype)


def _logical(op: str) -> Callable[..., Value]:
    return lambda x, y: _binary(op)(_to(x, torch.bool), _to(_values(x, y)[1][1], torch.bool))


def _filled(value: Any = None, default_dtype: bool = False) -> Callable[..., Value]:
    """new_ones, zeros_like and their kin, of which a mod needs rank 0 only."""

    def apply(x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Value:
        builder, (like,) = _values(x)
        fill = value if value is not None else kwargs.pop("fill_value", args[-1] if args else None)
        number = Value.lift(builder, fill)
        return _to(number, dtype or like.dtype)

    return apply


def _tensor(x: Any, dtype: Any = None, **_: Any) -> Any:
    """torch.tensor of one number; of a list, which has no meaning per (q, kv), captured numbers become constants."""
    if isinstance(x, (list, tuple)):
        for item in x:
            if isinstance(item, Value):
                item._python_number("torch.tensor of a list")
    _builder, (value,) = _values(x)
    return _to(value, dtype or value.dtype)


def _getitem(x: Any, key: Any) -> Any:
    if isinstance(x, torch.Tensor):
        builder = next(k.builder for k in (key if isinstance(key, tuple) else (key,)) if isinstance(k, (Value, View)))
        x = builder.capture(x)  # type: ignore[attr-defined]
    if isinstance(x, Value):
        if x.is_tensor and all(k is None or k is Ellipsis for k in (key if isinstance(key, tuple) else (key,))):
            return as_vector(x, x.builder)[key]
        raise mod_error("a mod's index or score is one number and cannot be indexed", "index the captured tensor instead")
    return x[key]


def _pow(x: Any, y: Any) -> Value:
    if isinstance(y, int) and y == 2:
        return _binary("mul")(x, x)
    builder, (a, b) = _values(x, y)
    if category(result_dtype([a.kind, b.kind])) == "int" and builder.nodes[b.node].op != "const":
        raise mod_error("an integer raised to an integer that is not a literal", "make one side a float: 2.0 ** n, or use 1 << n")
    return _binary("pow")(a, b)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: _unary(name) for name in OPS if OPS[name].arity == 1 and name not in ("not", "cast")},
    **{name: _binary(op) for op in ("add", "sub", "mul", "floordiv", "mod", "fmod") for name in (op,)},
    **{name: _binary(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor")},
    **{"r" + name: _binary(name, swapped=True) for name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor")},
    "fix": _unary("trunc"),
    "sgn": _unary("sign"),
    "negative": _unary("neg"),
    "absolute": _unary("abs"),
    "special_expit": _unary("sigmoid"),
    **{f"special_{name}": _unary(name) for name in ("erf", "erfinv", "exp2", "expm1", "log1p")},
    "arctan": _unary("atan"),
    **dict.fromkeys(("atan2", "arctan2"), _binary("atan2")),
    "hypot": _binary("hypot"),
    **dict.fromkeys(("round", "special_round"), rounded_to(_unary("round"))),
    **ACTIVATIONS,
    "invert": _unary("not"),
    "bitwise_not": _unary("not"),
    "logical_not": lambda x: _unary("not")(_to(x, torch.bool)),
    "pos": lambda x: x,
    "positive": lambda x: x,
    "subtract": _binary("sub"),
    "rsub": lambda x, y, alpha=None: _binary("sub")(y, x, alpha),
    "multiply": _binary("mul"),
    "div": _div,
    "divide": _div,
    "truediv": _binary("div"),
    "rtruediv": _binary("div", swapped=True),
    "true_divide": _binary("div"),
    "rdiv": _binary("div", swapped=True),
    "floor_divide": _binary("floordiv"),
    "remainder": _binary("mod"),
    "pow": _pow,
    "rpow": lambda x, y: _pow(_values(x, y)[1][1], x),
    "square": lambda x: _binary("mul")(x, x),
    "minimum": _binary("min"),
    "maximum": _binary("max"),
    "min": _binary("min"),
    "max": _binary("max"),
    "fmin": _binary("min"),
    "fmax": _binary("max"),
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda x, min: _clamp(x, min=min),
    "clamp_max": lambda x, max: _clamp(x, max=max),
    "relu": lambda x, inplace=False: _binary("max")(x, 0),
    "where": lambda condition, x, y: _where(condition, x, y),
    "masked_fill": lambda x, mask, value: _where(mask, value, x),
    "bitwise_and": _binary("and"),
    "bitwise_or": _binary("or"),
    "bitwise_xor": _binary("xor"),
    "logical_and": _logical("and"),
    "logical_or": _logical("or"),
    "logical_xor": _logical("xor"),
    "lshift": _binary("shl"),
    "rshift": _binary("shr"),
    "rlshift": _binary("shl", swapped=True),
    "rrshift": _binary("shr", swapped=True),
    "bitwise_left_shift": _binary("shl"),
    "bitwise_right_shift": _binary("shr"),
    **{name: _binary(op) for name, op in {"greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le"}.items()},
    "not_equal": _binary("ne"),
    "to": _to,
    "type": _to,
    "type_as": _to,
    **{name: _cast(dtype) for name, dtype in {"float": torch.float32, "double": torch.float64, "half": torch.float16,
                                               "bfloat16": torch.bfloat16, "bool": torch.bool, "int": torch.int32, "long": torch.int64,
                                               "short": torch.int16}.items()},
    **{name: _filled(1) for name in ("new_ones", "ones_like")},
    **{name: _filled(0) for name in ("new_zeros", "zeros_like")},
    **{name: _filled() for name in ("new_full", "full_like", "new_tensor")},
    **{name: (lambda x, *_, **__: x) for name in ("clone", "contiguous", "cpu", "squeeze", "view", "reshape", "expand")},
    **dict.fromkeys(("tensor", "as_tensor", "scalar_tensor"), _tensor),
    "getitem": _getitem,
}  # fmt: skip
FUNCTIONS = with_rows(FUNCTIONS)
_SUPPORTED = "a mod is arithmetic on single numbers; it may use Python's operators and: " + ", ".join(sorted(FUNCTIONS))

for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
        setattr(_class, f"__r{_name}__", FUNCTIONS["r" + _name])
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "pos"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
for _name in ("matmul", "rmatmul"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
setattr(Value, "__getitem__", _getitem)  # noqa: B010 - mypy reads an assignment as a generic class
