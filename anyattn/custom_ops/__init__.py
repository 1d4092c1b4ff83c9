"""Custom operators that ``torch.compile`` and ``torch.export`` record, and the registry of entry points that Dynamo captures."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

__all__ = ["ENTRY_POINTS", "entry_point"]

ENTRY_POINTS: list[FunctionType] = []
_Function = TypeVar("_Function", bound=Callable)


def entry_point(function: _Function) -> _Function:
    """Decorates a public function that Dynamo captures whole; where a call cannot be captured, Dynamo skips the function's frame."""
    assert isinstance(function, FunctionType)
    ENTRY_POINTS.append(function)
    return function
