"""Pieces of an expression: each says the same as the whole wherever its conditions hold, and together they leave no positions out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import scores
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.piecewise import pieces
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr, category
from anyattn.mods.tracing.trace import TracedMod, trace

SIZE = 24
TABLE = torch.randn(3, 2 * SIZE + 1, generator=torch.Generator().manual_seed(0))


def value(expr: Expr, mod: TracedMod, score: torch.Tensor) -> torch.Tensor:
    leaves = {"b": 1, "h": 2, "q_idx": torch.arange(SIZE)[:, None], "kv_idx": torch.arange(SIZE), "score": score}
    return torch.as_tensor(run(expr, leaves, mod.scalars, mod.tensors)[0]).expand(SIZE, SIZE)


def holds(conditions: tuple[Expr, ...], mod: TracedMod) -> torch.Tensor:
    found = torch.ones(SIZE, SIZE, dtype=torch.bool)
    for condition in conditions:
        found &= value(condition, mod, torch.zeros(SIZE, SIZE)) >= 0
    return found


def agree(mod: TracedMod, most: int = 4) -> int:
    """Asserts what the module promises; how many pieces there are."""
    score = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    whole, covered = value(mod.expr, mod, score), torch.zeros(SIZE, SIZE, dtype=torch.bool)
    found = pieces(mod.expr, most)
    for piece in found:
        where = holds(piece.conditions, mod)
        if where.any():  # a piece may read a table where it does not hold, and past its end
            assert torch.equal(guarded(piece.expr, mod, score)[where], whole[where])
        covered |= where
        for condition in piece.conditions:
            slope = dependence(condition)[condition.outputs[0]].slope
            assert slope is not None and slope[1] != 0 and category(condition.output.dtype) == "int"
    assert bool(covered.all()) and len(found) <= most
    return len(found)


def guarded(expr: Expr, mod: TracedMod, score: torch.Tensor) -> torch.Tensor:
    """``value`` with tables that go on, so that nothing is read past an end."""
    wide = [torch.cat([t, torch.full((*t.shape[:-1], 4 * SIZE), torch.nan), t], -1) for t in mod.tensors]
    return value(expr, replace(mod, tensors=tuple(wide)), score)


@pytest.mark.parametrize(
    "score,count",
    [
        (lambda s, b, h, q, k: s - 0.5 * (q - k).abs(), 2),
        (lambda s, b, h, q, k: s - 0.5 * (q - k), 1),
        (lambda s, b, h, q, k: s - 0.5 * (q - 5).abs(), 1),
        (lambda s, b, h, q, k: s + (k - 7).abs(), 2),
        (lambda s, b, h, q, k: s + TABLE[h, (q - k).abs()], 2),
        (lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q - k, -4, 4) + 4], 3),
        (lambda s, b, h, q, k: torch.where(q >= k, s, s - 1.0), 2),
        (lambda s, b, h, q, k: torch.where(q > k, s * 2, torch.where(k < q + 3, s, -s)), 3),
        (lambda s, b, h, q, k: torch.where((q <= k) & (k - q < 3), s * 2, s), 3),
        (lambda s, b, h, q, k: s + torch.minimum(q, k) * 0.25 - torch.maximum(2 * q, k + 3), 4),
        (lambda s, b, h, q, k: s - (s.abs() - 1).abs(), 1),
    ],
)
def test_pieces_say_the_same(score: Callable, count: int) -> None:
    assert agree(trace(score, "score")) == count


def test_of_a_clamped_distance_two_pieces_of_three_are_constants() -> None:
    mod = trace(scores.relative_bias(TABLE).fn, "score")
    changing = []
    for piece in pieces(mod.expr):
        loads = [i for i, n in enumerate(piece.expr.nodes) if n.op == "load"]
        changing.append(any(not dependence(piece.expr)[i].per_head for i in loads))
    assert sorted(changing) == [False, False, True]


def test_no_more_than_asked() -> None:
    mod = trace(lambda s, b, h, q, k: s + (q - k).abs() + (q - k - 3).abs() + (q - k + 5).abs() + (q - 2 * k).abs(), "score")
    for most in (1, 2, 3, 4, 9, 16):
        assert agree(mod, most) <= most


numbers = st.deferred(
    lambda: st.one_of(
        st.sampled_from(["q", "k", "h"]),
        st.integers(-9, 9).map(str),
        st.tuples(numbers, numbers, st.sampled_from(["{} + {}", "{} - {}"])).map(lambda x: "(" + x[2].format(x[0], x[1]) + ")"),
        st.tuples(numbers, st.integers(-2, 2)).map(lambda x: f"({x[0]} * {x[1]})"),
        st.tuples(numbers, numbers, st.sampled_from(["minimum", "maximum"])).map(lambda x: f"torch.{x[2]}(t({x[0]}, q), t({x[1]}, q))"),
        numbers.map(lambda x: f"t({x}, q).abs()"),
        st.tuples(numbers, numbers, numbers, st.sampled_from(["<", "<=", ">", ">="])).map(
            lambda x: f"torch.where(t({x[0]}, q) {x[3]} t({x[1]}, q), t({x[2]}, q), q)"
        ),
    )
)


@settings(max_examples=60, deadline=None)
@given(numbers, st.integers(1, 8))
def test_any_arithmetic_of_positions(text: str, most: int) -> None:
    body = eval(f"lambda s, b, h, q, k, t: s + ({text})", {"torch": torch})
    agree(trace(lambda s, b, h, q, k: body(s, b, h, q, k, lambda x, q: x + 0 * q), "score"), most)
