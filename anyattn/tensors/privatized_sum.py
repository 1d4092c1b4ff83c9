"""Privatized sums: several copies of a small captured gradient, to which threads add without contention, summed at the end.

Where many pairs add to the same few entries, such as the buckets of a relative bias, atomic additions to one address are serialised. With
copies, the lanes of a warp add to adjacent copies, and programs to different ones (``device_math.send_copies``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["copies_for", "read", "zeros"]

_ROOM = 4 << 20  # bytes: small compared with the gradients of a large call
_MOST = 1024  # 32 lanes times 32 programs; more programs share copies, but at different times


def copies_for(entries: int, itemsize: int) -> int:
    """The number of copies of a total: a power of two, 1 for a large total.

    >>> copies_for(32 * 16, 4), copies_for(2**16, 4), copies_for(2**21, 4)
    (1024, 16, 1)
    """
    most = min(_MOST, _ROOM // max(1, entries * itemsize))
    return 1 << (max(most, 1).bit_length() - 1)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero sums: a contiguous tensor of ``shape`` and a last dimension of copies."""
    return torch.zeros((*shape, copies_for(torch.Size(shape).numel(), dtype.itemsize)), dtype=dtype, device=device)


def read(total: Tensor) -> Tensor:
    """The sum of all copies, always added in the same order."""
    return total.sum(-1) if total.shape[-1] > 1 else total.squeeze(-1)
