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
