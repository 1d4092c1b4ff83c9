"""Autocast: query, key and value cast to the dtype of ``torch.autocast``, as torch's own attention does; nothing is cast twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["arguments", "beside", "cast", "disabled", "is_on"]

# Whether any device's autocast is on: the only cost of a call outside autocast.
is_on = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
disabled = torch._C._DisableAutocast  # type: ignore[attr-defined]  # a context: what runs inside computes in the dtypes it was written for


def cast(x: Any) -> Any:
    """``x`` in autocast's dtype where it is a tensor of floats, not of 64 bits, on a device whose autocast is on; else as it is."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_on_for(x) else x


def _is_on_for(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def arguments(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v as ``scaled_dot_product_attention`` takes them under autocast; nothing else of a call is cast.

    Called where ``is_on``. In compiled graphs the operators cast their operands; Dynamo traces no cast.
    """
    return cast(q), cast(k), cast(v)


def beside(cache: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """``arguments`` of a call with a cache, which is written in place and never cast: q, k and v are cast if it has autocast's dtype."""
    if not isinstance(cache, Tensor) or not _is_on_for(cache) or cache.dtype is not torch.get_autocast_dtype(cache.device.type):
        return q, k, v
    return arguments(q, k, v)
