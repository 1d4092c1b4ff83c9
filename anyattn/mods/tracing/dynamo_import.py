"""Import hook for Dynamo: runs a callback once Dynamo is imported, which ``import torch`` delays until the first compilation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["call_when_imported"]

_DYNAMO = "torch._dynamo"


class _Watch(MetaPathFinder):
    """Finds Dynamo as the other finders do and calls ``then`` once it is loaded. A search that imports nothing has no effect."""

    def __init__(self, then: Callable[[], None]):
        self.then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        found = (f.find_spec(fullname, path, target) for f in list(sys.meta_path) if f is not self and hasattr(f, "find_spec"))
        spec = next((s for s in found if s is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load = loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.then()

            loader.exec_module = load_and_call
        return spec


def call_when_imported(then: Callable[[], None]) -> None:
    """Calls ``then`` now if Dynamo is imported, else once it is. Only the first of several waiting callbacks is called."""
    if _DYNAMO in sys.modules:
        then()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(then))
