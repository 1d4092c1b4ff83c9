"""As on a GPU, a step of a layer reads no tensor on the host, and the layers of a step share checks and traces. Launches are only noted."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.call_cache import attention, kvcache_step
from anyattn.integrations.vllm.cache import FORMATS
from anyattn.mods.tracing import trace
from tests.integrations.vllm.batches import HEAD_SIZE, HEADS, KV_HEADS, batch_of, builder_of, cache_of, layer_of
from tests.support.no_reading import no_reading, noted_launches

QUANTISED = [name for name, stored in FORMATS.items() if stored.dtype is not None]
READS_8_BITS = "k_descale" in inspect.signature(anyattn.flash_attn_with_kvcache).parameters
TREE = torch.ones(4, 4).tril().bool()


def window(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return (kv <= q) & (q - kv < 9)


def tree(b: Any, h: Any, q: Any, kv: Any, aux_tensors: Any) -> Any:
    seq_lens, starts = aux_tensors
    first = seq_lens[b] - (starts[b + 1] - starts[b])
    return (kv < first) | TREE[(q - first).clamp(0, 3), (kv - first).clamp(0, 3)]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "causal": ({}, {}, {}),
    "window, sinks, softcap": ({}, {"sliding_window": 9, "sinks": torch.zeros(HEADS), "logits_soft_cap": 3.0}, {}),
    "alibi": ({}, {"alibi_slopes": [0.5] * HEADS}, {}),
    "a mask": ({}, {}, {"logical_mask_mod": window}),
    "a tree": ({}, {}, {"logical_mask_mod": tree}),
    "a score mod": ({}, {}, {"logical_score_mod": lambda s, b, h, q, kv: s * 0.5}),
    "causality by request": ({"causal": torch.ones(8, dtype=torch.int32)}, {"sliding_window": 9}, {}),
    "prefixes": ({"rswa_prefix_lens": torch.ones(8, dtype=torch.int32)}, {}, {}),
    **{name: ({}, {"kv_cache_dtype": name}, {}) for name in QUANTISED},
    "images": ({"mm_req_doc_ranges": {0: [(1, 5)]}}, {"sliding_window": 9}, {}),
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    attention.clear()
    yield noted_launches(monkeypatch, (9, 0))
    attention.clear()


@pytest.mark.parametrize("decodes", [True, False], ids=["decoding", "mixed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_layers_of_a_step(vllm: Any, gpu: SimpleNamespace, name: str, decodes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a cache of its own. The first one's call is checked, the others' are known; a mask is traced for the first alone."""
    common, options, attributes = OPTIONS[name]
    stored = options.get("kv_cache_dtype", "auto")
    if stored != "auto" and not READS_8_BITS:
        pytest.skip("this anyattn reads no 8-bit caches")
    lengths = {"lengths": [(1, n) for n in (7, 33, 50, 1, 64, 20)]} if decodes else {}
    of = batch_of(vllm, dtype=torch.bfloat16, left_over=1, **lengths, **common)
    builder = builder_of(vllm, rswa_window=5 if name == "prefixes" else None, is_mm_prefix_lm=name == "images")
    layers = [
        (vllm.implementation.AnyAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, **options), layer_of(**attributes))
        for _ in range(3)
    ]
    caches = [cache_of(vllm, of, "LBNHC", stored) for _ in layers]
    output = torch.empty_like(of.query)
    cold, traced = [], []
    cache_call, run = kvcache_step.cache_call, trace._run
    monkeypatch.setattr(kvcache_step, "cache_call", lambda *given: cold.append(1) or cache_call(*given))
    monkeypatch.setattr(trace, "_run", lambda *given: traced.append(1) or run(*given))
    steps = []
    for _ in range(3):
        metadata = builder.build(0, of.common)  # of images vLLM knows the ranges on the host
        for (impl, layer), kv_cache in zip(layers, caches, strict=True):
            before = len(cold), len(traced), len(gpu.made)
            with torch.inference_mode(), no_reading(through_dispatch=False):
                impl.forward(layer, of.query, None, None, kv_cache, metadata, output)
            steps.append((len(cold) - before[0], len(traced) - before[1], len(gpu.made) - before[2]))
    assert steps[0][0] == 1 and steps[0][2] >= 1
    assert [(checked, traces) for checked, traces, _ in steps[1:]] == [(0, 0)] * 8
