"""Vectors inside a mod: rows of captured tensors, a few numbers per (b, h, q_idx, kv_idx), traced element by element and then reduced.

For a captured tensor of shape (S, 8), ``a[q_idx]`` is such a row. A ``Vector`` holds one symbolic value per element, so that
``(a[q_idx] - b[kv_idx]).pow(2).sum(-1)`` is traced as arithmetic on 16 loads, and kernels need no vectors. A vector has therefore at most
``MOST`` elements. Shapes, broadcasting and type promotion are those of torch's flex_attention, which calls mods under vmap: in arithmetic a
row outranks a single number of the same category (a bfloat16 row times the score is bfloat16), in comparisons it does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from anyattn.mods.ir.expr import category, is_weak
from anyattn.mods.tracing.diagnostics import mod_error, user_line

__all__ = [
    "MOST", "Row", "Vector", "array_of", "as_vector", "broadcast", "builder_of", "by_element", "cuts", "from_values", "is_row", "kind_of",
    "refuse_many", "shaped", "spelled_out",
]  # fmt: skip

MOST = 64  # elements: each one is a load and arithmetic of its own
_CURE = "compute with its elements one by one, and reduce it: row.sum(-1), row.any(-1), row.amax(-1), torch.dot(row, other)"


class Row:
    """What a vector and a captured tensor indexed in part have in common: a dtype, and a shape of which a mod may make loops.

    The shape of a captured tensor is part of a trace's key, so a loop over a row is unrolled as one over ``range(n)`` is.
    """

    shape: Any
    dtype: Any

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return self.shape[0]  # type: ignore[no-any-return]

    def __iter__(self) -> Any:
        return iter(self.unbind())

    def unbind(self, dim: int = 0) -> tuple:
        """The entries along a dimension, as torch.unbind."""
        if not -self.ndim <= dim < self.ndim:
            raise mod_error(f"unbind is given dim={dim} for a row of {self.ndim} dimensions", f"use {-self.ndim} to {self.ndim - 1}")
        whole = [slice(None)] * (dim % self.ndim)
        keys = [(*whole, n) for n in range(self.shape[dim])]
        return tuple([self[key] for key in keys])  # type: ignore[index]


class Vector(Row):
    """A small tensor of symbolic values, stored in a NumPy array."""

    functions: ClassVar[dict[str, Callable[..., Any]]] = {}  # functions that a mod may call, by name: the table of ``symbolic.py``

    def __init__(self, items: np.ndarray):
        self.items = items
        self.made_at = user_line()

    __hash__ = object.__hash__

    @property
    def builder(self) -> Any:
        return self.items.flat[0].builder

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return torch.Size(self.items.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.items.flat[0].dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self.items.flat[0].device  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        raise mod_error(f"a row of shape {tuple(self.shape)} has no truth value", "reduce it: row.any(-1) or row.all(-1)")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.functions:
            return lambda *args, **kwargs: self.functions[name](self, *args, **kwargs)
        raise mod_error(f"tensor method or attribute .{name} of a row has no meaning inside a mod", _CURE)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", str(func)).strip("_")
        if name not in cls.functions:
            raise mod_error(f"torch.{name} of a row has no meaning inside a mod", _CURE)
        return cls.functions[name](*args, **(kwargs or {}))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        return shaped(self.items[tuple(_literal_key(k, self.shape) for k in keys)])


def _literal_key(key: Any, shape: torch.Size) -> Any:
    if key is None or key is Ellipsis or isinstance(key, slice):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return key
    if kind_of(key) is not None and category(key.kind) == "int":
        return int(key)  # a captured number is traced again as a literal; a value that differs per (q, kv) raises
    raise mod_error(
        f"a row of shape {tuple(shape)} that was computed is indexed with a {type(key).__name__}",
        "use literal integers and slices, or index the captured tensor itself: table[q_idx, i]",
    )


def shaped(items: Any) -> Any:
    """The single value if the shape is (), else a ``Vector``."""
    if not isinstance(items, np.ndarray):
        return items
    if items.size == 0:
        raise mod_error("a row of a captured tensor has no elements", "keep one element or more")
    return items.item() if items.ndim == 0 else Vector(items)


def array_of(values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    for place, value in enumerate(values):  # one by one: NumPy would convert a list of values to numbers
        made[place] = value
    return made.reshape(shape)


def from_values(values: Sequence[Any], shape: tuple[int, ...]) -> Vector:
    return Vector(array_of(values, shape))


def refuse_many(shape: Sequence[int]) -> None:
    """Raises ``ModError`` for a row with no or more than ``MOST`` elements."""
    if not 0 < math.prod(shape) <= MOST:
        raise mod_error(
            f"a captured tensor indexed in part leaves a row of shape {tuple(shape)}, {math.prod(shape)} elements; "
            f"a mod computes with rows of 1 to {MOST}",
            "index every dimension, as in table[h, q_idx], or compute what a longer row gives outside the mod and capture the result",
        )


def is_row(item: Any) -> bool:
    """Whether ``item`` has dimensions: a vector, a captured tensor, or one with some dimensions indexed."""
    return (isinstance(item, (Vector, torch.Tensor)) or hasattr(type(item), "components")) and item.ndim > 0


def as_vector(item: Any, builder: Any) -> Vector:
    """A row with one value per element; a single value becomes a vector without dimensions."""
    if isinstance(item, torch.Tensor):
        item = builder.capture(item)
    if hasattr(type(item), "components"):
        item = item.components()
    return item if isinstance(item, Vector) else Vector(array_of([item], ()))


def kind_of(item: Any) -> Any:
    """The dtype of a single value, weak dtypes included; None for anything else."""
    return item.kind if hasattr(type(item), "kind") else None


def builder_of(items: Sequence[Any]) -> Any:
    return next(i.builder for i in items if hasattr(i, "builder"))


# ---- indices


def cuts(key: Any) -> bool:
    return isinstance(key, slice) and not (key.start is None and key.stop is None and key.step is None)


def spelled_out(keys: list[Any], rank: int) -> list[Any]:
    """The same indices, with an ellipsis and missing trailing indices written as whole dimensions."""
    named = sum(k is not None and k is not Ellipsis for k in keys)
    rest = [slice(None)] * (rank - named)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
    return [*keys, *rest] if at is None else [*keys[:at], *rest, *keys[at + 1 :]]


# ---- element by element

_WIDEST = frozenset(
    ("where", "eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal")
)  # computed in the widest dtype of all operands
_NOT_BY_ELEMENT = frozenset(("expand", "tensor", "as_tensor", "scalar_tensor", "new_tensor", "new_full", "new_ones", "new_zeros"))
_BY_DTYPE = frozenset(("to", "type_as"))  # only the dtype of the second tensor matters


def by_element(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` extended to rows, element by element; single values are passed to it directly."""

    @functools.wraps(f)
    def apply(*args: Any, **kwargs: Any) -> Any:
        if name in _BY_DTYPE:
            args = (*args[:1], *(a.dtype if is_row(a) else a for a in args[1:]))
            kwargs = dict(("dtype", v.dtype) if is_row(v) else (k, v) for k, v in kwargs.items())
        if not any(map(is_row, args)) and not any(map(is_row, kwargs.values())):
            return f(*args, **kwargs)
        if name in _NOT_BY_ELEMENT:
            raise mod_error(f"torch.{name} of a row has no meaning inside a mod", "reduce the row first, as in row.sum(-1)")
        return _spread(f, name, args, kwargs)

    return apply


def _spread(f: Callable[..., Any], name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    given = [*args, *kwargs.values()]
    builder = builder_of(given)
    vectors = {i: as_vector(x, builder) for i, x in enumerate(given) if is_row(x)}
    shape = broadcast(*(v.items.shape for v in vectors.values()))
    columns: list[Sequence[Any]] = []
    dtype = functools.reduce(torch.promote_types, [v.dtype for v in vectors.values()])
    for i, x in enumerate(given):
        if i in vectors:
            columns.append(np.broadcast_to(vectors[i].items, shape).ravel().tolist())
        else:
            columns.append([x if name in _WIDEST else _outranked(x, dtype)] * math.prod(shape))
    positional = len(args)
    made = [f(*each[:positional], **dict(zip(kwargs, each[positional:], strict=True))) for each in zip(*columns, strict=True)]
    return from_values(made, shape)


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        shape = np.broadcast_shapes(*shapes)
    except ValueError:
        raise mod_error(f"rows of shapes {', '.join(map(str, shapes))} do not fit together", "give them one length, or length 1") from None
    refuse_many(shape)
    return shape


def _outranked(x: Any, dtype: torch.dtype) -> Any:
    """A single value cast to the rows' dtype where torch would do so: within a category, the operand with dimensions decides."""
    kind = x.dtype if isinstance(x, torch.Tensor) else kind_of(x)
    if kind is None or is_weak(kind) or kind == dtype or category(kind) != category(dtype) or dtype is torch.bool:
        return x
    return x.to(dtype)
