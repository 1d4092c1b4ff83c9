"""Backends: each computes a ``Problem`` by a ``Plan``; none imports another."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

__all__ = ["backend_module"]


@lru_cache(maxsize=8)
def backend_module(name: str) -> Any:
    """The module with ``forward`` and ``backward`` of the backend called ``name``, imported when first used."""
    return importlib.import_module(f"anyattn.backends.{name}")
