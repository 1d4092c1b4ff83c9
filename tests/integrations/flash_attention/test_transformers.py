"""Transformers' ``attn_implementation="flash_attention_2"`` on anyattn, beside the models' definition and eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_flash_attention_utils
from transformers.utils import import_utils

import anyattn
from anyattn.testing import budget
from tests.support.covering import few
from tests.support.model_rounding import KeepsFloat64
from tests.support.transformers_models import (
    DEFINITION,
    VOCABULARY,
    Judge,
    decoder,
    generated,
    gradients,
    logits,
    made,
    padded,
    tokens,
)

FLASH = "flash_attention_2"
CASES = [pytest.param(name, side) for name in ("llama", "mistral", "gemma2", "bert") for side in (None, "left", "right")]
CACHES = [pytest.param(name, cache) for name in ("llama", "mistral") for cache in (None, "static")]


@pytest.fixture(autouse=True)
def replacing(monkeypatch):
    """The replacement, where Transformers believes that there is a GPU, without which it refuses FlashAttention."""

    def is_there() -> bool:
        return True

    monkeypatch.setattr(import_utils, "is_torch_cuda_available", is_there)
    matrix = getattr(modeling_flash_attention_utils, "FLASH_ATTENTION_COMPATIBILITY_MATRIX", None)
    if matrix is None:
        pytest.skip("this Transformers checks for FlashAttention otherwise")
    monkeypatch.setitem(matrix[2], "supported_devices", ((is_there, "cuda"),))
    with anyattn.replace_flash_attention() as replacement:
        before = anyattn.replaced().taken
        yield replacement
        assert anyattn.replaced().taken > before


def check(run: Any) -> None:
    Judge(run).check(FLASH, run(FLASH, torch.float32))


def _bert(dtype: torch.dtype) -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return made(transformers.BertModel(config, add_pooling_layer=False), dtype)


def test_availability_checks(replacing) -> None:
    assert import_utils.is_flash_attn_2_available() and import_utils.is_flash_attn_3_available()
    assert import_utils.is_flash_attn_greater_or_equal("2.4.1") and not import_utils.is_flash_attn_greater_or_equal("3.0")
    assert not import_utils.is_flash_attn_4_available()
    logits(decoder("llama"), FLASH, input_ids=tokens(1, 5))
    replacing.undo()  # what Transformers remembers is forgotten
    assert not import_utils.is_flash_attn_2_available() and not import_utils.is_flash_attn_3_available()


@pytest.mark.parametrize(("name", "side"), few(CASES, pytest.param("bert", "left")))
def test_logits_and_gradients(name: str, side: str | None) -> None:
    ids = tokens(3, 19)
    mask = torch.ones_like(ids) if side is None else padded(3, 19, [19, 11, 4], side)
    others = {} if name == "bert" else {"use_cache": False}

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = _bert(dtype) if name == "bert" else decoder(name, dtype)
        return gradients(model, how, keep=mask, input_ids=ids, attention_mask=mask, **others)

    check(run)


def test_packed_texts_do_not_see_one_another() -> None:
    ids, lengths = tokens(1, 24), (9, 4, 11)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = decoder("llama", dtype)
        if how == FLASH:
            return {"out": logits(model, how, input_ids=ids, position_ids=positions)}
        return {"out": torch.cat([logits(model, how, input_ids=text) for text in ids.split(lengths, 1)], 1)}

    check(run)


@pytest.mark.parametrize(("name", "cache"), few(CACHES, pytest.param("mistral", "static")))
def test_generate(name: str, cache: str | None) -> None:
    model, ids, mask = decoder(name), tokens(3, 9), padded(3, 9, [9, 5, 2])
    ours, eager = (generated(model, how, ids, mask, cache_implementation=cache, disable_compile=True) for how in (FLASH, "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.slow
def test_compiled() -> None:
    torch._dynamo.reset()
    ids = tokens(2, 19)
    with KeepsFloat64():
        wanted = logits(decoder("llama", torch.float64), DEFINITION, input_ids=ids)
    plain = logits(decoder("llama", torch.bfloat16), DEFINITION, input_ids=ids)
    model = decoder("llama", torch.bfloat16)
    logits(model, FLASH, input_ids=ids)  # Transformers imports FlashAttention at the first call, which Dynamo cannot trace
    with torch.no_grad():
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(input_ids=ids, use_cache=False)[0]
    budget.check("logits", *(t.flatten()[None] for t in (got, wanted, plain)))


@pytest.mark.slow
def test_definition_is_not_replaced() -> None:
    before = anyattn.replaced().taken
    logits(decoder("llama"), DEFINITION, input_ids=tokens(1, 5))
    assert anyattn.replaced().taken == before
    logits(decoder("llama"), FLASH, input_ids=tokens(1, 5))
