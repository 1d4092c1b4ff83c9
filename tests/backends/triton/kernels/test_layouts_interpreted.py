"""Tensors whose head dimension is not innermost, as a convolution's output: copied for the kernels, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.tensors.strides import dense_strides

CALLS = {
    "flex": lambda q, k, v: anyattn.flex_attention(q, k, v, mask_mod=anyattn.masks.causal(), backend="triton"),
    "flash": lambda q, k, v: anyattn.flash_attn_func(q, k, v, causal=True, backend="triton"),
    "packed": lambda q, k, v: anyattn.flash_attn_varlen_func(
        q[0], k[0], v[0], torch.tensor([0, 5, 32]), torch.tensor([0, 5, 32]), max_seqlen_q=27, max_seqlen_k=27, backend="triton"
    ),
}


@pytest.mark.parametrize(("name", "is_compiled"), [*((name, False) for name in CALLS), ("flex", True)])
def test_a_head_dimension_that_is_not_innermost(name: str, is_compiled: bool) -> None:
    call = torch.compile(CALLS[name], backend="aot_eager") if is_compiled else CALLS[name]
    shape = (1, 2, 16, 32) if name == "flex" else (1, 32, 16, 2)
    given = [torch.randn(shape).transpose(2, 3).requires_grad_() for _ in range(3)]
    plain = [t.detach().contiguous().requires_grad_() for t in given]
    for _ in range(2):  # a first call and a warm one
        found: list[tuple[Tensor, ...]] = []
        for tensors in (given, plain):
            out = call(*tensors)
            found.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
        assert all(map(torch.equal, *found))
        for grad, t in zip(found[0][1:], given, strict=True):
            assert grad.stride() == dense_strides(t)


def test_queries_of_a_cache() -> None:
    q, caches = torch.randn(2, 1, 16, 2).transpose(2, 3), torch.randn(2, 2, 32, 2, 16)
    out, wanted = (anyattn.flash_attn_with_kvcache(x, *caches, cache_seqlens=7, backend="triton") for x in (q, q.contiguous()))
    assert torch.equal(out, wanted)
    with pytest.raises(anyattn.BackendError, match="k's last dimension has stride"):  # it would be written, or copied at every step
        anyattn.flash_attn_with_kvcache(q, *caches.transpose(3, 4).contiguous().transpose(3, 4), cache_seqlens=7, backend="triton")
