"""Backward passes of few K/V heads: the number of parts into which a K/V head's query heads are divided, one thread block for each.

A thread block computes dK and dV of one key tile from all rows that see it. One K/V head of 2,048 keys has 16 key tiles, and an H100 132
multiprocessors. The query heads that share a K/V head are then divided into equal parts. A thread block writes its part of dK and dV in
float32, and the last launch adds the parts in order: the sums are the same in every run. Source: FlashAttention (Dao, arXiv:2307.08691,
section 3.2) occupies multiprocessors by dividing the work of a head; there the gradients of shared keys are summed after the kernel.
"""

from __future__ import annotations

from functools import lru_cache

from anyattn.arithmetic import ceil_div

__all__ = ["PROCESSORS", "parts_for"]

PROCESSORS = 132  # multiprocessors of an H100 or H200, for kernels that are compiled where there is no GPU

# times in visits of one row tile (docs/history): the start and the end of a key tile; more of it if dK and dV are parts; the reads of one
# key tile's part at the end, if all multiprocessors read; the launch of the sum
_START, _PART, _SUM, _LAUNCH = 2.0, 1.0, 2.0, 1.5
_AS_FAST = 1.02  # times that differ by less count as equal


@lru_cache(maxsize=1024)
def parts_for(ratio: int, heads: int, key_tiles: int, row_tiles: int, is_uneven: bool, processors: int) -> int:
    """The number of parts, a divisor of ``ratio``, with which the pass is estimated to take the least time; the fewest of those that hardly
    differ, because each part takes memory.

    ratio: query heads for each K/V head. heads: K/V heads of all batch entries. key_tiles: of a head. row_tiles: those of one query head
    that see a key tile at most. is_uneven: later key tiles are seen by fewer rows, down to one row tile.

    >>> parts_for(32, 1, 16, 26, True, 132), parts_for(4, 8, 64, 103, True, 132), parts_for(8, 4, 8, 13, False, 132)
    (16, 1, 4)
    """
    mean = (row_tiles + 1) / 2 if is_uneven else row_tiles

    def time(parts: int) -> float:
        of_tile, tiles = _START + _PART * (parts > 1), heads * key_tiles * parts
        longest, average = ratio // parts * row_tiles + of_tile, ratio // parts * mean + of_tile
        if is_uneven:  # the longest go first
            products = max(longest, tiles * average / processors + average / 4)
        else:
            products = ceil_div(tiles, processors) * longest
        return products + (_LAUNCH + _SUM * tiles / processors if parts > 1 else 0)

    times = {parts: time(parts) for parts in range(1, ratio + 1) if ratio % parts == 0}
    return next(parts for parts in times if times[parts] <= _AS_FAST * min(times.values()))
