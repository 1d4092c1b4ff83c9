"""The functions that ``torch.compile`` captures in place of those that make block lists; they are in a higher layer, which enters them."""

from __future__ import annotations

from typing import Any

__all__ = ["entry_points"]

entry_points: Any = None  # the module ``anyattn.custom_ops.entry_points``, imported with Dynamo, which sets this
