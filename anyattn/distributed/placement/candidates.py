"""Placements that are always tried: contiguous pieces, and a front and a back piece for each rank."""

from __future__ import annotations

import numpy as np

from anyattn.distributed.placement.chunks import Chunks, quotas

__all__ = ["contiguous", "fold"]


def contiguous(chunks: Chunks, ranks: int) -> np.ndarray:
    """One piece for each rank, in order: fewest keys travel for windows."""
    return np.repeat(np.arange(ranks, dtype=np.int32), np.diff(quotas(chunks.number, ranks)))


def fold(chunks: Chunks, ranks: int) -> np.ndarray:
    """Each rank takes a piece from the front and a piece from the back of what is left, split so that its load is the mean of the rest.

    For causal attention this is the zigzag; a prefix that all rows see comes out balanced too.
    """
    owner = np.empty(chunks.number, np.int32)
    total = np.concatenate(([0], np.cumsum(chunks.load)))
    front, back = 0, chunks.number
    for rank, rows in enumerate(np.diff(quotas(chunks.number, ranks)).tolist()):
        # ``taken[x]``: the load of x chunks from the front and the others from the back
        taken = total[front : front + rows + 1] - total[front] + total[back] - total[back - rows : back + 1]
        x = int(np.argmin(np.abs(taken * (ranks - rank) - (total[back] - total[front]))))
        owner[front : front + x] = rank
        owner[back - (rows - x) : back] = rank
        front, back = front + x, back - (rows - x)
    return owner
