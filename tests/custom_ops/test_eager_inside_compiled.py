"""Eager calls inside compiled functions, where Dynamo has given up the function's frame: it compiles nothing of the library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import convert_frame

import anyattn

Q = torch.randn(1, 16, 4, 16, generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 6, 16], dtype=torch.int32)


def flex(weight: Tensor) -> Tensor:
    q = Q.transpose(1, 2)
    return anyattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * weight[h]).transpose(1, 2)


def listed(weight: Tensor) -> Tensor:
    q = Q.transpose(1, 2)
    mask = anyattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
    return anyattn.flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s * weight[h], block_mask=mask).transpose(1, 2)


def flash(weight: Tensor) -> Tensor:
    return anyattn.flash_attn_func(Q, Q, Q, causal=True, score_mod=lambda s, b, h, i, j: s * weight[h])


def varlen(weight: Tensor) -> Tensor:
    return anyattn.flash_attn_varlen_func(Q[0], Q[0], Q[0], ENDS, ENDS, 10, 10, score_mod=lambda s, b, h, i, j: s * weight[h])


def tiles(weight: Tensor) -> Tensor:
    """The lists of both makers, and the merge of two parts of the keys."""
    lists = anyattn.compute_block_sparsity(8, 8, None, None, 16, 16, lambda b, h, i, j: i >= j, device="cpu")
    dense = anyattn.flash_attn_func(Q, Q * weight[:, None], Q, block_sparse_tensors=lists, mask_mod=lambda b, h, i, j: i >= j)
    lists = anyattn.compute_varlen_block_sparsity(8, 8, None, lambda b, h, i, j: i >= j, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS)
    options = {"mask_mod": lambda b, h, i, j: i >= j, "block_sparse_tensors": lists, "return_lse": True}
    out, lse = anyattn.flash_attn_varlen_func(Q[0], Q[0] * weight[:, None], Q[0], ENDS, ENDS, 10, 10, **options)
    merged, _ = anyattn.flash_attn_combine(torch.stack([out, dense[0]]), torch.stack([lse, torch.zeros_like(lse)]).transpose(1, 2))
    return merged


@pytest.mark.parametrize("program", [flex, listed, flash, varlen, tiles])
def test_torch_func_around_a_compiled_function(program: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo captures nothing there, and what it captures before and after stays as it is."""
    torch.compiler.reset()
    names: list[str] = []
    convert = convert_frame.ConvertFrameAssert.__call__

    def noted(self: Any, frame: Any, *more: Any, **options: Any) -> Any:
        names.append(frame.f_code.co_filename)
        return convert(self, frame, *more, **options)

    monkeypatch.setattr(convert_frame.ConvertFrameAssert, "__call__", noted)
    compiled = torch.compile(program, backend="aot_eager")
    weight = torch.arange(1.0, 5.0)
    for seed in range(2):
        given = weight + seed
        eager = given.clone().requires_grad_()
        out = program(eager)
        (right,) = torch.autograd.grad(out.square().sum(), eager)
        assert torch.equal(compiled(given), out.detach())
        assert torch.equal(torch.func.grad(lambda w: compiled(w).square().sum())(given), right)
        again = given.clone().requires_grad_()
        assert torch.equal(torch.autograd.grad(compiled(again).square().sum(), again)[0], right)
    inside = {name.rpartition("/anyattn/")[2] for name in names if "/anyattn/" in name and "/tests/" not in name}
    paths = {"autograd.py", "call_cache/attention.py", "call_cache/calls.py", "mods/tracing/fingerprint.py", "problem.py"}
    assert not inside & (paths | {"mods/tracing/trace.py", "sparsity/device_lists.py", "sparsity/arguments.py", "validate/flash.py"})
