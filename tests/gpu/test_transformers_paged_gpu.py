"""On a GPU: continuous batching of Transformers with ``paged|anyattn``, step by step, in CUDA graphs, and without a wait for the device."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)
pytest.importorskip("transformers")

from transformers import AttentionInterface

from anyattn.integrations import transformers as integration
from anyattn.integrations.transformers import paged
from tests.integrations.transformers.tiny_decoders import IS_4, KINDS, batched, decoder, one_by_one, prompts
from tests.support.gpu.waiting import no_waiting

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(IS_4, reason="Transformers 4.57 has no such thing")]

LENGTHS, NEW = (1, 5, 40, 17, 70, 3), 12


def _decoder(kind: str) -> Any:
    """On the GPU. Experts by batched products: grouped ones of float32 wait for the device, which a CUDA graph refuses."""
    model = decoder(kind).cuda()
    if kind == "gpt_oss":
        model.set_experts_implementation("batched_mm")
    return model


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


@pytest.mark.parametrize("graphs", [False, True], ids=["steps", "graphs"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_eager(kind: str, graphs: bool) -> None:
    """In float32. Graphs: batches are filled up to fixed sizes, and the tables change between replays."""
    model, texts = _decoder(kind), prompts(LENGTHS)
    expected = one_by_one(model, texts, NEW)
    model.set_attn_implementation("anyattn")
    options: dict[str, Any] = {"use_cuda_graph": graphs, "q_padding_interval_size": 16, "kv_padding_interval_size": 64} if graphs else {}
    assert batched(model, texts, NEW, **(options or {"use_cuda_graph": False})) == expected


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_asynchronous_batches(kind: str) -> None:
    model, texts = _decoder(kind), prompts(LENGTHS)
    expected = one_by_one(model, texts, NEW)
    model.set_attn_implementation("anyattn")
    assert batched(model, texts, NEW, use_async_batching=True) == expected


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt_oss"])
def test_no_step_waits(kind: str) -> None:
    """After a first run, in which kernels are compiled and tuned."""
    model, texts = _decoder(kind), prompts(LENGTHS)
    model.set_attn_implementation("anyattn")
    steps = {"use_cuda_graph": False, "use_async_batching": False}
    expected = batched(model, texts, NEW, **steps)
    calls = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        with no_waiting():
            return paged.paged_attention(*args, **kwargs)

    try:
        AttentionInterface.register(paged.IMPLEMENTATION, watched)
        assert batched(model, texts, NEW, **steps) == expected
    finally:
        AttentionInterface.register(paged.IMPLEMENTATION, paged.paged_attention)
    assert calls > 4 * NEW
