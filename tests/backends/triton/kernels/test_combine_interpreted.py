"""Merging of partial results by the Triton kernel, in Triton's interpreter.

Run by ``test_in_the_interpreter.py``: the interpreter is chosen before Triton is imported.
"""

import math

import pytest
import torch

from anyattn.backends.torch.combine import combine as by_torch
from anyattn.backends.triton.combine import combine, merge
from anyattn.testing import budget
from anyattn.testing.rounding import Noise


def partials(parts, lead, width, seed=0, spread=3.0):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(seed)
    return torch.randn(parts, *lead, width, generator=g), spread * torch.randn(parts, *lead, generator=g)


def noise(outs, lses, sink, dtype):  # type: ignore[no-untyped-def]
    """One rounding of each exponent, as large as it is, and of each weight, which a whole row shares; and of what is stored."""
    unit = torch.finfo(torch.float32).eps / 2
    out, lse = by_torch(outs, lses, sink)
    near = torch.maximum(lses.amax(0), lses.amax(0) if sink is None else sink).nan_to_num(neginf=0.0)
    seen = lses != -math.inf
    share = torch.where(seen, torch.exp(lses - lse), 0.0).nan_to_num()
    error = share * unit * (torch.where(seen, (lses - near).abs(), 0.0) + 2)
    of_lse = error.square().sum(0).sqrt() + unit * lse.nan_to_num(neginf=0.0).abs()
    of_out = (error[..., None] * (outs - out)).square().sum(0).sqrt() + (unit + torch.finfo(dtype).eps / 2) * out.abs()
    return Noise(of_out, of_out), Noise(of_lse, of_lse)


def judge(outs, lses, sink=None, dtype=torch.float32):  # type: ignore[no-untyped-def]
    clean = outs.masked_fill(torch.isneginf(lses)[..., None], 0.0)
    exact = by_torch(clean.double(), lses.double(), None if sink is None else sink.double())
    plain = by_torch(clean, lses, sink)
    out, lse = combine(outs, lses, sink, dtype)
    assert out.dtype is dtype and lse.dtype is torch.float32 and out.shape == outs.shape[1:] and lse.shape == lses.shape[1:]
    of_out, of_lse = noise(clean.double(), lses.double(), None if sink is None else sink.double(), dtype)
    budget.check("out", out, exact[0], plain[0].to(dtype), of_out)
    budget.check("lse", lse, exact[1], plain[1], of_lse)
    return out, lse


@pytest.mark.covering(1)
@pytest.mark.parametrize("parts", [1, 3, 8, 19])
@pytest.mark.parametrize(("lead", "width"), [((2, 3, 5), 16), ((2, 1, 7), 33), ((11,), 64), ((2, 2, 2, 3), 8), ((1, 6), 128)])
def test_against_torch(parts, lead, width):  # type: ignore[no-untyped-def]
    outs, lses = partials(parts, lead, width, seed=parts)
    judge(outs, lses)
    judge(outs, 100 * lses, dtype=torch.float16)


@pytest.mark.parametrize("shape", [(3, 1), (3, 5), (2, 1, 1), (1,)])
def test_a_sink_joins_once(shape):  # type: ignore[no-untyped-def]
    outs, lses = partials(4, (2, 3, 5), 16)
    for shift in (0.0, 50.0, -50.0, -math.inf):
        judge(outs, lses, torch.randn(shape) + shift)
    outs, lses = partials(4, (3, 5), 16)
    judge(outs, lses, torch.randn(3, 1))


@pytest.mark.parametrize("rest", [math.nan, math.inf, 0.0])
def test_parts_that_have_seen_nothing(rest):  # type: ignore[no-untyped-def]
    outs, lses = partials(10, (2, 3, 5), 20)
    blind = torch.rand(lses.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    blind[:, 0, 0] = True
    lses = lses.masked_fill(blind, -math.inf)
    outs = outs.masked_fill(blind[..., None], rest)
    out, lse = judge(outs, lses)
    assert bool((out[0, 0] == 0).all()) and bool((lse[0, 0] == -math.inf).all())
    sink = torch.randn(3, 1)
    out, lse = judge(outs, lses, sink)
    assert bool((out[0, 0] == 0).all()) and torch.equal(lse[0, 0], sink[0].expand(5))


def test_what_is_not_finite_is_not_hidden():  # type: ignore[no-untyped-def]
    outs, lses = partials(3, (1, 1, 4), 16)
    lses[1, 0, 0, 0] = math.nan
    outs[2, 0, 0, 1, 3] = math.nan
    out, lse = combine(outs, lses)
    assert bool(out[0, 0, 0].isnan().all()) and bool(lse[0, 0, 0].isnan())
    assert out[0, 0, 1].isnan().tolist() == [i == 3 for i in range(16)] and bool(lse[0, 0, 1:].isfinite().all())


def test_strides_and_rows_of_no_sequence():  # type: ignore[no-untyped-def]
    outs, lses = partials(5, (2, 3, 4), 24)
    lses[:, 1, :, 2:] = math.inf
    sink = torch.randn(3)[:, None].expand(2, 3, 4)
    storage = torch.full((2, 4, 3, 32), math.nan)
    out, lse = storage.transpose(1, 2)[..., :24], torch.empty(2, 3, 4)
    merge(outs, lses, sink, out, lse, True)
    want_out, want_lse = combine(outs[:, 0], lses[:, 0], sink[0])
    assert torch.equal(out[0], want_out) and torch.equal(lse[0], want_lse)
    assert bool((out[1, :, 2:] == 0).all()) and bool((lse[1, :, 2:] == -math.inf).all()) and bool(storage[..., 24:].isnan().all())
    want_out, want_lse = combine(outs[:, 1, :, :2], lses[:, 1, :, :2], sink[1, :, :2])
    assert torch.equal(out[1, :, :2], want_out) and torch.equal(lse[1, :, :2], want_lse)
    merge(outs, lses, sink, out, None, True)


def test_parts_of_any_strides():  # type: ignore[no-untyped-def]
    outs, lses = partials(3, (2, 3, 4), 16)
    want = combine(outs, lses)
    spaced = torch.stack((outs, outs * 0), 1)[:, 0], torch.stack((lses, lses * 0), 1)[:, 0]
    turned = outs.transpose(1, 3).contiguous().transpose(1, 3), lses.transpose(0, 1).contiguous().transpose(0, 1)
    for got in (combine(*spaced), combine(*turned)):
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_nothing_to_merge():  # type: ignore[no-untyped-def]
    out, lse = combine(torch.empty(3, 0, 4, 16), torch.empty(3, 0, 4))
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)
