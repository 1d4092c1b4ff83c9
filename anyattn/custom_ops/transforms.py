"""Custom operators under ``torch.func.grad`` and ``vjp``, which need an ``autograd.Function`` with ``setup_context``.

The function takes every tensor of the operator's arguments, also those in lists, as an argument of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anyattn.autograd import refuse_second_derivative
from anyattn.tensors import kinds

__all__ = ["called"]


def called(operator: Callable[..., Any], operands: tuple, save: Any = None, gradients: Any = None) -> Any:
    """``operator(*operands)``. save, gradients: what ``register_autograd`` was given for it; without, it has no derivative."""
    active = kinds.transforms()
    if not active:
        return operator(*operands)
    leaves, spec = pytree.tree_flatten(operands)
    for t in leaves:
        if isinstance(t, Tensor):
            kinds.refuse("an argument of attention", t)
    if "grad" not in active:
        return operator(*operands)
    found = _Transformed.apply(operator, save, gradients, spec, *leaves)
    return list(found) if save is None else found


class _Transformed(torch.autograd.Function):
    @staticmethod
    def forward(operator: Any, save: Any, gradients: Any, spec: Any, *leaves: Any) -> Any:  # type: ignore[override]
        return tuple(operator(*pytree.tree_unflatten(leaves, spec)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        _, save, gradients, spec, *leaves = inputs
        operands = pytree.tree_unflatten(leaves, spec)
        ctx.differentiate = gradients or refuse_second_derivative
        ctx.lengths = [len(x) if isinstance(x, (list, tuple)) else None for x in operands]
        if save is not None:
            save(ctx, operands, output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found: list[Any] = []
        for x, length in zip(ctx.differentiate(ctx, *gradients), ctx.lengths, strict=True):
            found += [x] if length is None else x or [None] * length
        return None, None, None, None, *found
