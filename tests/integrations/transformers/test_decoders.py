"""Decoder-only models: logits, gradients of all parameters and generated tokens as eager attention's."""

from __future__ import annotations

import pytest
import torch

from anyattn.integrations.transformers import NAME, attention_forward, describe_mask
from tests.support.transformers_models import (
    DECODERS,
    IS_FIVE,
    check_attention,
    check_like_eager,
    decoder,
    generated,
    gradients,
    logits,
    padded,
    tokens,
)

MODELS = list(DECODERS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    ids = tokens(2, 19)
    check_like_eager(lambda how, dtype: gradients(decoder(name, dtype), how, input_ids=ids, use_cache=False))


@pytest.mark.covering(1)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_with_gradients(name: str, side: str) -> None:
    ids, mask = tokens(3, 19), padded(3, 19, [19, 11, 4], side)
    check_like_eager(
        lambda how, dtype: gradients(decoder(name, dtype), how, keep=mask, input_ids=ids, attention_mask=mask, use_cache=False)
    )


def test_padding_with_holes() -> None:
    ids, mask = tokens(2, 19), padded(2, 19, [19, 14])
    mask[0, 5:8] = 0
    mask[1, 12] = 0
    check_like_eager(lambda how, dtype: gradients(decoder("llama", dtype), how, keep=mask, input_ids=ids, attention_mask=mask))


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str | None) -> None:
    model, ids = decoder(name), tokens(2, 9)
    ours, eager = (generated(model, how, ids, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_left_padding(name: str, cache: str | None) -> None:
    model, ids, mask = decoder(name), tokens(3, 9), padded(3, 9, [9, 5, 2])
    ours, eager = (generated(model, how, ids, mask, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_beams(name: str, cache: str | None) -> None:
    model, ids, mask = decoder(name), tokens(2, 9), padded(2, 9, [9, 5])
    ours, eager = (generated(model, how, ids, mask, num_beams=3, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


def test_generate_without_a_cache() -> None:
    model, ids, mask = decoder("mistral"), tokens(2, 9), padded(2, 9, [9, 5])
    ours, eager = (generated(model, how, ids, mask, use_cache=False) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.covering(1)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_without_a_look_at_contents(name: str, cache: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: lengths and padding stay tensors, the cached call computes every step."""
    monkeypatch.setattr("anyattn.integrations.transformers.masks._can_read", lambda *given: False)
    model, ids, mask = decoder(name), tokens(3, 9), padded(3, 9, [9, 5, 2])
    ours, eager = (generated(model, how, ids, mask, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


def test_tokens_appended_to_a_static_cache() -> None:
    """A second piece of the prompt, whose queries begin in the middle of the cache."""
    from transformers import StaticCache

    model, ids = decoder("mistral"), tokens(2, 15)
    model.set_attn_implementation(NAME)
    whole = logits(model, "eager", input_ids=ids, use_cache=False)
    model.set_attn_implementation(NAME)
    cache, found = StaticCache(config=model.config, max_cache_len=24), []
    with torch.no_grad():
        for at, piece in zip((0, 4, 9), ids.split((4, 5, 6), 1), strict=True):
            positions = {} if IS_FIVE else {"cache_position": torch.arange(at, at + piece.shape[1])}
            found.append(model(input_ids=piece, past_key_values=cache, **positions).logits)
    assert torch.equal(torch.cat(found, 1).argmax(-1), whole.argmax(-1))


def test_gradients_through_a_static_cache() -> None:
    """Where autograd records, the cached call has no gradients: the same mask is listed instead."""
    keys = torch.randn(2, 2, 24, 12, requires_grad=True)
    query = torch.randn(2, 6, 3, 12, requires_grad=True)
    mask = padded(2, 12, [12, 5]).bool()
    described = describe_mask(batch_size=2, q_length=3, kv_length=24, q_offset=torch.tensor(9), attention_mask=mask)
    out, _ = attention_forward(torch.nn.Module(), query, keys, keys, described)
    at = torch.arange(24)
    seen = torch.nn.functional.pad(mask, (0, 12))[:, None, None] & (at <= torch.arange(9, 12)[:, None])
    check_attention(out, query, keys, keys, seen)
    out.sum().backward()
    assert bool((keys.grad[:, :, 12:] == 0).all())
