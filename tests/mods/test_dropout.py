"""The bits of dropout: their definition in integers of Python, and their statistics beside those of an ideal generator."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.dropout import BITS, FINE, KEEP, KEEP_PROGRAM, KEPT, Seeded, dropout_of
from anyattn.mods.ir.codec import decode
from anyattn.mods.ir.dependence import dependence
from tests.support.covering import few

SEED = (-123456789, 987654321)


def bits(p: float, sizes: tuple[int, int, int, int], seed: tuple[int, int] = SEED) -> torch.Tensor:
    """(B, H, Sq, Sk): the pairs that are kept."""
    dropout = dropout_of(Seeded(torch.tensor(seed, dtype=torch.int32), p))
    assert dropout is not None
    b, h, q, k = (torch.arange(n).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate(sizes))
    return evaluate(dropout.keep, b, h, q, k)


def by_definition(p: float, seed: tuple[int, int], b: int, h: int, q: int, k: int) -> bool:
    most = 2**32 - 1

    def fold(x: int, y: int) -> int:
        return (x * y & most) ^ (x * y >> 32)

    def spread(n: int) -> int:
        return fold(n * 0x9E3779B1 & most, 0xC2B2AE3D)

    def mixed(state: int, n: int) -> int:
        return fold(spread(n) ^ state, state * 0x85EBCA6A + 1 & most)

    first, second = (mixed(mixed((word & most) ^ start, b), h) for word, start in zip(seed, (0x243F6A88, 0x85A308D3), strict=True))
    row = fold(spread(q // 16) ^ first, second | 1)
    word = fold(row ^ spread(q % 8) ^ spread(8 + k % 8) ^ spread(16 + k // 16), row * 0x85EBCA6A + 1 & most)
    field = (word >> 8 * (q // 8 % 2 * 2 + k // 8 % 2)) % 128
    return field * 128 + (first + 40 * q + 79 * (k % 16)) % 128 >= min(round(p * 2**14), 2**14 - 1)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.5, 0.99999])
def test_definition(p: float) -> None:
    found = bits(p, (2, 3, 40, 60))
    for b, h, q, k in itertools.product((0, 1), (0, 2), (0, 1, 17, 39), range(60)):
        assert bool(found[b, h, q, k]) is by_definition(p, SEED, b, h, q, k), (b, h, q, k)


def test_far_positions_and_the_program_of_graphs() -> None:
    keep = dropout_of(Seeded(torch.tensor(SEED, dtype=torch.int32), 0.3)).keep  # type: ignore[union-attr]
    for place in ((0, 0, 2**24 - 1, 2**24 - 1), (70000, 127, 1, 2**30)):
        assert bool(evaluate(keep, *(torch.tensor(n) for n in place))) is by_definition(0.3, SEED, *place)
    assert decode(KEEP_PROGRAM) == KEEP


@pytest.mark.parametrize("p", [1e-9, 0.003, 0.1, 0.5, 0.99999])
def test_words_of_four_pairs(p: float) -> None:
    """``KEPT`` is one word for four pairs, of any of them, and its bits are those of ``KEEP``."""
    dropout = dropout_of(Seeded(torch.tensor(SEED, dtype=torch.int32), p))
    assert dropout is not None
    h, q, k = torch.arange(3).view(-1, 1, 1), torch.arange(64)[:, None], torch.arange(80)
    leaves = {"b": torch.tensor(1), "h": h, "q_idx": q, "kv_idx": k, "score": None}
    (words,) = run(KEPT, leaves, dropout.keep.scalars, dropout.keep.tensors)
    found = words >> (7 + (k & 8) + (q & 8) * 2) & 1
    assert torch.equal(found.bool(), evaluate(dropout.keep, 1, h, q, k))
    fours = words.view(3, 4, 2, 8, 5, 2, 8)
    assert torch.equal(fours, fours[:, :, :1, :, :, :1].expand_as(fours))


def test_little_work_for_a_pair() -> None:
    """Words of rows and keys are computed once for each: what is left for a pair has one multiplication in 64 bits."""
    deps = dependence(KEEP)
    by_pair = [node.op for node, dep in zip(KEEP.nodes, deps, strict=True) if dep.q and dep.kv]
    assert sorted(by_pair) == ["add", "add", "and", "and", "fold", "ge", "mul", "or", "shr", "xor"]


def spread_of(means: np.ndarray, count: int) -> float:
    """The variance of means of ``count`` numbers of variance 1, in units of what independent numbers have."""
    return float(means.var() * count)


@pytest.mark.parametrize("p", few((0.5, 0.1, 0.02), 0.1))
@pytest.mark.parametrize("seed", few((SEED, (0, 0), (1, 0)), (0, 0)))
def test_statistics(p: float, seed: tuple[int, int]) -> None:
    """Each figure is within five standard deviations of an ideal generator's."""
    heads, rows, keys = 4, 512, 512
    kept = bits(p, (2, heads // 2, rows, keys), seed).reshape(heads, rows, keys).numpy()
    t = round(p * 2 ** (BITS + FINE)) / 2 ** (BITS + FINE)
    x = (kept - (1 - t)) / math.sqrt(t * (1 - t))

    def is_centred(values: np.ndarray, what: str) -> None:
        assert abs(values.mean()) * math.sqrt(values.size) < 5 * max(values.std(), 1e-9), what

    is_centred(x, "rate")
    for axis, what in ((2, "rows"), (1, "columns")):
        means = x.mean(axis)
        assert abs(spread_of(means, x.shape[axis]) - 1) < 5 * math.sqrt(2 / means.size), what
    for y, what in ((x, "diagonals"), (x[:, :, ::-1], "antidiagonals")):
        sums = np.array([np.trace(y[h], n) / math.sqrt(rows - n) for h in range(heads) for n in range(rows // 2)])
        assert abs(spread_of(sums, 1) - 1) < 5 * math.sqrt(2 / sums.size), what
    for n in (1, 2, 3, 4, 7, 8, 9, 16, 24, 32, 64, 128, 256):
        along, across = x[:, :, n:] * x[:, :, :-n], x[:, n:] * x[:, :-n]
        is_centred(along, f"keys {n} apart")
        is_centred(across, f"rows {n} apart")
        for pairs, axis, what in ((along, 2, "keys"), (across, 1, "rows")):
            means = pairs.mean(axis)  # also not in single rows or columns
            assert abs(spread_of(means, pairs.shape[axis]) / float((pairs**2).mean()) - 1) < 6 * math.sqrt(2 / means.size), (what, n)
        for m in (1, 2, 8, 64):
            is_centred(along[:, m:] * along[:, :-m], f"corners of rectangles of {m} rows and {n} keys")
    for one, other in itertools.combinations(range(heads), 2):
        is_centred(x[one] * x[other], f"heads and entries {one}, {other}")
    patterns = (kept.reshape(-1, 8) << np.arange(8)).sum(-1)
    ones = np.array([n.bit_count() for n in range(256)])
    wanted = (1 - t) ** ones * t ** (8 - ones) * len(patterns)
    often = wanted > 5
    chi = ((np.bincount(patterns, minlength=256) - wanted) ** 2 / wanted)[often].sum()
    assert abs(chi - often.sum()) < 5 * math.sqrt(2 * often.sum()), "patterns of 8 keys"


def test_neighbouring_seeds_are_independent() -> None:
    found = [bits(0.5, (1, 1, 256, 256), seed).double().mul(2).sub(1) for seed in ((0, 0), (1, 0), (0, 1), (-1, -1), (2, 0), (0, 2**30))]
    for a, b in itertools.combinations(found, 2):
        assert abs(float((a * b).mean())) * 256 < 5
