"""Transformers inside ``anyattn.batch_invariant``: a layer's rows have the same bits in a prefill, a decoding step and a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import masking_utils

import anyattn
from anyattn.integrations.transformers import attention_forward, describe_mask
from anyattn.integrations.transformers.masks import causal_mask_function

LENGTH = 150


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (q >= kv) & (q - kv < 40)


def drawn(batch: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, length, 32, generator=g) for heads in (4, 2, 2))  # type: ignore[return-value]


def attended(qkv: tuple[Tensor, ...], first: int, function: Any, seen: Tensor | None = None) -> Tensor:
    """The layer's output for queries from position ``first`` on, over the keys up to the last of them."""
    q, k, v = qkv
    sizes = {"batch_size": len(q), "q_length": q.shape[2], "kv_length": k.shape[2], "q_offset": first}
    mask = describe_mask(**sizes, mask_function=function, attention_mask=seen)
    return attention_forward(nn.Module(), q, k, v, mask)[0]


@pytest.mark.parametrize("function", [causal_mask_function, window], ids=["causal", "window"])
def test_decoding_has_the_bits_of_a_prefill(function: Any) -> None:
    q, k, v = drawn(1, LENGTH)
    differ = 0
    for is_in in (True, False):
        with anyattn.batch_invariant() if is_in else torch.no_grad(), torch.no_grad():
            whole = attended((q, k, v), 0, function)
            for at in (0, 9, 10, 64, 127, 149):
                step = attended((q[:, :, at : at + 1], k[:, :, : at + 1], v[:, :, : at + 1]), at, function)
                assert not is_in or torch.equal(step[0, 0], whole[0, at]), at
                differ += not torch.equal(step[0, 0], whole[0, at])
    assert differ  # by default they may, and do


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str) -> None:
    q, k, v = drawn(2, LENGTH)
    count = 77
    rows = slice(LENGTH - count, LENGTH) if side == "left" else slice(0, count)
    seen = torch.ones(2, LENGTH, dtype=torch.bool)
    seen[1] = False
    seen[1, rows] = True
    with anyattn.batch_invariant(), torch.no_grad():
        both = attended((q, k, v), 0, causal_mask_function, seen)
        own = attended(tuple(x[1:, :, rows] for x in (q, k, v)), 0, causal_mask_function)
    assert torch.equal(both[1, rows], own[0])


def test_training_has_the_bits_of_serving() -> None:
    q, k, v = drawn(1, LENGTH)
    with anyattn.batch_invariant():
        with torch.no_grad():
            served = attended((q[:, :, 90:91], k[:, :, :91], v[:, :, :91]), 90, causal_mask_function)
        trained = attended((q.requires_grad_(), k, v), 0, causal_mask_function)
        trained.sum().backward()
    assert torch.equal(trained[0, 90], served[0, 0])
    assert q.grad is not None


@pytest.mark.parametrize("function", [causal_mask_function, masking_utils.sliding_window_causal_mask_function(40)], ids=["all", "near"])
def test_packed_texts_have_the_bits_of_each_alone(function: Any) -> None:
    """Wherever in a row a text is; two rows of texts of 23, 70 and 57, and of 150."""
    q, k, v = drawn(2, LENGTH)
    leaf = q.clone().requires_grad_()
    lengths = [23, 70, 57]
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]), torch.arange(LENGTH)])
    both = masking_utils.and_masks(
        masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(positions)), function
    )
    with anyattn.batch_invariant():
        packed = attended((leaf, k, v), 0, both)
        packed.square().sum().backward()
        for row, start, length in ((0, 0, 23), (0, 23, 70), (0, 93, 57), (1, 0, LENGTH)):
            rows = slice(start, start + length)
            own = q[row : row + 1, :, rows].clone().requires_grad_()
            alone = attended((own, *(x[row : row + 1, :, rows] for x in (k, v))), 0, function)
            alone.square().sum().backward()
            assert torch.equal(packed[row, rows], alone[0])
            assert leaf.grad is not None and own.grad is not None
            assert float((leaf.grad[row, :, rows] - own.grad[0]).abs().max()) <= 1e-6 * float(own.grad.abs().max())


@pytest.mark.parametrize(("ids", "function"), [([0] * 9 + [1] * 11, window), ([0] * 9 + [1] * 5 + [0] * 6, causal_mask_function)])
def test_packed_texts_that_are_no_calls_of_their_own_are_refused(ids: list[int], function: Any) -> None:
    both = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(torch.tensor([ids])), function)
    with anyattn.batch_invariant(), pytest.raises(ValueError, match=r"packed sequences are in parts, .*wanted one text in each row"):
        describe_mask(batch_size=1, q_length=20, kv_length=20, mask_function=both)


def test_packed_texts_with_a_position_bias_are_refused() -> None:
    ids = (torch.arange(20) // 8)[None]
    both = masking_utils.and_masks(masking_utils.packed_sequence_mask_function(ids), causal_mask_function)
    q, k, v = drawn(1, 20)
    with anyattn.batch_invariant():
        mask = describe_mask(batch_size=1, q_length=20, kv_length=20, mask_function=both)
        with pytest.raises(ValueError, match=r"packed sequences have a position_bias.*wanted one text in each row"):
            attention_forward(nn.Module(), q, k, v, mask, position_bias=torch.zeros(1, 4, 20, 20))


def test_left_padding_with_gradients_is_refused() -> None:
    q, k, v = drawn(2, 20)
    seen = torch.ones(2, 20, dtype=torch.bool)
    seen[1, :5] = False
    with anyattn.batch_invariant(), pytest.raises(ValueError, match=r"padded on the left has gradients.*wanted padding on the right"):
        attended((q.requires_grad_(), k, v), 0, causal_mask_function, seen)


def test_a_cache_that_drops_keys_is_refused() -> None:
    with anyattn.batch_invariant(), pytest.raises(ValueError, match=r"has dropped its first 30 keys.*DynamicCache\(\)"):
        describe_mask(batch_size=1, q_length=1, kv_length=40, q_offset=69, kv_offset=30, mask_function=window)
