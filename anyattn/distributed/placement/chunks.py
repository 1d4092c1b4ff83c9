"""Work in whole numbers: loads of row chunks as integers, and the keys that they see as sets of bits."""

from __future__ import annotations

from functools import lru_cache
from math import frexp
from typing import NamedTuple

import numpy as np

from anyattn.distributed.placement.work import Work

__all__ = ["Chunks", "chunks_of", "packed", "popcount", "quotas", "unpacked", "windows"]

_BITS = 30  # of the largest load: products of a sum of loads with ranks stay below 2**63 for 4,096 chunks and 1,024 ranks


class Chunks(NamedTuple):
    """What placements are made from. Comparisons of whole numbers do not depend on the order in which a machine adds.

    load: int64 (chunks,), attention of the rows of a chunk in units of ``unit`` tiles. sees: uint64 (chunks, words), a bit for each key
    chunk that the rows of a chunk see, and for the chunk itself, whose keys lie with its rows. keys: int64 (chunks,), positions of a chunk.
    """

    work: Work
    load: np.ndarray
    unit: float
    sees: np.ndarray
    keys: np.ndarray

    def keys_in(self, words: np.ndarray) -> np.ndarray:
        """int64 (sets,): the number of keys in sets of chunks, uint64 (sets, words)."""
        last = packed(np.arange(self.number) == self.number - 1)[-1]
        # every chunk has as many keys, but for the last
        missing = self.work.chunk - self.keys[-1]
        return popcount(words) * self.work.chunk - np.where((words[:, -1] & last) != 0, missing, 0)  # type: ignore[no-any-return]

    @property
    def number(self) -> int:
        return len(self.load)


def chunks_of(work: Work, partial_factor: float) -> Chunks:
    """partial_factor: what evaluating the mask in a tile costs, in tiles."""
    load = work.visited.sum(1) + partial_factor * work.partial.sum(1)
    unit = 2.0 ** (frexp(float(load.max(initial=0.0)))[1] - _BITS)
    sees = work.needs.copy()
    np.fill_diagonal(sees, True)
    start = work.chunk * np.arange(work.chunks, dtype=np.int64)
    return Chunks(work, np.rint(load / unit).astype(np.int64), unit, packed(sees), np.minimum(work.chunk, work.length - start))


def quotas(chunks: int, ranks: int) -> np.ndarray:
    """int64 (ranks + 1,): rank r has ``quotas[r + 1] - quotas[r]`` chunks; the numbers of any two ranks differ by at most one."""
    return np.arange(ranks + 1, dtype=np.int64) * chunks // ranks


def packed(flags: np.ndarray) -> np.ndarray:
    """uint64 (..., words) of bool (..., n), 64 flags a word."""
    octets = np.packbits(flags, axis=-1)
    padding = [(0, 0)] * (flags.ndim - 1) + [(0, -octets.shape[-1] % 8)]
    return np.ascontiguousarray(np.pad(octets, padding) if padding[-1][1] else octets).view(np.uint64)


def unpacked(words: np.ndarray, number: int) -> np.ndarray:
    """bool (..., number): the first ``number`` flags of uint64 (..., words)."""
    return np.unpackbits(words.view(np.uint8), axis=-1, count=number).view(bool)


def popcount(words: np.ndarray) -> np.ndarray:
    """int64 (...,): the number of ones in uint64 (..., words)."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        return np.bitwise_count(words).sum(-1, dtype=np.int64)
    return _ones_of_16_bits()[words.view(np.uint16)].sum(-1, dtype=np.int64)


@lru_cache(maxsize=1)
def _ones_of_16_bits() -> np.ndarray:
    numbers = np.arange(2**16, dtype=np.uint16)
    return np.unpackbits(numbers.view(np.uint8).reshape(-1, 2), axis=1).sum(1, dtype=np.uint8)


def windows(words: np.ndarray, length: int) -> np.ndarray:
    """The union of each ``length`` neighbours on a circle: entry x of uint64 (circles, m, words) is that of x to x + length - 1.

    By doubling: overlapping unions are unions, so ``log2(length)`` steps do.
    """
    ring = np.concatenate((words, words[:, : length - 1]), 1)
    size = 1
    while size < length:
        step = min(size, length - size)
        ring = ring[:, :-step] | ring[:, step:]
        size += step
    return ring
