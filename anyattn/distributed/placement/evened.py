"""Swaps of chunks between heavy and light ranks, for many ranks: there bisection is left with few chunks to halve."""

from __future__ import annotations

import numpy as np

from anyattn.distributed.placement.chunks import Chunks

__all__ = ["evened"]

_ROUNDS = 16
_NEVER = np.iinfo(np.int64).max


def evened(chunks: Chunks, owner: np.ndarray, ranks: int, most: float) -> np.ndarray:
    """The owners after swaps of single chunks, the same array if there is none.

    In each round the heaviest rank swaps with the lightest, the second with the second lightest and so on, as long as the heavier one of a
    pair has more than ``most`` times the mean. Each swap is the one that leaves its pair most even.
    """
    has_swapped = False
    mean, members = int(chunks.load.sum()) / ranks, np.bincount(owner, minlength=ranks)
    # (ranks, most chunks of a rank): a rank's chunks; the last place of ranks with one chunk less is empty, -1
    held = np.full((ranks, int(members.max())), -1)
    order = np.argsort(owner, kind="stable")
    place = np.arange(len(owner)) - np.repeat(np.cumsum(members) - members, members)
    held[owner[order], place] = order
    half = ranks // 2
    for _ in range(_ROUNDS):
        loads = np.where(held >= 0, chunks.load[held], 0)
        total = loads.sum(1)
        by_load = np.argsort(-total, kind="stable")
        heavy, light = by_load[:half], by_load[::-1][:half]
        is_over = total[heavy] > most * mean
        if not is_over.any():
            break
        heavy, light = heavy[is_over], light[is_over]
        gap = total[heavy] - total[light]
        left = np.abs(gap[:, None, None] - 2 * (loads[heavy][:, :, None] - loads[light][:, None]))
        left[(held[heavy] < 0)[:, :, None] | (held[light] < 0)[:, None]] = _NEVER
        left = left.reshape(len(gap), -1)
        best = left.argmin(1)
        helps = left.min(1) < gap
        if not helps.any():
            break
        heavy, light, (i, j) = heavy[helps], light[helps], np.divmod(best[helps], held.shape[1])
        held[heavy, i], held[light, j] = held[light, j], held[heavy, i]
        has_swapped = True
    if not has_swapped:
        return owner
    found = np.empty_like(owner)
    rank, place = np.nonzero(held >= 0)
    found[held[rank, place]] = rank
    return found
