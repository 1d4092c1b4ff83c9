"""Backends: each computes a ``Problem`` according to a ``Plan``; backends do not import one another."""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

__all__ = ["backend_module"]


@lru_cache(maxsize=8)
def backend_module(name: str) -> Any:
    """The module of the backend called ``name``, with ``forward`` and ``backward``; imported when first used."""
    return importlib.import_module(f"anyattn.backends.{name}")
