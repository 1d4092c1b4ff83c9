"""Comparison of tensors with earlier ones in one call below Python: by all properties that Dynamo guards, without their contents."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["comparison"]


def comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that tells whether as many others are like ``tensors``, of which it keeps none.

    Alike are types, dtypes, devices, shapes, strides, dispatch keys (with those that the thread adds or leaves out) and whether gradients
    are required; not contents and addresses. A tensor that comes twice is like none. Where this torch has no such thing, none are alike.

    Plain tensors with memory may be compared: a nested or sparse one, whose sizes or strides torch cannot tell, ends the process.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [[*t.shape] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
    return lambda *_: False
