"""Arithmetic among captured numbers is Python's: its exceptions, whole numbers and truth values, for the numbers of each call."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anyattn import ModError, create_block_mask, flex_attention
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace

NUMBERS = (2.0, 0.0, 4.0, 2, 0, 4, -1, -0.5, 2)
B, H, Q, K = torch.tensor(1), torch.tensor(0), torch.tensor(5), torch.tensor(3)
S = torch.tensor(1.5, dtype=torch.float64)

MODS = {
    "1/n": lambda n: lambda s, b, h, q, k: s * (1 / n),
    "1//n": lambda n: lambda s, b, h, q, k: s + 1 // n,
    "1%n": lambda n: lambda s, b, h, q, k: s + 1 % n,
    "n/n": lambda n: lambda s, b, h, q, k: s + n / n,
    "n**-1": lambda n: lambda s, b, h, q, k: s + n**-1,
    "n**-0.5": lambda n: lambda s, b, h, q, k: s + n**-0.5,
    "10.0**(200*n)": lambda n: lambda s, b, h, q, k: s + 10.0 ** (200 * n),
    "1/(n-2)": lambda n: lambda s, b, h, q, k: s + 1 / (n - 2),
    "1/(n*1e-200*1e-200)": lambda n: lambda s, b, h, q, k: s + 1 / (n * 1e-200 * 1e-200),
    "unused": lambda n: lambda s, b, h, q, k: [s, 1 / n][0],
    "in a where": lambda n: lambda s, b, h, q, k: torch.where(q > k, 1 / n, 0.0) + s,
    "clamp": lambda n: lambda s, b, h, q, k: s + torch.clamp(q, max=1 / n),
    "tensor/n": lambda n: lambda s, b, h, q, k: s / n + q / n,
    "guarded": lambda n: lambda s, b, h, q, k: s + (n != 0) * (1 / (n + (n == 0))),
    "log": lambda n: lambda s, b, h, q, k: s + math.log(n),
    "sqrt": lambda n: lambda s, b, h, q, k: s + math.sqrt(n),
    "exp": lambda n: lambda s, b, h, q, k: s + math.exp(400 * n),
    "shift": lambda n: lambda s, b, h, q, k: s + (1 << n) + (8 >> n),
    "sum of truths": lambda n: lambda s, b, h, q, k: s + ((n > 1) + (n > 2)),
    "count": lambda n: lambda s, b, h, q, k: s + (((n > 1) + (n > 2)) >= 2) * 7.0,
    "True + truth": lambda n: lambda s, b, h, q, k: s + (True + (n > 1)),
    "truth - truth": lambda n: lambda s, b, h, q, k: s * ((n > 1) - (n > 2)),
    "product": lambda n: lambda s, b, h, q, k: s + (n > 1) * (n > 2) * 3,
    "-truth": lambda n: lambda s, b, h, q, k: s + -(n > 1),
    "+truth": lambda n: lambda s, b, h, q, k: s + (+(n > 1) + (n > 2)),
    "abs": lambda n: lambda s, b, h, q, k: s + abs(n > 1),
    "~truth": lambda n: lambda s, b, h, q, k: s + ~(n > 1),
    "truth / 2": lambda n: lambda s, b, h, q, k: s + (n > 1) / 3,
    "truth << 2": lambda n: lambda s, b, h, q, k: s + ((n > 1) << 2) + (2 ** (n > 2)),
    "truth & truth": lambda n: lambda s, b, h, q, k: s + ((n > 1) & (n > 2)) + ((n > 1) ^ True),
    "truth & 1": lambda n: lambda s, b, h, q, k: s + ((n > 1) & 1),
    "truth & tensor": lambda n: lambda s, b, h, q, k: s + ((n > 1) & (q > k)) + ((n > 2) | (k > q)),
    "round": lambda n: lambda s, b, h, q, k: s + round(n / 3 + 1),
    "round to digits": lambda n: lambda s, b, h, q, k: s + round(n + 0.675, 2),
    "round is whole": lambda n: lambda s, b, h, q, k: s + q.new_tensor(0) + ((q + 2**25 - 4) * round(n + 1.2)) % 2,
}


def outcome(call) -> float | str:
    try:
        return float(call())
    except ModError as error:
        return next((name for name in ("ZeroDivisionError", "OverflowError", "ValueError", "TypeError") if name in str(error)), "ModError")
    except Exception as error:
        return type(error).__name__


@pytest.mark.parametrize("name", [n for n in MODS if n != "round is whole"])
def test_captured_numbers_are_pythons_at_each_call(name: str) -> None:
    for n in NUMBERS:
        mod = MODS[name](n)
        wanted = outcome(lambda mod=mod: mod(S, B, H, Q, K))
        found = outcome(lambda mod=mod: evaluate(trace(mod, "score", score_dtype=torch.float64), B, H, Q, K, score=S))
        if isinstance(wanted, str):
            assert found in (wanted, "ModError"), (n, wanted, found)
        else:
            assert found == pytest.approx(wanted, rel=1e-14), n


def test_a_rounded_float_is_a_whole_number() -> None:
    """A product of floats would lose the last bits in float32."""
    for width in (2.6, 3.4):
        mask = lambda b, h, q, k: (q + 2**25) * round(width) % 2 == k % 2  # noqa: B023
        q = torch.arange(8)[:, None]
        assert torch.equal(evaluate(trace(mask, "mask"), B, H, q, torch.arange(8)), mask(B, H, q, torch.arange(8)))


def test_an_inverted_truth_of_numbers_is_no_mask() -> None:
    """In Python ~True is -2, and -2 & a bool tensor is 0."""
    width = 3
    with pytest.raises(ModError, match="return a bool"):
        trace(lambda b, h, q, k: ~(width > 2) & (q >= k), "mask")


def dense(q: Tensor, k: Tensor, v: Tensor, score) -> Tensor:
    n = torch.arange(q.shape[2])
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return torch.softmax(score(scores, 0, 0, n[:, None], n[None]), -1) @ v


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_temperature_of_zero_raises_at_its_call_alone(is_compiled: bool) -> None:
    q, k, v = (torch.randn(1, 1, 16, 8, dtype=torch.float64) for _ in range(3))

    def run(t: float) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s * (1 / t))

    call = torch.compile(run, backend="eager") if is_compiled else run
    for t in (0.5, 0.0, 2.0, 0.0, 3.0, 0.5, 0.0):
        if t == 0.0:
            with pytest.raises(Exception, match=r"by zero"):
                call(t)
        else:
            torch.testing.assert_close(call(t), dense(q, k, v, lambda s, b, h, i, j, t=t: s * (1 / t)))


def test_a_divisor_of_zero_in_a_mask_raises_at_its_call_alone() -> None:
    for block in (4, 0, 8, 0):
        mask = lambda b, h, q, k: (q - k) * (1 / block) < 1  # noqa: B023
        if block == 0:
            with pytest.raises(ModError, match="ZeroDivisionError"):
                create_block_mask(mask, None, None, 64, 64, device="cpu")
        else:
            made = create_block_mask(mask, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
            assert made.sparsity() < 100


CHECKED = {  # functions in which torch raises for a number outside a dtype
    "where": lambda t, n: torch.where(t > 3, t, n),
    "where of a number": lambda t, n: torch.where(t > 3, n * 1, t),
    "where, the method": lambda t, n: t.where(t > 3, n),
    "clamp": lambda t, n: torch.clamp(t, -1, n),
    "clamp from both sides": lambda t, n: torch.clamp(t, n, n),
    "clip": lambda t, n: t.clip(n),
    "clamp_min": lambda t, n: torch.clamp_min(t, n),
    "clamp_max": lambda t, n: t.clamp_max(n),
    "masked_fill": lambda t, n: t.masked_fill(t > 3, n),
    "full_like": lambda t, n: torch.full_like(t, n),
    "new_full": lambda t, n: t.new_full((), n),
    "tensor": lambda t, n: torch.tensor(n, dtype=t.dtype) + t,
    "add": lambda t, n: torch.add(t, t, alpha=n),
    "sub": lambda t, n: torch.sub(t, t, alpha=n),
    "rsub": lambda t, n: torch.rsub(t, t, alpha=n),
    "addcmul": lambda t, n: torch.addcmul(t, t, t, value=n),
    "pow": lambda t, n: t ** (n if type(n) is int and n >= 0 else 2),
    "unchecked": lambda t, n: (t + n) * n,
}


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_numbers_that_do_not_fit_a_dtype_are_refused_as_torch_refuses_them(name: str, dtype: torch.dtype) -> None:
    f, t, info = CHECKED[name], torch.arange(8, dtype=dtype), torch.iinfo(dtype)
    for n in (3, info.max, info.max + 1, info.min, info.min - 1, -info.max - 1, -1, 3, 2**40, -(2**40)):
        mods = [lambda b, h, q, k, n=n: f(t[q], n) + 0 > 3, eval(f"lambda b, h, q, k: f(t[q], {n}) + 0 > 3", {"f": f, "t": t})]
        for mod in mods if name != "pow" else mods[1:]:
            try:
                want = f(t, n) + 0 > 3
            except RuntimeError as error:
                assert "without overflow" in str(error) or "outside the representable range" in str(error)  # from torch 2.15 on
                with pytest.raises(ModError, match=r"does not fit into|without overflow"):
                    trace(mod, "mask")
            else:
                assert torch.equal(evaluate(trace(mod, "mask"), B, H, torch.arange(8), K).expand(8), want.expand(8))


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_numbers_that_do_not_fit_are_refused_at_their_calls_alone(is_compiled: bool) -> None:
    t, idx = torch.arange(8, dtype=torch.int8), torch.arange(8)
    q, k, v = torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), torch.eye(8)[None, None]

    def masked(n: int) -> Tensor:
        return flex_attention(q, k, v, mask_mod=lambda b, h, i, j: torch.where(j > 3, t[j], n) > 4)

    def scored(n: int) -> Tensor:
        return flex_attention(q, k, v, lambda s, b, h, i, j: s + torch.clamp(t[j], 2 * n + 1, 2 * n + 1))

    def listed(n: int) -> Tensor:
        return create_block_mask(lambda b, h, i, j: torch.where(j > 3, t[j], n) > 4, 1, 1, 8, 8, device="cpu").kv_num_blocks

    calls = (masked, scored) if is_compiled else (masked, scored, listed)
    for call in calls:
        f = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True) if is_compiled else call
        for n in (9, 9, 200, 2, 200, 60, -129, 9):
            if n >= -128 and 2 * n + 1 <= 127:
                seen = torch.where(idx > 3, idx, n) > 4 if call is masked else idx >= 0
                assert torch.equal(f(n)[0, 0, 0] > 0, seen if call is not listed else torch.tensor(True))
            else:
                with pytest.raises(ModError, match=r"does not fit into torch.int8"):
                    f(n)
