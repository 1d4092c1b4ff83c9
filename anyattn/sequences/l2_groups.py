"""L2 grouping of heads: the number of heads computed at a time, so that programs with the same keys and values find them in the L2 cache.

The work of a group is the first tile of each of its heads, then the second tile of each, and so on; then comes the next group. Kernels
compute ``place_in_groups`` (Hopper's ``tile_scheduler.row_tile``, Triton's ``backward._place``). Each backend measures how many bytes of
the cache a group may take.
"""

from __future__ import annotations

from typing import Any

__all__ = ["equal_groups", "fills_one_round", "heads_side_by_side", "place_in_groups"]


def heads_side_by_side(head_bytes: int, ratio: int, room: int) -> int:
    """The number of query heads computed at a time: as many as have K and V that fit the cache together, at least those of one K/V head.

    head_bytes: of one head's K and V. ratio: query heads that share them, or groups of heads that share row tiles. room: bytes of the cache
    that they may take, as measured by the backend.

    >>> heads_side_by_side(8 << 20, 4, 32 << 20), heads_side_by_side(64 << 20, 4, 32 << 20)
    (16, 4)
    """
    return max(1, room // max(head_bytes, 1)) * ratio


def equal_groups(heads: int, most: int) -> int:
    """The number of heads per group if all groups are equal: the greatest divisor of ``heads`` that is at most ``most`` (1 or more).

    >>> equal_groups(12, 8), equal_groups(7, 6)
    (6, 1)
    """
    return next(n for n in range(min(heads, most), 0, -1) if heads % n == 0)


def fills_one_round(tiles: Any, processors: Any) -> Any:
    """Whether so many tiles occupy at least 95 % of the multiprocessors, all at once. For Python ints and CuTe DSL integers.

    >>> fills_one_round(128, 132), fills_one_round(136, 132), fills_one_round(125, 132)
    (True, False, False)
    """
    return (tiles <= processors) & (20 * tiles >= 19 * processors)


def place_in_groups(work: int, tiles: int, heads: int, together: int) -> tuple[int, int]:
    """(tile, head) of work item ``work``. tiles: per head. together: heads per group; the last group may have fewer.

    >>> [place_in_groups(work, 2, 3, 2) for work in range(6)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2)]
    """
    first = work // (together * tiles) * together
    width = min(together, heads - first)
    rest = work - first * tiles
    return rest // width, first + rest % width
