"""Placements by bisection: ranks are halved, and with them rows and load, where the two halves receive the fewest keys.

On a circle of row chunks some window with half of the rows has half of the load, up to one chunk: the necklace theorem for two thieves
(Goldberg and West, 1985; Alon, "Splitting necklaces", 1987). Among the windows within a tolerance of the load the one is taken whose two
sides receive the fewest keys; cuts fall on edges of documents by themselves, since fewest keys cross there. The circle is tried in several
orders of the segments between such edges: as they are, by load, and in fixed pseudo-random orders.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anyattn.distributed.placement.chunks import Chunks, packed, popcount, quotas, windows

__all__ = ["bisected", "seams"]

_BALANCE = 0.5  # what a load off by its whole counts beside the job's keys received once


class _Job(NamedTuple):
    """Chunks, ascending, that ``ranks`` ranks from ``first`` on share."""

    rows: np.ndarray
    first: int
    ranks: int


def bisected(chunks: Chunks, ranks: int, tolerance: float, words: int) -> np.ndarray:
    """The owner of each chunk, int32 (chunks,).

    tolerance: how far a rank's load may be from the mean, where chunks are fine enough. words: of bits that are searched, which bounds the
    number of orders. Each level of halving has an equal share of both.
    """
    owner = np.zeros(chunks.number, np.int32)
    ends, is_seam = quotas(chunks.number, ranks), seams(chunks)
    levels = max((ranks - 1).bit_length(), 1)
    orders, each = max(words // (levels * max(chunks.sees.size, 1)), 2), tolerance / levels
    jobs = [_Job(np.arange(chunks.number), 0, ranks)]
    while jobs:
        alike: dict[tuple[int, int, int], list[_Job]] = {}
        for job in jobs:
            if job.ranks == 1:
                owner[job.rows] = job.first
            else:
                middle = int(ends[job.first + job.ranks // 2] - ends[job.first])
                alike.setdefault((len(job.rows), middle, job.ranks), []).append(job)
        jobs = []
        for (_, middle, number), group in alike.items():
            halves = _halved(chunks, np.stack([job.rows for job in group]), middle, (number // 2, number), (is_seam, orders, each))
            for job, one, other in zip(group, *halves, strict=True):
                jobs += [_Job(one, job.first, number // 2), _Job(other, job.first + number // 2, number - number // 2)]
    return owner


def _halved(
    chunks: Chunks, rows: np.ndarray, middle: int, ranks: tuple[int, int], search: tuple[np.ndarray, int, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The two sides of each job. rows: (jobs, m) -> (jobs, middle), (jobs, m - middle), ascending.

    ranks: of the first side, of both. search: seams, number of orders, tolerance.
    """
    (jobs, m), (is_seam, orders, tolerance) = rows.shape, search
    if middle in (0, m):  # fewer chunks than ranks
        return rows[:, :middle], rows[:, middle:]
    circles = _circles(chunks.load, rows, is_seam, orders)  # (jobs, orders, m)
    number = circles.shape[1]
    load = chunks.load[circles]
    sums = np.cumsum(np.concatenate((np.zeros_like(load[..., :1]), load, load[..., :middle]), -1), -1)
    inside, whole = sums[..., middle : middle + m] - sums[..., :m], sums[:, :1, m : m + 1]
    # a share of the load of the ranks of the smaller side
    scale = np.maximum(whole * min(ranks[0], ranks[1] - ranks[0]), 1)
    off = np.abs(inside * ranks[1] - whole * ranks[0]) / scale
    sees = chunks.sees[circles.reshape(-1, m)]
    received = popcount(windows(sees, middle)).reshape(jobs, number, m)
    other = received if 2 * middle == m else popcount(windows(sees, m - middle)).reshape(jobs, number, m)
    received = received + np.roll(other, -middle, -1)  # less m, the chunks that the two sides own
    value = np.where(off <= np.maximum(tolerance, off.min((1, 2), keepdims=True)), received / m + _BALANCE * off, np.inf)
    best = value.reshape(jobs, -1).argmin(1)
    order = circles[np.arange(jobs), best // m]
    turned = np.take_along_axis(order, (best[:, None] % m + np.arange(m)) % m, 1)
    return np.sort(turned[:, :middle], 1), np.sort(turned[:, middle:], 1)


def _circles(load: np.ndarray, rows: np.ndarray, is_seam: np.ndarray, most: int) -> np.ndarray:
    """The orders of chunks that are tried, (jobs, orders, m): as they are, and others of their segments.

    A segment is a run of neighbouring chunks between seams. Three segments on a circle have one order, up to its direction.
    """
    jobs = len(rows)
    begins = np.ones(rows.shape, bool)
    begins[:, 1:] = (np.diff(rows, axis=1) > 1) | is_seam[rows[:, 1:]]
    segment = np.cumsum(begins, 1) - 1
    number = int(segment[:, -1].max()) + 1
    if number <= 3:
        return rows[:, None]
    place = segment + number * np.arange(jobs)[:, None]
    first = np.zeros(jobs * number, np.int64)
    first[place[begins]] = rows[begins]
    sizes, loads = (np.bincount(place.reshape(-1), w, len(first)) for w in (None, load[rows].reshape(-1)))  # exact: below 2**53
    by_load = -(loads // np.maximum(sizes, 1)).astype(np.int64)
    keys = np.concatenate((by_load[None], _scattered(first, most - 2)))[:, place].swapaxes(0, 1)  # (jobs, orders, m)
    order = np.argsort(keys, axis=-1, kind="stable")
    others = np.take_along_axis(np.broadcast_to(rows[:, None], order.shape), order, -1)
    return np.concatenate((rows[:, None], others), 1)


def _scattered(first: np.ndarray, number: int) -> np.ndarray:
    """int64 (number, segments): pseudo-random keys of segments, by their first chunks (splitmix64, each number with its own increment)."""
    seeds = np.arange(1, number + 1, dtype=np.uint64)[:, None] * np.uint64(0xD1B54A32D192ED03)
    z = (first + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seeds
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z >> np.uint64(33)).astype(np.int64)


def seams(chunks: Chunks) -> np.ndarray:
    """bool (chunks,): the chunks before which an edge of documents lies, as the counts alone show it: few visited pairs of chunks lie
    across the edge, no more than one row sees, and fewer than across the edges next to it."""
    needs = chunks.work.needs
    lower = needs & np.tri(len(needs), k=-1, dtype=bool)
    upper = needs ^ lower
    rows, columns = [popcount(packed(each)) for each in (lower, upper)], [_of_columns(each) for each in (lower, upper)]
    # an edge that moves over a chunk no longer crosses the pairs with chunks before it, and then crosses those with chunks after it; a
    # chunk's pair with itself is counted both ways
    steps = rows[1] + columns[0] - rows[0] - columns[1]
    cross = np.concatenate(([0], np.cumsum(steps)))
    found = np.zeros(len(needs), bool)
    found[1:] = (cross[1:-1] <= (rows[0] + rows[1]).max()) & (cross[:-2] >= cross[1:-1]) & (cross[1:-1] < cross[2:])
    return found


def _of_columns(flags: np.ndarray) -> np.ndarray:
    """int64 (columns,): the number of ones of each column."""
    return flags.view(np.int8).sum(0, dtype=np.int16).astype(np.int64)
