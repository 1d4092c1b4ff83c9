"""The torch backend's streaming backward pass against the oracle."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import machines


@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("keys", [1, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_that_sees_one_key_has_the_dq_of_exact_products(dtype, keys, has_dlse):
    """dP - delta is 0 there: products in 16 bits must not round dP before delta is subtracted."""
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, n, 64, generator=g).to(dtype) for n in (70, keys, keys, 70))
    dlse = torch.randn(1, 2, 70, generator=g) if has_dlse else None
    mask = None if keys == 1 else masks.causal()
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    with machines.planned_for(machines.WITH_FP16):
        out, lse = anyattn.flex_attention(*inputs, mask_mod=mask, return_lse=True)
        grads = torch.autograd.grad((out, lse) if has_dlse else (out,), inputs, (dout, dlse) if has_dlse else (dout,))
    wide, plain, noise = (f(q, k, v, dout, mask=mask, dlse=dlse) for f in (oracle.gradients, oracle.same_dtype_gradients, rounding))
    for name, grad in zip(("dq", "dk", "dv"), grads):
        budget.check(name, grad, getattr(wide, name), getattr(plain, name), getattr(noise, name))


def test_a_gradient_of_the_log_sum_exp_may_exceed_float16():
    """Its share of dS, weight by weight, need not."""
    q, k, v = (torch.ones(1, 1, 4096, 16, dtype=torch.float16).requires_grad_() for _ in range(3))
    with machines.planned_for(machines.WITH_FP16):
        _, lse = anyattn.flex_attention(q, k, v, return_lse=True)
        (dq,) = torch.autograd.grad(lse, q, torch.full_like(lse, 1e5))
    assert torch.equal(dq, torch.full_like(dq, 25000.0))  # scale x 1e5 x the mean key
