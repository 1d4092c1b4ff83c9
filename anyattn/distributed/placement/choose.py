"""The choice among placements by what they are expected to cost."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import numpy as np

from anyattn.distributed.placement.bisected import bisected
from anyattn.distributed.placement.bound import bound_of
from anyattn.distributed.placement.candidates import contiguous, fold
from anyattn.distributed.placement.chunks import Chunks, chunks_of
from anyattn.distributed.placement.cost import CostModel, Load, load_of
from anyattn.distributed.placement.evened import evened
from anyattn.distributed.placement.stats import PlanStats
from anyattn.distributed.placement.work import Work

__all__ = ["Placement", "digest_of", "place"]

_TOLERANCE = 0.03  # of the load, by bisection
_WORDS_SEARCHED = 2**14  # of bits, on all levels of bisection
_NEARLY_EVEN, _NEARLY_LEAST = 1.01, 0.02  # load, and excess over the bound in all-gathers, at which no bisection is tried
_PER_ALL_GATHER = 0.08  # of the ideal time: what messages cost others than attention
_LEAST_PER_PIECE, _MOST_PER_PIECE = 0.001, 0.02  # of the ideal time; in short sequences uneven load costs more than calls
_MOST_PER_RELAY = 0.2  # of the ideal time, for a second exchange
_EVEN = 1.03  # a load above it costs twice: no other part of a model is that uneven
_STEP = 1e-6  # differences of value below it are ties, which the earlier candidate wins


class Placement(NamedTuple):
    """Which rank owns which rows, and their keys. owner: int32 (chunks,). name: of the way in which it was made."""

    owner: np.ndarray
    name: str
    stats: PlanStats


def place(work: Work, ranks: int, costs: CostModel | None = None) -> Placement:
    """The placement of the least cost among a few with equal rows: the numbers of chunks of two ranks differ by at most one.

    The same on every machine: comparisons are of whole numbers, or of floats that are computed elementwise. ranks may exceed the chunks;
    some then have no rows. costs: by default ``CostModel.of(ranks=ranks)``. Raises ``ValueError`` for ranks below 1.

    >>> import torch
    >>> from anyattn.distributed.placement import work_of
    >>> from anyattn.sparsity import BlockMask
    >>> causal = BlockMask.from_block_map(torch.ones(8, 8).tril() > 0, BLOCK_SIZE=64)
    >>> made = place(work_of([causal], [1.0], 64), 2)
    >>> made.name, made.owner.tolist()
    ('fold', [0, 0, 1, 1, 1, 1, 0, 0])
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks}; wanted at least 1")
    costs = CostModel.of(ranks=ranks) if costs is None else costs
    chunks = chunks_of(work, costs.partial)
    cheap = [_Valued.of(chunks, name, way(chunks, ranks), ranks, costs) for name, way in (("contiguous", contiguous), ("fold", fold))]
    best = min(cheap, key=lambda each: each.value)
    bound = bound_of(chunks, ranks, best.load.balance) if best.load.balance <= _NEARLY_EVEN else None
    if ranks > 1 and (bound is None or int(best.load.received.sum()) - bound > _NEARLY_LEAST * (ranks - 1) * work.length):
        halved = bisected(chunks, ranks, _TOLERANCE, _WORDS_SEARCHED)
        even = evened(chunks, halved, ranks, _EVEN)
        owners = [halved] if even is halved else [halved, even]
        found = min([best, *(_Valued.of(chunks, "bisected", owner, ranks, costs) for owner in owners)], key=lambda each: each.value)
        best, bound = found, bound if found is best else None
    if bound is None:
        bound = bound_of(chunks, ranks, best.load.balance)
    return Placement(best.owner, best.name, _stats(chunks, best, bound, costs.node_size or ranks))


class _Valued(NamedTuple):
    """A candidate, and what it costs."""

    value: int
    name: str
    owner: np.ndarray
    load: Load

    @classmethod
    def of(cls, chunks: Chunks, name: str, owner: np.ndarray, ranks: int, costs: CostModel) -> _Valued:
        load = load_of(chunks, owner, ranks, costs)
        return cls(_value(load, chunks.work.length, costs), name, owner, load)


def _value(load: Load, length: int, costs: CostModel) -> int:
    """What is minimised, in steps of ``_STEP``: time relative to the ideal, with at most a share of it for fixed costs, which would rank
    placements of short sequences alone; messages, which others share; and uneven load, which waits elsewhere too."""
    slowdown = float(load.attention.max()) / load.ideal if load.ideal else 1.0
    share = int(load.received.sum()) / (max(len(load.rows) - 1, 1) * length)
    per_piece = min(max(costs.call_seconds / load.ideal, _LEAST_PER_PIECE), _MOST_PER_PIECE) if load.ideal else _LEAST_PER_PIECE
    fixed = per_piece * (int(load.pieces.max()) - 1)
    if load.exchanges > 1:
        fixed += min(costs.fixed_seconds / load.ideal, _MOST_PER_RELAY) if load.ideal else _MOST_PER_RELAY
    return round((slowdown + max(load.balance - _EVEN, 0.0) + _PER_ALL_GATHER * share + fixed) / _STEP)


def _stats(chunks: Chunks, found: _Valued, bound: int, node_size: int) -> PlanStats:
    load, work = found.load, chunks.work
    ranks = len(load.rows)
    gathered = max((ranks - 1) * work.length, 1)
    total = int(load.work.sum())
    return PlanStats(
        length=work.length,
        ranks=ranks,
        chunk=work.chunk,
        placement=found.name,
        rows=tuple(load.rows.tolist()),
        load=load.balance,
        loads=tuple((load.work * ranks / total if total else np.ones(ranks)).tolist()),
        received=tuple(load.received.tolist()),
        received_share=int(load.received.sum()) / gathered,
        bound=bound / gathered,
        node_size=node_size,
        across=tuple(load.across.tolist()),
        across_share=int(load.across.sum()) / gathered,
        pieces=tuple(load.pieces.tolist()),
        seconds=float(load.seconds.max()),
        efficiency=load.efficiency,
    )


def digest_of(*parts: Any) -> int:
    """A number of 63 bits of whole numbers and arrays of whole numbers or truth values, the same in every process, on every machine and
    in every version of Python: ranks compare it. Fits an int64 tensor. Raises ``TypeError`` for anything else.

    >>> digest_of(8, [1, 2], True) == digest_of(8, [1, 2], 1) != digest_of(8, 1, [2, 1])
    True
    """
    text = hashlib.blake2b(digest_size=8)
    for part in parts:
        numbers = np.asarray(part)
        if numbers.dtype.kind not in "iub":
            raise TypeError(f"a digest of {type(part).__name__} of {numbers.dtype}; wanted whole numbers")
        text.update(np.array([numbers.ndim, *numbers.shape], "<i8").tobytes() + numbers.astype("<i8").tobytes())
    return int.from_bytes(text.digest(), "little") >> 1
