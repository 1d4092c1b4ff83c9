"""Custom operators that ``torch.compile`` and ``torch.export`` record, and the registry of entry points that Dynamo captures.

``torch.ops.anyattn.attend`` and the other operators of attention are defined when they are first looked up, which a program may do before a
call (for selective checkpointing): importing them takes longer than importing all else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

import torch

from anyattn.tensors.kinds import not_scriptable

__all__ = ["ENTRY_POINTS", "entry_point"]

ENTRY_POINTS: list[FunctionType] = []
_HOMES = {"attend": "anyattn.custom_ops.flex", "flash": "anyattn.custom_ops.flash", "decode": "anyattn.custom_ops.flash"}
_Function = TypeVar("_Function", bound=Callable)


def entry_point(function: _Function) -> _Function:
    """Decorates a public function that Dynamo captures whole; where a call cannot be captured, Dynamo skips the function's frame."""
    assert isinstance(function, FunctionType)
    ENTRY_POINTS.append(function)
    return not_scriptable(function)


class _Operators(torch._ops._OpNamespace):
    """``torch.ops.anyattn``, which imports the module that defines an operator of attention."""

    __module__ = torch._ops._OpNamespace.__module__  # is part of an operator's name in saved programs

    def __getattr__(self, name: str) -> Any:
        home = _HOMES.get(name.split("_")[0])
        if home is not None and home not in sys.modules:  # an operator that is being defined is looked up too
            importlib.import_module(home)
        return super().__getattr__(name)


torch.ops.anyattn = _Operators("anyattn")
