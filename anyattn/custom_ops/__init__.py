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
from torch._C._dynamo.eval_frame import reset_code

from anyattn.tensors.dynamo import opaque
from anyattn.tensors.kinds import not_scriptable

__all__ = ["entry_point", "run_uncompiled"]

_entry_points: list[FunctionType] = []
_HOMES = {
    "attend": "anyattn.custom_ops.flex",
    "attend_skipping": "anyattn.custom_ops.skipping",
    "attend_sharded": "anyattn.custom_ops.sharded",
    "flash": "anyattn.custom_ops.flash",
    "decode": "anyattn.custom_ops.flash",
    "document": "anyattn.custom_ops.document_ids",
    "reductions": "anyattn.custom_ops.reductions",
}
_Function = TypeVar("_Function", bound=Callable)


def entry_point(function: _Function) -> _Function:
    """Decorates a public function that Dynamo captures whole; where a call cannot be captured, Dynamo skips the function's frame."""
    assert isinstance(function, FunctionType)
    _entry_points.append(function)
    return not_scriptable(function)


def run_uncompiled(is_wanted: bool = True) -> None:
    """Makes Dynamo skip the entry points' frames and everything that they call: after a graph break such a call runs as in eager mode.

    Calls that are inlined into other functions' frames are traced as before; an entry point that is itself passed to ``torch.compile`` runs
    uncompiled too.
    """
    for fn in _entry_points:
        if is_wanted:
            opaque(fn)
        else:
            reset_code(fn.__code__)


class _Operators(torch._ops._OpNamespace):
    """``torch.ops.anyattn``, which imports the module that defines an operator when it is looked up."""

    __module__ = torch._ops._OpNamespace.__module__  # is part of an operator's name in saved programs

    def __getattr__(self, name: str) -> Any:
        home = _HOMES.get(name.removesuffix("_backward")) or _HOMES.get(name.split("_")[0])
        if home is not None and home not in sys.modules:  # an operator that is being defined is looked up too
            importlib.import_module(home)
        return super().__getattr__(name)


torch.ops.anyattn = _Operators("anyattn")  # type: ignore[attr-defined]
