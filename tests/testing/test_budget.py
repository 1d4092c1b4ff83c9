"""The budget catches what is wrong and lets pass what is right; only then is a green test worth anything."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import cases
from tests.support.tiled_attention import BUGS, attention

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WINDOW = 300


def window_mask(b, h, q, k):
    return (k <= q) & (q - k <= WINDOW)


@functools.lru_cache(maxsize=64)
def expected(kind: str, dtype: str, seqlen: int, seed: int):
    q, k, v, dout = cases.inputs(kind, cases.Shape(1, 4, 2, seqlen, seqlen, 32, 32), DTYPES[dtype], seed)
    args = (q, k, v, dout)
    forward, plain = oracle.attention(q, k, v, mask=window_mask), oracle.same_dtype(q, k, v, mask=window_mask)
    back, plain_back = oracle.gradients(*args, mask=window_mask), oracle.same_dtype_gradients(*args, mask=window_mask)
    noise = rounding(*args, mask=window_mask)
    named = {"out": (forward.out, plain.out, noise.out), "lse": (forward.lse, plain.lse, noise.lse)}
    named |= {n: (getattr(back, n), getattr(plain_back, n), getattr(noise, n)) for n in ("dq", "dk", "dv")}
    return args, named


def shares(results, named):
    return {name: budget.share(results[name], *named[name]) for name in named}


@pytest.mark.covering(1, of=lambda dtype, kind, seqlen: ((dtype, seqlen), kind))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("seqlen", [33, 611])
def test_correct_noise_is_not_flagged(kind, dtype, seqlen):
    for seed in range(2):
        args, named = expected(kind, dtype, seqlen, seed)
        for half_scores in {False, dtype in ("bfloat16", "float16")}:
            found = shares(attention(*args, WINDOW, half_scores), named)
            assert max(found.values()) <= 1.0, found


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_errors_are_caught(bug, dtype):
    """By at least one kind of input in bfloat16, by normal or peaky input in float32."""
    worst = []
    for kind in cases.KINDS:
        args, named = expected(kind, dtype, 611, 0)
        worst.append(max(shares(attention(*args, WINDOW, bug=bug), named).values()))
    assert max(worst if dtype == "bfloat16" else worst[:2]) > (1.0 if dtype == "bfloat16" else 10.0), worst


def rows(seed: int, shape=(3, 40, 32)):
    g = torch.Generator().manual_seed(seed)
    exact = torch.randn(shape, generator=g, dtype=torch.float64)
    return exact, (exact + 1e-3 * torch.randn(shape, generator=g, dtype=torch.float64)).to(torch.float32), g


@given(seed=st.integers(0, 2**31), factor=st.floats(0.0, 1.9))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_an_error_up_to_twice_the_yardstick_passes(seed, factor):
    exact, plain, _ = rows(seed)
    assert budget.share(exact + factor * (plain.double() - exact), exact, plain) <= factor / 2 + 1e-6


@given(seed=st.integers(0, 2**31), factor=st.floats(2.1, 1e6), row=st.integers(0, 119))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_one_bad_row_of_many_fails(seed, factor, row):
    exact, plain, _ = rows(seed)
    got = exact.clone().reshape(-1, 32)
    got[row] += factor * (plain.double() - exact).reshape(-1, 32)[row]
    with pytest.raises(AssertionError, match="budget"):
        budget.check("out", got.reshape(exact.shape), exact, plain)


@given(seed=st.integers(0, 2**31), power=st.integers(-60, 60))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_share_does_not_depend_on_scale_or_order(seed, power):
    exact, plain, g = rows(seed)
    got = exact + 1e-3 * torch.randn(exact.shape, generator=g, dtype=torch.float64)
    order = torch.randperm(40, generator=g)
    unit = 2.0**power
    found = budget.share(got, exact, plain)
    assert math.isclose(found, budget.share(got * unit, exact * unit, plain * unit), rel_tol=1e-9)
    assert found == budget.share(got[:, order], exact[:, order], plain[:, order])


@given(seed=st.integers(0, 2**31), at=st.integers(0, 3 * 40 * 32 - 1), value=st.sampled_from([math.nan, math.inf, -math.inf]))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_anything_not_finite_fails(seed, at, value):
    exact, plain, _ = rows(seed)
    got = exact.clone()
    got.view(-1)[at] = value
    assert budget.share(got, exact, plain) == math.inf


def test_minus_infinity_must_stand_where_the_oracle_has_it():
    exact, plain, _ = rows(0, (2, 3, 32))
    exact[0, 1, 5] = plain[0, 1, 5] = -math.inf
    assert budget.share(exact.clone(), exact, plain) == 0.0
    for place in ((0, 1, 6), (0, 1, 5)):
        got = exact.clone()
        got[place] = -math.inf if place[2] == 6 else 0.0
        assert budget.share(got, exact, plain) == math.inf


def test_exact_zero_is_demanded_where_the_plain_formula_gives_it():
    exact, plain, _ = rows(0)
    exact[1, 3] = plain[1, 3] = 0.0
    got = exact.clone()
    assert budget.share(got, exact, plain) == 0.0
    got[1, 3, 0] = 1e-30
    assert budget.share(got, exact, plain) == math.inf


def test_rows_that_see_nothing_are_no_errors_of_an_lse():
    """An LSE's row is all queries of a head: those that see nothing make neither an error nor a statistic of more of them."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 16, generator=g) for n in (300, 2, 2))
    among_many = rounding(q, k, v, mask=lambda b, h, i, j: j <= i - 298).lse
    alone = rounding(q[:, :, 298:], k, v, mask=lambda b, h, i, j: j <= i).lse
    for many, few in zip(among_many, alone):
        assert not bool(many[..., :298].any())
        assert bool(((many[..., 298:] / few - 1).abs() < 1e-6).all())


def test_the_message_names_what_failed_and_where():
    exact, plain, _ = rows(0)
    got = exact.clone()
    got[2, 7] += 1.0
    with pytest.raises(AssertionError, match=r"dq: row starting at \(2, 7, 0\) of 120 uses .* of its budget"):
        budget.check("dq", got, exact, plain)


def test_shapes_must_agree():
    exact, plain, _ = rows(0)
    with pytest.raises(AssertionError, match="shapes"):
        budget.check("out", exact[0], exact, plain)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4, 1)])
def test_short_rows_are_judged_together(shape):
    exact, plain, _ = rows(1, shape)
    assert budget.share(plain, exact, plain) <= 0.5 + 1e-6
    assert budget.share(exact * 2, exact, plain) > 1.0


def test_nothing_passes():
    assert budget.share(torch.zeros(0, 4), torch.zeros(0, 4, dtype=torch.float64), torch.zeros(0, 4)) == 0.0
