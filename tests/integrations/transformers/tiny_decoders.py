"""Small random decoders of five kinds, and how to generate with them one prompt at a time and by continuous batching."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import torch
import transformers

VOCABULARY, WINDOW = 199, 9
KINDS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss")
IS_4 = int(transformers.__version__.split(".")[0]) < 5


def decoder(kind: str, seed: int = 1) -> Any:
    """An untrained model, its weights wide enough that what a token sees decides what follows it."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": None, "tie_word_embeddings": False,
    }  # fmt: skip
    windows = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
    t = transformers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any
        if kind == "llama":
            model = t.LlamaForCausalLM(t.LlamaConfig(**sizes))
        elif kind == "mistral":
            model = t.MistralForCausalLM(t.MistralConfig(**sizes, sliding_window=WINDOW))
        elif kind == "gemma2":
            model = t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, **windows, attn_logit_softcapping=2.0, query_pre_attn_scalar=7))
        elif kind == "gemma3":
            model = t.Gemma3ForCausalLM(t.Gemma3TextConfig(**sizes, **windows))
        else:
            model = t.GptOssForCausalLM(t.GptOssConfig(**sizes, **windows, num_local_experts=4, num_experts_per_tok=2))
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=1.5 * weight.shape[-1] ** -0.5)
            elif "sinks" in name:
                torch.nn.init.normal_(weight)
    return model.float().eval()


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=random).tolist() for n in lengths]


def one_by_one(model: Any, texts: list[list[int]], new: int) -> list[list[int]]:
    """Greedy answers of eager attention, no two prompts in one batch."""
    model.set_attn_implementation("eager")
    found = []
    for text in texts:
        given = torch.tensor([text], device=model.device)
        answer = model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=new, do_sample=False)
        found.append(answer[0, len(text) :].tolist())
    return found


def batched(model: Any, texts: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    """Greedy answers of ``generate_batch``. options: as of ``batching``; 4.57 has some of them elsewhere, or not at all."""
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": new, "eos_token_id": -1, "pad_token_id": 0}
    options = {"page_size": 8, "num_blocks": 64, "max_batch_tokens": 32} | options
    if IS_4:
        greedy |= {"block_size": options["page_size"], "num_blocks": options["num_blocks"], "max_batch_tokens": options["max_batch_tokens"]}
        with mock.patch("transformers.generation.continuous_batching.cache.get_device_and_memory_breakdown", _memory_of_a_gpu):
            found = model.generate_batch(texts, generation_config=transformers.GenerationConfig(**greedy), progress_bar=False)
        answers = [found[f"req_{i}"] for i in range(len(texts))]
    else:
        found = model.generate_batch(
            texts,
            generation_config=transformers.GenerationConfig(**greedy),
            continuous_batching_config=batching(**options),
        )
        answers = list(found.values())
    assert [answer.error for answer in answers] == [None] * len(texts)
    return [answer.generated_tokens for answer in answers]


def batching(page_size: int, **options: Any) -> Any:
    """A ContinuousBatchingConfig by the names that 5.23 has; 5.17 calls a page a block."""
    config = transformers.ContinuousBatchingConfig
    name = "page_size" if "page_size" in inspect.signature(config).parameters else "block_size"
    return config(**{name: page_size}, **options)


def _memory_of_a_gpu() -> tuple[torch.device, int, int, int]:
    """(device, total, reserved, allocated): 4.57 divides a GPU's memory and fails without one."""
    return torch.device("cpu"), 2**30, 0, 0
