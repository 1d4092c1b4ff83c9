"""The way from the functions that make block lists to what ``torch.compile`` captures of them, which lies in a higher layer."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["entry_points", "load"]

entry_points: Any = None  # the module ``anyattn.custom_ops.entry_points``, which enters itself


def load() -> None:
    """Imports ``entry_points``; the first call inside a compiled function needs it."""
    importlib.import_module("anyattn.custom_ops.entry_points")


load._dynamo_marked_constant = True  # type: ignore[attr-defined]  # runs while Dynamo traces; its decorator would import Dynamo
