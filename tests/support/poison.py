"""Poisoned memory: inside ``enabled()`` every buffer that the package allocates starts as garbage, between guard bands.

Floats start as NaN, integers as bytes 0x7f, bools as True, so that results that depend on uninitialised memory show; the bands on both
sides must be unchanged when the context ends, so that writes past either end show too.

>>> from tests.support import poison
>>> with poison.enabled():
...     out = anyattn.flex_attention(q, k, v)  # doctest: +SKIP
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Log", "enabled"]

_GUARD = 64  # elements on either side; keeps the result's alignment


class Log:
    """The allocations: ``count`` buffers of ``total_bytes``."""

    def __init__(self) -> None:
        self.count, self.total_bytes = 0, 0
        self._whole: list[tuple[Tensor, int]] = []

    def allocate(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any = None) -> Tensor:
        size = math.prod(shape)
        whole = _garbage(torch.empty(size + 2 * _GUARD, dtype=dtype, device=device))
        self.count += 1
        self.total_bytes += size * whole.element_size()
        self._whole.append((whole, size))
        return whole[_GUARD : _GUARD + size].view(shape)

    def allocate_strided(self, shape: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype, device: Any = None) -> Tensor:
        """strides: dense, in any order of the dimensions."""
        return self.allocate((math.prod(shape),), dtype=dtype, device=device).as_strided(shape, strides, _GUARD)

    def check(self) -> None:
        """Raises ``AssertionError`` if a guard band was overwritten."""
        for whole, size in self._whole:
            for band, side in ((whole[:_GUARD], "before"), (whole[_GUARD + size :], "after")):
                untouched = _garbage(torch.empty_like(band))
                assert torch.equal(band.view(torch.uint8), untouched.view(torch.uint8)), (
                    f"memory {side} a buffer of {size} {whole.dtype} elements was overwritten"
                )


def _garbage(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(math.nan)
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    tensor.view(torch.uint8).fill_(0x7F)
    return tensor


@contextlib.contextmanager
def enabled() -> Iterator[Log]:
    """Poisons all allocations of the torch backend inside; checks the guard bands at the end. Not thread-safe."""
    from anyattn.backends.torch import workspace

    log, plain, strided = Log(), workspace._allocate, workspace._allocate_strided
    workspace._allocate, workspace._allocate_strided = log.allocate, log.allocate_strided
    try:
        yield log
    finally:
        workspace._allocate, workspace._allocate_strided = plain, strided
    log.check()
