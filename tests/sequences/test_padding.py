"""Batches without their padding."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.sequences.padding import index_put_first_axis


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


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 29\) but hidden_states has \(2, 30, 3\); wanted the first two"):
        anyattn.unpad_input(torch.ones(2, 30, 3), torch.ones(2, 29))
