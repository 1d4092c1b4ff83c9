"""Training: gradient checkpointing, LoRA, packed batches with and without the Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.integrations.transformers import NAME
from tests.support.transformers_models import check_like_eager, check_packed, decoder, gradients, packed, padded, spread, tokens

LENGTHS = (7, 1, 9, 3)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_gradient_checkpointing(name: str, is_reentrant: bool) -> None:
    ids, mask = tokens(2, 15), padded(2, 15, [15, 8])

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        model = decoder(name, dtype).train()
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
        return gradients(model, how, keep=mask, input_ids=ids, attention_mask=mask, use_cache=False)

    check_like_eager(run)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_packed_positions(name: str) -> None:
    check_packed(lambda dtype: decoder(name, dtype), LENGTHS, **packed(LENGTHS))


def test_packed_is_one_by_one() -> None:
    """Packed sequences give the logits that each gives alone: no neighbour is seen."""
    model, batch = decoder("mistral"), packed(LENGTHS)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        together = model(use_cache=False, **batch).logits[0].split(LENGTHS)
        alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in batch["input_ids"][0].split(LENGTHS)]
    assert all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(together, alone, strict=True))


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_by_cumulative_lengths(use_cache: bool) -> None:
    """The keywords of a padding-free collator; with a cache they alone say where a sequence ends."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
    keywords = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(LENGTHS), "max_length_k": max(LENGTHS)}

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        more: dict[str, Any] = {**keywords, "use_cache": use_cache} if how == NAME else {"use_cache": False}
        return gradients(decoder("mistral", dtype), how, **packed(LENGTHS), **more)

    check_like_eager(run)


def test_lora() -> None:
    peft = pytest.importorskip("peft")
    ids, mask = tokens(2, 15), padded(2, 15, [15, 8])

    def run(how: str, dtype: torch.dtype) -> dict[str, Tensor]:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
        model = peft.get_peft_model(decoder("llama", torch.float32), config)
        spread(model)
        base = model.to(dtype).get_base_model()
        base.set_attn_implementation(how)
        assert any("lora" in name for name, parameter in base.named_parameters() if parameter.requires_grad)
        return gradients(base, how, keep=mask, input_ids=ids, attention_mask=mask, use_cache=False)

    check_like_eager(run)


def test_prefix_tuning_generates() -> None:
    """Keys that no token has come with the cache, and the padding mask is that much longer."""
    peft = pytest.importorskip("peft")
    ids, mask = tokens(2, 7), padded(2, 7, [7, 4])
    torch.manual_seed(0)
    model = peft.get_peft_model(decoder("llama"), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    found = []
    for how in (NAME, "eager"):
        model.get_base_model().set_attn_implementation(how)
        with torch.no_grad():
            found.append(model(input_ids=ids, attention_mask=mask).logits[mask.bool()])
    assert torch.equal(*[x.argmax(-1) for x in found])


@pytest.mark.parametrize("with_keywords", [False, True])
def test_trainer_with_packing(with_keywords: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    rows = [{"input_ids": tokens(1, n, seed=n)[0].tolist()} for n in (5, 9, 3, 8, 6, 7, 4, 10)]
    losses = {}
    for how in (NAME, "eager"):
        model = decoder("mistral")
        model.config.use_cache = False
        model.set_attn_implementation(how)
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_keywords and how == NAME)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3, logging_steps=1, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collator)
        trainer.train()
        losses[how] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses[NAME]) == 4
    assert losses[NAME][0] > losses[NAME][-1]
    # logged with four digits or more; a leak between sequences moves the first of them
    assert [f"{x:.3f}" for x in losses[NAME]] == [f"{x:.3f}" for x in losses["eager"]]
