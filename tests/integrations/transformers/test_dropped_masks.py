"""Masks that are refused because a model drops its own, and masks of the user's that are not, whatever ran before or runs around them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from anyattn.integrations.transformers import NAME, attention_forward, describe_mask
from tests.support.transformers_models import check_like_eager, decoder, gradients, logits, tokens

LENGTH = 14


def _mask(kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A mask of the user's, (2, 1, S, S): the first five keys are visible to all."""
    at = torch.arange(LENGTH)
    seen = ((at <= at[:, None]) | (at < 5)).expand(2, 1, LENGTH, LENGTH)
    return seen if kind == "bool" else torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


class _StoppedError(Exception):
    pass


def _stop(*args: Any) -> None:
    raise _StoppedError


def _failed(model: Any) -> BaseException:
    """The error of a pass that stops between the making of its mask and the first layer; its traceback holds the mask."""
    model.set_attn_implementation(NAME)
    hook = model.model.layers[0].register_forward_pre_hook(_stop)
    try:
        model(input_ids=tokens(2, LENGTH))
    except _StoppedError as error:
        return error
    finally:
        hook.remove()
    raise AssertionError


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_after_a_pass_that_failed(kind: str) -> None:
    error = _failed(decoder("llama"))
    check_like_eager(
        lambda how, dtype: gradients(decoder("llama", dtype), how, input_ids=tokens(2, LENGTH), attention_mask=_mask("float", dtype))
    )
    q = torch.randn(2, 2, LENGTH, 8)
    attention_forward(nn.Module(), q, q, q, _mask(kind))
    assert error.__traceback__ is not None


def test_after_a_mask_that_no_model_was_called_with() -> None:
    model, ids = decoder("llama"), tokens(2, LENGTH)
    model.set_attn_implementation(NAME)
    unused: Any = create_causal_mask(model.config, model.model.embed_tokens(ids), None, None, position_ids=None)
    logits(model, NAME, input_ids=ids, attention_mask=_mask("bool"))
    assert not unused.is_used


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_model_inside_another(kind: str) -> None:
    """A model with a mask of the user's runs between the making of the outer model's mask and its first layer."""
    ids = tokens(2, LENGTH)
    inner = decoder("mistral")
    alone = logits(inner, NAME, input_ids=ids, attention_mask=_mask(kind))
    outer = decoder("llama")
    expected = logits(outer, NAME, input_ids=ids)
    inside: list[Tensor] = []
    outer.model.layers[0].register_forward_pre_hook(
        lambda *args: inside.append(logits(inner, NAME, input_ids=ids, attention_mask=_mask(kind)))  # type: ignore[func-returns-value]
    )
    assert torch.equal(logits(outer, NAME, input_ids=ids), expected)
    assert torch.equal(inside[0], alone)


def _replacing(layer: nn.Module, args: tuple, named: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return args, named | {"attention_mask": _mask("bool")}


def test_a_mask_that_is_handed_on_is_still_expected() -> None:
    """Made outside, as by ``generate``, and replaced inside the model that gets it."""
    model, ids = decoder("llama"), tokens(2, LENGTH)
    model.set_attn_implementation(NAME)
    mask = create_causal_mask(model.config, model.model.embed_tokens(ids), None, None, position_ids=None)
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(_replacing, with_kwargs=True)
    with pytest.raises(TypeError, match=r"drops the mask .*passes a Tensor to attention in its place"):
        model(input_ids=ids, attention_mask=mask)
    model(input_ids=ids, attention_mask=_mask("float"))


def test_a_mask_of_a_model_around_the_one_that_drops_it() -> None:
    """No layer of either has received it when the outer one ends."""
    ids = tokens(2, LENGTH)
    outer, inner = decoder("llama"), decoder("mistral")
    inner.set_attn_implementation(NAME)
    for layer in outer.model.layers:
        layer.forward = lambda hidden, **named: inner.model(inputs_embeds=hidden, attention_mask=_mask("bool")).last_hidden_state
    with pytest.raises(TypeError, match=r"^Llama drops the mask"):
        logits(outer, NAME, input_ids=ids)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("kind", ["float"])
def test_gradient_checkpointing(kind: str, is_reentrant: bool) -> None:
    """The second forward of the layers, while a mask of another model that failed is still alive."""
    error = _failed(decoder("mistral"))

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = decoder("llama", dtype).train()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        return gradients(model, how, input_ids=tokens(2, LENGTH), attention_mask=_mask(kind, dtype), use_cache=False)

    check_like_eager(run)
    assert error.__traceback__ is not None


def test_models_one_after_another() -> None:
    """Masks of models that do not use all of them, such as windows without a layer that has one."""
    ids = tokens(2, LENGTH)
    gc.disable()
    try:
        for name in ("gemma2", "gemma3"):
            logits(decoder(name, layer_types=["full_attention"] * 2), NAME, input_ids=ids)
            logits(decoder("llama"), NAME, input_ids=ids, attention_mask=_mask("bool"))
    finally:
        gc.enable()


def test_a_mask_made_by_hand_is_expected_until_a_model_runs_without_it() -> None:
    q = torch.randn(2, 2, LENGTH, 8)
    mask = describe_mask(batch_size=2, q_length=LENGTH, kv_length=LENGTH)
    with pytest.raises(TypeError, match="drops the mask"):
        attention_forward(nn.Module(), q, q, q, _mask("bool"))
    logits(decoder("llama"), NAME, input_ids=tokens(2, LENGTH))
    attention_forward(nn.Module(), q, q, q, _mask("bool"))
    assert not mask.is_used
