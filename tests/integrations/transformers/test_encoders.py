"""Encoders of text and images, and encoder-decoders, beside eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from anyattn.integrations.transformers import NAME
from tests.support.transformers_models import IS_FIVE, VOCABULARY, check_like_eager, generated, gradients, made, padded, tokens

_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64, "dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip


def _bert(dtype: torch.dtype, **changes: Any) -> Any:
    return made(transformers.BertModel(transformers.BertConfig(**_BERT, **changes), add_pooling_layer=False), dtype)


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_bert(side: str | None) -> None:
    ids = tokens(3, 17)
    mask = torch.ones_like(ids) if side is None else padded(3, 17, [17, 9, 3], side)
    check_like_eager(lambda how, dtype: gradients(_bert(dtype), how, keep=mask, input_ids=ids, attention_mask=mask))


def test_modern_bert_with_windows() -> None:
    def model(dtype: torch.dtype) -> Any:
        config = transformers.ModernBertConfig(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, local_attention=6,
            max_position_embeddings=64, pad_token_id=0, attention_dropout=0.0, reference_compile=False,
        )  # fmt: skip
        return made(transformers.ModernBertModel(config), dtype)

    if not getattr(transformers.ModernBertModel, "_supports_attention_backend", False):
        pytest.skip("this Transformers' ModernBERT does not go through the attention interface")
    ids, mask = tokens(2, 21), padded(2, 21, [21, 12], "right")
    check_like_eager(lambda how, dtype: gradients(model(dtype), how, keep=mask, input_ids=ids, attention_mask=mask))


def test_vit() -> None:
    def model(dtype: torch.dtype) -> Any:
        config = transformers.ViTConfig(
            hidden_size=40, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4,
            attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
        )  # fmt: skip
        return made(transformers.ViTModel(config, add_pooling_layer=False), dtype)

    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    check_like_eager(lambda how, dtype: gradients(model(dtype), how, pixel_values=pixels.to(dtype)))


def _vision_tower(dtype: torch.dtype) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    config = Qwen2_5_VLVisionConfig(
        depth=2, hidden_size=48, intermediate_size=64, num_heads=4, patch_size=4, spatial_merge_size=2, temporal_patch_size=1,
        out_hidden_size=32, window_size=16, fullatt_block_indexes=[1],
    )  # fmt: skip
    return made(Qwen2_5_VisionTransformerPretrainedModel(config), dtype)


def test_packed_images() -> None:
    """Images of different sizes in one row, windows in the first layer, whole images in the second."""
    grid = torch.tensor([[1, 8, 4], [1, 4, 12]])
    pixels = torch.randn(8 * 4 + 4 * 12, 3 * 16, generator=torch.Generator().manual_seed(0))

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        return gradients(_vision_tower(dtype), how, hidden_states=pixels.to(dtype), grid_thw=grid)

    check_like_eager(run)


@pytest.mark.parametrize("family", ["Bart", "T5Gemma", "Whisper"])
def test_cross_attention(family: str) -> None:
    source, target = tokens(2, 13), tokens(2, 7, seed=1)
    mask = padded(2, 13, [13, 6], "right")

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = _seq2seq(family, dtype)
        if family == "Whisper":
            features = torch.randn(2, 8, 26, generator=torch.Generator().manual_seed(0)).to(dtype)  # the same in every dtype
            return gradients(model, how, input_features=features, decoder_input_ids=target, use_cache=False)
        return gradients(model, how, input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False)

    check_like_eager(run)


@pytest.mark.parametrize("cache", [None, "static"])
def test_seq2seq_generate(cache: str | None) -> None:
    model = _seq2seq("Bart", torch.float32)
    ids, mask = tokens(2, 13), padded(2, 13, [13, 6], "right")
    ours, eager = (generated(model, how, ids, mask, num_beams=2, cache_implementation=cache) for how in (NAME, "eager"))
    assert torch.equal(ours, eager)


def _seq2seq(family: str, dtype: torch.dtype) -> Any:
    if family == "Bart":
        return made(transformers.BartForConditionalGeneration(transformers.BartConfig(**_SEQ2SEQ)), dtype)
    if family == "Whisper":
        sizes = {**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 13, "max_target_positions": 32, "suppress_tokens": None}
        return made(transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes, begin_suppress_tokens=None)), dtype)
    side: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 12, "sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 95,
        "max_position_embeddings": 64, "dropout_rate": 0.0, "cross_attention_hidden_size": 48,
    }  # fmt: skip
    config = transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=VOCABULARY, pad_token_id=0)
    return made(transformers.T5GemmaForConditionalGeneration(config), dtype)


def test_t5_position_bias() -> None:
    """The learned bias of T5, which goes through the attention interface in Transformers 5."""
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, pad_token_id=0,
        decoder_start_token_id=1, relative_attention_num_buckets=8, relative_attention_max_distance=16,
    )  # fmt: skip
    if not IS_FIVE:
        pytest.skip("T5 of Transformers 4 does not go through the attention interface")
    source, target, mask = tokens(2, 13), tokens(2, 7, seed=1), padded(2, 13, [13, 6], "right")

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = made(transformers.T5ForConditionalGeneration(config), dtype)
        return gradients(model, how, input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False)

    check_like_eager(run)
