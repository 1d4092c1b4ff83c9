"""Transformers inside ``anyattn.batch_invariant``: a layer's rows have the same bits in a prefill, a decoding step and a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


def test_left_padding_with_gradients_is_refused() -> None:
    q, k, v = drawn(2, 20)
    seen = torch.ones(2, 20, dtype=torch.bool)
    seen[1, :5] = False
    with anyattn.batch_invariant(), pytest.raises(ValueError, match=r"padded on the left has gradients.*wanted padding on the right"):
        attended((q.requires_grad_(), k, v), 0, causal_mask_function, seen)


def test_a_cache_that_drops_keys_is_refused() -> None:
    with anyattn.batch_invariant(), pytest.raises(ValueError, match=r"has dropped its first 30 keys.*DynamicCache\(\)"):
        describe_mask(batch_size=1, q_length=1, kv_length=40, q_offset=69, kv_offset=30, mask_function=window)
