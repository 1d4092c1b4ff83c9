"""L2 grouping of heads: how many are computed at a time, so that programs with the same keys and values find them in the L2 cache."""

from __future__ import annotations

__all__ = ["heads_side_by_side"]


def heads_side_by_side(head_bytes: int, ratio: int, room: int) -> int:
    """How many query heads are computed at a time: as many as have K and V that fit the cache together, at least those of one K/V head.

    head_bytes: of one head's K and V; ratio: query heads that share them, or groups of heads that share row tiles; room: bytes of the cache
    that they may take, by the backend's measurements.

    >>> heads_side_by_side(8 << 20, 4, 32 << 20), heads_side_by_side(64 << 20, 4, 32 << 20)
    (16, 4)
    """
    return max(1, room // max(head_bytes, 1)) * ratio
