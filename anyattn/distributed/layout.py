"""Where rows and keys of a plan lie: intervals of rows per rank, and local attention calls. Host integers."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "Layout", "Segment", "Source", "hull_of", "length_of", "local_rows", "overlap", "segments_of"]

Interval = tuple[int, int]  # [start, stop) of global positions
_MOST_SEGMENTS = 6  # local attention calls of a rank; each costs a launch and, at its ends, partly filled multiprocessors


class Segment(NamedTuple):
    """One local attention call: rows of a rank, next to one another in its tensors, and the interval of keys that they see.

    rows: global intervals, ascending. first: the local row of its first one. keys: a hull: of its keys, those that no row needs may be
    missing, and are 0 then. is_local: all needed keys are the rank's own, so that the call need not wait for messages.
    """

    rows: tuple[Interval, ...]
    first: int
    keys: Interval
    is_local: bool

    @property
    def length(self) -> int:
        return length_of(self.rows)

    @property
    def spans(self) -> tuple[Interval, ...]:
        """The intervals of keys that lie one behind the other in the call's."""
        return (self.keys,)

    @property
    def key_length(self) -> int:
        return self.keys[1] - self.keys[0]


class Source(NamedTuple):
    """A part of a call's keys. at: the interval inside of them. message: which received interval it comes from, None for the rank's own
    keys. rows: the interval inside that, or inside the rank's own rows."""

    at: Interval
    message: int | None
    rows: Interval


class Layout(NamedTuple):
    """The placement of one mask's rows and keys, the same on every rank.

    length: of the sequence. chunk: positions in a chunk, the last of which may be short. owner: the rank of each chunk. needs: bool
    (ranks, chunks): which chunks of keys the rows of a rank see. node_size: ranks of a node, neighbours; all of them if there is one.
    """

    length: int
    chunk: int
    owner: np.ndarray
    needs: np.ndarray
    node_size: int

    @classmethod
    def of(cls, length: int, chunk: int, owner: np.ndarray, ranks: int, visits: np.ndarray, node_size: int) -> Layout:
        """visits: bool (chunks, chunks), which chunks of keys the rows of each chunk see."""
        return cls(length, chunk, owner, np.stack([visits[owner == r].any(0) for r in range(ranks)]), node_size)

    @property
    def ranks(self) -> int:
        return len(self.needs)

    def rows_of(self, rank: int) -> tuple[Interval, ...]:
        """The global rows of a rank."""
        return self.intervals(self.owner == rank)

    @property
    def padded_rows(self) -> int:
        """Rows of a padded shard: the most that a rank has under any placement of such a sequence, so that new masks change no shape."""
        most = -(-len(self.owner) // self.ranks) * self.chunk
        return min(max(most, *[length_of(self.rows_of(r)) for r in range(self.ranks)]), self.length)

    def received(self, rank: int) -> int:
        """The number of keys that ``rank`` receives."""
        return length_of(self.intervals(self.needs[rank] & (self.owner != rank)))

    def intervals(self, chosen: np.ndarray) -> tuple[Interval, ...]:
        """The global intervals of chosen chunks, bool (chunks,), neighbours of one owner joined."""
        owner = np.where(chosen, self.owner, -1)
        starts = np.flatnonzero(np.diff(owner, prepend=-1))
        runs = zip(starts.tolist(), [*starts[1:].tolist(), len(owner)], owner[starts].tolist())
        return tuple([(a * self.chunk, min(b * self.chunk, self.length)) for a, b, rank in runs if rank >= 0])


def length_of(intervals: Iterable[Interval]) -> int:
    return sum(stop - start for start, stop in intervals)


def local_rows(rows: Sequence[Interval], interval: Interval) -> Interval:
    """The local rows of a global interval that lies inside one of ``rows``."""
    first = 0
    for start, stop in rows:
        if start <= interval[0] and interval[1] <= stop:
            return first + interval[0] - start, first + interval[1] - start
        first += stop - start
    raise AssertionError(f"{interval} is not among {rows}")


def overlap(intervals: Iterable[Interval], other: Interval) -> list[Interval]:
    """The parts of ``intervals`` inside ``other``."""
    cut = [(max(a, other[0]), min(b, other[1])) for a, b in intervals]
    return [(a, b) for a, b in cut if a < b]


def hull_of(rows: Sequence[Interval], keys: Sequence[Interval], spans: Sequence[Interval]) -> Interval | tuple[Source, ...]:
    """Where the keys of a call come from: the interval of the rank's own rows that they are, or a source for each part.

    rows: the rank's own. keys: the received intervals. spans: of the call's keys, one behind the other.
    """
    own = [local_rows(rows, span) for span in spans if any(start <= span[0] and span[1] <= stop for start, stop in rows)]
    if len(own) == len(spans) and all(a[1] == b[0] for a, b in itertools.pairwise(own)):
        return own[0][0], own[-1][1]
    found, base = [], 0
    for span in spans:
        shift = base - span[0]
        for part in overlap(rows, span):
            found.append(Source((part[0] + shift, part[1] + shift), None, local_rows(rows, part)))
        for i, interval in enumerate(keys):
            for part in overlap((interval,), span):
                found.append(Source((part[0] + shift, part[1] + shift), i, (part[0] - interval[0], part[1] - interval[0])))
        base += span[1] - span[0]
    return tuple(found)


def segments_of(layout: Layout, visits: np.ndarray, rank: int, overlaps: bool, joins: bool = True) -> tuple[Segment, ...]:
    """The local attention calls of a rank. visits: bool (chunks, chunks), which chunks of keys the rows of each chunk see. overlaps:
    whether rows that need no remote key have calls of their own, which run while messages travel.

    A run of chunks is one call if all of them or none of them need remote keys. Calls whose hulls of keys meet are joined (joins), because
    then their joint hull has no gap; and if there are many, those with the smallest gap.
    """
    own = layout.owner == rank
    mine = np.flatnonzero(own)
    if not len(mine):
        return ()
    seen = visits[mine]
    is_local = ~(seen & ~own).any(1)
    if not overlaps:
        is_local[:] = is_local.all()
    cuts = np.flatnonzero((np.diff(mine) > 1) | (np.diff(is_local.astype(np.int8)) != 0)) + 1
    parts: list[tuple[list[int], Interval, bool]] = []
    for part in np.split(np.arange(len(mine)), cuts):
        columns = np.flatnonzero(seen[part].any(0))
        hull = (int(columns[0]), int(columns[-1]) + 1) if len(columns) else (int(mine[part[0]]), int(mine[part[0]]) + 1)
        parts.append(([int(p) for p in part], hull, bool(is_local[part[0]])))
    parts = _joined(parts, joins)
    begins = np.concatenate(([0], np.cumsum([min(layout.chunk, layout.length - int(c) * layout.chunk) for c in mine])))
    segments = []
    for places, (low, high), local in parts:
        chosen = np.zeros(len(own), bool)
        chosen[mine[places]] = True
        keys = (low * layout.chunk, min(high * layout.chunk, layout.length))
        segments.append(Segment(layout.intervals(chosen), int(begins[places[0]]), keys, local))
    return tuple(segments)


def _joined(parts: list[tuple[list[int], Interval, bool]], joins: bool) -> list[tuple[list[int], Interval, bool]]:
    """Neighbouring parts joined: those that wait alike and whose hulls meet, and beyond ``_MOST_SEGMENTS`` those with the smallest gap."""
    while len(parts) > 1:
        gaps = [max(max(a[1][0], b[1][0]) - min(a[1][1], b[1][1]), 0) for a, b in itertools.pairwise(parts)]
        alike = [a[2] is b[2] for a, b in itertools.pairwise(parts)]
        is_many = len(parts) > _MOST_SEGMENTS
        best = min(range(len(gaps)), key=lambda i: (gaps[i] if alike[i] or is_many else 1 << 62, not alike[i]))
        if not is_many and (not joins or gaps[best] > 0 or not alike[best]):
            break
        a, b = parts[best], parts[best + 1]
        hull = (min(a[1][0], b[1][0]), max(a[1][1], b[1][1]))
        parts[best : best + 2] = [(a[0] + b[0], hull, a[2] and b[2])]
    return parts
