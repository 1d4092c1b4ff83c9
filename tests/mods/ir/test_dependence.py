"""What dependence analysis claims holds for the values: a claim of "does not change with" is checked on every pair."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_mask

from anyattn import create_block_mask, flex_attention, masks, scores
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.trace import trace
from tests.support.fuzz.random_mods import chains, mask_of, score_of, trees

B, H, M, N = 2, 3, 7, 9
LEAVES = {
    "b": torch.arange(B).view(-1, 1, 1, 1),
    "h": torch.arange(H).view(-1, 1, 1),
    "q_idx": torch.arange(M).view(-1, 1),
    "kv_idx": torch.arange(N),
}
SCORE = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
table = torch.randn(H, M + N, generator=torch.Generator().manual_seed(1))
ids = torch.randint(0, 3, (B, N), generator=torch.Generator().manual_seed(2))
n = 3


def claims_hold(traced):
    """Evaluates every node and checks what is claimed of it. Returns the claims."""
    expr = traced.expr
    deps = dependence(expr)
    values = run(Expr(expr.nodes, tuple(range(len(expr.nodes)))), {**LEAVES, "score": SCORE}, traced.scalars, traced.tensors)
    i = torch.arange(M).view(-1, 1) - torch.arange(N)
    for node, dep, value in zip(expr.nodes, deps, values):
        full = (value if isinstance(value, torch.Tensor) else torch.tensor(value)).expand(B, H, M, N)
        if not dep.score:
            for dim, depends in enumerate((dep.b, dep.h, dep.q, dep.kv)):
                assert depends or same(full, full.select(dim, 0).unsqueeze(dim)), (node, dep)
        if dep.diagonal:
            assert dep.q and dep.kv and not dep.score
            for d in range(-N + 1, M):
                on = full[:, :, i == d]
                assert same(on, on[:, :, :1]), (node, dep, d)
        if dep.slope is not None:
            a, c = dep.slope
            rest = full - a * LEAVES["q_idx"] - c * LEAVES["kv_idx"] if full.dtype is not torch.bool else full
            assert same(rest, rest[:, :, :1, :1]), (node, dep)
    return deps


def same(a, b):
    return bool(((a == b) | ((a != a) & (b != b))).all())


SCORES = {
    "alibi": (lambda s, b, h, q, k: s + table[h, 0] * abs(q - k), "score"),
    "row": (lambda s, b, h, q, k: table[h, q] * q, "h, q"),
    "col": (lambda s, b, h, q, k: table[0, k] + ids[b, k], "b, kv"),
    "diagonal": (lambda s, b, h, q, k: table[h, q - k] * 2, "h, q - kv"),
    "shifted": (lambda s, b, h, q, k: 1.0 * ((q + n) - (k - 2) + h), "h, q - kv"),
    "scaled": (lambda s, b, h, q, k: 1.0 * (2 * q - 2 * k), "q - kv"),
    "sum": (lambda s, b, h, q, k: 1.0 * (q + k), "q, kv"),
    "cancelled": (lambda s, b, h, q, k: 1.0 * (q - k + k), "q"),
    "bucketed": (lambda s, b, h, q, k: table[h, torch.clamp(q - k, -2, 2) + 2], "h, q - kv"),
    "diagonal_times_row": (lambda s, b, h, q, k: (q - k) * table[h, q], "h, q, kv"),
    "number": (lambda s, b, h, q, k: table[1, 2] * n, "nothing"),
    "chunk": (lambda s, b, h, q, k: 1.0 * (q // 2 - k // 2), "q, kv"),
    "narrowed": (lambda s, b, h, q, k: 1.0 * ((100 * q).to(torch.int8) - (100 * k).to(torch.int8)), "q, kv"),
}
MASKS = {
    "causal": (masks.causal(), "q - kv"),
    "window": (masks.sliding_window(2, 1, 3), "q - kv"),
    "other_side": (lambda b, h, q, k: k + n <= q - 1, "q - kv"),
    "negated": (lambda b, h, q, k: -k <= n - q, "q - kv"),
    "document": (masks.document(ids), "b, q, kv"),
    "antidiagonal": (lambda b, h, q, k: -k <= q, "q, kv"),
    "row": (lambda b, h, q, k: q - k + k > 2, "q"),
    "head_window": (lambda b, h, q, k: q - h <= k, "h, q - kv"),
    "dilated": (masks.dilated(2, 3), "q - kv"),
    "float_compare": (lambda b, h, q, k: q * 1.0 >= k * 1.0, None),
}


@pytest.mark.parametrize("name", SCORES)
def test_scores(name):
    fn, claimed = SCORES[name]
    traced = trace(fn, "score", score_dtype=torch.float64)
    output = claims_hold(traced)[traced.expr.outputs[0]]
    if name == "alibi":
        assert output.score and str(output) == "score"
    elif name == "cancelled":
        assert output.q and not output.diagonal
    else:
        assert str(output) == claimed


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    fn, claimed = MASKS[name]
    traced = trace(fn, "mask")
    output = claims_hold(traced)[traced.expr.outputs[0]]
    if name == "row":
        assert output.q and not output.diagonal
    elif claimed is not None:
        assert str(output) == claimed


def test_slopes():
    expr = trace(lambda b, h, q, k: 3 * (q - 2 * k) + h == 0, "mask").expr
    assert any(d.slope == (3, -6) for d in dependence(expr))


FLOATS = {
    "a sum that is rounded": lambda b, h, q, k: (q.double() + 0.1) - (k.double() + 0.1) == 3,
    "on both sides": lambda b, h, q, k: q.double() - 0.3 >= k.double() + 0.1,
    "whole numbers beyond 2^53": lambda b, h, q, k: (q + 2**53).double() >= (k + 2**53).double(),
    "absorbed": lambda b, h, q, k: (q.double() + 1e17) >= (k.double() + 1e17),
    "a captured number": lambda b, h, q, k, x=0.1: (q.double() + x) - (k.double() + x) >= 3,
}


@pytest.mark.parametrize("name", FLOATS)
def test_sums_of_floats_are_no_difference_of_positions(name):
    """They are rounded by where they are: no diagonal of a mask may be told from its first element."""
    size = 160
    expr = trace(FLOATS[name], "mask").expr
    assert not dependence(expr)[expr.outputs[0]].diagonal
    zero, each = torch.zeros(1, 1, size, 16), torch.eye(size)[None, None]
    for call in ({"mask_mod": FLOATS[name]}, {"block_mask": create_block_mask(FLOATS[name], 1, 1, size, size, device="cpu")}):
        seen = flex_attention(zero, zero, each, **call) > 0
        assert torch.equal(seen, create_mask(FLOATS[name], 1, 1, size, size, device="cpu"))


def test_library_scores():
    for mod in (scores.t5_bias(table.T), scores.relative_bias(table[:, :15]), scores.softcap(3.0), scores.head_bias(table[:, 0])):
        claims_hold(trace(mod, "score", score_dtype=torch.float64))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(trees(3))
def test_random_masks(tree):
    claims_hold(trace(mask_of(tree), "mask"))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(chains)
def test_random_scores(chain):
    fn, _ = score_of(chain, H)
    if fn is not None:
        claims_hold(trace(fn, "score", score_dtype=torch.float64))
