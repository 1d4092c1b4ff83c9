"""The choice among placements by what they are expected to cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
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
_BITS_SEARCHED = 2**13  # words of a level of bisection
_PER_ALL_GATHER, _PER_PIECE = 0.08, 0.001  # of the ideal time: what messages and pieces cost others than attention
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
    best: tuple[int, str, np.ndarray, Load] | None = None
    for name, owner in _candidates(chunks, ranks):
        load = load_of(chunks, owner, ranks, costs)
        value = _value(load, work.length)
        if best is None or value < best[0]:
            best = value, name, owner, load
    assert best is not None
    _, name, owner, load = best
    return Placement(owner, name, _stats(chunks, name, load, costs))


def _candidates(chunks: Chunks, ranks: int) -> Iterator[tuple[str, np.ndarray]]:
    yield "contiguous", contiguous(chunks, ranks)
    if ranks > 1:
        yield "fold", fold(chunks, ranks)
        halved = bisected(chunks, ranks, _TOLERANCE, _BITS_SEARCHED)
        yield "bisected", halved
        even = evened(chunks, halved, ranks, _EVEN)
        if even is not halved:
            yield "bisected", even


def _value(load: Load, length: int) -> int:
    """What is minimised, in steps of ``_STEP``: time relative to the ideal, without fixed costs, which rank placements of short sequences
    by their pieces alone; messages, which others share; and uneven load, which waits elsewhere too."""
    slowdown = float(load.attention.max()) / load.ideal if load.ideal else 1.0
    share = int(load.received.sum()) / (max(len(load.rows) - 1, 1) * length)
    pieces = int(load.pieces.max()) - 1
    return round((slowdown + max(load.balance - _EVEN, 0.0) + _PER_ALL_GATHER * share + _PER_PIECE * pieces) / _STEP)


def _stats(chunks: Chunks, name: str, load: Load, costs: CostModel) -> PlanStats:
    ranks, work = len(load.rows), chunks.work
    gathered = max((ranks - 1) * work.length, 1)
    total = int(load.work.sum())
    return PlanStats(
        length=work.length,
        ranks=ranks,
        chunk=work.chunk,
        placement=name,
        rows=tuple(load.rows.tolist()),
        load=load.balance,
        loads=tuple((load.work * ranks / total if total else np.ones(ranks)).tolist()),
        received=tuple(load.received.tolist()),
        received_share=int(load.received.sum()) / gathered,
        bound=bound_of(chunks, ranks, load.balance) / gathered,
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
