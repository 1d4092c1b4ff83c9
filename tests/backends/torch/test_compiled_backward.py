"""Compiled loops: the backward pass against the oracle, and the gradients of captured tensors."""

from __future__ import annotations

import math

import pytest
import torch

import anyattn
from anyattn import oracle
from anyattn.backends.torch import api
from anyattn.backends.torch.compiled import backward as compiled
from anyattn.backends.torch.compiled import build
from anyattn.call_cache import attention
from anyattn.problem import Problem
from tests.support.compiled_loops import HK, B, H, K, S, for_small_calls, qkv, random
from tests.support.flex_calls import judge
from tests.support.wide_gradients import in_turns

pytestmark = pytest.mark.skipif(build.reason_against() is not None, reason="no C++ compiler")
flex = anyattn.flex_attention


@pytest.fixture(autouse=True)
def _small_calls():
    with for_small_calls():
        yield


@pytest.fixture
def passes(monkeypatch):
    """Whether each backward pass was compiled."""
    found, compute = [], compiled.backward

    def spied(*args):
        result = compute(*args)
        found.append(result is not None)
        return result

    monkeypatch.setattr(compiled, "backward", spied)
    return found


kinds = torch.randint(0, 4, (B, 256), generator=torch.Generator().manual_seed(2))
choice = torch.randint(-3, 4, (S, K), generator=torch.Generator().manual_seed(3))
holes = torch.where(torch.randint(0, 3, (S, K), generator=torch.Generator().manual_seed(4)) == 0, -math.inf, random(S, K, seed=7))
CAUSAL = lambda b, h, i, j: i >= j
SAME = lambda b, h, i, j: kinds[b, i] == kinds[b, j]

# shapes of the captured tensors that get gradients, and the score mod
CAPTURED = {
    "nothing": ((), lambda: None),
    "infinite": ((), lambda: lambda s, b, h, i, j: s + holes[i, j]),
    "capped": ((), lambda: lambda s, b, h, i, j: torch.tanh(s * 0.3) * 4 + torch.where(i > j, s, -s.abs())),
    "pairs": (((B, H, S, K),), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "pairs, times a number": (((B + 1, H, S + 3, K + 2),), lambda t: lambda s, b, h, i, j: s - 0.5 * t[b, h, i, j]),
    "pairs of all heads": (((S, K),), lambda t: lambda s, b, h, i, j: s + t[i, j]),
    "pairs of each head": (((H + 1, S, K + 2),), lambda t: lambda s, b, h, i, j: s + t[h, i, j]),
    "keys of each head": (((S, K, H), (K,)), lambda t, u: lambda s, b, h, i, j: s + t[i, j, h] * u[j]),
    "two numbers a head": (((2, H),), lambda t: lambda s, b, h, i, j: s + t[(kinds[b, i] == kinds[b, j]).to(torch.int32), h]),
    "rows and columns": (((H, S), (B, K)), lambda t, u: lambda s, b, h, i, j: s + t[h, i] * u[b, j]),
    "distances": (((H, S + K),), lambda t: lambda s, b, h, i, j: s + t[h, i - j + K]),
    "gathers": (((7, 5), (B, K)), lambda t, u: lambda s, b, h, i, j: s + t[choice[i, j], h] - t[2, kinds[b, j]] + u[b, j]),
    "the same twice": (((H, 256, 256),), lambda t: lambda s, b, h, i, j: s + t[h, i, j] + t[h, j, i]),
}
TORCH = {
    "of the score": (((H,),), lambda t: lambda s, b, h, i, j: s * t[h]),
}


def check(name, mask=None, dtype=torch.float32, sink=None, of=torch.float64, **options):
    """of: the captured tensors' dtype."""
    shapes, mod = (CAPTURED | TORCH)[name]
    tensors = [random(*shape, seed=50 + n, dtype=of) for n, shape in enumerate(shapes)]
    return judge(*qkv(dtype), score=mod(*tensors), mask=mask, captured=tensors, sink=sink, label=name, **options)


MASKS = {"all": None, "causal": CAUSAL, "same": SAME}
QUICK = {
    ("nothing", "causal"),
    ("capped", "same"),
    ("pairs", "causal"),
    ("pairs of each head", "same"),
    ("two numbers a head", "all"),
    ("gathers", "causal"),
}
EVERY = [(name, mask) for name in CAPTURED for mask in MASKS]


@pytest.mark.parametrize(("name", "mask"), [pytest.param(*c, marks=[] if c in QUICK else pytest.mark.slow) for c in EVERY])
def test_gradients_are_within_the_budget(name, mask, passes):
    check(name, MASKS[mask])
    assert passes
    assert all(passes)


def test_what_is_not_compiled_is_torchs(passes):
    check("of the score", CAUSAL)
    assert not any(passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype, passes):
    check("two numbers a head", CAUSAL, dtype)
    assert all(passes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["two numbers a head", "pairs, times a number"])
def test_captured_tensors_of_16_bits(name, dtype, passes):
    check(name, SAME, dtype, of=dtype)
    assert passes
    assert all(passes)


def test_a_sink_and_rows_that_see_nothing(passes):
    check("infinite", lambda b, h, i, j: (i < 100) & (i >= j), sink=random(H, seed=31))
    assert all(passes)


def test_strides(passes):
    q, k, v = random(B, S, H, 24, seed=1).transpose(1, 2), random(B, 24, K, HK, seed=2).permute(0, 3, 2, 1), random(B, HK, K, 80, seed=3)
    judge(q, k, v[..., ::2], mask=CAUSAL, dout=random(B, 40, S, H, seed=4).permute(0, 3, 2, 1))
    assert all(passes)


def test_few_heads_divide_their_keys(passes):
    table = random(130, 1100, seed=9, dtype=torch.float64)
    judge(*(random(1, 1, n, 16, seed=n) for n in (130, 1100, 1100)), score=lambda s, b, h, i, j: s + table[i, j], captured=(table,))
    assert all(passes)
    assert compiled._splits(Problem(*(torch.zeros(1, 1, n, 8) for n in (16, 1100, 1100)), 1.0))[0] > 1


@pytest.mark.parametrize("name", ["pairs of each head", "pairs of all heads", "keys of each head"])
def test_parts_of_the_keys_share_the_sums_for_captured_tensors(name, passes, monkeypatch):
    monkeypatch.setattr(compiled, "_LEAST_KEYS", 64)
    check(name, SAME)
    assert all(passes)


@pytest.mark.parametrize(("name", "copies"), [("pairs of each head", B), ("pairs of all heads", B * HK)])
def test_heads_with_values_of_their_own_share_a_copy_of_the_sums(name, copies, passes, monkeypatch):
    most = copies * math.prod(CAPTURED[name][0][0])
    for number in (most, most - 1):
        monkeypatch.setattr(compiled, "_MOST_SUMS", number)
        check(name)
    assert passes == [True, True, False, False]  # each check runs twice


def test_gradients_of_the_log_sum_exp(passes):
    leaves = [t.requires_grad_() for t in qkv()]
    out, lse = flex(*leaves, mask_mod=CAUSAL, enable_gqa=True, return_lse=True)
    got = torch.autograd.grad((out.sum() + (lse * 3).sum()), leaves)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    out, lse = flex(*wide, mask_mod=CAUSAL, enable_gqa=True, return_lse=True)
    exact = torch.autograd.grad((out.sum() + (lse * 3).sum()), wide)
    assert passes == [True]
    for a, b in zip(got, exact, strict=True):
        assert (a - b).norm() <= 3e-6 * b.norm()


def test_sequences(passes):
    lengths_q, lengths_k = [70, 0, 33, 129, 5], [70, 20, 101, 0, 200]
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k)]
    leaves = [t.requires_grad_() for t in (random(240, H, 24, seed=1), random(395, HK, 24, seed=2), random(395, HK, 24, seed=3))]
    dout = random(240, H, 24, seed=4)
    out = anyattn.flash_attn_varlen_func(*leaves, *starts, 129, 200, causal=True)
    got = torch.autograd.grad(out, leaves, dout)
    assert passes == [True]
    for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(int(starts[0][b]), int(starts[0][b]) + m), slice(int(starts[1][b]), int(starts[1][b]) + n)
        if not m or not n:
            assert not any(t[part].any() for t, part in zip(got, (rows, keys, keys), strict=True))
            continue
        parts = [t.detach()[part][None].transpose(1, 2) for t, part in zip((*leaves, dout), (rows, keys, keys, rows), strict=True)]
        mask = lambda b, h, i, j, n=n, m=m: j <= i + n - m
        exact = oracle.gradients(*parts, mask=mask)
        for name, grad, part in zip(("dq", "dk", "dv"), got, (rows, keys, keys), strict=True):
            wanted = getattr(exact, name)
            assert (grad[part][None].transpose(1, 2) - wanted).norm() <= 3e-6 * wanted.norm(), (b, name)
    assert not any(t[-3:].any() for t in got)  # storage that belongs to no sequence


def test_the_number_of_threads_changes_no_bit():
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            attention.clear()
            leaves = [t.requires_grad_() for t in (*qkv(), random(2, H, seed=4))]
            score = lambda s, b, h, i, j, t=leaves[3]: s + t[(kinds[b, i] == kinds[b, j]).to(torch.int32), h]
            long = [random(1, 1, 2048, 32, seed=n).requires_grad_() for n in range(3)]
            of_call = torch.autograd.grad(flex(*leaves[:3], score_mod=score, enable_gqa=True).sum(), leaves)
            found.append((*of_call, *torch.autograd.grad(flex(*long, mask_mod=CAUSAL).square().sum(), long)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_values_at_hidden_keys_do_not_matter(passes):
    q, k, v = qkv(d=32, dv=64)
    dirty = [t.clone() for t in (k, v)]
    for t in dirty:
        t[:, :, 90:] = math.nan
    seen = lambda b, h, i, j: (j < 90) & (i >= j)
    got = judge(q, *dirty, mask=seen, meant=(q, *(torch.where(t.isnan(), 0.0, t) for t in dirty)))
    assert all(passes)
    assert not got["dk"][:, :, 90:].any()


def test_both_passes_of_a_mask_of_tables_share_the_coverage(monkeypatch, passes):
    covered, cover = [], api._cover
    monkeypatch.setattr(api, "_cover", lambda *args: covered.append(args) or cover(*args))
    first = torch.tensor([3, 70])
    q, k, v = (t.requires_grad_() for t in qkv())
    flex(q, k, v, mask_mod=lambda b, h, i, j: (j >= first[b]) & (i >= j), enable_gqa=True).sum().backward()
    assert all(passes)
    assert len(covered) == 1


def test_scores_far_from_0_are_torchs(passes):
    far = torch.full((S, K), -1e6)
    leaves = [t.requires_grad_() for t in qkv()]
    got = torch.autograd.grad(flex(*leaves, score_mod=lambda s, b, h, i, j: s + far[i, j], enable_gqa=True).sum(), leaves)
    assert not passes
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize(("d", "dv"), [(24, 40), (32, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_wide_gradients_of_keys(dtype, d, dv, passes):
    """Rows of 32 and 64 numbers take the sums of the loops themselves."""
    with in_turns() as found:
        judge(*qkv(dtype, d, dv), mask=CAUSAL)
    assert passes and all(passes)
    assert all(torch.equal(wide.to(dtype), narrow) for both in found for narrow, wide in both.of_keys)
