"""Descales of 8-bit keys and values: the float32 factors by which stored numbers are multiplied, in the two forms that backends read."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.kvcache.quantise import LIMITS
from anyattn.tensors.kinds import are_fake
from anyattn.triton_tools.recording import active_recorder

__all__ = ["EIGHT_BITS", "KVScales", "kv_scales"]

EIGHT_BITS = tuple(LIMITS)


class KVScales(NamedTuple):
    """Factors of the stored keys and of the stored values, float32; None is 1.

    Two dimensions: (batch entries, K/V heads). Three: (rows of storage or pages, K/V heads, positions in a row or page), a factor for each
    key, at the place that it has in the storage ``Problem.k``. Any strides, 0 where factors are equal; what belongs to no key of a sequence
    may hold anything.
    """

    k: Tensor | None
    v: Tensor | None


def kv_scales(k_descale: Any, v_descale: Any, k: Tensor, batch: int) -> KVScales | None:
    """The scales of a call whose arguments are checked (``validate.scales``); None if both are 1. k: heads first, as ``Problem.k``.

    >>> k = torch.zeros(6, 2, 16, 64, dtype=torch.int8)  # six pages of 16 keys of two heads
    >>> found = kv_scales(0.5, torch.ones(6, 16, 2), k, 3)
    >>> found.k.shape, found.v.shape
    (torch.Size([3, 2]), torch.Size([6, 2, 16]))
    """
    if k_descale is None and v_descale is None:
        return None
    found = KVScales(_factors(k_descale, k, batch), _factors(v_descale, k, batch))
    return None if found.k is None and found.v is None else found


def _factors(descale: Any, k: Tensor, batch: int) -> Tensor | None:
    if descale is None:
        return None
    if not isinstance(descale, Tensor):
        return None if descale == 1.0 else _constant(float(descale), k.device).expand(batch, k.shape[1])
    rows, heads, positions, _ = k.shape
    if descale.ndim < 3:
        if descale.shape == (batch, heads):
            return descale
        return (descale if descale.ndim == 2 else descale.reshape(1, 1)).expand(batch, heads)
    (n_rows, n_positions, n_heads), (row, position, head) = descale.shape, descale.stride()
    # one view, where expand and transpose are two
    return descale.as_strided((rows, heads, positions), (row * (n_rows > 1), head * (n_heads > 1), position * (n_positions > 1)))


def _constant(value: float, device: torch.device) -> Tensor:
    """A tensor of one number. One that is made while a CUDA graph is captured is filled at replays, and so belongs to that graph alone; one
    that is made in a fake mode has no number."""
    if are_fake(()) or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _filled(value, device)
    found = _kept(value, device)
    if (recorder := active_recorder()) is not None:
        recorder.outlives(found, partial(_kept, value, device))
    return found


def _filled(value: float, device: torch.device) -> Tensor:
    return torch.full((1, 1), value, dtype=torch.float32, device=device)


_kept = lru_cache(maxsize=256)(_filled)
