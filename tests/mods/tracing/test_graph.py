"""Mods that a compiler hands over as graphs are refused where mods are refused in eager mode: never another result."""

from __future__ import annotations

import warnings

import pytest
import torch

import anyattn
from anyattn.custom_ops import dynamo


@pytest.fixture(autouse=True)
def _captured_again():
    """The entry points run uncompiled once a capture has failed; not so in other tests."""
    yield
    dynamo.run_uncompiled(False)


# what its operators compute is not what torch's functions of the same names do
LIBRARY = torch.library.Library("anyattn_test_names", "DEF")
LIBRARY.define("exp(Tensor x) -> Tensor")
LIBRARY.impl("exp", lambda x: x * 2, "CompositeExplicitAutograd")
LIBRARY._register_fake("exp", lambda x: torch.empty_like(x))


class Square(torch.autograd.Function):
    """With a gradient of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * 100


def without_grad(score, b, h, q_idx, kv_idx):
    with torch.no_grad():
        factor = score * 2
    return score * factor


def in_bfloat16(score, b, h, q_idx, kv_idx):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return score * 1.001


MODS = {
    "an operator named like torch's": (
        lambda s, b, h, q, k: torch.ops.anyattn_test_names.exp(s),
        "is a custom operator, and a mod may use torch's own operators only",
    ),
    "an autograd.Function": (lambda s, b, h, q, k: Square.apply(s), "torch.autograd.Function"),
    "no_grad": (without_grad, "grad mode"),
    "autocast": (in_bfloat16, "autocast"),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_refused(name, compiles):
    mod, reason = MODS[name]
    torch._dynamo.reset()
    q = torch.randn(1, 2, 16, 8, requires_grad=True)

    def call(q):
        return anyattn.flex_attention(q, q, q, score_mod=mod)

    with pytest.raises(anyattn.ModError, match=reason), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (torch.compile(call, backend="aot_eager") if compiles else call)(q)
    with pytest.raises(Exception):  # noqa: B017 - Dynamo's own kind
        torch.compile(call, backend="aot_eager", fullgraph=True)(q)
