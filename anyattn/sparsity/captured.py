"""The way from the functions that make block lists to what ``torch.compile`` captures of them, which lies in a higher layer."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["entry_points"]


def entry_points() -> Any:
    """``anyattn.custom_ops.entry_points``, imported by the first call inside a compiled function."""
    return importlib.import_module("anyattn.custom_ops.entry_points")


entry_points._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator would import Dynamo
