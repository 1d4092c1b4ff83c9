"""q, k and v in one tensor, and batches without their padding."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.packed import index_put_first_axis

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
        (
            lambda: anyattn.unpad_input(QKV, torch.ones(2, 29)),
            ValueError,
            r"attention_mask has shape \(2, 29\) but hidden_states has \(2, 30",
        ),
    ],
)
def test_refusals(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_unpad_and_pad_are_inverse_and_differentiable(dtype):
    x = torch.randn(3, 5, 2, 4).requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 1, 0, 1], [0, 0, 0, 0, 0]]).to(dtype)
    room = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0]]).to(dtype)
    rows, indices, ends, longest, used = anyattn.unpad_input(x, mask, room)
    assert torch.equal(rows, torch.stack([x[0, 0], x[0, 1], x[0, 2], x[1, 2], x[1, 4], x[2, 3]]))
    assert (indices.tolist(), ends.tolist(), longest, used.tolist()) == ([0, 1, 2, 7, 9, 13], [0, 3, 5, 6], 3, [2, 2, 0])
    assert indices.dtype is torch.int64 and ends.dtype is used.dtype is torch.int32 and type(longest) is int
    padded = anyattn.pad_input(rows, indices.to(torch.int32), 3, 5)
    seen = (mask + room).bool() if dtype is not torch.bool else mask | room
    assert torch.equal(padded, x * seen[..., None, None])
    assert torch.equal(torch.autograd.grad((padded * x.detach()).sum(), x)[0], (x * seen[..., None, None]).detach())
    kept, _, ends, longest, _ = anyattn.unpad_input(x, torch.zeros(3, 5))
    assert kept.shape == (0, 2, 4) and ends.tolist() == [0, 0, 0, 0] and longest == 0
    assert anyattn.unpad_input(x[:0], torch.zeros(0, 5))[3] == 0
    assert index_put_first_axis(rows[:0], indices[:0], 2).tolist() == torch.zeros(2, 2, 4).tolist()
