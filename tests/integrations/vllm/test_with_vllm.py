"""vLLM's own attention layers, metadata wrappers and selection on the back end. Skipped without vLLM or its sources."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.integrations import vllm as plugin
from tests.integrations.vllm.batches import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    MIXED,
    Batch,
    batch_of,
    builder_of,
    config,
    empty_cache,
    held_by,
    judge,
    layer_of,
    step,
)
from tests.support.sequences import NAN, Meaning
from tests.support.vllm.package import SOURCES

DTYPE = torch.bfloat16
needs_scales = pytest.mark.skipif(
    "k_descale" not in inspect.signature(anyattn.flash_attn_with_kvcache).parameters, reason="this anyattn reads no 8-bit caches"
)


@pytest.fixture
def real(vllm: Any) -> Iterator[Any]:
    if not vllm.is_real:
        pytest.skip(f"needs vLLM itself: set {SOURCES} to the root of its source distribution, or install vLLM")
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config

    plugin.register()
    made = VllmConfig(device_config=DeviceConfig(device="cpu"))
    with set_current_vllm_config(made):
        yield SimpleNamespace(config=made, ours=vllm.registry.AttentionBackendEnum.CUSTOM.get_class(), **vars(vllm))


def layer_of_vllm(real: Any, name: str = "layers.0.attn", kv_cache_dtype: str = "bfloat16", **options: Any) -> Any:
    from vllm.config import CacheConfig
    from vllm.model_executor.layers.attention.attention import Attention

    cache = CacheConfig(block_size=16, cache_dtype=kv_cache_dtype)
    made = Attention(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, cache_config=cache, prefix=name, attn_backend=real.ours, **options)
    made.process_weights_after_loading(DTYPE)
    return made


def caches_of_vllm(real: Any, layer: Any, layout: str, of: Batch) -> list[torch.Tensor]:
    """Two layers' caches as vLLM allocates them."""
    from vllm.v1.kv_cache_interface import KVCacheTensor, compute_layout_strides, create_kv_cache_views

    order = real.cache.KVCacheLayout[layout]
    spec = real.ours.customize_spec(replace(layer.get_kv_cache_spec(real.config), block_size=16))
    strides = compute_layout_strides(spec, of.num_pages, 2, order)
    size = 2 * of.num_pages * spec.page_size_bytes
    raw = torch.full((size,), -1, dtype=torch.int8)
    placed = KVCacheTensor(size=size, layers=["a", "b"], layer_stride=strides[0], block_stride=strides[1])
    return create_kv_cache_views(raw, spec, of.num_pages, order, placed)


def run(real: Any, layer: Any, metadata: Any, slots: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from vllm.forward_context import set_forward_context

    name = layer.layer_name
    with torch.inference_mode(), set_forward_context({name: metadata}, real.config, slot_mapping={name: slots}):
        out = layer(q.flatten(1), k.flatten(1), v.flatten(1)).view(len(q), HEADS, HEAD_SIZE)
    out = out.clone()
    out[0 if metadata is None else metadata.num_actual_tokens :] = NAN  # not written: vLLM's layer allocates it
    return out


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_a_layer(real: Any, layout: str) -> None:
    """It writes a prompt's keys in one step and attends in the next, from a cache in vLLM's allocation; so does one that shares it."""
    of, layer, out = two_steps(real, layout)
    judge(out, of, Meaning(causal=True))
    sharing = layer_of_vllm(real, "layers.1.attn", kv_sharing_target_layer_name="layers.0.attn")
    sharing.kv_cache = layer.kv_cache
    metadata = builder_of(real).build(0, of.common)
    again = run(real, sharing, metadata, metadata.slot_mapping, of.query.contiguous(), torch.zeros_like(of.key), torch.zeros_like(of.value))
    assert torch.equal(again[: of.common.num_actual_tokens], out[: of.common.num_actual_tokens])


@needs_scales
@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"])
def test_a_layer_with_a_quantised_cache(real: Any, name: str, layout: str) -> None:
    of, layer, out = two_steps(real, layout, name)
    judge(out, held_by(of, layer.kv_cache, layer, name), Meaning(causal=True), name)


def two_steps(real: Any, layout: str, name: str = "bfloat16") -> tuple[Batch, Any, torch.Tensor]:
    of, builder = batch_of(real, dtype=DTYPE), builder_of(real)
    layer = layer_of_vllm(real, kv_cache_dtype=name)
    layer.kv_cache = caches_of_vllm(real, layer, layout, of)[1]
    metadata = builder.build(0, of.common)
    k, v, slots = of.before
    run(real, layer, None, slots, torch.zeros(len(k), HEADS, HEAD_SIZE, dtype=DTYPE), k, v)
    return of, layer, run(real, layer, metadata, metadata.slot_mapping, of.query.contiguous(), of.key, of.value)


def test_a_mask_of_all_layers(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own tests set one for FLEX_ATTENTION."""
    from vllm.model_executor.layers.attention.attention import Attention

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (q - kv < 4)

    monkeypatch.setattr(Attention, "logical_mask_mod", staticmethod(mask), raising=False)
    of = batch_of(real, [(n, n) for n in (7, 1, 30)], dtype=DTYPE)
    layer = layer_of_vllm(real)
    layer.kv_cache = caches_of_vllm(real, layer, "LBNHC", of)[0]
    metadata = builder_of(real).build(0, of.common)
    out = run(real, layer, metadata, metadata.slot_mapping, of.query.contiguous(), of.key, of.value)
    judge(out, of, Meaning(mask_mod=mask))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"])
def test_quantised_caches_are_allocated(real: Any, name: str) -> None:
    """With the room that the views expect."""
    from anyattn.integrations.vllm.cache import cache_views, format_of

    layer = layer_of_vllm(real, kv_cache_dtype=name)
    of = batch_of(real)
    for layout in ("LBHNC", "BLNHC"):
        kv_cache = caches_of_vllm(real, layer, layout, of)[1]
        views = cache_views(kv_cache, HEAD_SIZE, format_of(name))
        assert views.k.shape == views.v.shape == (of.num_pages, 16, KV_HEADS, HEAD_SIZE)
        assert (views.k_scale is not None) == name.endswith("head")


def test_queries_are_not_quantised(real: Any) -> None:
    assert layer_of_vllm(real, kv_cache_dtype="fp8").query_quant is None


def test_other_options_reach_the_implementation(real: Any) -> None:
    sinks = torch.zeros(HEADS)
    impl = layer_of_vllm(real, logits_soft_cap=30.0, alibi_slopes=[1.0] * HEADS, per_layer_sliding_window=64, sinks=sinks).impl
    assert (impl.logits_soft_cap, impl.sliding_window) == (30.0, 64) and impl.sinks is sinks and impl.alibi_slopes.dtype == torch.float32


# ---- vLLM's wrappers of a back end


def test_encoder_only_metadata(real: Any) -> None:
    from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend

    backend = create_encoder_only_attention_backend(real.ours)
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], config(), torch.device("cpu"))
    assert builder.build(0, batch_of(real).common).causal is False
    assert builder.build_for_cudagraph_capture(batch_of(real).common).causal is False


def test_cross_attention(real: Any) -> None:
    """vLLM's implementation for it writes the encoder's keys, which are more than the queries."""
    from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend

    of = batch_of(real, [(3, 20), (1, 17), (2, 7)], padding=(0, 0))
    common = of.common
    common.encoder_seq_lens, common.encoder_seq_lens_cpu = common.seq_lens, common.seq_lens.numpy()
    common.seq_lens_cpu_upper_bound = torch.tensor([3, 1, 2])  # of the decoder: a first step
    common.slot_mapping = torch.full((6,), -1)
    backend = create_cross_attention_backend(real.ours)
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], config(), torch.device("cpu"))
    metadata = builder.build(0, common)
    impl = backend.get_impl_cls()(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, attn_type=real.api.AttentionType.ENCODER_DECODER)
    k, v = (torch.cat([x.transpose(0, 1) for x in parts]) for parts in (of.parts.k, of.parts.v))
    kv_cache = empty_cache(real, of, "LBNHC", torch.float32, 2 * HEAD_SIZE)
    output = torch.full((of.tokens, HEADS, HEAD_SIZE), NAN, dtype=torch.float32)
    impl.forward(layer_of(kv_sharing_target_layer_name=None), of.query, k, v, kv_cache, metadata, output)
    judge(output, of, Meaning())


def test_fast_prefill_metadata(real: Any) -> None:
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    backend = create_fast_prefill_custom_backend("FastPrefill", real.ours)
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], config(), torch.device("cpu"))
    metadata = builder.build(0, batch_of(real).common)
    assert isinstance(metadata, real.metadata.AnyAttentionMetadata) and metadata.visible(None, None, False)["causal"]


def test_local_chunks(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes requests of a prompt's chunks, whose tables are parts of the prompt's."""
    from vllm.model_executor.layers.attention.chunked_local_attention import create_chunked_local_attention_backend
    from vllm.utils import torch_utils

    monkeypatch.setattr(torch_utils, "PIN_MEMORY", False)

    of = batch_of(real, [(q, k) for q, k in MIXED if q], padding=(0, 0))
    backend = create_chunked_local_attention_backend(real.ours, 16)
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=16), ["layer"], config(), torch.device("cpu"))
    metadata = builder.build(0, of.common)
    kv_cache = empty_cache(real, of, "LBNHC", torch.float32, 2 * HEAD_SIZE)
    impl = real.implementation.AnyAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS)
    out = step(impl, layer_of(), of, kv_cache, metadata)
    judge(out, of, Meaning(causal=True, mask_mod=lambda b, h, i, j: i // 16 == j // 16))


# ---- selection


def test_the_option(real: Any) -> None:
    from vllm.config import AttentionConfig

    custom = real.registry.AttentionBackendEnum.CUSTOM
    assert AttentionConfig(backend="CUSTOM").backend is custom
    assert AttentionConfig(backend_per_kind={"sliding_window": "CUSTOM"}).backend_per_kind == {"sliding_window": custom}


def test_the_gpus_platform_selects_it(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import cuda
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setattr(cuda.CudaPlatformBase, "get_device_capability", classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)))
    custom = real.registry.AttentionBackendEnum.CUSTOM
    asked = AttentionSelectorConfig(128, torch.bfloat16, "fp8", 16, has_sink=True, has_sliding_window=True)
    assert cuda.CudaPlatformBase.get_attn_backend_cls(custom, asked, 8) == plugin.BACKEND
    with pytest.raises(ValueError, match="head_size not supported"):
        cuda.CudaPlatformBase.get_attn_backend_cls(custom, asked._replace(head_size=512), 8)
