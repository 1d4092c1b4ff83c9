"""Evaluation of an expression on tensors of indices, by a broadcasting interpreter.

With index tensors of shapes such as (B, 1, 1, 1), (H, 1, 1), (M, 1) and (N,), a subexpression has only the dimensions it depends on, so an
expression of the row alone is computed once per row. This is the only dense meaning of a mod; the oracle uses it too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.ir.expr import MIRRORED, OPS, Expr, Node, category, is_weak, wrapped
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["TORCH_OPS", "Positions", "apply", "as_operand", "evaluate", "run", "slice_at"]


def fold(a: Tensor, b: Tensor) -> Tensor:
    """The lowest 32 bits of both numbers, multiplied without sign; the two halves of the product, combined by xor.

    It mixes bits (``mods.dropout``): no function of a user's mod becomes this operation, as none may wrap around.
    """
    product = (a.to(torch.int64) & 0xFFFFFFFF) * (b.to(torch.int64) & 0xFFFFFFFF)
    return (product ^ (product >> 32)).to(torch.int32).to(a.dtype)


TORCH_OPS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in ("neg", "abs", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos",
                                                "tan", "atan", "sinh", "cosh", "tanh", "sigmoid", "erf", "erfinv", "floor", "ceil", "trunc",
                                                "round", "sign", "reciprocal", "detach")},
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "fmod", "pow", "eq", "ne", "lt", "le", "gt", "ge", "where")},
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "not": torch.bitwise_not,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "fold": fold,
}  # fmt: skip
_SCALAR_SECOND = frozenset(
    ("add", "sub", "mul", "div", "floordiv", "mod", "fmod", "pow", "and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge")
)
# operations on a number and a tensor, as functions of the tensor and the number: torch decides where the number is rounded
_NUMBER_FIRST: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.rsub,
    "mul": torch.mul,
    **{op: TORCH_OPS[mirrored] for op, mirrored in MIRRORED.items()},
}


@dataclass(frozen=True, eq=False)
class Positions:
    """The values ``first``, ``first + 1``, ... of b, h, q_idx or kv_idx along their dimension: a load at such indices is a slice.

    dim: -4 for b, -3 for h, -2 for q_idx, -1 for kv_idx. descends: the values stand in reverse order. make: the same values as a tensor,
    for all other operations.
    """

    first: int
    count: int
    dim: int
    make: Callable[[], Tensor]
    descends: bool = False

    @cached_property
    def tensor(self) -> Tensor:
        return self.make()


def evaluate(mod: TracedMod, b: Any, h: Any, q_idx: Any, kv_idx: Any, score: Tensor | None = None) -> Tensor:
    """The mod's value at every combination of the broadcast indices.

    b, h, q_idx, kv_idx: int64 tensors (or ints) that broadcast with each other and with ``score``. Returns a tensor that broadcasts to
    their common shape, of dtype bool for a mask and the score's dtype for a score; captured float tensors receive gradients through it.

    >>> from anyattn.mods.tracing.trace import trace
    >>> i = torch.arange(3)
    >>> evaluate(trace(lambda b, h, q, k: q >= k, "mask"), 0, 0, i[:, None], i).int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    leaves = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": score}
    value = run(mod.expr, leaves, mod.scalars, mod.tensors)[0]
    if isinstance(value, Tensor):
        return value
    device = next((x.device for x in leaves.values() if isinstance(x, Tensor)), None)
    return torch.tensor(value, dtype=mod.expr.output.dtype, device=device)  # type: ignore[arg-type]


def run(expr: Expr, leaves: Mapping[Any, Any], scalars: Sequence[int | float], tensors: Sequence[Tensor]) -> list[Any]:
    """The values of ``expr.outputs``. leaves: ``score`` and the indices, as tensors, ``Positions`` or Python numbers; those of
    ``bounds.py`` by attribute, loads' as functions of their arguments."""
    values: list[Any] = []
    for node in expr.nodes:
        if node.op == "index":
            values.append(leaves[node.attr])  # type: ignore[index]
        elif node.op == "bound":
            leaf = leaves[node.attr]  # type: ignore[index]
            values.append(leaf(*(values[a] for a in node.args)) if callable(leaf) else leaf)
        elif node.op == "score":
            values.append(leaves["score"])
        elif node.op == "const":
            values.append(node.attr)
        elif node.op == "scalar":
            values.append(scalars[node.attr])  # type: ignore[call-overload]
        else:
            values.append(apply(node, [values[a] if node.op == "load" else as_operand(values[a]) for a in node.args], tensors))
    return [as_operand(values[o]) for o in expr.outputs]


def as_operand(value: Any) -> Any:
    """``value`` for an operation that is not a load."""
    return value.tensor if isinstance(value, Positions) else value


def apply(node: Node, args: list[Any], tensors: Sequence[Tensor]) -> Any:
    """One operation on tensors, or on Python numbers if all arguments are Python numbers (weak values, literals). Only a load's arguments
    may be ``Positions``."""
    if node.op == "load":
        return _load(tensors[node.attr], args)  # type: ignore[call-overload]
    on_host = not any(isinstance(a, Tensor) for a in args)
    if node.op == "cast":
        if on_host and is_weak(node.dtype):
            return node.dtype(args[0])  # type: ignore[operator]
        # casts of Python numbers come from promotion only; the next operation treats the number as torch would
        if on_host and node.attr is None and _keeps_number(args[0], node.dtype):
            is_narrow = category(node.dtype) == "int" and node.dtype is not torch.int64
            return wrapped(args[0], node.dtype) if is_narrow else args[0]  # type: ignore[arg-type]
        return _as_tensor(args[0], node.dtype)
    if on_host:
        if is_weak(node.dtype) and (f := OPS[node.op].on_host) is not None:
            try:
                return f(*args)
            except (ArithmeticError, ValueError):
                return TORCH_OPS[node.op](*(torch.tensor(a, dtype=torch.float64, device="cpu") for a in args)).item()
        # operands of a comparison keep Python's precision; other operations compute in their own dtype
        strong = None if is_weak(node.dtype) or node.dtype is torch.bool else node.dtype
        args = [_as_tensor(a, strong or (torch.float64 if isinstance(a, float) else None)) for a in args]
    elif len(args) == 2 and not (isinstance(args[0], Tensor) and node.op in _SCALAR_SECOND):
        if node.op in _NUMBER_FIRST and not isinstance(args[0], Tensor):
            return _typed(_NUMBER_FIRST[node.op](args[1], args[0]), node)
        like = next(a for a in args if isinstance(a, Tensor))
        args = [a if isinstance(a, Tensor) else torch.full((), a, dtype=like.dtype, device=like.device) for a in args]
    elif node.op == "where" and not isinstance(args[0], Tensor):
        return args[1] if args[0] else args[2]
    elif node.op == "where" and not any(isinstance(a, Tensor) for a in args[1:]):  # torch would round both numbers to float32
        dtype: Any = None if is_weak(node.dtype) else node.dtype
        args = [args[0], *(torch.full((), a, dtype=dtype, device=args[0].device) for a in args[1:])]
    return _typed(TORCH_OPS[node.op](*args), node)


def _typed(value: Tensor, node: Node) -> Tensor:
    return value if is_weak(node.dtype) or value.dtype == node.dtype else value.to(node.dtype)  # type: ignore[arg-type]


def _keeps_number(value: Any, dtype: Any) -> bool:
    """Whether a Python number can replace a strong value: integers are exact, and a float is rounded when it meets a narrower tensor."""
    return isinstance(value, bool) == (dtype is torch.bool) and isinstance(value, float) == dtype.is_floating_point


def _as_tensor(value: Any, dtype: Any = None) -> Tensor:
    if isinstance(value, Tensor):
        return value if dtype is None or is_weak(dtype) else value.to(dtype)
    strong = None if dtype is None or is_weak(dtype) else dtype
    if strong is not None and isinstance(value, float) and category(strong) == "int":  # torch.tensor refuses it, a cast does not
        return torch.tensor(value, dtype=torch.float64, device="cpu").to(strong)
    return torch.tensor(value, dtype=strong, device="cpu")


def _load(tensor: Tensor, indices: list[Any]) -> Tensor:
    if not indices:
        return tensor
    if all(isinstance(i, int) for i in indices):
        return tensor[tuple(indices)]
    view = slice_at(tensor, indices)
    if view is not None:
        return view.flip(2) if any(isinstance(i, Positions) and i.descends for i in indices) else view
    device = tensor.device
    indices = [as_operand(i) for i in indices]
    return tensor[tuple(i if isinstance(i, Tensor) else torch.tensor(i, device=device) for i in indices)]


def slice_at(tensor: Tensor, indices: Sequence[Any]) -> Tensor | None:
    """The view (b, h, q_idx, kv_idx) of ``tensor`` at ``Positions`` and integers, its rows in ascending order; a dimension without an index
    has size 1. None if the indices are no slice: others, one that is used twice, one that leaves the tensor or is negative in part only."""
    shape, strides, offset = [1] * 4, [0] * 4, tensor.storage_offset()
    for index, size, stride in zip(indices, tensor.shape, tensor.stride(), strict=True):
        if isinstance(index, Positions) and strides[index.dim] == 0 and shape[index.dim] == 1:
            first, count = index.first, index.count
            shape[index.dim], strides[index.dim] = count, stride
        elif isinstance(index, int):
            first, count = index, 1
        else:
            return None
        if first < 0 and first + count <= 0:  # negative indices count from the end
            first += size
        if not 0 <= first <= first + count <= size:
            return None
        offset += first * stride
    return tensor.as_strided(shape, strides, offset)
