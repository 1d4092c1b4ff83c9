"""Far sides equal the score mod for all pairs that are at least as far apart as they say, and load fewer values per pair."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import scores
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.far_sides import Side, far_sides
from anyattn.mods.tracing.trace import TracedMod, trace

LENGTH = 48
OFFSET = 5
TABLE = torch.arange(4096.0)
ROWS = torch.rand(LENGTH, 32)


def values(expr: Any, mod: TracedMod) -> torch.Tensor:
    """(LENGTH, LENGTH), of queries by keys."""
    positions = torch.arange(LENGTH)
    leaves = {"b": 0, "h": 1, "q_idx": positions[:, None], "kv_idx": positions, "score": torch.zeros(LENGTH, LENGTH)}
    (found,) = run(expr, leaves, mod.scalars, mod.tensors)
    return torch.as_tensor(found).expand(LENGTH, LENGTH)


def sides_of(score: Callable) -> list[tuple[Side, int]]:
    """The sides of a score mod with the distances from which on they are proved to hold."""
    mod = trace(score, "score")
    positions = torch.arange(LENGTH)
    distance = positions[:, None] - positions
    whole, found = values(mod.expr, mod), []
    for side, way in zip(far_sides(mod.expr), (1, -1), strict=True):
        if side is None:
            continue
        (reach,) = run(side.reach, {}, mod.scalars, ())
        far = distance * way >= int(reach)
        assert torch.equal(values(side.expr, mod)[far], whole[far])
        found.append((side, int(reach)))
    return found


def drawn(random_: random.Random, depth: int) -> Callable[[Any, Any], Any]:
    """A random integer of two positions, of clamps, comparisons and sums."""
    n = random_.randint(-9, 30)
    if depth == 0:
        return random_.choice((
            lambda q, k: q - k, lambda q, k: k - q + n, lambda q, k: 2 * q - k * 2, lambda q, k: (q - k + OFFSET).to(torch.int32).long(),
            lambda q, k: q, lambda q, k: q + k, lambda q, k: q * 0 + n, lambda q, k: (k - q).abs(), lambda q, k: -(q - k - OFFSET) * 3,
        ))  # fmt: skip
    one, other = drawn(random_, depth - 1), drawn(random_, depth - 1)
    return random_.choice((
        lambda q, k: torch.clamp(one(q, k), -9, 14), lambda q, k: torch.clamp(one(q, k), max=n), lambda q, k: torch.clamp(one(q, k), min=n),
        lambda q, k: torch.minimum(one(q, k), other(q, k)), lambda q, k: torch.maximum(one(q, k), other(q, k)),
        lambda q, k: one(q, k) + other(q, k), lambda q, k: one(q, k) - other(q, k), lambda q, k: one(q, k).abs(),
        lambda q, k: torch.where(one(q, k) < other(q, k), one(q, k), n), lambda q, k: torch.where(one(q, k) >= n, n, other(q, k)),
        lambda q, k: torch.where((one(q, k) == n) | (other(q, k) > OFFSET), one(q, k), other(q, k)),
        lambda q, k: torch.where((one(q, k) != n) & (other(q, k) <= n), one(q, k), other(q, k)),
    ))  # fmt: skip


@given(st.integers(0, 2**32), st.integers(1, 4))
@settings(max_examples=400, deadline=None)
def test_random_places(seed: int, depth: int) -> None:
    place = drawn(random.Random(seed), depth)
    sides_of(lambda s, b, h, q, k: s + TABLE[torch.clamp(place(q, k) + 2048, 0, 4095)])


def test_some_random_places_have_sides() -> None:
    counts = []
    for seed in range(60):
        place = drawn(random.Random(seed), 2)
        found = sides_of(lambda s, b, h, q, k, place=place: s + TABLE[torch.clamp(torch.clamp(place(q, k), -7, 7) + 2048, 0, 4095)])
        counts += [reach for _, reach in found]
    assert sum(0 < reach < LENGTH for reach in counts) > 20


@pytest.mark.parametrize(
    ("place", "reaches"),
    [
        (lambda q, k: torch.clamp(q - k, -3, 8) + 3, [8, 3]),
        (lambda q, k: torch.clamp(q - k + OFFSET, -3, 8) + 3, [3, 8]),
        (lambda q, k: torch.clamp((k - q) * 4, -9, 9) + 9, [3, 3]),
        (lambda q, k: (q - k).abs().clamp(max=6), [6, 6]),
        (lambda q, k: torch.where(q - k > 6, 0, 1), [7, -6]),
        (lambda q, k: torch.where(q - k == 6, 0, 1), [7, -5]),
        (lambda q, k: torch.clamp(q - k, min=2), [-2]),
        (lambda q, k: torch.clamp(q + k, 0, 9), []),
        (lambda q, k: torch.clamp((q - k) % 7, 0, 4), []),
        (lambda q, k: torch.clamp((q * 2**61 - k * 2**61), 0, 4), []),
    ],
)
def test_distances(place: Callable, reaches: list[int]) -> None:
    assert [reach for _, reach in sides_of(lambda s, b, h, q, k: s + TABLE[place(q, k)])] == reaches


def test_what_a_side_loads() -> None:
    """Values per row, per key and per head; none per pair."""
    c2p, p2c = torch.rand(1, 2, LENGTH, 8), torch.rand(1, 2, LENGTH, 8)
    for limit, reaches in ((None, [4, 4]), (9, [9, 9])):
        assert [reach for _, reach in sides_of(scores.disentangled(c2p, p2c, limit))] == reaches
    assert [reach for _, reach in sides_of(scores.relative_bias(torch.rand(2, 17)))] == [8, 8]


def test_a_side_that_hides_all_scores_is_none() -> None:
    """A program's far tiles have scores, whatever they are."""
    score = lambda s, b, h, q, k: torch.where(q - k > 9, -torch.inf, s + ROWS[q, torch.clamp(q - k, 0, 31)])
    assert [reach for _, reach in sides_of(score)] == [0]


def test_mods_that_load_nothing_per_pair_have_no_sides() -> None:
    assert sides_of(lambda s, b, h, q, k: s - torch.clamp(q - k, 0, 9) * 0.5 + ROWS[q, 3]) == []
