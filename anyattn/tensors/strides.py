"""Strides of results: dense, in the stride order of an input.

With these strides ``out.transpose(1, 2).view(B, S, H * D)`` copies nothing if the query is a transposed (B, S, H, D). Backends allocate
results with these functions, and the operators' fake kernels describe results with them, so that the two agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Allocator",
    "Layout",
    "allocator",
    "begins",
    "contiguous_strides",
    "dense_layout",
    "dense_strides",
    "empty_in_order",
    "in_order",
    "innermost",
]


def dense_strides(like: Tensor, last: int | None = None) -> tuple[int, ...]:
    """Strides without gaps for a tensor of ``like``'s shape, its dimensions nested as ``like``'s are, the last one always innermost.

    last: size of the last dimension, ``like``'s own if None. The strides of a dimension of one entry, or of an expanded one (stride 0), do
    not determine its position in the order: it gets the position that it has in a contiguous tensor.

    >>> dense_strides(torch.empty(2, 5, 3, 4).transpose(1, 2), 8)
    (120, 8, 24, 1)
    """
    shape = like.shape
    try:
        return _known_strides(shape, like.stride(), shape[-1] if last is None else last)
    except TypeError:  # symbolic sizes are not hashable
        return _strides(shape, like.stride(), shape[-1] if last is None else last, _may_be_symbolic)


@lru_cache(maxsize=4096)
def dense_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout:
    """Shape and ``dense_strides`` of a tensor with this shape and these strides, none of them symbolic, for an ``Allocator``."""
    return tuple(shape), _strides(shape, strides, shape[-1], _plainly)


def empty_in_order(like: Tensor, *, last: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory with ``dense_strides(like, last)``, on ``like``'s device, in its dtype if none is given."""
    shape = like.shape if last is None else (*like.shape[:-1], last)
    return torch.empty_strided(shape, dense_strides(like, last), dtype=like.dtype if dtype is None else dtype, device=like.device)


def begins(part: Tensor, whole: Tensor) -> bool:
    """Whether ``part`` is the first columns of ``whole``'s rows, in the same memory, as ``whole[..., :n]`` is, and has any element.

    >>> rows = torch.zeros(2, 3, 8)
    >>> begins(rows[..., :4], rows), begins(rows[..., 4:], rows), begins(rows[..., :4].clone(), rows)
    (True, False, False)
    """
    if part.dtype is not whole.dtype or part.device != whole.device or part.data_ptr() != whole.data_ptr() or part.numel() == 0:
        return False
    if part.shape[:-1] != whole.shape[:-1] or part.shape[-1] > whole.shape[-1]:
        return False
    return all(a == b for a, b, n in zip(part.stride(), whole.stride(), part.shape, strict=True) if n > 1)


def innermost(x: Tensor) -> Tensor:
    """``x`` if the elements of its last dimension are side by side, else a copy with ``dense_strides(x)``; gradients reach ``x``.

    >>> innermost(torch.zeros(2, 4, 5, 3).transpose(2, 3)).stride()
    (60, 15, 5, 1)
    """
    if x.stride(-1) == 1 or x.shape[-1] == 1:
        return x
    made = empty_in_order(x).copy_(x)
    # in an operator grad mode is off, and requires_grad says which gradients are wanted
    return made if made.requires_grad is x.requires_grad else made.requires_grad_(x.requires_grad)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    found = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        found[dim] = found[dim + 1] * max(shape[dim + 1], 1)
    return tuple(found)


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides
Allocator = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]  # of a layout and a dtype


@lru_cache(maxsize=64)
def allocator(device: torch.device, passes_dispatcher: bool = True) -> Allocator:
    """A function that returns uninitialised memory on a device, given shape, strides and dtype.

    passes_dispatcher: use, if torch has it, the function that Inductor's code allocates with, which takes half the time of
    ``torch.empty_strided`` and which dispatch modes do not see.
    """
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)  # type: ignore[attr-defined]

    def plainly(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    if not passes_dispatcher or fast is None or device.type not in ("cpu", "cuda"):
        return plainly
    if device.type == "cpu":
        return fast  # type: ignore[no-any-return]
    current_device, index = torch._C._cuda_getDevice, device.index  # type: ignore[attr-defined]

    def on_current_device(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return fast(shape, strides, dtype) if current_device() == index else plainly(shape, strides, dtype)  # type: ignore[no-any-return]

    return on_current_device


def in_order(x: Tensor, like: Tensor) -> Tensor:
    """``x``, which has ``like``'s shape except for the last dimension, with ``dense_strides(like, x.shape[-1])``; copied if needed."""
    wanted = dense_strides(like, x.shape[-1])
    if all(a == b for a, b, n in zip(x.stride(), wanted, x.shape, strict=True) if n > 1):
        return x if x.stride() == wanted else x.as_strided(x.shape, wanted)
    return empty_in_order(like, last=x.shape[-1], dtype=x.dtype).copy_(x)


def _plainly(x: Any) -> bool:
    return bool(x)


def _may_be_symbolic(x: Any) -> bool:
    """A condition on sizes; False if symbolic sizes leave it undecided, so that dimensions keep their order."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(x)


def _strides(shape: Sequence[Any], strides: Sequence[Any], last: Any, holds: Any) -> tuple[Any, ...]:
    """holds: how a comparison is evaluated; for symbolic sizes it must not add a guard."""
    order: list[int] = []  # of all dimensions except the last, outermost first
    for dim in range(len(shape) - 1):
        place = len(order)
        if not _is_silent(shape, strides, dim, holds):
            for at in range(len(order) - 1, -1, -1):
                other = order[at]
                if _is_silent(shape, strides, other, holds):
                    continue
                if not holds(strides[other] < strides[dim]):
                    break
                place = at
        order.insert(place, dim)
    found: list[Any] = [1] * len(shape)
    step = _at_least_one(last)
    for dim in reversed(order):
        found[dim] = step
        step = step * _at_least_one(shape[dim])
    return tuple(found)


def _is_silent(shape: Sequence[Any], strides: Sequence[Any], dim: int, holds: Any) -> bool:
    return holds(shape[dim] == 1) or holds(strides[dim] == 0)


def _at_least_one(size: Any) -> Any:
    """The size, but at least 1: as in torch, an empty dimension counts as one entry."""
    return max(size, 1) if isinstance(size, int) else torch.sym_max(size, 1)


@lru_cache(maxsize=4096)
def _known_strides(shape: tuple[int, ...], strides: tuple[int, ...], last: int) -> tuple[int, ...]:
    return _strides(shape, strides, last, _plainly)
