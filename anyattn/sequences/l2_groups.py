"""How many heads are computed at a time, so that what reads the same keys and values finds them in the cache of all multiprocessors."""

from __future__ import annotations

__all__ = ["heads_side_by_side"]


def heads_side_by_side(head_bytes: int, ratio: int, room: int) -> int:
    """How many query heads go side by side: those whose keys and values fit the cache together, and those of one K/V head at the least.

    head_bytes: of one head's K and V; ratio: query heads that share them, or groups of heads that share row tiles; room: bytes of the cache
    that they may take, with which a backend was measured.

    >>> heads_side_by_side(8 << 20, 4, 32 << 20), heads_side_by_side(64 << 20, 4, 32 << 20)
    (16, 4)
    """
    return max(1, room // max(head_bytes, 1)) * ratio
