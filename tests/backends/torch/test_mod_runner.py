"""A mod cut in stages and run tile by tile is the mod; lowering changes its operations, not its value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from anyattn.backends.torch.lower import lowered
from anyattn.backends.torch.mod_runner import Bound, Tile, stage_of
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace
from anyattn.testing import budget
from tests.support import cases
from tests.support.fuzz.random_mods import chains, mask_of, score_of, trees

B, H, M, N = 2, 3, 21, 27
SHAPE = cases.Shape(B, H, H, M, N, 4, 4)
LEAVES = {
    "b": torch.arange(B).view(-1, 1, 1, 1),
    "h": torch.arange(H).view(-1, 1, 1),
    "q_idx": torch.arange(M).view(-1, 1),
    "kv_idx": torch.arange(N),
}
TILES = [Tile(0, B, 0, H, 0, M, 0, N), Tile(0, 1, 1, 3, 5, 13, 0, 7), Tile(1, 2, 0, 1, 20, 21, 26, 27), Tile(0, 2, 2, 3, 3, 20, 11, 27)]


def score_values(dtype):
    return torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(0), dtype=dtype)


def whole(value):
    return (value if isinstance(value, torch.Tensor) else torch.tensor(value)).expand(B, H, M, N)


def cut(value, tile):
    """A tile of (B, H, M, N), its rows in descending order as a tile's are."""
    return value[tile.b_lo : tile.b_hi, tile.h_lo : tile.h_hi, tile.q_lo : tile.q_hi, tile.k_lo : tile.k_hi].flip(2)


def same(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())


def tiles_are_the_mod(traced, expr, dtype):
    score = score_values(dtype) if any(n.op == "score" for n in expr.nodes) else None
    want = run(expr, {**LEAVES, "score": score}, traced.scalars, traced.tensors)
    bound = Bound(expr, traced.scalars, traced.tensors, B, H, M, N, torch.device("cpu"))
    for tile in TILES:
        for owns in (False, True):
            mine = cut(score, tile).clone() if score is not None else None
            kept = mine.clone() if mine is not None else None
            for got, all_ in zip(bound.on(tile, mine, owns_score=owns), want):
                got = got if isinstance(got, torch.Tensor) else torch.tensor(got)
                assert same(got.expand(tile.shape), cut(whole(all_), tile)), (tile, owns)
            assert owns or mine is None or torch.equal(mine, kept), "the score was not given away"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", cases.VARIANTS)
def test_gallery(name, dtype):
    variant = cases.VARIANTS[name]
    mods = variant.mods(variant.make(SHAPE._replace(seqlen_q=max(M, N)), torch.Generator().manual_seed(3)), SHAPE)
    if mods["mask"] is not None:
        traced = trace(mods["mask"], "mask")
        tiles_are_the_mod(traced, traced.expr, dtype)
    if mods["score"] is not None and not name.startswith("pair"):
        traced = trace(mods["score"], "score", score_dtype=dtype)
        tiles_are_the_mod(traced, traced.expr, dtype)
        tiles_are_the_mod(traced, score_gradients(traced.expr).expr, dtype)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(trees(3))
def test_random_masks(tree):
    traced = trace(mask_of(tree), "mask")
    tiles_are_the_mod(traced, traced.expr, torch.float32)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chains)
def test_random_scores(chain):
    fn, _ = score_of(chain, H)
    if fn is not None:
        traced = trace(fn, "score", score_dtype=torch.float64)
        tiles_are_the_mod(traced, traced.expr, torch.float64)
        tiles_are_the_mod(traced, score_gradients(traced.expr).expr, torch.float64)


def test_stages():
    table = torch.zeros(H, M + N)
    for fn, stage in (
        (lambda s, b, h, q, k: s * 2, "tile"), (lambda s, b, h, q, k: table[h, 0], "per_head"), (lambda s, b, h, q, k: table[h, q], "row"),
        (lambda s, b, h, q, k: table[h, k], "col"), (lambda s, b, h, q, k: table[h, q - k], "diagonal"),
        (lambda s, b, h, q, k: table[h, q + k], "tile"),
    ):  # fmt: skip
        assert stage_of(trace(fn, "score").expr, is_ragged=False) == stage


def test_along_diagonals():
    table = torch.randn(H, 2 * (M + N), generator=torch.Generator().manual_seed(0))
    traced = trace(lambda s, b, h, q, k: table[h, q - k] * 1.0, "score")
    bound = Bound(traced.expr, traced.scalars, traced.tensors, B, H, M, N, torch.device("cpu"))
    for tile in TILES:
        (along,) = bound.along_diagonals(tile)
        rows, cols = tile.shape[2:]
        want = [[float(table[h, tile.q_hi - 1 - tile.k_lo - y]) for y in range(rows + cols - 1)] for h in range(tile.h_lo, tile.h_hi)]
        assert along.expand(1, -1, 1, -1)[0, :, 0].tolist() == want


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(lengths):
    traced = trace(lambda b, h, q, k: (q - k < 3) & (q > 1) & (k > h), "mask")
    Bound(traced.expr, traced.scalars, traced.tensors, B, H, *lengths, torch.device("cpu"))


cap, gain = 1.3, torch.tensor(0.7)
LOWERED = {
    "softcap": lambda s, b, h, q, k: cap * torch.tanh(s / cap),
    "scaled_inside": lambda s, b, h, q, k: torch.tanh(s * 3 * gain / cap) * 2,
    "twice": lambda s, b, h, q, k: torch.tanh(torch.tanh(s) * 5) * gain,
    "quotient": lambda s, b, h, q, k: 3 / (1 + torch.tanh(s) ** 2),
    "of_the_row": lambda s, b, h, q, k: s * torch.tanh(q * 0.1) * 0.5 / (1 + k),
    "big": lambda s, b, h, q, k: torch.tanh(s * 500),
}


@pytest.mark.parametrize("factor", [1.0, 1.4426950408889634])
@pytest.mark.parametrize("name", LOWERED)
def test_lowered(name, factor):
    wide, traced = (trace(LOWERED[name], "score", score_dtype=d) for d in (torch.float64, torch.float32))
    score = score_values(torch.float32)
    exact = evaluate(wide, *LEAVES.values(), score=score.double()) * factor
    plain = evaluate(traced, *LEAVES.values(), score=score) * factor
    (got,) = run(lowered(traced.expr, (factor,), False), {**LEAVES, "score": score}, traced.scalars, traced.tensors)
    budget.check(name, got, exact, plain)
    (rough,) = run(lowered(traced.expr, (factor,), True), {**LEAVES, "score": score}, traced.scalars, traced.tensors)
    # for inputs of 16 bits an absolute error far below bfloat16's unit will do
    assert float((rough - exact).abs().max()) <= 2**-18 * max(1.0, float(exact.abs().max()))


def test_lowering_of_gradients_scales_each_output():
    traced = trace(LOWERED["softcap"], "score", score_dtype=torch.float64)
    expr = score_gradients(traced.expr).expr
    score = score_values(torch.float64)
    got, want = (run(e, {**LEAVES, "score": score}, traced.scalars, traced.tensors)[0] for e in (lowered(expr, (0.25,), False), expr))
    assert float((got - 0.25 * want).abs().max()) <= 16 * torch.finfo(torch.float64).eps
