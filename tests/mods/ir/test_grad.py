"""``score_gradients`` against torch's autograd through ``evaluate``, in float64, to a count of ulps."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given, settings

from anyattn import scores
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.ir.expr import OPS
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace
from tests.support import cases
from tests.support.fuzz.random_mods import chains, score_of

H, M, N = 2, 5, 7
EPS = sys.float_info.epsilon
LEAVES = {
    "b": torch.zeros(1, 1, 1, 1, dtype=torch.int64),
    "h": torch.arange(H).view(-1, 1, 1),
    "q_idx": torch.arange(M).view(-1, 1),
    "kv_idx": torch.arange(N),
}
SCORE = torch.randn(1, H, M, N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(1, H, M, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def table_of(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def both_gradients(fn, score):
    """(ours, autograd's): the gradients of sum(weight * mod) by the score and by each captured tensor."""
    traced = trace(fn, "score", score_dtype=torch.float64)
    found = score_gradients(traced.expr)
    leaf = score.clone().requires_grad_()
    floats = [t for t in traced.tensors if t.requires_grad]
    value = evaluate(traced, *LEAVES.values(), score=leaf).expand(score.shape)
    theirs = torch.autograd.grad((value * WEIGHT).sum() + 0 * leaf.sum(), [leaf, *floats], allow_unused=True, materialize_grads=True)
    with torch.no_grad():
        values = [
            v if isinstance(v, torch.Tensor) else torch.tensor(v)
            for v in run(found.expr, {**LEAVES, "score": score}, traced.scalars, traced.tensors)
        ]
        ours = [(values[0] * WEIGHT).expand(score.shape)]
        for tensor in floats:
            total = torch.zeros_like(tensor)
            for load in found.loads:
                if traced.tensors[load.slot] is tensor:
                    indices = [values[i].expand(score.shape) for i in load.indices]
                    part = (values[load.output] * WEIGHT).expand(score.shape).to(tensor.dtype)
                    total = total.index_put(indices, part, accumulate=True) if indices else total + part.sum()
            ours.append(total)
    return ours, theirs


def agree(fn, score=SCORE, ulps=16.0):
    """Every gradient within ``ulps`` rounding errors of the largest term that it is a sum of (or of 1)."""
    ours, theirs = both_gradients(fn, score)
    for got, want in zip(ours, theirs):
        scale = max(1.0, float(want.abs().max())) * max(1, score.numel() // max(1, want.numel()))
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), (got, want)
        got, want = (torch.where(finite, t, 0.0) for t in (got, want))
        worst = float((got - want).abs().max())
        assert worst <= ulps * EPS * scale, (worst / EPS / scale, got, want)


positive = lambda s: torch.abs(s) + 0.3
learned = table_of(H, N)
UNARY = {
    "neg": lambda s: -s,
    "abs": torch.abs,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": lambda s: torch.log(positive(s)),
    "sin": torch.sin,
    "log2": lambda s: torch.log2(positive(s)),
    "log1p": lambda s: torch.log1p(positive(s)),
    "expm1": torch.expm1,
    "cos": torch.cos,
    "sqrt": lambda s: torch.sqrt(positive(s)),
    "rsqrt": lambda s: torch.rsqrt(positive(s)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "tan": lambda s: torch.tan(s * 0.3),
    "atan": torch.atan,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "erfinv": lambda s: torch.erfinv(s / (1 + torch.abs(s))),
    "reciprocal": lambda s: torch.reciprocal(positive(s)),
    "floor": lambda s: torch.floor(s) + s,
    "ceil": lambda s: torch.ceil(s) * s,
    "trunc": lambda s: torch.trunc(s) - s,
    "round": lambda s: torch.round(s * 3),
    "sign": lambda s: torch.sign(s) * s,
    "detach": lambda s: s * s.detach() - torch.exp(s - s.detach()) + (s * 2).detach(),
}
BINARY = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y + 5),
    "floordiv": lambda x, y: (x * 3) // (y + 5) + x,
    "mod": lambda x, y: (x * 3) % (y * y + 0.7),
    "fmod": lambda x, y: torch.fmod(x * 3, y * y + 0.7),
    "pow": lambda x, y: positive(x) ** y,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "min": torch.minimum,
    "max": torch.maximum,
}
NO_DERIVATIVE = {"not", "and", "or", "xor", "shl", "shr", "eq", "ne", "lt", "le", "gt", "ge", "where", "cast", "fold"}


def test_no_operation_is_forgotten():
    assert set(UNARY) | set(BINARY) | NO_DERIVATIVE == set(OPS)


@pytest.mark.parametrize("op", UNARY)
def test_unary(op):
    f = UNARY[op]
    agree(lambda s, b, h, q, k: f(s) * learned[h, k] + f(learned[h, q]), ulps=32)


def test_floor_division_is_a_step():
    """torch's autograd has no rule for it."""
    traced = trace(lambda s, b, h, q, k: s // 0.7 + 2 * s, "score", score_dtype=torch.float64)
    found = score_gradients(traced.expr)
    assert [float(v) for v in run(found.expr, {**LEAVES, "score": SCORE}, traced.scalars, traced.tensors)] == [2.0]


@pytest.mark.parametrize("op", [op for op in BINARY if op != "floordiv"])
def test_binary(op):
    f = BINARY[op]
    agree(lambda s, b, h, q, k: f(s, learned[h, k]), ulps=32)
    agree(lambda s, b, h, q, k: f(learned[h, k], s) * 0.5, ulps=32)
    agree(lambda s, b, h, q, k: f(s, s * 0.5), ulps=32)
    agree(lambda s, b, h, q, k: f(s, q + 1) + f(k + 1, s), ulps=64 if op != "pow" else 1024)


def test_where_and_casts():
    agree(lambda s, b, h, q, k: torch.where(q >= k, s * 2, learned[h, k]))
    agree(lambda s, b, h, q, k: torch.where(s > 0, s, 0.1 * s))
    agree(lambda s, b, h, q, k: s.to(torch.float64) * learned[h, q].to(torch.float64))


@pytest.mark.parametrize("point", [0.0, 1.0, -1.0])
def test_subgradients_are_torchs(point):
    at = torch.full_like(SCORE, point)
    agree(lambda s, b, h, q, k: torch.abs(s), at)
    agree(lambda s, b, h, q, k: torch.maximum(s, torch.tensor(point, dtype=torch.float64)), at)
    agree(lambda s, b, h, q, k: torch.minimum(s * 1.0, s), at)
    agree(lambda s, b, h, q, k: s**3 + s**2 + s**1, at)
    agree(lambda s, b, h, q, k: torch.floor(s) + torch.sign(s), at)


def test_a_branch_not_taken_makes_no_nan():
    at = torch.zeros_like(SCORE)
    for f in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, lambda x: 1 / x, lambda x: x**0.5):
        ours, _ = both_gradients(lambda s, b, h, q, k: torch.where(s > 0, f(s), s * 2), at)  # noqa: B023
        assert torch.equal(ours[0], 2 * WEIGHT)
    ours, _ = both_gradients(lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf), SCORE)
    assert torch.equal(ours[0], torch.where(LEAVES["q_idx"] >= LEAVES["kv_idx"], WEIGHT, 0.0))


vector, scalar, relative, square = table_of(H), table_of(), table_of(M + N, seed=3), table_of(N, N, seed=4)
bucket = torch.tensor([0, 1, 1, 2, 2, 2, 3])
LOADS = {
    "scalar": lambda s, b, h, q, k: scalar * torch.tanh(s / scalar),
    "head": lambda s, b, h, q, k: s + vector[h],
    "relative": lambda s, b, h, q, k: s + relative[q - k + N - 1],
    "negative_index": lambda s, b, h, q, k: s * relative[q - k],
    "gathered": lambda s, b, h, q, k: s + square[bucket[k], bucket[q]],
    "twice": lambda s, b, h, q, k: s * square[q, k] + square[k, q] ** 2,
    "one_at_a_time": lambda s, b, h, q, k: s + square[q][k] * vector[h],
    "constant_index": lambda s, b, h, q, k: s + square[0, k] - vector[-1],
    "only_captured": lambda s, b, h, q, k: square[q, k],
    "constant": lambda s, b, h, q, k: q * 1.0,
    "alibi": scores.alibi(vector),
    "t5": scores.t5_bias(table_of(8, H, seed=5), True, 6),
    "chain": scores.relative_bias(table_of(H, 7, seed=6))
    .then(scores.softcap(scalar.detach().abs().requires_grad_()))
    .then(scores.temperature(2.0)),
}


@pytest.mark.parametrize("name", LOADS)
def test_captured(name):
    agree(LOADS[name], ulps=64)


def test_integer_tensors_get_no_gradient():
    traced = trace(lambda s, b, h, q, k: s + bucket[k] * vector[h], "score", score_dtype=torch.float64)
    assert [traced.tensors[load.slot] is vector for load in score_gradients(traced.expr).loads] == [True]


def test_equal_mods_share_one_gradient_program():
    keys = {score_gradients(trace(scores.softcap(c), "score").expr).expr.key for c in (1.0, 50.0)}
    assert len(keys) == 1


@settings(max_examples=60, deadline=None, derandomize=True)
@given(chains)
def test_random_chains(chain):
    fn, captured = score_of(chain, H)
    for tensor in captured:
        tensor.requires_grad_()
    agree(fn or (lambda s, b, h, q, k: s), ulps=256)


SHAPE = cases.Shape(1, H, 1, M, N, 4, 4)


@pytest.mark.parametrize("name", [n for n in cases.VARIANTS if n != "documents"])
def test_gallery(name):
    variant = cases.VARIANTS[name]
    mod = variant.mods(variant.make(SHAPE, torch.Generator().manual_seed(3)), SHAPE)["score"]
    if mod is not None:
        agree(mod, ulps=64)


@pytest.mark.parametrize("f", [torch.tanh, torch.sigmoid, torch.sin, torch.cos, torch.erf, abs], ids=lambda f: f.__name__)
def test_a_branch_not_taken_contributes_nothing_even_where_it_is_nan(f):
    expr = trace(lambda s, b, h, q, k: torch.where(s > 0, f(torch.log(s)), s), "score").expr
    (by_score,) = run(score_gradients(expr).expr, {"score": torch.tensor([-1.0])}, (), ())
    assert by_score.tolist() == [1.0]


@pytest.mark.parametrize("name", ("tanh", "sigmoid"))
def test_a_flat_derivative_keeps_its_digits(name):
    """Where tanh is nearly 1, 1 - tanh^2 is what rounding left over; the exact form is as right as its argument is."""
    expr = trace(lambda s, b, h, q, k: getattr(torch, name)(s), "score").expr
    far = torch.linspace(-20, 20, 401)
    twice = far.double() * (2 if name == "tanh" else 1)
    want = torch.exp(-twice.abs()) / (1 + torch.exp(-twice.abs())).square() * (4 if name == "tanh" else 1)
    # the exponential of x errs by x roundings of its argument
    bound = torch.finfo(torch.float32).eps * (8 + twice.abs())
    worst = {}
    for is_exact in (True, False):
        (found,) = run(score_gradients(expr, is_exact).expr, {"score": far}, (), ())
        worst[is_exact] = float(((found.double() / want - 1).abs() / bound).max())
    assert worst[True] <= 1 < worst[False], worst


@pytest.mark.parametrize("name", ("tanh", "sigmoid"))
def test_both_forms_are_one_derivative(name):
    for is_exact in (True, False):
        expr = trace(lambda s, b, h, q, k: getattr(torch, name)(s * 0.7), "score", score_dtype=torch.float64).expr
        leaf = SCORE.clone().requires_grad_()
        (want,) = torch.autograd.grad(getattr(torch, name)(leaf * 0.7).sum(), leaf)
        (found,) = run(score_gradients(expr, is_exact).expr, {"score": SCORE}, (), ())
        assert float((found - want).abs().max()) <= 16 * EPS
