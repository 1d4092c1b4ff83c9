"""Decoder-only models: logits, gradients of all parameters and generated tokens as eager attention's."""

from __future__ import annotations

import pytest
import torch

from anyattn.integrations.transformers import NAME
from tests.support.transformers_models import DECODERS, check_like_eager, decoder, generated, gradients, padded, tokens

MODELS = list(DECODERS)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str) -> None:
    ids = tokens(2, 19)
    check_like_eager(lambda how, dtype: gradients(decoder(name, dtype), how, input_ids=ids, use_cache=False))


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


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate(name: str, cache: str | None) -> None:
    model, ids = decoder(name), tokens(2, 9)
    ours, eager = (generated(model, how, ids, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_generate_with_left_padding(name: str, cache: str | None) -> None:
    model, ids, mask = decoder(name), tokens(3, 9), padded(3, 9, [9, 5, 2])
    ours, eager = (generated(model, how, ids, mask, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


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
