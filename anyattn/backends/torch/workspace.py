"""Memory allocation of the torch backend, in one place so that tests can poison uninitialised memory.

A ``Workspace`` has named scratch buffers that are reused from tile to tile: a new tensor of more than a few MB costs page faults at every
use (measured on the CPU: they tripled the time of a 16 MB tile).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyattn.tensors.strides import dense_strides

__all__ = ["Workspace", "empty", "empty_in_order", "zeros", "zeros_in_order"]

# Tests replace these to fill every buffer with NaN or 0x7f bytes and to put guard bands around outputs.
_allocate: Callable[..., Tensor] = torch.empty
_allocate_strided: Callable[..., Tensor] = torch.empty_strided


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _allocate(shape, dtype=dtype, device=device)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return empty(shape, dtype, device).zero_()


def empty_in_order(like: Tensor, last: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised result of ``like``'s shape except for the last dimension, dense, in ``like``'s stride order."""
    return _allocate_strided((*like.shape[:-1], last), dense_strides(like, last), dtype=dtype, device=like.device)


def zeros_in_order(like: Tensor, dtype: torch.dtype) -> Tensor:
    return empty_in_order(like, like.shape[-1], dtype).zero_()


class Workspace:
    """Scratch buffers by name; a buffer grows to the largest requested shape and is never shrunk or cleared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised contiguous tensor; the previous one of the same name and dtype is overwritten."""
        held = self._held.get((name, dtype))
        if held is not None and held.shape == shape:
            return held
        size = math.prod(shape)
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = empty(shape, dtype, self.device)  # without spare room: a tile takes each buffer once
            return held
        return held.view(-1)[:size].view(shape)

    def cast(self, name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        """``x`` if it has this dtype, else a copy in the buffer of this name."""
        return x if x.dtype == dtype else self.take(name, tuple(x.shape), dtype).copy_(x)
