"""Decoding on a GPU reads nothing that tensors hold: with a GPU pretended, any such read fails."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_causal_mask_function

from anyattn.call_cache import attention, kvcache_step
from anyattn.integrations.transformers import attention_forward, describe_mask, masks
from anyattn.mods.tracing import trace
from tests.support.no_reading import no_reading, noted_launches
from tests.support.transformers_models import padded


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """CPU tensors are taken for a GPU's; kernels are noted and not launched."""
    monkeypatch.setattr(masks, "_can_read", lambda *given: False)
    attention.clear()
    yield noted_launches(monkeypatch, (8, 0))
    attention.clear()


KINDS = torch.arange(600).view(2, 300) % 7 > 0
MASKS: dict[str, Any] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(33),
    "a model's own": and_masks(causal_mask_function, lambda b, h, q, kv: KINDS[b, kv] | (q == kv)),
}


# what else there is goes by block lists, which kernels of their own make on a GPU
STEPS = [(name, 1, cache) for name in MASKS for cache in ("static", "dynamic")] + [(name, 4, "static") for name in ("causal", "window")]


@pytest.mark.covering(2)
@pytest.mark.parametrize("padding", [None, "left", "holes"])
@pytest.mark.parametrize(("name", "queries", "cache"), STEPS)
def test_a_step_reads_nothing(name: str, queries: int, cache: str, padding: str | None, gpu: SimpleNamespace) -> None:
    """Queries: one token, or several at once as speculative decoding has them. A dynamic cache ends with the last query."""
    first = 200 if cache == "static" else 300 - queries
    query, key, value = (torch.randn(2, heads, rows, 64).bfloat16() for heads, rows in ((8, queries), (2, 300), (2, 300)))
    seen = None if padding is None else padded(2, first + queries, [first + queries, 90]).bool()
    if seen is not None and padding == "holes":
        seen[0, 170:180] = False

    def step(offset: int | Tensor) -> Tensor:
        described = describe_mask(
            batch_size=2, q_length=queries, kv_length=300, q_offset=offset, mask_function=MASKS[name], attention_mask=seen, device="cpu"
        )
        return attention_forward(torch.nn.Module(), query, key, value, described, scaling=0.2)[0]

    with torch.no_grad(), no_reading():
        out = step(torch.tensor(first) if cache == "static" else first)
    assert out.shape == (2, queries, 8, 64) and len(gpu.made) == 1


@pytest.mark.parametrize("name", MASKS)
def test_many_tokens_are_checked_once_for_all_layers(name: str, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cache that grows, some hundred tokens are; no mod is traced again, and no layer makes a vector of lengths."""
    cold, traced, layers = [], [], 3
    cache_call, run, full = kvcache_step.cache_call, trace._run, torch.full
    monkeypatch.setattr(kvcache_step, "cache_call", lambda *given: cold.append(1) or cache_call(*given))
    monkeypatch.setattr(trace, "_run", lambda *given: traced.append(1) or run(*given))
    for length in range(260, 264):
        seen = padded(2, length, [length, 90]).bool()
        described = describe_mask(
            batch_size=2, q_length=1, kv_length=length, q_offset=length - 1, mask_function=MASKS[name], attention_mask=seen, device="cpu"
        )
        monkeypatch.setattr(torch, "full", None)
        for _ in range(layers):
            query, key, value = (torch.randn(2, heads, rows, 64).bfloat16() for heads, rows in ((8, 1), (2, length), (2, length)))
            with torch.no_grad():
                attention_forward(torch.nn.Module(), query, key, value, described, scaling=0.2)
        monkeypatch.setattr(torch, "full", full)
        if length == 260:
            traced.clear()
    assert len(gpu.made) == 4 * layers and len(cold) == 1 and not traced
