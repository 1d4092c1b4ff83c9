"""Autocast: casts query, key and value to the dtype of ``torch.autocast``, as torch's own attention does, and once only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["arguments", "beside", "cast", "disabled", "is_on"]

# Whether autocast is on for any device; a call outside autocast costs only this check.
is_on = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
disabled = torch._C._DisableAutocast  # context in which operations compute in the dtypes of their inputs


def cast(x: Any) -> Any:
    """``x`` in autocast's dtype if it is a float tensor of 16 or 32 bits on a device with autocast on; else ``x`` itself."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype.itemsize not in (2, 4):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_on_for(x) else x


def _is_on_for(x: Tensor) -> bool:
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def arguments(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v, cast as by ``scaled_dot_product_attention`` under autocast; a call's other tensors are not cast.

    Called only if ``is_on``. In compiled graphs the operators cast their operands; Dynamo traces no cast.
    """
    return cast(q), cast(k), cast(v)


def beside(cache: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """``arguments`` for a call with a cache, which is written in place and never cast:
    q, k and v are cast if the cache has autocast's dtype, or 8 bits."""
    if not isinstance(cache, Tensor) or not _is_on_for(cache):
        return q, k, v
    if cache.dtype.itemsize > 1 and cache.dtype is not torch.get_autocast_dtype(cache.device.type):
        return q, k, v
    return arguments(q, k, v)
