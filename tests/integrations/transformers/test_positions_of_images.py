"""M-RoPE models: positions of time, height and width, of packed texts and of ordinary images, which repeat and jump back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.masking_utils import find_packed_sequence_indices

from anyattn.integrations.transformers import NAME, forward_passes
from anyattn.integrations.transformers.positions import text_positions
from anyattn.testing import budget
from tests.support.covering import few
from tests.support.transformers_models import IS_FIVE, VOCABULARY, check_like_eager, check_packed, gradients, logits, made, padded, tokens

pytestmark = pytest.mark.skipif(not IS_FIVE, reason="Transformers 4 passes a row of M-RoPE's positions to its masks")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FAMILIES = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v", "Cosmos3Edge")


def _model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    modules = {"Qwen2VL": "qwen2_vl", "Qwen2_5_VL": "qwen2_5_vl", "Qwen3VL": "qwen3_vl", "Glm4v": "glm4v", "Cosmos3Edge": "cosmos3_edge"}
    home = getattr(transformers.models, modules[family], None)
    if home is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1] if family == "Glm4v" else [2, 2, 2]}
    rope |= {"partial_rotary_factor": 0.5} if family == "Glm4v" else {}
    config = getattr(home, f"{family}TextConfig")(**_SIZES, rope_parameters=rope)
    return made(getattr(home, f"modeling_{modules[family]}").__dict__[f"{family}TextModel"](config), dtype)


def _text(first: int, length: int) -> Tensor:
    return torch.arange(first, first + length).expand(3, length)


def _image(first: int, frames: int, height: int, width: int) -> Tensor:
    at = torch.meshgrid(torch.arange(frames), torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack(at).reshape(3, -1) + first


def _sample(rng: random.Random, first: int = 0) -> Tensor:
    """Positions (3, tokens) of text with images and videos, whose time may run on beyond the text that follows, or not."""
    parts = [_text(first, rng.randint(1, 4))]
    at = int(parts[0].max()) + 1
    for _ in range(rng.randint(1, 4)):
        if rng.random() < 0.5:
            frames, height, width = rng.choice([1, 1, rng.randint(1, 6)]), rng.randint(1, 5), rng.randint(1, 5)
            parts.append(_image(at, frames, height, width))
            at += max(height, width) if rng.random() < 0.5 else max(frames, height, width)
        else:
            parts.append(_text(at, rng.randint(1, 5)))
            at += parts[-1].shape[1]
    return torch.cat(parts, 1)


def _documents(position_ids: Tensor) -> Any:
    """The number of each token's sequence, (B, S), as Transformers reads the text's positions; None if there is one alone."""
    return find_packed_sequence_indices(text_positions(position_ids))


def _texts(lengths: tuple[int, ...]) -> Tensor:
    return torch.cat([_text(0, n) for n in lengths], 1)


IMAGES = [
    torch.cat([_text(0, 3), _image(3, 1, 2, 3), _text(6, 2)], 1),
    torch.cat([_text(0, 2), _image(2, 4, 2, 2), _text(4, 3)], 1),  # the text lies before the video's last frames
    _text(0, 1),
    torch.cat([_text(0, 1), _image(1, 1, 3, 1), _text(4, 1)], 1),
]


def _packed_like_alone(family: str, whole: Tensor, lengths: tuple[int, ...], **more: Any) -> None:
    check_packed(lambda dtype: _model(family, dtype), lengths, input_ids=tokens(1, sum(lengths)), position_ids=whole, **more)


@pytest.mark.parametrize("rows", [0, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_texts(family: str, rows: int) -> None:
    """Positions (1, S), (3, 1, S), and (4, 1, S), whose first row is the text's, which alone separates texts in eager attention."""
    lengths = (7, 1, 9, 4)
    positions = _texts(lengths)
    _packed_like_alone(family, positions[:1] if rows == 0 else positions[:1].expand(rows, -1)[:, None], lengths)


@pytest.mark.parametrize("family", few(["Qwen2VL", "Cosmos3Edge"], "Qwen2VL"))
def test_packed_texts_with_images(family: str) -> None:
    lengths = tuple(part.shape[1] for part in IMAGES)
    _packed_like_alone(family, torch.cat(IMAGES, 1)[:, None], lengths)
    _packed_like_alone(family, torch.cat(IMAGES, 1)[:, None], lengths, attention_mask=torch.ones(1, sum(lengths), dtype=torch.int64))


@pytest.mark.parametrize("image", range(2))
@pytest.mark.parametrize("family", ["Qwen2VL", "Glm4v", "Cosmos3Edge"])
def test_ordinary_images(family: str, image: int) -> None:
    """One text with an image is neither refused nor divided."""
    positions = IMAGES[image][:, None]

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        ids = tokens(1, positions.shape[2])
        return gradients(_model(family, dtype), how, input_ids=ids, position_ids=positions, use_cache=False)

    check_like_eager(run)


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("axes", [1, 3])
def test_padding_has_positions_of_its_own(position: int, axes: int) -> None:
    short, long = IMAGES[0], IMAGES[1][:, : IMAGES[1].shape[1]]
    padding = torch.full((3, long.shape[1] - short.shape[1]), position)
    positions = torch.stack([torch.cat([padding, short], 1), long], 1)
    positions = positions if axes == 3 else positions[0].clamp(max=0) + padded(2, long.shape[1], [short.shape[1], long.shape[1]]).cumsum(1)
    mask = padded(2, long.shape[1], [short.shape[1], long.shape[1]])

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model, ids = _model("Qwen2_5_VL", dtype), tokens(2, long.shape[1])
        return gradients(model, how, keep=mask, input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)

    check_like_eager(run)


@pytest.mark.parametrize("seed", range(20))
def test_sequences_begin_where_positions_start_again(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        one = _sample(rng, rng.choice([0, 0, 3]))
        assert _documents(one[:, None]) is None
        parts = [_sample(rng) for _ in range(rng.randint(2, 4))]
        lengths = torch.tensor([part.shape[1] for part in parts])
        expected = torch.arange(len(parts)).repeat_interleave(lengths)[None]
        assert torch.equal(_documents(torch.cat(parts, 1)[:, None]), expected)


OTHERS: dict[str, tuple[Tensor, list[int] | None]] = {
    "chunks of texts": (torch.cat([_text(5, 3), _text(2, 4)], 1), [3, 4]),
    "a jump": (torch.cat([_text(0, 3), _text(7, 4)], 1), [3, 4]),
    "a chunk after an image": (torch.cat([_text(5, 2), _image(7, 1, 2, 2), _text(9, 1), _text(3, 2)], 1), [7, 2]),
    "an image first": (torch.cat([_text(0, 2), _image(2, 1, 2, 2), _image(0, 1, 3, 2), _text(3, 2)], 1), [6, 8]),
    "images inside an image": (torch.cat([_text(0, 1), _image(1, 3, 3, 3), _image(4, 3, 3, 3), _text(7, 1)], 1), None),
    # HunYuan-VL: width, height and number of the image
    "an image of its own": (torch.cat([_text(0, 4), _image(0, 1, 3, 2).flip(0), _text(10, 3)], 1), None),
    "the second of its own": (torch.cat([_text(0, 4), _image(0, 1, 3, 3).flip(0) + torch.tensor([[0], [0], [1]]), _text(13, 3)], 1), None),
    # MiniCPM-V: a frame begins at the image's origin
    "a frame first": (torch.cat([_text(0, 1), _image(0, 1, 2, 2), _text(0, 1), _image(0, 1, 2, 2), _text(3, 4)], 1), None),
    "a frame": (torch.cat([_text(0, 2), _text(2, 1), _image(2, 1, 2, 2), _text(2, 1), _image(2, 1, 2, 2), _text(5, 4)], 1), None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_rarer_positions(name: str) -> None:
    positions, lengths = OTHERS[name]
    ids = _documents(positions[:, None])
    if lengths is None:
        assert ids is None
    else:
        assert torch.equal(ids, torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None])


def test_rows_of_a_batch_are_judged_each() -> None:
    texts, images = _texts((4, 5)), torch.cat([_text(0, 3), _image(3, 1, 2, 2), _text(5, 2)], 1)
    ids = _documents(torch.stack([texts, images], 1))
    assert ids.tolist() == [[0] * 4 + [1] * 5, [0] * 9]


@pytest.mark.parametrize("of", [pytest.param(_texts((5, 3, 6)), marks=pytest.mark.slow), torch.cat(IMAGES[:2], 1)], ids=["texts", "images"])
def test_packed_in_a_compiled_graph(of: Tensor) -> None:
    model = _model("Qwen2VL")
    ids, positions = tokens(1, of.shape[1]), of[:, None]
    eager = logits(model, NAME, input_ids=ids, position_ids=positions, use_cache=False)
    wide = logits(_model("Qwen2VL", torch.float64), NAME, input_ids=ids, position_ids=positions, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        got = compiled(input_ids=ids, position_ids=positions, use_cache=False)[0]
    budget.check("compiled", got.flatten()[None], wide.flatten()[None], eager.flatten()[None])
    assert forward_passes.positions_of_call() is None


def test_positions_of_other_lengths_that_start_again_are_refused() -> None:
    """A model that puts rows before its text makes a mask that the text's positions do not fit."""
    model = _model("Qwen2VL")
    model.set_attn_implementation(NAME)
    _prepend(model)
    with pytest.raises(ValueError, match=r"position_ids .*\(1, 8\) start again .* mask is of 10 .*wanted one text in each row"):
        model(input_ids=tokens(1, 8), position_ids=_texts((3, 5))[:1], use_cache=False)
    model(input_ids=tokens(1, 8), position_ids=_text(0, 8)[:1], use_cache=False)


def _prepend(model: Any) -> None:
    """Has the model's masks made for two rows more than it gets."""
    embed: Callable = model.embed_tokens.forward
    model.embed_tokens.forward = lambda ids: torch.nn.functional.pad(embed(ids), (0, 0, 2, 0))
    turn = model.rotary_emb.forward
    model.rotary_emb.forward = lambda x, at: turn(x, torch.nn.functional.pad(at, (2, 0)))
