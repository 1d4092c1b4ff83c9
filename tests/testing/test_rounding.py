"""The rounding noise of captured tensors' gradients is what correct code errs by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyattn import flex_attention, oracle
from anyattn.hardware import Hardware
from anyattn.testing.rounding import _equal_in_rows, later
from tests.support import cases
from tests.support.machines import PLAIN, WITH_BF16, planned_for

SHAPE = cases.Shape(1, 2, 1, 60, 64, 8, 8)


def every_third(t: Tensor) -> Callable:
    """With scores of 0 a row has three different weights."""
    return lambda s, b, h, i, j: s + t[h] * (j % 3)


def capped(t: Tensor) -> Callable:
    """The cap is saturated: its derivative is a difference of numbers near 1."""
    return lambda s, b, h, i, j: 0.2 * torch.tanh((s + t[h] * (j % 3) * 3) / 0.2)


def errors(mod: Callable, kind: str, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """The squares of a call's error and of its noise, (heads,) each."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, _ = cases.inputs(kind, SHAPE, dtype, seed)
    dout, table = torch.randn(1, 2, 60, 8, generator=g).to(dtype), torch.randn(2, generator=g, dtype=torch.float64).requires_grad_()
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    (got,) = torch.autograd.grad(flex_attention(*leaves, score_mod=mod(table), enable_gqa=True), [table], dout)
    right = oracle.gradients(q, k, v, dout, score=mod(table), captured=[table]).captured[0]
    noise = later(q, k, v, dout, score=mod(table), captured=[table]).of_captured(0)()
    return (got - right).square(), noise.sigma.square()


@pytest.mark.covering(1, of=lambda mod, dtype, cpu: ((mod.__name__, dtype), cpu.name))
@pytest.mark.parametrize("cpu", [PLAIN, WITH_BF16], ids=["streaming", "whole spans"])
@pytest.mark.parametrize(
    ("mod", "dtype"),
    [(every_third, torch.float32), (every_third, torch.bfloat16), (every_third, torch.float16), (capped, torch.float32)],
    ids=["float32", "bfloat16", "float16", "saturated cap"],
)
def test_noise_is_as_large_as_errors_are(mod: Callable, dtype: torch.dtype, cpu: Hardware) -> None:
    """Of equal scores: not less than they are, and not many times as much."""
    with planned_for(cpu):
        found = [errors(mod, "coded", dtype, seed) for seed in range(12)]
    error, noise = (torch.stack(part).mean().sqrt() for part in zip(*found, strict=True))
    assert 1 <= noise / error <= 12, float(noise / error)


def test_equal_elements_of_a_row_have_one_number() -> None:
    x = torch.tensor([[0.5, 0.25, 0.5, 0.0], [1.0, 1.0, 1.0, 1.0]])
    assert _equal_in_rows(x).tolist() == [[2, 1, 2, 0], [0, 0, 0, 0]]
