"""Late binding of the operators that ``torch.compile`` captures for functions that make block lists; they are in a higher layer."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["entry_points", "load"]

entry_points: Any = None  # the module ``anyattn.custom_ops.entry_points``, which sets this when it is imported


def load() -> None:
    """Imports ``entry_points``; the first call inside a compiled function needs it."""
    importlib.import_module("anyattn.custom_ops.entry_points")


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo runs it while tracing; the decorator would import Dynamo
