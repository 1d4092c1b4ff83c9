"""What travels between ranks: the keys that their rows need, or rows of all heads for all rows of some heads; chosen by predicted time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from anyattn.distributed.head_share import are_divided
from anyattn.distributed.layout import Layout
from anyattn.distributed.overlap import Demand, seconds_of
from anyattn.distributed.placement import CostModel, Placement, PlanStats, Work, chunks_of, combined, place
from anyattn.distributed.placement.candidates import contiguous
from anyattn.distributed.relay import exchanges_of
from anyattn.sparsity.block_mask import BlockMask

__all__ = ["HEADS", "TRANSPORTS", "Layer", "placed_rows"]

HEADS = (16, 4)  # of queries and of keys, in the cost model of a plan that names none
TRANSPORTS = ("auto", "keys", "heads")
_GAIN = 0.02  # of the time, at least: all of a rank's tensors travel, in two exchanges, where keys are packed and sent in one


class Layer(NamedTuple):
    """A mask (None: every row sees every key), its work, what its rows demand, and its weight among the layers of a model."""

    mask: BlockMask | None
    work: Work
    demand: Demand
    weight: float


def placed_rows(
    layers: Sequence[Layer], ranks: int, costs: CostModel, heads: tuple[int, int] | None, transport: str, overlap: Any, row_bytes: int
) -> Placement:
    """The placement of the rows for one transport, or, for "auto", of the one whose forward pass is expected to take less time.

    heads: of queries and of keys; None if they are not known: "auto" is "keys" then, since other heads might not be divisible. overlap,
    row_bytes: of ``plan`` and of ``seconds_of``. Raises ``ValueError`` for an unknown transport, and for heads that ranks cannot divide
    under "heads".
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}; wanted 'auto', 'keys' or 'heads'")
    is_divided = heads is None or are_divided(*heads, ranks)
    if transport == "heads":
        if not is_divided:
            raise ValueError(
                f"transport='heads' and heads={heads}, which {ranks} ranks cannot divide; wanted a multiple of {ranks} query heads, and "
                f"K/V heads that are a multiple or a divisor of {ranks}; or transport='keys'"
            )
        return _by_heads(layers, ranks, costs, heads or HEADS)
    by_keys = place(combined([each.work for each in layers], [each.weight for each in layers]), ranks, costs)
    if transport == "keys" or heads is None or not is_divided or ranks == 1:
        return by_keys
    by_heads = _by_heads(layers, ranks, costs, heads)
    keys = _seconds_by_keys(layers, by_keys.owner, ranks, costs, overlap, row_bytes)
    return by_heads if by_heads.stats.seconds < (1 - _GAIN) * keys else by_keys


def _seconds_by_keys(layers: Sequence[Layer], owner: np.ndarray, ranks: int, costs: CostModel, overlap: Any, row_bytes: int) -> float:
    """Of the forward passes of all layers, by the slowest rank."""
    total = 0.0
    for each in layers:
        layout = Layout.of(each.work.length, each.work.chunk, owner, ranks, each.demand.needs, costs.node_size or ranks)
        both = seconds_of(layout, each.demand, costs, row_bytes)
        seconds = min(both) if overlap == "auto" else both[0 if overlap else 1]
        total += each.weight * (seconds + costs.fixed_seconds * len(exchanges_of(layout)))
    return total


def _by_heads(layers: Sequence[Layer], ranks: int, costs: CostModel, heads: tuple[int, int]) -> Placement:
    """Contiguous rows, of which every rank computes all for its heads. Nothing is computed while messages travel."""
    first = layers[0].work
    chunks, length = chunks_of(first, costs.partial), first.length
    owner = contiguous(chunks, ranks)
    rows = np.bincount(owner, chunks.keys, ranks).astype(np.int64)
    compute = np.sum([each.weight * float(each.demand.seconds.sum()) * _shares(each.mask, ranks, costs.partial) for each in layers], 0)
    # q, k and v of other ranks' rows for the heads of this one, and out of its rows for other heads, in keys and their values
    queries, keys = (max(n, ranks) for n in heads)
    parts = (length - rows) * (queries + 2 * keys) + rows * queries * (ranks - 1)
    received = -(-parts // (2 * heads[1] * ranks))
    node_size = costs.node_size or ranks
    across = received * (ranks - node_size) // max(ranks - 1, 1)
    messages = costs.message_seconds(received - across, across) + 2 * costs.fixed_seconds * bool(received.any())
    seconds = float((compute + sum(each.weight for each in layers) * messages).max())
    mean, gathered = float(compute.mean()), max((ranks - 1) * length, 1)
    loads = compute / mean if mean else np.ones(ranks)
    share = int(received.sum()) / gathered
    return Placement(
        owner,
        "heads",
        PlanStats(
            length=length,
            ranks=ranks,
            chunk=first.chunk,
            placement="heads",
            rows=tuple(rows.tolist()),
            load=float(loads.max()),
            loads=tuple(loads.tolist()),
            received=tuple(received.tolist()),
            received_share=share,
            bound=share,
            node_size=node_size,
            across=tuple(across.tolist()),
            across_share=int(across.sum()) / gathered,
            pieces=tuple((rows > 0).astype(int).tolist()),
            seconds=seconds,
            efficiency=min(mean / seconds, 1.0) if seconds else 1.0,
        ),
    )


def _shares(mask: BlockMask | None, ranks: int, partial: float) -> np.ndarray:
    """float64 (ranks,): the part of a mask's attention that the heads of each rank have; equal if all heads share its lists."""
    if mask is None or (counts := mask._lists_4d())["kv_num_blocks"].shape[1] % ranks or counts["kv_num_blocks"].shape[1] == 1:
        return np.full(ranks, 1 / ranks)
    listed = [counts[name] for name in ("kv_num_blocks", "full_kv_num_blocks") if counts[name] is not None]
    masked, *full = [t.clamp(min=0).sum((0, 2), dtype=int).reshape(ranks, -1).sum(1).cpu().numpy() for t in listed]
    tiles = (1 + partial) * masked + sum(full)
    return tiles / tiles.sum() if tiles.any() else np.full(ranks, 1 / ranks)
