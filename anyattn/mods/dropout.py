"""Dropout of attention weights: the pairs of a query and a key that keep their weight, as a counter-based hash in the IR.

A pair's bit is a function of a seed, b, h, q_idx and kv_idx, as mods see them; so it does not depend on tiles, splits, storage or
backend, and the backward pass recomputes it. The hash is a chain of multiply-and-fold steps (wyhash, Wang Yi, 2019): the state of a seed
takes up b, then h, then q_idx. Two keys 8 apart share the last step, each with 15 of its 32 bits: that step is all the work per pair, and
in Hopper's tensor core fragments a thread holds both keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.ir.codec import encode
from anyattn.mods.ir.expr import Builder, Expr, wrapped
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["BITS", "COLUMN", "FIRST", "KEEP", "KEEP_PROGRAM", "SPREAD", "STATE", "Dropout", "Seeded", "dropout_of", "seeded"]

BITS = 15  # of a decision: probabilities are multiples of 2^-15
# odd multipliers, whose bits are those of 2^32 divided by the golden ratio and of MurmurHash3 and xxHash; STATE is even, and 1 is added
SPREAD, COLUMN, STATE = (wrapped(n, torch.int32) for n in (0x9E3779B1, 0xC2B2AE3D, 0x85EBCA6A))
FIRST = tuple(wrapped(n, torch.int32) for n in (0x243F6A88, 0x85A308D3))  # of pi: the state of a seed of zeros


class Seeded(NamedTuple):
    """The dropout of a call as its entry point passes it on. seed: int32 (2,). p: the probability that a weight is dropped."""

    seed: Tensor
    p: float


class Dropout(NamedTuple):
    """keep: a mask that is true for the pairs that keep their weight. p: the probability that it is false."""

    keep: TracedMod
    p: float

    @property
    def scale(self) -> float:
        """The factor of the weights that are kept."""
        return 1.0 / (1.0 - self.p)

    @property
    def captured(self) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
        """The numbers and tensors that a kernel takes: those of the mask, and the factor."""
        return (*self.keep.scalars, self.scale), self.keep.tensors


def _keep() -> Expr:
    make, short = Builder(), torch.int32
    b, h, q, k = (make.cast(make.add("index", dtype=torch.int64, attr=name), short) for name in ("b", "h", "q_idx", "kv_idx"))

    def number(value: int) -> int:
        return make.const(value, short)

    def spread(counter: int) -> int:
        return make.add("fold", make.add("mul", counter, number(SPREAD)), number(COLUMN))

    def mixed(state: int, counter: int) -> int:
        odd = make.add("add", make.add("mul", state, number(STATE)), number(1))
        return make.add("fold", make.add("xor", spread(counter), state), odd)

    loaded = (make.add("load", make.const(i, torch.int64), dtype=short, attr=0) for i in range(2))
    seeds = [make.add("xor", word, number(first)) for word, first in zip(loaded, FIRST, strict=True)]
    of_head, odd = (mixed(mixed(seed, b), h) for seed in seeds)
    row = make.add("fold", make.add("xor", spread(q), of_head), make.add("or", odd, number(1)))
    word = mixed(row, make.add("and", k, number(~8)))
    is_upper = make.add("ne", make.add("and", k, number(8)), number(0))
    raised = make.add("mul", word, make.add("where", is_upper, number(1), number(1 << 16)))  # the pair's bits from bit 16 on
    least = make.add("mul", make.cast(make.add("scalar", dtype=int, attr=0), short), number(1 << 16))
    return make.build(make.add("ge", make.add("and", raised, number(2**31 - 1)), least))


KEEP = _keep()
KEEP_PROGRAM = encode(KEEP)


def seeded(p: float, q: Tensor, is_run: bool = True) -> Seeded | None:
    """The dropout of a call with ``dropout_p=p``, with a seed from torch's generator of q's device; None for 0.

    The host does not wait for the seed, and a compiled or captured graph draws another one at each run. is_run: False for a call that is
    only planned, which draws nothing.
    """
    if isinstance(p, (bool, Tensor)) or not isinstance(p, (int, float, torch.SymFloat)):
        raise TypeError(f"dropout_p is a {type(p).__name__}; wanted a number from 0 up to, but not including, 1")
    if p == 0.0:
        return None
    if not 0.0 < p < 1.0:
        raise ValueError(f"dropout_p={p}; wanted a number from 0 up to, but not including, 1: dropout_p=1 would leave no weight")
    if not isinstance(q, Tensor):  # which the checks of q refuse
        return None
    if not is_run:
        return Seeded(torch.zeros(2, dtype=torch.int32, device=q.device), p)
    return Seeded(torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=q.device), p)


def dropout_of(given: Seeded | None) -> Dropout | None:
    """The mask of a call's dropout.

    >>> keep = dropout_of(Seeded(torch.tensor([1, 2], dtype=torch.int32), 0.25)).keep
    >>> from anyattn.mods.analysis.evaluate import evaluate
    >>> i = torch.arange(1000)
    >>> float(evaluate(keep, 0, 0, i[:, None], i).float().mean().round(decimals=2))
    0.75
    """
    if given is None:
        return None
    seed, p = given[0], float(given[1])  # a compiler's symbolic number becomes a constant of its graph
    least = min(round(p * 2**BITS), 2**BITS - 1)
    return Dropout(TracedMod("mask", KEEP, (least,), (seed,), "dropout"), p)
