"""Masks that users hand over themselves: block masks and tensors of four dimensions, never dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn.integrations.transformers import NAME, attention_forward
from tests.support.covering import few
from tests.support.transformers_models import DEFINITION, check_like_eager, decoder, gradients, logits, tokens

LENGTH = 14


def _prefix(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) | (k < 5)


def _seen(batch: int = 2) -> Tensor:
    at = torch.arange(LENGTH)
    return _prefix(None, None, at[:, None], at[None]).expand(batch, 1, LENGTH, LENGTH)


@pytest.mark.parametrize("maker", [anyattn.create_block_mask, torch_flex.create_block_mask])
def test_a_block_mask_passes_through(maker: Any) -> None:
    block_mask = maker(_prefix, 2, None, LENGTH, LENGTH, device="cpu")

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        mask = _seen() if how == DEFINITION else block_mask
        return gradients(decoder("llama", dtype), how, input_ids=tokens(2, LENGTH), attention_mask=mask)

    check_like_eager(run, has_eager=False)


@pytest.mark.parametrize("batch", few([1, 2], 2))
def test_a_bool_mask(batch: int) -> None:
    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        return gradients(decoder("gemma2", dtype), how, input_ids=tokens(2, LENGTH), attention_mask={k: _seen(batch) for k in KINDS})

    check_like_eager(run, has_eager=False)


KINDS = ("full_attention", "sliding_attention")


@pytest.mark.parametrize("heads", [1, 6])
def test_a_float_mask(heads: int) -> None:
    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        noise = torch.randn(2, heads, LENGTH, LENGTH + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        hidden = torch.nn.functional.pad(~_seen(), (0, 3))
        mask = noise.masked_fill(hidden, torch.finfo(dtype).min)[..., :LENGTH]
        return gradients(decoder("llama", dtype), how, input_ids=tokens(2, LENGTH), attention_mask=mask)

    check_like_eager(run)


def test_a_mask_decides_alone() -> None:
    """A bool mask of everything makes a causal model see everything, as with sdpa."""
    model, ids = decoder("llama"), tokens(1, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    changed = ids.clone()
    changed[0, -1] += 1 if int(ids[0, -1]) < 90 else -1
    first = [logits(model, NAME, input_ids=i, attention_mask=mask)[0, 0] for i in (ids, changed)]
    assert not torch.equal(*first)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (torch.ones(2, 1, LENGTH, LENGTH - 1, dtype=torch.bool), ValueError, "attention_mask has shape .*wanted .2 or 1, 6 or 1, 14 or 1"),
        (torch.ones(2, 3, LENGTH, LENGTH, dtype=torch.bool), ValueError, "attention_mask has shape"),
        (torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.int64), TypeError, "attention_mask has dtype torch.int64"),
    ],
)
def test_masks_that_do_not_fit(mask: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        logits(decoder("llama"), NAME, input_ids=tokens(2, LENGTH), attention_mask=mask)


def test_what_is_no_mask() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(TypeError, match="attention_mask is a list"):
        attention_forward(torch.nn.Module(), q, q, q, [1])
