"""flex_attention with torch's activations, rows of captured tensors and other libraries' mods, forward and backward, by the budget."""

from __future__ import annotations

import os

import pytest
import torch

from tests.support import cases
from tests.support.flex_calls import flex, judge
from tests.support.torch_operations import ACTIVATIONS, EVERY, OTHERS, ROWS, B, H, M, N, UnderVmap


def qkv(dtype=torch.float32, batch=B, heads=H, heads_kv=2, dim=16):
    return cases.inputs("normal", cases.Shape(batch, heads, heads_kv, M, N, dim, dim), dtype, 0)[:3]


@pytest.mark.parametrize("name", EVERY)
def test_float32(name):
    made = EVERY[name]()
    judge(*qkv(), score=made.score, mask=made.mask, captured=made.captured, label=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", [*list(ACTIVATIONS)[::4], *list(ROWS)[:3], *list(OTHERS)[:4]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes(name, dtype):
    made = EVERY[name]()
    judge(*qkv(dtype), score=made.score, mask=made.mask, captured=made.captured, label=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_64(dtype):
    """As long as a row may be, with gradients to both tables."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(20, 64, generator=generator, dtype=torch.float64) * 0.2 for _ in range(2))
    score = UnderVmap(lambda s, b, h, i, j: s + torch.dot(x[i % 20], y[j % 20]))
    judge(*qkv(dtype, 1, 2, 1), score=score, captured=(x, y), mask=lambda b, h, i, j: i + 12 >= j)


def test_gradients_of_float32_tables_are_those_of_their_float64_copies():
    """A learned table in float32 gets its gradient in float32: near the exact one by its own rounding."""
    q, k, v = qkv()
    tables = [t.float() for t in ROWS["distance"]().captured]

    def gradients(x, y, dtype):
        x, y = (t.to(dtype).requires_grad_() for t in (x, y))
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        score = lambda s, b, h, i, j: s - 0.2 * (x[i] - y[j]).pow(2).sum(-1)
        if dtype is torch.float64:
            out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=-0.2 * torch.cdist(x, y).square(), enable_gqa=True)
        else:
            out = flex(*leaves, score_mod=score, enable_gqa=True)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
        return torch.autograd.grad(out, (x, y), dout)

    for got, want in zip(gradients(*tables, torch.float32), gradients(*tables, torch.float64), strict=True):
        assert got.dtype is torch.float32
        assert float((got - want).norm()) <= 64 * torch.finfo(torch.float32).eps * float(want.norm())


@pytest.mark.skipif("ANYATTN_TEST_BACKEND" in os.environ, reason="is of the choice of backends")
def test_hopper_leaves_long_rows_to_triton_and_says_so():
    from anyattn.backends.hopper.plan import reason_against
    from anyattn.mods.tracing.trace import trace
    from anyattn.problem import Problem

    x = torch.randn(N, 64)
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    for length, words in ((8, None), (64, "operations for every pair of a query and a key")):
        y = x[:, :length].contiguous()
        score = trace(lambda s, b, h, i, j: s + torch.dot(y[i], y[j]), "score")  # noqa: B023
        reason = reason_against(Problem(q, q, q, 0.1, score))
        assert (reason is None) if words is None else (words in reason), reason
