"""A placement in numbers, for people and tests."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["PlanStats"]

_MOST_LISTED = 16  # ranks in the table


class PlanStats(NamedTuple):
    """What a plan's placement is expected to cost. ``print`` shows it as a few lines.

    length: positions of the sequence. chunk: positions that stay together. placement: how rows were placed: "contiguous", "fold" (a front
    and a back piece for each rank) or "bisected"; "heads": contiguous, and each rank computes some heads of all rows. rows, received,
    pieces: of each rank, its rows, the keys that it receives in a forward pass ("heads": keys and values of as many bytes), and its runs of
    neighbouring chunks. loads: of each rank, its attention relative to the mean. load: the largest of them. received_share: keys received
    by all ranks, in parts of an all-gather. bound: in the same unit, what no placement with equal rows, no larger load and this transport
    can go below. node_size: ranks of a node. across: of each rank, the keys that it receives from other nodes, some to pass them on;
    across_share: by all ranks, in parts of an all-gather. seconds, efficiency: predicted for the forward pass of one layer; efficiency is
    the time of one rank for everything, divided by ranks times seconds.
    """

    length: int
    ranks: int
    chunk: int
    placement: str
    rows: tuple[int, ...]
    load: float
    loads: tuple[float, ...]
    received: tuple[int, ...]
    received_share: float
    bound: float
    node_size: int
    across: tuple[int, ...]
    across_share: float
    pieces: tuple[int, ...]
    seconds: float
    efficiency: float

    @property
    def transport(self) -> str:
        """What travels: "keys" or "heads"."""
        return "heads" if self.placement == "heads" else "keys"

    def __str__(self) -> str:
        received = "keys received" if self.transport == "keys" else "heads received, in keys"
        nodes = self.ranks // self.node_size
        across = f"from other nodes, {nodes} of {self.node_size}: {self.across_share:.3f}, a rank at most {max(self.across)}"
        return "\n".join(
            [
                f"{self.length} positions on {self.ranks} rank{'s' * (self.ranks > 1)}, {self.placement}, in chunks of {self.chunk}",
                f"load: {self.load:.3f} of the mean at most",
                f"{received}: {self.received_share:.3f} of an all-gather (bound {self.bound:.3f}), a rank at most {max(self.received)}",
                *[f"{received} {across}"] * (nodes > 1),
                f"forward pass of a layer, predicted: {1e3 * self.seconds:.3f} ms, efficiency {self.efficiency:.2f}",
            ]
        )

    def table(self) -> str:
        """The lines of ``print``, and a line for each rank; of many ranks the first."""
        lines = [str(self), "", f"{'rank':>5} {'rows':>9} {'load':>6} {'received':>9} {'pieces':>6}"]
        for rank in range(min(self.ranks, _MOST_LISTED)):
            numbers = f"{self.rows[rank]:>9} {self.loads[rank]:>6.3f} {self.received[rank]:>9} {self.pieces[rank]:>6}"
            lines.append(f"{rank:>5} {numbers}")
        return "\n".join(lines + [f"and {self.ranks - _MOST_LISTED} more"] * (self.ranks > _MOST_LISTED))
