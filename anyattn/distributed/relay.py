"""How keys travel: a key that several ranks of another node need goes to one of them, which passes it on inside its node. Host integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anyattn.distributed.layout import Interval, Layout, length_of, local_rows

__all__ = ["Arrivals", "Exchange", "Route", "arrivals_of", "exchanges_of", "route_of"]


class Exchange(NamedTuple):
    """One exchange between all ranks, the same on each. arrives: bool (ranks, chunks), the chunks of keys that a rank receives. senders:
    int (ranks, chunks), from which rank."""

    arrives: np.ndarray
    senders: np.ndarray


class Route(NamedTuple):
    """The keys that a rank sends and receives, in exchanges that follow one another: none if no key travels between any two ranks, one, or
    two if some are passed on.

    sent, received: for each exchange, the keys to and from each rank. rows: the intervals of the rank's own rows that are sent in the first
    one, rank after rank. passed: the global intervals that are sent in the second one, rank after rank; each is a part of one that was
    received. arriving: for each exchange, the global intervals that are received, rank after rank.
    """

    sent: tuple[tuple[int, ...], ...]
    received: tuple[tuple[int, ...], ...]
    rows: tuple[Interval, ...]
    passed: tuple[Interval, ...]
    arriving: tuple[tuple[Interval, ...], ...]

    @property
    def keys(self) -> tuple[Interval, ...]:
        """All global intervals that are received; what is passed on may not be needed here."""
        return tuple([interval for each in self.arriving for interval in each])


def exchanges_of(layout: Layout) -> tuple[Exchange, ...]:
    """The exchanges of a layout, without those in which nothing travels.

    In the first one a key goes to the ranks of its owner's node that need it, and for each other node to the one rank that needs it, or,
    if several do, to the rank that has the place in its node which the owner has in its own: so the load of the nodes' network cards is
    that of the owners, and networks that join the cards of one place by a switch of their own need no other. In the second one it goes
    from there to the ranks of the node that need it.
    """
    size, owner = layout.node_size, layout.owner
    node, place = np.divmod(np.arange(layout.ranks), size)
    needs = layout.needs & (owner != np.arange(layout.ranks)[:, None])
    several = needs.reshape(-1, size, len(owner)).sum(1) > 1  # (nodes, chunks)
    is_relayed = several[node] & (owner // size != node[:, None])
    is_relay = is_relayed & (owner % size == place[:, None])
    first = Exchange(np.where(is_relayed, is_relay, needs), np.broadcast_to(owner, needs.shape))
    second = Exchange(needs & is_relayed & ~is_relay, size * node[:, None] + owner % size)
    return tuple([exchange for exchange in (first, second) if exchange.arrives.any()])


class Arrivals(NamedTuple):
    """How many keys each rank receives, with those that it passes on. inside, across: int64 (ranks,), from its own node and from others.
    exchanges: their number."""

    inside: np.ndarray
    across: np.ndarray
    exchanges: int


def arrivals_of(layout: Layout) -> Arrivals:
    lengths = np.minimum(layout.chunk, layout.length - layout.chunk * np.arange(len(layout.owner)))
    inside = across = np.zeros(layout.ranks, np.int64)
    exchanges = exchanges_of(layout)
    for arrives, senders in exchanges:
        crosses = senders // layout.node_size != np.arange(layout.ranks)[:, None] // layout.node_size
        inside, across = inside + (arrives & ~crosses) @ lengths, across + (arrives & crosses) @ lengths
    return Arrivals(inside, across, len(exchanges))


def route_of(layout: Layout, rank: int) -> Route:
    """What ``rank`` sends and receives."""
    ranks = range(layout.ranks)
    sent, received, leaving, arriving = [], [], [], []
    for arrives, senders in exchanges_of(layout):
        to = [layout.intervals(arrives[r] & (senders[r] == rank)) for r in ranks]
        came = [layout.intervals(arrives[rank] & (senders[rank] == r)) for r in ranks]
        sent.append(tuple(map(length_of, to)))
        received.append(tuple(map(length_of, came)))
        leaving.append([interval for part in to for interval in part])
        arriving.append(tuple([interval for part in came for interval in part]))
    own, passed = layout.rows_of(rank), leaving[1] if len(leaving) > 1 else []
    rows = [local_rows(own, interval) for interval in (leaving[0] if leaving else [])]
    return Route(tuple(sent), tuple(received), tuple(rows), tuple(passed), tuple(arriving))
