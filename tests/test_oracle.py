"""The oracle against loops over single numbers, torch's own attention and finite differences."""

from __future__ import annotations

import math

import pytest
import torch

from anyattn import oracle
from anyattn.mods.tracing.trace import trace
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import cases


def loops(q, k, v, score, mask, scale, sink):
    """The definition, one number at a time in Python floats."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    ratio = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                terms = []
                for j in range(k.shape[2]):
                    if mask is not None and not mask(b, h, i, j):
                        continue
                    s = scale * sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, h // ratio, j]))
                    terms.append((float(score(torch.tensor(s, dtype=torch.float64), b, h, i, j)) if score else s, j))
                logits = [s for s, _ in terms] + ([] if sink is None else [float(sink[h])])
                if not logits:
                    continue
                top = max(logits)
                total = math.fsum(math.exp(s - top) for s in logits)
                lse[b, h, i] = top + math.log(total)
                for d in range(v.shape[3]):
                    out[b, h, i, d] = math.fsum(math.exp(s - top) / total * float(v[b, h // ratio, j, d]) for s, j in terms)
    return out, lse


SHAPE = cases.Shape(2, 4, 2, 7, 9, 5, 3)


@pytest.mark.parametrize("name", [n for n in cases.VARIANTS if n != "documents"])
def test_loops(name):
    variant = cases.VARIANTS[name]
    g = torch.Generator().manual_seed(3)
    q, k, v, _ = cases.inputs("normal", SHAPE, torch.float64, 0)
    mods = variant.mods(variant.make(SHAPE, g), SHAPE)
    single, seen = mods["score"], mods["mask"]
    score = None if single is None else lambda s, *i: single(s, *map(torch.tensor, i))
    mask = None if seen is None else lambda *i: seen(*map(torch.tensor, i))
    sink = torch.randn(4, generator=g, dtype=torch.float64) if variant.has_sink else None
    out, lse = loops(q, k, v, score, mask, 0.3, sink)
    got, plain = (f(q, k, v, **mods, scale=0.3, sink=sink) for f in (oracle.attention, oracle.same_dtype))
    noise = rounding(q, k, v, **mods, scale=0.3, sink=sink)
    budget.check("out", got.out, out, plain.out, noise.out)
    budget.check("lse", got.lse, lse, plain.lse, noise.lse)


@pytest.mark.parametrize("name", ["gated_sink", "t5", "islands", "relative_window"])
def test_a_traced_mod_means_what_its_function_means(name):
    variant = cases.VARIANTS[name]
    q, k, v, dout = cases.inputs("normal", SHAPE, torch.float64, 0)
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in variant.make(SHAPE, torch.Generator().manual_seed(3))]
    mods = variant.mods(tuple(tensors), SHAPE)
    traced = {kind: None if f is None else trace(f, kind, score_dtype=torch.float64) for kind, f in mods.items()}
    assert torch.equal(oracle.attention(q, k, v, **mods).out, oracle.attention(q, k, v, **traced).out)
    want = oracle.gradients(q, k, v, dout, **mods, captured=tensors)
    got = oracle.gradients(q, k, v, dout, **traced)
    assert all(torch.equal(a, b) for a, b in zip((want.dq, want.dk, want.dv), (got.dq, got.dk, got.dv)))
    assert len(got.captured) == len(want.captured)
    plain = oracle.same_dtype_gradients(q, k, v, dout, **traced)
    noise = rounding(q, k, v, dout, **traced)
    for a, b, p, n in zip(got.captured, want.captured, plain.captured, noise.captured):
        budget.check("captured", a, b, p, n)  # sums of floats in another order


def test_gradients_against_finite_differences():
    """A central difference along random directions; its own error, of order step^2, is what bounds the comparison."""
    variant = cases.VARIANTS["gated_sink"]
    g = torch.Generator().manual_seed(5)
    q, k, v, dout = cases.inputs("normal", SHAPE, torch.float64, 0)
    dlse = torch.randn(q.shape[:3], generator=g, dtype=torch.float64)
    (table,) = variant.make(SHAPE, g)
    sink = torch.randn(4, generator=g, dtype=torch.float64)

    def loss(q, k, v, sink, table):
        result = oracle.attention(q, k, v, **variant.mods((table,), SHAPE), sink=sink)
        return float((result.out * dout).sum() + (result.lse * dlse).sum())

    leaf = table.clone().requires_grad_()
    grads = oracle.gradients(q, k, v, dout, dlse=dlse, **variant.mods((leaf,), SHAPE), sink=sink, captured=[leaf])
    point, step = [q, k, v, sink, table], 1e-4
    for i, gradient in enumerate((grads.dq, grads.dk, grads.dv, grads.dsink, *grads.captured)):
        direction = torch.randn(point[i].shape, generator=g, dtype=torch.float64)
        moved = [loss(*(t + s * step * direction if j == i else t for j, t in enumerate(point))) for s in (1, -1)]
        slope = float((gradient * direction).sum())
        assert abs((moved[0] - moved[1]) / (2 * step) - slope) < 1e-5 * max(1.0, abs(slope)), i


@pytest.mark.parametrize("causal", [False, True])
def test_torch_agrees(causal):
    q, k, v, dout = cases.inputs("normal", cases.Shape(2, 4, 2, 50, 50, 16, 16), torch.float64, 1)
    mask = (lambda b, h, i, j: i >= j) if causal else None
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, enable_gqa=True)
    out.backward(dout)
    noise = rounding(q, k, v, dout, mask=mask)
    plain, plain_grads = oracle.same_dtype(q, k, v, mask=mask), oracle.same_dtype_gradients(q, k, v, dout, mask=mask)
    budget.check("out", out, oracle.attention(q, k, v, mask=mask).out, plain.out, noise.out)
    want = oracle.gradients(q, k, v, dout, mask=mask)
    for name, leaf in zip(("dq", "dk", "dv"), leaves):
        budget.check(name, leaf.grad, getattr(want, name), getattr(plain_grads, name), getattr(noise, name))


def test_a_row_that_sees_nothing():
    q, k, v, dout = cases.inputs("normal", cases.Shape(1, 2, 1, 6, 6, 4, 4), torch.float32, 0)
    mask = lambda b, h, i, j: (i != 2) & (j <= i)
    for sink in (None, torch.tensor([0.5, -2.0])):
        for f, g in ((oracle.attention, oracle.gradients), (oracle.same_dtype, oracle.same_dtype_gradients)):
            result, grads = f(q, k, v, mask=mask, sink=sink), g(q, k, v, dout, mask=mask, sink=sink)
            assert not result.out[:, :, 2].any() and not grads.dq[:, :, 2].any()
            assert (result.max_scores[:, :, 2] == -math.inf).all()
            assert result.lse[0, :, 2].tolist() == ([-math.inf] * 2 if sink is None else sink.tolist())
            assert all(t is None or torch.isfinite(t).all() for t in grads[:4])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_masked_changes_nothing(poison):
    """Also where the key is visible to other rows, and where the mod itself is infinite under the mask."""
    q, k, v, dout = cases.inputs("normal", cases.Shape(1, 2, 2, 6, 8, 4, 4), torch.float64, 0)
    mask = lambda b, h, i, j: (j <= i) & (j < 6)
    score = lambda s, b, h, i, j: s / torch.clamp(i - j + 1, min=0)
    want, grads = oracle.attention(q, k, v, mask=mask, score=score), oracle.gradients(q, k, v, dout, mask=mask, score=score)
    k[:, :, 6:], v[:, :, 6:] = poison, poison
    got, got_grads = oracle.attention(q, k, v, mask=mask, score=score), oracle.gradients(q, k, v, dout, mask=mask, score=score)
    noise = rounding(q, k, v, dout, mask=mask, score=score)
    budget.check("out", got.out, want.out, want.out, noise.out)
    for name in ("dq", "dk", "dv"):
        budget.check(name, getattr(got_grads, name), getattr(grads, name), getattr(grads, name), getattr(noise, name))


def test_a_poisoned_key_reaches_only_the_rows_that_see_it():
    q, k, v, _ = cases.inputs("normal", cases.Shape(1, 1, 1, 6, 6, 4, 4), torch.float64, 0)
    k[:, :, 4], v[:, :, 4] = math.nan, math.nan
    out = oracle.attention(q, k, v, mask=lambda b, h, i, j: j <= i).out
    assert torch.isfinite(out[:, :, :4]).all() and torch.isnan(out[:, :, 4:]).all()


@pytest.mark.parametrize("shape", [(0, 2, 1, 3, 3, 4, 4), (1, 2, 1, 0, 3, 4, 4), (1, 2, 1, 3, 0, 4, 4), (1, 2, 1, 0, 0, 4, 4)])
@pytest.mark.parametrize("mod", [None, "mods"])
def test_empty_shapes(shape, mod):
    q, k, v, dout = cases.inputs("normal", cases.Shape(*shape), torch.float32, 0)
    mods = {} if mod is None else {"mask": lambda b, h, i, j: i >= j, "score": lambda s, b, h, i, j: s * 2}
    sink = torch.ones(2)
    for f, g in ((oracle.attention, oracle.gradients), (oracle.same_dtype, oracle.same_dtype_gradients)):
        result = f(q, k, v, **mods)
        assert result.out.shape == dout.shape and not result.out.any() and (result.lse == -math.inf).all()
        assert (f(q, k, v, **mods, sink=sink).lse == 1).all()
        assert all(not t.any() for t in g(q, k, v, dout, **mods)[:3])
    assert rounding(q, k, v, dout, **mods).dq is not None


def test_inputs_are_left_alone():
    q, k, v, dout = cases.inputs("normal", SHAPE, torch.float64, 0)
    before = [t.clone() for t in (q, k, v, dout)]
    oracle.gradients(q, k, v, dout, mask=lambda b, h, i, j: i >= j)
    oracle.same_dtype_gradients(q, k, v, dout, mask=lambda b, h, i, j: i >= j)
    for t, b in zip((q, k, v, dout), before):
        assert torch.equal(t, b) and not t.requires_grad
