"""Split-KV: how the keys of a row tile are divided among workers, and the choice of their number."""

from __future__ import annotations

from typing import Any

from anyattn.arithmetic import ceil_div
from anyattn.sequences.integers import minimum

__all__ = ["MOST_SPLITS", "num_splits", "split_range"]

MOST_SPLITS = 256  # that a call may ask for

_START = 1.0  # what beginning and ending a piece costs, in key tiles: loading the queries, filling the pipeline, storing
_MERGE = 0.1  # what one more partial result costs whoever combines them, in key tiles


def split_range(n_block_min: Any, n_block_max: Any, split_idx: Any, splits: Any) -> tuple[Any, Any]:
    """The key tiles of one split: equal shares of ``n_block_min .. n_block_max``, rounded up, the last ones shorter or empty.

    >>> [split_range(0, 7, i, 4) for i in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    share = ceil_div(n_block_max - n_block_min, splits)
    first = minimum(n_block_min + split_idx * share, n_block_max)
    return first, minimum(first + share, n_block_max)


def num_splits(num_m_blocks: int, num_n_blocks: int, heads: int, batch: int, sm_count: int, max_splits: int = 128) -> int:
    """Into how many pieces to divide the keys so that ``sm_count`` processors finish soonest; a pure function.

    num_m_blocks, num_n_blocks: row tiles, and key tiles that each visits, of one (batch entry, head). heads: K/V heads where query heads
    are packed, else query heads. The time of s splits is that of its waves, ``ceil(tiles * s / sm_count)`` times a piece's key tiles and
    what starting one costs, plus what combining costs; the least s with the least time is taken.

    Raises ``ValueError`` for a negative count, or for ``sm_count`` or ``max_splits`` below 1.

    >>> num_splits(1, 64, heads=8, batch=1, sm_count=132), num_splits(64, 64, heads=32, batch=4, sm_count=132)
    (16, 1)
    """
    given = {"num_m_blocks": num_m_blocks, "num_n_blocks": num_n_blocks, "heads": heads, "batch": batch}
    for name, value, least in (*((n, v, 0) for n, v in given.items()), ("sm_count", sm_count, 1), ("max_splits", max_splits, 1)):
        if value < least:
            raise ValueError(f"{name}={value}; wanted at least {least}")
    tiles = num_m_blocks * heads * batch
    if tiles == 0 or num_n_blocks == 0:
        return 1

    def time(splits: int) -> float:
        waves = ceil_div(tiles * splits, sm_count)
        return waves * (ceil_div(num_n_blocks, splits) + _START) + (_MERGE * splits if splits > 1 else 0.0)

    return min(range(1, min(max_splits, num_n_blocks) + 1), key=lambda s: (time(s), s))
