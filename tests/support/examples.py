"""Programs of ``examples/``, imported as modules."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from tests.support.processes import ROOT

__all__ = ["example"]


def example(name: str) -> ModuleType:
    """``examples/name.py``, run anew."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
