"""Whether rows that need no remote key have calls of their own, which run while messages travel."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from anyattn.distributed.layout import Layout
from anyattn.distributed.placement import CostModel, Work
from anyattn.distributed.relay import arrivals_of

__all__ = ["Demand", "demand_of", "overlap_pays", "seconds_of"]

_GAIN = 0.02  # of the time, at least: two calls of a rank's rows take some 3 % longer than one (causal, S 64k, an H100: 12.26 and 11.9 ms)
_MEMORY = 2.5e12  # bytes/s, reading and writing: outputs of several calls are copied into one


class Demand(NamedTuple):
    """What the rows of each chunk ask for under one mask. needs: bool (chunks, chunks), the chunks of keys that they see. seconds: float64
    (chunks,), their attention."""

    needs: np.ndarray
    seconds: np.ndarray


def demand_of(work: Work, costs: CostModel) -> Demand:
    tiles = (work.visited + costs.partial * work.partial).sum(1)
    return Demand(work.needs, tiles * (work.tile[0] * work.tile[1] * costs.pair_seconds))


def overlap_pays(layout: Layout, demand: Demand, costs: CostModel, row_bytes: int) -> bool:
    """Whether the slowest rank is expected to end earlier. row_bytes: of one row of the output.

    Between GPUs that NVLink connects this pays for hardly any mask: messages take 1 to 3 % of the time, and the slowest rank often has no
    row that can be computed before.
    """
    with_overlap, without = seconds_of(layout, demand, costs, row_bytes)
    return with_overlap < (1 - _GAIN) * without


def seconds_of(layout: Layout, demand: Demand, costs: CostModel, row_bytes: int) -> tuple[float, float]:
    """What the slowest rank is expected to take with and without overlap.

    Without it a rank computes for C after it has received for M: with it, C_local of that runs during M, and a further launch and the
    copy of its rows are added.
    """
    needs, seconds = demand
    inside, across, _ = arrivals_of(layout)
    messages = costs.message_seconds(inside, across)
    with_overlap, without = [], []
    for rank in range(layout.ranks):
        own = layout.owner == rank
        is_local = own & ~(needs & ~own).any(1)
        message = float(messages[rank])
        local, rest = float(seconds[is_local].sum()), float(seconds[own & ~is_local].sum())
        rows = int(own.sum()) * layout.chunk
        split = costs.call_seconds + 2 * rows * row_bytes / _MEMORY if is_local.any() and rest else 0.0
        with_overlap.append(max(local, message) + rest + split)
        without.append(local + rest + message)
    return max(with_overlap), max(without)
