"""The one cache of what is derived from block lists: their transposes, their widened forms, tables of kernels and of documents."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

__all__ = ["derived", "write_counts"]

_derived: WeakKeyDictionary[Any, tuple[tuple[int, ...], dict[Any, Any]]] = WeakKeyDictionary()


def derived(lists: Any) -> dict[Any, Any]:
    """What was derived from ``lists`` as they are now, by keys of the callers, who read it and add to it.

    It is kept until the lists are deleted or torch counts a write to one of their tensors. What is added for inference tensors, whose
    writes torch does not count, or while a CUDA graph is captured, is not kept: the graph computes it at every replay.
    """
    versions = write_counts(lists)
    if -1 in versions:
        return {}
    known = _derived.get(lists)
    if known is None or known[0] != versions:
        known = _derived[lists] = versions, {}
    is_capturing = lists.mask_block_cnt.is_cuda and torch.cuda.is_current_stream_capturing()
    return dict(known[1]) if is_capturing else known[1]


def write_counts(lists: Any) -> tuple[int, ...]:
    """torch's write counter of each tensor of block lists; -1 for an inference tensor, whose writes torch does not count."""
    return tuple([-1 if t.is_inference() else t._version for t in vars(lists).values() if isinstance(t, Tensor)])
