"""Reductions inside a mod, from rows of captured tensors (``vectors.py``) to one number: sums, extremes, norms, inner products.

A reduction is traced as a tree of pairs, so the rounding error of a sum grows with the logarithm of its length. 16-bit rows are added in
float32 and rounded once, as in torch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from anyattn.mods.ir.expr import HALVES, is_weak
from anyattn.mods.tracing.diagnostics import mod_error
from anyattn.mods.tracing.vectors import Row, Vector, array_of, as_vector, broadcast, builder_of, by_element, is_row, kind_of, shaped

__all__ = ["with_rows"]


class Extremes(NamedTuple):
    """The result of torch's ``max`` and ``min`` along a dimension."""

    values: Any
    indices: Any


class _NoIndices:
    def __getattr__(self, name: str) -> Any:
        raise mod_error("the index of a row's greatest or least entry has no meaning inside a mod", "use the entry: row.amax(-1)")


def _tree(values: Sequence[Any], pair: Callable[[Any, Any], Any]) -> Any:
    """Combines the values as a balanced tree: pairs, then pairs of pairs."""
    values = list(values)
    while len(values) > 1:
        paired = [pair(a, b) for a, b in zip(values[::2], values[1::2])]
        values = paired + values[2 * len(paired) :]
    return values[0]


def _axes(dim: Any, rank: int) -> tuple[int, ...]:
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(rank))
    axes = []
    for d in dim if isinstance(dim, (tuple, list)) else [dim]:
        d = int(d)
        if not -max(rank, 1) <= d < max(rank, 1):
            raise mod_error(f"dim={d} is out of range for a row of {rank} dimensions", f"use {-max(rank, 1)} to {max(rank, 1) - 1}")
        axes.append(d % max(rank, 1))
    if len(set(axes)) < len(axes):
        raise mod_error(f"dim={tuple(dim)} names a dimension twice", "name each dimension once")
    return tuple(a for a in axes if a < rank)


def _along(x: Any, dim: Any, keepdim: bool, reduce: Callable[[list[Any]], Any]) -> Any:
    """``reduce`` of the elements along ``dim``: one result per position of the other dimensions."""
    items = as_vector(x, builder_of([x])).items
    axes = _axes(dim, items.ndim)
    kept = [a for a in range(items.ndim) if a not in axes]
    lines = items.transpose([*kept, *axes]).reshape(-1, math.prod(items.shape[a] for a in axes))
    found = array_of([reduce(line.tolist()) for line in lines], tuple(items.shape[a] for a in kept))
    return shaped(np.expand_dims(found, axes) if keepdim else found)


def _of(name: str, x: Any) -> Any:
    """The dtype of a row. Single values are accepted too: a reduction over no dimensions returns them."""
    if isinstance(x, (int, float)) or _is_number(x):
        raise mod_error(f"torch.{name} of a Python number", "reduce rows of captured tensors: table[q_idx].sum(-1)")
    return x.dtype


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVES else dtype


def _total(values: list[Any], dtype: torch.dtype) -> Any:
    return _tree([v.to(dtype) for v in values], lambda a, b: a + b)


def _sum(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: None = None) -> Any:
    dtype = dtype or (_of("sum", x) if _of("sum", x).is_floating_point else torch.int64)
    return _along(x, dim, keepdim, lambda values: _total([v.to(dtype) for v in values], _accumulated(dtype)).to(dtype))


def _mean(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, out: None = None) -> Any:
    dtype = dtype or _of("mean", x)
    _need_float("mean", dtype)
    return _along(x, dim, keepdim, lambda v: (_total([a.to(dtype) for a in v], _accumulated(dtype)) / float(len(v))).to(dtype))


def _prod(x: Any, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    dtype = dtype or (_of("prod", x) if _of("prod", x).is_floating_point else torch.int64)
    inner = _accumulated(dtype)
    return _along(x, dim, keepdim, lambda v: _tree([a.to(dtype).to(inner) for a in v], lambda a, b: a * b).to(dtype))


def _need_float(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise mod_error(f"torch.{name} takes floats, and got a row of {dtype}", f"convert it: row.float().{name.rsplit('_', 1)[-1]}(-1)")


def _logical(name: str, pair: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dtype = torch.uint8 if _of(name, x) is torch.uint8 else torch.bool  # as in torch
        return _along(x, dim, keepdim, lambda values: _tree([v.to(torch.bool) for v in values], pair).to(dtype))

    return apply


def _extreme(name: str, pair: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """amax and amin: equal extreme elements share the derivative."""

    def apply(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        _of(name, x)
        return _along(x, dim, keepdim, lambda values: _tree(values, pair))

    return apply


def _first(is_more: Callable[[Any, Any], Any]) -> Callable[[list[Any]], Any]:
    """Reduces to the first of equal extreme elements, which gets the whole derivative; NaN counts as the most extreme."""

    def reduce(values: list[Any]) -> Any:
        return functools.reduce(lambda a, b: torch.where(is_more(b, a) | ((b != b) & (a == a)), b, a), values)

    return reduce


def _max_or_min(
    name: str, of_two: Callable[..., Any], of_all: Callable[..., Any], is_more: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """torch's ``max``: of two values, of all elements, or along a dimension, which returns values and (unusable) indices."""

    def apply(x: Any, *args: Any, dim: Any = None, keepdim: bool = False, other: Any = None, out: None = None) -> Any:
        if args and not isinstance(args[0], int) and not _is_number(args[0]):
            other, *args = args  # type: ignore[assignment]
        if other is not None:
            if dim is not None or keepdim or args:
                raise mod_error(f"torch.{name} of two values has a dimension", f"use torch.{name}imum(a, b), or row.a{name}(dim)")
            return of_two(x, other)
        dim, keepdim = (args[0] if args else dim), (args[1] if len(args) > 1 else keepdim)
        if dim is None:
            return of_all(x)
        _of(name, x)
        if isinstance(dim, (tuple, list)):
            raise mod_error(f"torch.{name} takes one dimension, and got {dim}", f"use row.a{name}({tuple(dim)})")
        return Extremes(_along(x, dim, keepdim, _first(is_more)), _NoIndices())

    return apply


def _is_number(item: Any) -> bool:
    """Whether ``item`` is a captured number; as a second argument it is a dimension, since torch takes no number there."""
    return kind_of(item) is not None and is_weak(item.kind)


# ---- norms and products


def _norm(name: str) -> Callable[..., Any]:
    def apply(
        x: Any, p: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None, out: None = None, ord: Any = None
    ) -> Any:
        given = ord if ord is not None else p
        order = 2.0 if given is None or (name == "norm" and isinstance(given, str) and given == "fro") else given
        if isinstance(order, str) or float(order) not in _NORMS:
            raise mod_error(f"torch.{name} of order {order!r}", f"use one of {', '.join(map(str, _NORMS))}, or write it out")
        if name == "linalg_norm" and given is not None and len(_axes(dim, as_vector(x, builder_of([x])).ndim)) != 1:
            raise mod_error("torch.linalg.norm of a matrix", "use torch.linalg.vector_norm, or norms of rows: dim=-1")
        dtype = dtype or _of(name, x)
        _need_float(name, dtype)
        inner = _accumulated(dtype)
        return _along(x, dim, keepdim, lambda values: _NORMS[float(order)]([v.to(dtype).to(inner) for v in values]).to(dtype))

    return apply


def _euclid(values: list[Any]) -> Any:
    total = _tree([v * v for v in values], lambda a, b: a + b)
    return torch.where(total == 0, 0.0, torch.sqrt(total))  # the derivative at an all-zero row is 0, as in torch


_NORMS: dict[float, Callable[[list[Any]], Any]] = {
    2.0: _euclid,
    1.0: lambda values: _tree([abs(v) for v in values], lambda a, b: a + b),
    0.0: lambda values: _tree([(v != 0).to(v.dtype) for v in values], lambda a, b: a + b),
    math.inf: lambda values: _tree([abs(v) for v in values], lambda a, b: torch.maximum(a, b)),
    -math.inf: lambda values: _tree([abs(v) for v in values], lambda a, b: torch.minimum(a, b)),
}


def _inner_product(a: Sequence[Any], b: Sequence[Any], dtype: torch.dtype) -> Any:
    inner = _accumulated(dtype)
    return _tree([x.to(inner) * y.to(inner) for x, y in zip(a, b, strict=True)], lambda x, y: x + y).to(dtype)


def _pair(name: str, x: Any, y: Any) -> tuple[np.ndarray, np.ndarray, torch.dtype]:
    builder = builder_of([x, y])
    a, b = as_vector(x, builder), as_vector(y, builder)
    if a.dtype != b.dtype:
        raise mod_error(f"torch.{name} of {a.dtype} and {b.dtype}", "convert one, as in row.to(other.dtype)")
    if a.dtype is torch.bool:
        raise mod_error(f"torch.{name} of bools", "use (a & b).any(-1), or convert: a.int()")
    return a.items, b.items, a.dtype


def _dot(name: str) -> Callable[..., Any]:
    """dot, vdot and inner: the inner product of two rows."""

    def apply(x: Any, y: Any, *, out: None = None) -> Any:
        a, b, dtype = _pair(name, x, y)
        if a.ndim != 1 or a.shape != b.shape:
            raise mod_error(f"torch.{name} of shapes {a.shape} and {b.shape}", "give it two rows of one length, or use (a * b).sum(-1)")
        return _inner_product(a.tolist(), b.tolist(), dtype)

    return apply


def _vecdot(x: Any, y: Any, *, dim: int = -1, out: None = None) -> Any:
    a, b, dtype = _pair("linalg.vecdot", x, y)
    broadcast(a.shape, b.shape)
    inner = _accumulated(dtype)
    products = np.frompyfunc(lambda p, q: p.to(inner) * q.to(inner), 2, 1)(a, b)
    return _along(Vector(products), dim, False, lambda values: _total(values, inner).to(dtype))


def _matmul(x: Any, y: Any, *, out: None = None) -> Any:
    """The product of two rows, or of a matrix and a row."""
    a, b, dtype = _pair("matmul", x, y)
    if not (1 <= a.ndim <= 2 and 1 <= b.ndim <= 2) or a.shape[-1] != b.shape[0]:
        raise mod_error(f"a product of shapes {a.shape} and {b.shape}", "give it rows of one length, or matrices that fit")
    left, right = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1).T
    found = [_inner_product(row.tolist(), column.tolist(), dtype) for row in left for column in right]
    return shaped(array_of(found, (*a.shape[:-1], *b.shape[1:])))


# ---- shapes


def _unsqueeze(x: Any, dim: int) -> Any:
    items = as_vector(x, builder_of([x])).items
    (axis,) = _axes(dim, items.ndim + 1)
    return Vector(np.expand_dims(items, axis))


def _squeeze(x: Any, dim: Any = None) -> Any:
    items = as_vector(x, builder_of([x])).items
    axes = tuple(a for a in _axes(dim, items.ndim) if items.shape[a] == 1)
    return shaped(np.squeeze(items, axes))


def _reshape(x: Any, *shape: Any) -> Any:
    items = as_vector(x, builder_of([x])).items
    wanted = tuple(int(n) for n in (shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape))
    try:
        return shaped(items.reshape(wanted))
    except ValueError:
        raise mod_error(f"a row of shape {items.shape} has no shape {wanted}", "keep the number of elements") from None


def _flip(x: Any, *dims: Any) -> Any:
    items = as_vector(x, builder_of([x])).items
    return Vector(np.flip(items, _axes(dims[0] if len(dims) == 1 else dims, items.ndim)))


def _flatten(x: Any) -> Any:
    return Vector(as_vector(x, builder_of([x])).items.reshape(-1))


def _rows_or(of_rows: Callable[..., Any], of_values: Callable[..., Any] | None) -> Callable[..., Any]:
    """Applies ``of_rows`` to rows and ``of_values`` to single values."""

    def apply(x: Any, *args: Any, **kwargs: Any) -> Any:
        # for a whole captured tensor, the function of single values requests a captured number in its shape
        f = of_rows if of_values is None or (is_row(x) and not isinstance(x, torch.Tensor)) else of_values
        return f(x, *args, **kwargs)

    return apply


_SHAPES = {"squeeze": _squeeze, "reshape": _reshape, "view": _reshape}


def with_rows(functions: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """The functions of single values, by name, extended to rows element by element, and the functions of rows alone.

    ``max`` and ``min`` take two values or a row.
    """
    made = {name: by_element(name, f) for name, f in functions.items() if name != "getitem"}
    largest, least = _extreme("amax", functions["maximum"]), _extreme("amin", functions["minimum"])
    made |= {name: _rows_or(f, functions[name]) for name, f in _SHAPES.items()}
    Vector.functions = made | {
        "getitem": functions["getitem"],
        "unsqueeze": _unsqueeze,
        "flatten": _flatten,
        "flip": _flip,
        "reversed": lambda x: _flip(x, 0),
        "unbind": lambda input, dim=0: (input if isinstance(input, Row) else as_vector(input, input.builder)).unbind(dim),
        "sum": _sum,
        "mean": _mean,
        "prod": _prod,
        "any": _logical("any", lambda a, b: a | b),
        "all": _logical("all", lambda a, b: a & b),
        "amax": largest,
        "amin": least,
        "max": _max_or_min("max", made["max"], largest, lambda a, b: a > b),
        "min": _max_or_min("min", made["min"], least, lambda a, b: a < b),
        **{name: _norm(name) for name in ("norm", "linalg_norm", "linalg_vector_norm")},
        **{name: _dot(name) for name in ("dot", "vdot", "inner")},
        "linalg_vecdot": _vecdot,
        "matmul": _matmul,
        "rmatmul": lambda x, y: _matmul(y, x),
    }
    return Vector.functions
