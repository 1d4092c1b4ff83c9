"""A lower bound of the keys that travel, for every placement with equal rows and a load no worse than a given one."""

from __future__ import annotations

import numpy as np

from anyattn.arithmetic import ceil_div
from anyattn.distributed.placement.chunks import Chunks

__all__ = ["bound_of"]

_THRESHOLDS = 16
_SLACK = 1e-9  # of a quotient that may have come out above the whole number that it is


def bound_of(chunks: Chunks, ranks: int, most: float = 1.05) -> int:
    """No placement whose numbers of chunks differ by at most one and whose ranks have at most ``most`` times the mean attention receives
    fewer keys, summed over ranks, than this. The greater of two bounds, with R rows and load L a rank:

    Of key chunks. A chunk's keys travel to all ranks that see them but one. Rows and load of the rows that see them need so many ranks. And
    A ranks that do not see them have ``A R`` rows among the others, and at least ``(A most - (most - 1) ranks) L`` of the load, because no
    other rank has more than ``most L``: for every t, that is at most ``A R t`` and what the others' rows have above t. For causal attention
    and equal load it follows that no placement receives less than 0.75 of an all-gather.

    Of rows. A rank receives at least the mean number of keys that one of its rows sees, less those that it owns.
    """
    load, total, rows = chunks.load, int(chunks.load.sum()), ceil_div(chunks.number, ranks)
    seen = chunks.work.needs.astype(np.float64)
    by_rows = ceil_div(int((seen @ chunks.keys).sum()), rows) - chunks.work.length
    if total == 0:
        return max(by_rows, 0)
    # sums of whole numbers below 2**53 are exact
    number, weight = np.array([np.ones(chunks.number), load]) @ seen
    wanted = np.maximum(_up(number / rows), _up(weight * ranks / (most * total)))
    mean = total / (ranks * rows)  # load of a row
    thresholds = np.floor(np.linspace(0, 1, _THRESHOLDS, endpoint=False) * mean)
    above = np.maximum(load - thresholds[:, None], 0)
    others = above.sum(1)[:, None] - above @ seen  # (thresholds, chunks)
    blind = (others + (most - 1) * total) / (most * total / ranks - rows * thresholds)[:, None]
    wanted = np.maximum(wanted, ranks - np.floor(blind.min(0) * (1 + _SLACK)))
    return max(by_rows, int((np.maximum(wanted - 1, 0) * chunks.keys).sum()))


def _up(share: np.ndarray) -> np.ndarray:
    return np.ceil(share * (1 - _SLACK))
