"""Split-KV: the division of a row tile's keys among workers, and the choice of the number of splits."""

from __future__ import annotations

from typing import Any

from anyattn.arithmetic import ceil_div
from anyattn.sequences.integers import minimum

__all__ = ["MOST_SPLITS", "num_splits", "split_range"]

MOST_SPLITS = 256  # most splits that a call may request

_START = 1.0  # cost of starting and ending a split, in key tiles: loading the queries, filling the pipeline, storing
_MERGE = 0.1  # cost of combining one more partial result, in key tiles


def split_range(n_block_min: Any, n_block_max: Any, split_idx: Any, splits: Any) -> tuple[Any, Any]:
    """The key tiles of one split: equal shares of ``n_block_min .. n_block_max``, rounded up; the last ones may be shorter or empty.

    >>> [split_range(0, 7, i, 4) for i in range(4)]
    [(0, 2), (2, 4), (4, 6), (6, 7)]
    """
    share = ceil_div(n_block_max - n_block_min, splits)
    first = minimum(n_block_min + split_idx * share, n_block_max)
    return first, minimum(first + share, n_block_max)


def num_splits(num_m_blocks: int, num_n_blocks: int, heads: int, batch: int, sm_count: int, max_splits: int = 128) -> int:
    """The number of splits with which ``sm_count`` processors finish soonest; a pure function.

    num_m_blocks, num_n_blocks: row tiles of one (batch entry, head), and key tiles that each row tile visits. heads: K/V heads where query
    heads are packed, else query heads. The modelled time of s splits is the number of waves, ``ceil(tiles * s / sm_count)``, times (a
    split's key tiles plus the cost of starting a split), plus the cost of combining; the smallest s with the least time is returned.

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
