"""Costs of attention and messages, and what a placement makes of them: rows, load, received keys and time of each rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anyattn.distributed.layout import Layout
from anyattn.distributed.placement.chunks import Chunks, unpacked
from anyattn.distributed.relay import arrivals_of

__all__ = ["CostModel", "Load", "load_of"]

_NEAR_RANKS = 8  # GPUs that a switch such as NVSwitch connects, where nodes are not known
_NEAR, _FAR = 330e9, 50e9  # bytes/s in one direction: NVLink of an H100, and one 400 Gbit/s network card a GPU
_FLOPS = 600e12  # of a forward pass in bfloat16 on an H100
_CALL_SECONDS = 60e-6  # of a further local call: its launch, idle multiprocessors at its end, copies of its rows; 50 to 100 us on an H100
_OVERLAP_LOSS = 0.1  # of the shorter of computing and receiving is not hidden


class CostModel(NamedTuple):
    """What the forward pass of one layer costs a rank.

    pair_seconds: of one (row, key) pair, all query heads. partial: what evaluating a mask in a tile costs, in tiles. bandwidth: bytes a
    second that a rank receives. key_bytes: of one position's K and V. fixed_seconds: of an exchange of keys, to pack, launch and meet.
    piece_seconds: of each of a rank's pieces after its first. node_size: ranks of a node, neighbours, which pass on what several of them
    need of another node (``relay.exchanges_of``); None for one exchange between all. network: bytes a second that a rank receives from
    other nodes. call_seconds: of a further local call.

    The defaults are 16 query heads and 4 K/V heads of 128 in 16 bits, at 600 TFLOP/s, with 330 GB/s in one node.
    """

    pair_seconds: float = 4 * 128 * 16 / _FLOPS
    partial: float = 0.15
    bandwidth: float = _NEAR
    key_bytes: int = 2 * 4 * 128 * 2
    fixed_seconds: float = 80e-6
    piece_seconds: float = 5e-6
    node_size: int | None = None
    network: float = _FAR
    call_seconds: float = _CALL_SECONDS

    @classmethod
    def of(
        cls,
        heads: tuple[int, int] = (16, 4),
        head_dim: int = 128,
        ranks: int = 8,
        element_bytes: int = 2,
        node_size: int | None = None,
    ) -> CostModel:
        """heads: of queries and of keys. node_size: a divisor of ranks; without it, every key of more than 8 ranks crosses the network.

        >>> [CostModel.of((16, 4), 128, 64, node_size=size).bandwidth for size in (None, 8)]
        [50000000000.0, 330000000000.0]
        """
        if node_size is not None and (node_size < 1 or ranks % node_size):
            raise ValueError(f"node_size={node_size} and {ranks} ranks; wanted a divisor of the number of ranks, or None")
        queries, keys = heads
        return cls(
            pair_seconds=4 * head_dim * queries / _FLOPS,
            bandwidth=_NEAR if ranks <= _NEAR_RANKS or node_size is not None else _FAR,
            key_bytes=2 * keys * head_dim * element_bytes,
            node_size=node_size,
        )

    def message_seconds(self, inside: np.ndarray, across: np.ndarray) -> np.ndarray:
        """Of keys received from the rank's own node, and from others, int64 (ranks,) -> float64."""
        return inside * (self.key_bytes / self.bandwidth) + across * (self.key_bytes / self.network)


class Load(NamedTuple):
    """A placement in numbers, each (ranks,), but for exchanges, the number of all-to-alls: 2 if keys are passed on inside nodes.

    rows: int64. work: int64, attention in units of ``Chunks.unit`` tiles. received: int64, keys that its rows need. across: int64, keys
    received from other nodes, with those that are passed on. pieces: int64, runs of neighbouring chunks. compute, attention, seconds:
    float64, of computing alone, with messages, and with fixed costs.
    """

    rows: np.ndarray
    work: np.ndarray
    received: np.ndarray
    across: np.ndarray
    pieces: np.ndarray
    exchanges: int
    compute: np.ndarray
    attention: np.ndarray
    seconds: np.ndarray

    @property
    def balance(self) -> float:
        """The largest attention of a rank, relative to the mean."""
        total = int(self.work.sum())
        return int(self.work.max()) * len(self.work) / total if total else 1.0

    @property
    def ideal(self) -> float:
        """The mean of ``compute``, from whole numbers: a float sum depends on its order."""
        return float(self.compute.max()) / self.balance

    @property
    def efficiency(self) -> float:
        """The predicted time of one rank for everything, divided by ``ranks`` times that of the call: 1 is ideal."""
        slowest = float(self.seconds.max())
        return min(self.ideal / slowest, 1.0) if slowest else 1.0


def load_of(chunks: Chunks, owner: np.ndarray, ranks: int, costs: CostModel) -> Load:
    """owner: int32 (chunks,). Time of a rank: ``max(C, M) + 0.1 min(C, M)`` of computing C and receiving M, and fixed costs."""
    order = np.argsort(owner, kind="stable")
    has_rows, starts = np.unique(owner[order], return_index=True)

    def of_ranks(found: np.ndarray) -> np.ndarray:
        spread = np.zeros(ranks, np.int64)
        spread[has_rows] = found
        return spread

    rows = of_ranks(np.add.reduceat(chunks.keys[order], starts))
    work = of_ranks(np.add.reduceat(chunks.load[order], starts))
    sees = np.zeros((ranks, chunks.sees.shape[1]), np.uint64)
    sees[has_rows] = np.bitwise_or.reduceat(chunks.sees[order], starts)
    received = chunks.keys_in(sees) - rows
    begins = np.concatenate(([True], np.diff(owner) != 0))
    pieces = np.bincount(owner[begins], minlength=ranks)
    tile = chunks.work.tile[0] * chunks.work.tile[1]
    compute = work * (chunks.unit * tile * costs.pair_seconds)
    inside, across, exchanges = received, np.zeros(ranks, np.int64), int(received.any())
    if costs.node_size not in (None, ranks):
        needs = unpacked(sees, chunks.number)
        inside, across, exchanges = arrivals_of(Layout(chunks.work.length, chunks.work.chunk, owner, needs, costs.node_size or ranks))
    message = costs.message_seconds(inside, across)
    fixed = costs.fixed_seconds * exchanges + costs.piece_seconds * np.maximum(pieces - 1, 0)
    attention = np.maximum(compute, message) + _OVERLAP_LOSS * np.minimum(compute, message)
    return Load(rows, work, received, across, pieces, exchanges, compute, attention, attention + fixed)
