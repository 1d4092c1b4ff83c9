"""q, k and v in one tensor."""

from __future__ import annotations

import pytest
import torch

import anyattn

torch.manual_seed(0)
QKV = torch.randn(2, 30, 3, 4, 16)
GQA = torch.randn(2, 30, 8, 16)  # 4 heads of q, 2 of k, 2 of v
ENDS = torch.tensor([0, 25, 60], dtype=torch.int32)


def gradients(call, *tensors):
    leaves = [t.clone().requires_grad_() for t in tensors]
    out = call(*leaves)
    return out.detach(), *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), leaves)


@pytest.mark.parametrize(
    ("packed", "plain", "tensors"),
    [
        (anyattn.flash_attn_qkvpacked_func, lambda x, **o: anyattn.flash_attn_func(*x.unbind(2), **o), [QKV]),
        (
            lambda x, **o: anyattn.flash_attn_qkvpacked_func(x, num_heads_q=4, **o),
            lambda x, **o: anyattn.flash_attn_func(x[:, :, :4], x[:, :, 4:6], x[:, :, 6:], **o),
            [GQA],
        ),
        (
            anyattn.flash_attn_kvpacked_func,
            lambda q, kv, **o: anyattn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], **o),
            [QKV[:, :, 0], QKV[:, :, 1:, :2]],
        ),
        (
            lambda x, **o: anyattn.flash_attn_varlen_qkvpacked_func(x.flatten(0, 1), ENDS, 35, **o),
            lambda x, **o: anyattn.flash_attn_varlen_func(*x.flatten(0, 1).unbind(1), ENDS, ENDS, **o),
            [QKV],
        ),
        (
            lambda q, kv, **o: anyattn.flash_attn_varlen_kvpacked_func(q, kv, ENDS, ENDS, **o),
            lambda q, kv, **o: anyattn.flash_attn_varlen_func(q, kv[:, 0], kv[:, 1], ENDS, ENDS, **o),
            [QKV.flatten(0, 1)[:, 0], QKV.flatten(0, 1)[:, 1:, :2]],
        ),
    ],
)
def test_packed_is_apart(packed, plain, tensors):
    options = {"causal": True, "window_size": (9, 0), "score_mod": lambda s, b, h, i, j: s + 0.1 * h * b}
    got, wanted = (gradients(lambda *t, call=call: call(*t, **options), *tensors) for call in (packed, plain))
    assert all(map(torch.equal, got, wanted))
    assert torch.equal(packed(*tensors, return_lse=True)[1], plain(*tensors, return_lse=True)[1])


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: anyattn.flash_attn_qkvpacked_func(QKV[:, :, :2]),
            ValueError,
            r"qkv has shape \(2, 30, 2, 4, 16\); wanted \(batch, length, 3,",
        ),
        (lambda: anyattn.flash_attn_qkvpacked_func(None), TypeError, r"qkv is a NoneType; wanted a torch\.Tensor of shape"),
        (lambda: anyattn.flash_attn_qkvpacked_func(GQA, num_heads_q=5), ValueError, r"with num_heads_q=5; wanted .*Hq \+ 2 Hkv"),
        (lambda: anyattn.flash_attn_kvpacked_func(QKV[:, :, 0], QKV), ValueError, r"kv has shape .*; wanted \(batch, length, 2, heads"),
        (lambda: anyattn.flash_attn_varlen_qkvpacked_func(QKV, ENDS), ValueError, r"qkv has shape .*; wanted \(total, 3, heads"),
    ],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()
