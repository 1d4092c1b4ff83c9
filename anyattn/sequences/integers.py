"""Integer minimum and maximum for Python ints, integer tensors (elementwise) and CuTe DSL integers; ceiling division is re-exported.

``+ - *`` and ``//`` by a positive number mean the same for all three.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["ceil_div", "maximum", "minimum"]


def minimum(a: Any, b: Any) -> Any:
    return _either(a, b, min, torch.minimum, "min")


def maximum(a: Any, b: Any) -> Any:
    return _either(a, b, max, torch.maximum, "max")


def _either(a: Any, b: Any, on_ints: Any, on_tensors: Any, name: str) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        return on_ints(a, b)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        like = a if isinstance(a, Tensor) else b
        return on_tensors(*(torch.as_tensor(x, dtype=like.dtype, device=like.device) if not isinstance(x, Tensor) else x for x in (a, b)))
    import cutlass  # installed, since a CuTe integer was passed

    return getattr(cutlass, name)(a, b)
