"""On a GPU: the layers of the back end for vLLM, in CUDA graphs that are replayed for other batches, and without a wait for the device."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)

import anyattn
from anyattn.integrations.vllm.cache import FORMATS
from tests.integrations.vllm import batches
from tests.integrations.vllm.batches import (
    Batch,
    batch_of,
    builder_of,
    cache_of,
    empty_cache,
    judge,
    layer_of,
    on_device,
    step,
    write,
)
from tests.integrations.vllm.conftest import vllm as vllm  # a fixture
from tests.support.gpu.graphs import captured
from tests.support.gpu.waiting import no_waiting
from tests.support.sequences import NAN, Meaning

pytestmark = pytest.mark.gpu

GPU = "cuda"
SHAPES = {"32/8 heads of 128": ((32, 8), 128), "8/1 heads of 64": ((8, 1), 64), "4/4 heads of 256": ((4, 4), 256)}
FIRST, SECOND = ((7, 7), (1, 33), (4, 50), (20, 64)), ((3, 3), (25, 40), (1, 64), (3, 50))
"""Batches of as many requests and tokens."""
QUANTISED = [name for name, stored in FORMATS.items() if stored.dtype is not None]
needs_scales = pytest.mark.skipif(
    "k_descale" not in inspect.signature(anyattn.flash_attn_with_kvcache).parameters, reason="this anyattn reads no 8-bit caches"
)


@pytest.fixture(autouse=True)
def _writes(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batches.writes_by_torch(vllm, monkeypatch)


def impl_of(vllm: Any, shape: str = "32/8 heads of 128", **options: Any) -> Any:
    (heads, kv_heads), size = SHAPES[shape]
    return vllm.implementation.AnyAttentionImpl(heads, size, size**-0.5, kv_heads, **options)


def batch(vllm: Any, shape: str = "32/8 heads of 128", lengths: Any = batches.MIXED, page_size: int = 16, **more: Any) -> Batch:
    heads, size = SHAPES[shape]
    dtype = more.pop("dtype", torch.bfloat16)
    made = batch_of(vllm, lengths, page_size, dtype, heads=heads, head_size=size, left_over=1, **more)
    return on_device(made, GPU)


def cache(vllm: Any, of: Batch, layout: str = "LBNHC", page_size: int = 16) -> torch.Tensor:
    return empty_cache(vllm, of, layout, of.query.dtype, 2 * of.key.shape[2], page_size)


@pytest.mark.parametrize(("layout", "page_size"), [("LBNHC", 16), ("LBHNC", 64), ("BLHNC", 16), ("BLNHC", 13)])
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decoding_in_one_batch(vllm: Any, shape: str, page_size: int, layout: str) -> None:
    of = batch(vllm, shape, page_size=page_size)
    kv_cache = cache(vllm, of, layout, page_size)
    metadata = builder_of(vllm, page_size, GPU).build(0, of.common)
    judge(step(impl_of(vllm, shape), layer_of(device=GPU), of, kv_cache, metadata), of, Meaning(causal=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_options(vllm: Any, dtype: torch.dtype) -> None:
    sinks = torch.randn(32, generator=torch.Generator().manual_seed(3))
    slopes = [2.0 ** -(h / 8 + 1) for h in range(32)]
    impl = impl_of(vllm, sliding_window=20, sinks=sinks.cuda(), logits_soft_cap=3.0, alibi_slopes=slopes)
    of = batch(vllm, dtype=dtype)
    meaning = Meaning(causal=True, window_size=(19, 0), sink=sinks, softcap=3.0, alibi_slopes=torch.tensor(slopes))
    judge(step(impl, layer_of(device=GPU), of, cache(vllm, of), builder_of(vllm, 16, GPU).build(0, of.common)), of, meaning)


@needs_scales
@pytest.mark.parametrize(("shape", "layout"), list(zip(SHAPES, ("LBNHC", "LBHNC", "BLHNC"), strict=True)))
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_caches(vllm: Any, name: str, shape: str, layout: str) -> None:
    of = batch(vllm, shape)
    layer = layer_of(0.37, 1.7, GPU)
    kv_cache = cache_of(vllm, of, layout, name)
    out = step(impl_of(vllm, shape, kv_cache_dtype=name), layer, of, kv_cache, builder_of(vllm, 16, GPU).build(0, of.common))
    judge(out, batches.held_by(of, kv_cache, layer, name), Meaning(causal=True))


def drafts(b: Any, h: Any, q: Any, kv: Any, aux_tensors: Any) -> Any:
    """Of each request's last tokens every other one; all keys before them."""
    seq_lens, starts = aux_tensors
    first = seq_lens[b] - (starts[b + 1] - starts[b])
    return (kv < first) | ((kv <= q) & ((q - kv) % 2 == 0))


@pytest.mark.parametrize("mask", [False, True], ids=["causal", "mask"])
@pytest.mark.parametrize("name", ["auto", *(pytest.param(name, marks=needs_scales) for name in ("fp8", "fp8_per_token_head"))])
def test_a_graph_of_a_batch_replays_another(vllm: Any, name: str, mask: bool) -> None:
    """Captured as vLLM does: with a query as long as all tokens and requests as long as the model allows."""
    first, second = batch(vllm, lengths=FIRST), batch(vllm, lengths=SECOND, seed=5)
    impl, layer = impl_of(vllm, kv_cache_dtype=name), layer_of(0.5, 2.0, GPU)
    if mask:
        layer.logical_mask_mod = drafts
    kv_cache = cache(vllm, first) if name == "auto" else cache_of(vllm, first, "LBNHC", name)
    static = first.common
    static.max_query_len = static.num_actual_tokens
    metadata = builder_of(vllm, 16, GPU).build_for_cudagraph_capture(static)
    query, output = first.query.clone(), torch.full(first.query.shape, NAN, dtype=torch.bfloat16, device=GPU)

    def forward() -> torch.Tensor:
        return impl.forward(layer, query, None, None, kv_cache, metadata, output)

    with torch.inference_mode():
        write(impl, layer, first, kv_cache)
        graph, _ = captured(forward)
        for of in (second, batch(vllm, lengths=FIRST)):
            kv_cache.view(torch.uint8).fill_(255)
            write(impl, layer, of, kv_cache)
            for field in fields(static):
                mine, theirs = getattr(static, field.name), getattr(of.common, field.name)
                if isinstance(mine, torch.Tensor) and mine.is_cuda:
                    mine.copy_(theirs)
            query.copy_(of.query)
            graph.replay()
            wanted = of if name == "auto" else batches.held_by(of, kv_cache, layer, name)
            judge(output, wanted, Meaning(mask_mod=_expected(of)) if mask else Meaning(causal=True))


def _expected(of: Batch) -> Any:
    return lambda b, h, q, kv: (kv < of.positions[b]) | ((kv <= q) & ((q - kv) % 2 == 0))


@pytest.mark.parametrize("mask", [None, drafts, lambda b, h, q, kv: (kv <= q) & (q - kv < 9)], ids=["causal", "drafts", "window"])
def test_no_step_waits(vllm: Any, mask: Any) -> None:
    """After a first one, in which kernels are compiled."""
    of = batch(vllm)
    impl, layer, kv_cache = impl_of(vllm), layer_of(device=GPU), cache(vllm, of)
    if mask is not None:
        layer.logical_mask_mod = mask
    builder = builder_of(vllm, 16, GPU)
    step(impl, layer, of, kv_cache, builder.build(0, of.common))
    output = torch.empty_like(of.query)
    with torch.inference_mode(), no_waiting():
        for _ in range(3):
            impl.forward(layer, of.query, None, None, kv_cache, builder.build(0, of.common), output)


def test_per_request_causality_and_prefixes(vllm: Any) -> None:
    causal = torch.tensor([1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.int32)
    of = batch(vllm, causal=causal)
    metadata = builder_of(vllm, 16, GPU).build(0, of.common)
    mask = Meaning(mask_mod=lambda b, h, i, j: (j <= i) | (not int(causal[b])))
    judge(step(impl_of(vllm), layer_of(device=GPU), of, cache(vllm, of), metadata), of, mask)
    prefix = [20, 41, 1, 50, 10, 0, 0, 0]
    of = batch(vllm, rswa_prefix_lens=torch.tensor(prefix))
    metadata = builder_of(vllm, 16, GPU, rswa_window=5).build(0, of.common)
    mask = Meaning(causal=True, mask_mod=lambda b, h, i, j: (j < prefix[b]) | (i - j < 5))
    judge(step(impl_of(vllm), layer_of(device=GPU), of, cache(vllm, of), metadata), of, mask)


def test_encoders(vllm: Any) -> None:
    of = batch(vllm, lengths=[(9, 9), (1, 1), (130, 130), (0, 0)], causal=False)
    impl = impl_of(vllm, attn_type=vllm.api.AttentionType.ENCODER_ONLY, sliding_window=40)
    metadata = builder_of(vllm, 16, GPU).build(0, of.common)
    judge(step(impl, layer_of(device=GPU), of, torch.empty(0), metadata), of, Meaning(window_size=(39, 39)))
