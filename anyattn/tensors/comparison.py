"""Comparison of the properties of several tensors with those of earlier tensors, in one C++ call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

__all__ = ["comparison"]


def comparison(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A function that returns whether as many other tensors have the properties of ``tensors``, which are not kept alive.

    It compares Python types, dtypes, devices, shapes, strides, dispatch keys (with those that the thread includes and excludes) and
    ``requires_grad``, but no contents and no addresses. It returns False if one tensor is passed twice, and always if this torch does not
    have Dynamo's comparison. Pass it no nested, sparse or opaque tensor: torch raises a C++ exception for the sizes or strides of these,
    which ends the process.
    """
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [[*t.shape] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check  # type: ignore[no-any-return]
    return lambda *_: False
