"""Dropout of attention weights: the pairs of a query and a key that keep their weight, as a counter-based hash in the IR.

A pair's bit is a function of a seed, b, h, q_idx and kv_idx, as mods see them; so it does not depend on tiles, splits, storage or
backend, and the backward pass recomputes it. The hash is a chain of multiply-and-fold steps (wyhash, Wang Yi, 2019): the state of a seed
takes up b, then h, then 16 query rows, and the last step takes the place of the row and the key among them. Only that step is computed
for pairs. Its word has 7 bits for each of four pairs, two rows and two keys 8 apart: in Hopper's tensor core fragments one thread holds
all four, both in S of the forward pass and in its transpose of the backward pass.

Seven bits say p to 1/128 only. The remaining 7 bits of p are dithered: a lattice with a random phase per head raises the threshold by one
for that fraction of the pairs, exactly in each 16 x 16 of them, so that every pair is dropped with the probability p to 2^-14.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.ir.codec import encode
from anyattn.mods.ir.expr import Builder, Expr, wrapped
from anyattn.mods.tracing.trace import TracedMod

__all__ = [
    "BITS", "COLUMN", "FINE", "FIRST", "KEEP", "KEEP_PROGRAM", "KEPT", "KEY_GROUPS", "KEY_PLACES", "KEY_STEP", "PHASE", "ROW_PLACES",
    "ROW_STEP", "SPREAD", "STATE", "WORD", "Dropout", "Seeded", "dropout_of", "seeded",
]  # fmt: skip

BITS = 7  # of a field: a pair's part of a word, the lowest bits of a byte
FINE = 7  # more bits of the probability, by dithering
# odd multipliers, whose bits are those of 2^32 divided by the golden ratio and of MurmurHash3 and xxHash; STATE is even, and 1 is added
SPREAD, COLUMN, STATE = (wrapped(n, torch.int32) for n in (0x9E3779B1, 0xC2B2AE3D, 0x85EBCA6A))
FIRST = tuple(wrapped(n, torch.int32) for n in (0x243F6A88, 0x85A308D3))  # of pi: the state of a seed of zeros
# Counters from here on are spread to the words of: a row's place among 8, a key's place among 8, groups of 16 keys.
ROW_PLACES, KEY_PLACES, KEY_GROUPS = 0, 8, 16
# The lattice: phase + q * ROW_STEP + k % 16 * KEY_STEP modulo 128 takes every value twice in 16 x 16 pairs, the same in all of these, and
# each row's values lie apart.
ROW_STEP, KEY_STEP = 40, 79


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


def _parts(make: Builder, clear: int = 0) -> tuple[int, int, int]:
    """(the word of a pair; the first bit of the pair's byte in it; the pair's phase in the lattice)
    clear: bits of the row and the key that are taken as 0."""
    short = torch.int32
    b, h, q, k = (make.cast(make.add("index", dtype=torch.int64, attr=name), short) for name in ("b", "h", "q_idx", "kv_idx"))

    def number(value: int) -> int:
        return make.const(value, short)

    if clear:
        q, k = (make.add("and", x, number(~clear)) for x in (q, k))

    def does(op: str, x: int, value: int) -> int:
        return make.add(op, x, number(value))

    def spread(counter: int) -> int:
        return make.add("fold", does("mul", counter, SPREAD), number(COLUMN))

    def mixed(state: int, counter: int) -> int:
        return make.add("fold", make.add("xor", spread(counter), state), does("add", does("mul", state, STATE), 1))

    def place(x: int, first: int) -> int:
        return spread(does("add", does("and", x, 7), first))

    loaded = (make.add("load", make.const(i, torch.int64), dtype=short, attr=0) for i in range(2))
    seeds = [make.add("xor", word, number(first)) for word, first in zip(loaded, FIRST, strict=True)]
    of_head, odd = (mixed(mixed(seed, b), h) for seed in seeds)
    row = make.add("fold", make.add("xor", spread(does("shr", q, 4)), of_head), does("or", odd, 1))
    of_query = make.add("xor", row, place(q, ROW_PLACES))
    of_key = make.add("xor", spread(does("add", does("shr", k, 4), KEY_GROUPS)), place(k, KEY_PLACES))
    word = make.add("fold", make.add("xor", of_query, of_key), does("add", does("mul", row, STATE), 1))
    byte = make.add("add", does("and", k, 8), does("mul", does("and", q, 8), 2))
    of_row = make.add("add", does("mul", does("and", q, 15), ROW_STEP), of_head)  # 16 rows go once around
    phase = does("and", make.add("add", of_row, does("mul", does("and", k, 15), KEY_STEP)), 2**FINE - 1)
    return word, byte, phase


def _keep() -> Expr:
    make = Builder()
    word, byte, phase = _parts(make)
    field = make.add("and", make.add("shr", word, byte), make.const(2**BITS - 1, torch.int32))
    dropped = make.cast(make.add("scalar", dtype=int, attr=0), torch.int32)  # of 2^14 pairs
    return make.build(make.add("ge", make.add("or", make.add("mul", field, make.const(2**FINE, torch.int32)), phase), dropped))


def _kept() -> Expr:
    """A word whose bits 7, 15, 23 and 31 say which of four pairs keep their weight: each field plus 128 less the least field that is kept.
    The lattice's part repeats every 16 keys."""
    make = Builder()
    short = torch.int32

    def does(op: str, x: int, value: int) -> int:
        return make.add(op, x, make.const(value, short))

    word, _, phase = _parts(make, clear=8)
    dropped = make.cast(make.add("scalar", dtype=int, attr=0), short)
    fine, kept = does("and", dropped, 2**FINE - 1), make.add("sub", make.const(2**BITS, short), does("shr", dropped, FINE))
    least = make.const(0, short)
    for byte in range(4):
        of_pair = does("and", does("add", phase, 8 * (byte % 2 * KEY_STEP + byte // 2 * ROW_STEP)), 2**FINE - 1)
        of_byte = make.add("add", kept, does("shr", make.add("sub", of_pair, fine), 31))  # -1 where the lattice raises the threshold
        least = make.add("add", least, does("mul", of_byte, wrapped(1 << 8 * byte, short)))
    return make.build(make.add("add", does("and", word, (2**BITS - 1) * 0x01010101), least))


def _part(at: int) -> Expr:
    make = Builder()
    return make.build(_parts(make)[at])


WORD, PHASE, KEPT = _part(0), _part(2), _kept()
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
    count = 2 ** (BITS + FINE)
    return Dropout(TracedMod("mask", KEEP, (min(round(p * count), count - 1),), (seed,), "dropout"), p)
