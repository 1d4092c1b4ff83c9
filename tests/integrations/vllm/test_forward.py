"""Forward pass of a layer in a vLLM step, beside the definition in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import anyattn
from anyattn.integrations.vllm.cache import FORMATS
from tests.integrations.vllm.batches import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    batch_of,
    builder_of,
    cache_of,
    empty_cache,
    held_by,
    judge,
    layer_of,
    step,
    write,
)
from tests.support.sequences import Meaning

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
SLOPES = [0.5, 0.25, 0.125, 0.0625]


def impl_of(vllm: Any, **options: Any) -> Any:
    return vllm.implementation.AnyAttentionImpl(HEADS, HEAD_SIZE, HEAD_SIZE**-0.5, KV_HEADS, **options)


def run(vllm: Any, meaning: Meaning, impl: Any, *, layer: Any = None, page_size: int = 16, layout: str = "LBNHC", **batch: Any) -> None:
    of = batch_of(vllm, page_size=page_size, **batch)
    kv_cache = empty_cache(vllm, of, layout, of.query.dtype, 2 * HEAD_SIZE, page_size)
    metadata = builder_of(vllm, page_size).build(0, of.common)
    judge(step(impl, layer or layer_of(), of, kv_cache, metadata), of, meaning, layout)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [16, 64, 13])
def test_prefill_and_decoding_in_one_batch(vllm: Any, layout: str, page_size: int) -> None:
    run(vllm, Meaning(causal=True), impl_of(vllm), layout=layout, page_size=page_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [(0, 0), (1, 0), (9, 4)])
def test_half_precision_and_padding(vllm: Any, dtype: torch.dtype, padding: tuple[int, int]) -> None:
    run(vllm, Meaning(causal=True), impl_of(vllm), dtype=dtype, padding=padding)


def test_options(vllm: Any) -> None:
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(3))
    run(vllm, Meaning(causal=True, window_size=(8, 0)), impl_of(vllm, sliding_window=9))
    run(vllm, Meaning(causal=True, sink=sinks), impl_of(vllm, sinks=sinks))
    run(vllm, Meaning(causal=True, softcap=2.0), impl_of(vllm, logits_soft_cap=2.0))
    run(vllm, Meaning(causal=True, alibi_slopes=torch.tensor(SLOPES)), impl_of(vllm, alibi_slopes=SLOPES))
    every = {"sliding_window": 20, "sinks": sinks, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES}
    meaning = Meaning(causal=True, window_size=(19, 0), sink=sinks, softcap=3.0, alibi_slopes=torch.tensor(SLOPES))
    run(vllm, meaning, impl_of(vllm, **every), page_size=64, layout="BLHNC")


def test_batch_invariance_is_asked_by_the_environment(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm.backend.AnyAttentionBackend.supports_batch_invariance()
    asked = []
    decode = anyattn.flash_attn_with_kvcache
    for value, mode in (("1", "batch"), ("0", None), ("no number", None)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        impl = impl_of(vllm)
        with monkeypatch.context() as patch:
            patch.setattr(anyattn, "flash_attn_with_kvcache", lambda *t, **o: asked.append(o.get("deterministic")) or decode(*t, **o))
            run(vllm, Meaning(causal=True), impl, dtype=torch.float32)
        assert asked.pop() == mode


@pytest.mark.parametrize("window", [None, 6])
def test_requests_that_see_in_both_directions(vllm: Any, window: int | None) -> None:
    """All of a batch, or some: vLLM then says it per request, in a tensor."""
    band = (-1, -1) if window is None else (window - 1, window - 1)
    impl = impl_of(vllm, sliding_window=window)
    run(vllm, Meaning(window_size=band), impl, causal=False)
    causal = torch.tensor([1, 0, 0, 1, 0, 1, 1, 1], dtype=torch.int32)
    mask = Meaning(window_size=band, mask_mod=lambda b, h, i, j: (j <= i) | (not int(causal[b])))
    run(vllm, mask, impl, causal=causal)


@pytest.mark.parametrize("window", [None, 30])
def test_a_layers_own_mask(vllm: Any, window: int | None) -> None:
    """It replaces causality, as in vLLM's FLEX_ATTENTION; the window holds on both sides of the query."""

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & ((q - kv < 4) | (kv % 3 == h % 3))

    band = (-1, -1) if window is None else (window - 1, window - 1)
    run(vllm, Meaning(mask_mod=mask, window_size=band), impl_of(vllm, sliding_window=window), layer=layer_of(logical_mask_mod=mask))


def test_a_tree_of_drafts(vllm: Any) -> None:
    """A mask with a trailing argument reads the batch's lengths: drafts see the cached keys and their ancestors in the tree."""
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    lengths = ((4, 40), (4, 4), (1, 9), (4, 23))

    def mask(b: Any, h: Any, q: Any, kv: Any, aux_tensors: Any) -> Any:
        seq_lens, starts = aux_tensors
        count = starts[b + 1] - starts[b]
        first = seq_lens[b] - count
        i, j = (q - first).clamp(0, 3), (kv - first).clamp(0, 3)
        return (kv < first) | torch.where(count == 4, tree[i, j], kv <= q)

    def expected(b: Any, h: Any, q: Any, kv: Any) -> Any:
        count, total = lengths[b]
        if count != 4:
            return kv <= q
        first = total - count
        return (kv < first) | tree[(q - first).clamp(0, 3), (kv - first).clamp(0, 3)]

    run(vllm, Meaning(mask_mod=expected), impl_of(vllm), layer=layer_of(logical_mask_mod=mask), lengths=lengths)


def test_a_layers_own_score_mod(vllm: Any) -> None:
    def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (h + 1) * 0.1 * (q - kv) % 3

    run(vllm, Meaning(causal=True, score_mod=score), impl_of(vllm), layer=layer_of(logical_score_mod=score))


@pytest.mark.parametrize("window", [None, 8])
def test_prefixes_that_all_see(vllm: Any, window: int | None) -> None:
    """R-SWA: the prompt stays visible, of later tokens the last few."""
    lengths, prefix = ((1, 33), (4, 50), (1, 1), (20, 64)), [20, 41, 1, 50]
    of = batch_of(vllm, lengths, padding=(0, 0), rswa_prefix_lens=torch.tensor(prefix))
    builder = builder_of(vllm, rswa_window=5)
    metadata = builder.build(0, of.common)
    assert not builder.supports_draft_decode_metadata_update
    kv_cache = empty_cache(vllm, of, "LBNHC", torch.float32, 2 * HEAD_SIZE)
    band = (-1, -1) if window is None else (window - 1, 0)
    meaning = Meaning(causal=True, window_size=band, mask_mod=lambda b, h, i, j: (j < prefix[b]) | (i - j < 5))
    judge(step(impl_of(vllm, sliding_window=window), layer_of(), of, kv_cache, metadata), of, meaning)


@pytest.mark.parametrize(("window", "clamps"), [(None, False), (6, False), (6, True)])
def test_images_that_see_themselves(vllm: Any, window: int | None, clamps: bool) -> None:
    """PrefixLM: the tokens of an image see each other, those of a later chunk the earlier ones too."""
    lengths = ((30, 30), (12, 40), (1, 35), (9, 9))
    ranges: dict[int, list[tuple[int, int]]] = {0: [(3, 12), (20, 29)], 1: [(25, 39)], 2: [(2, 20)], 3: [(4, 4)]}
    of = batch_of(vllm, lengths, mm_req_doc_ranges=ranges)
    metadata = builder_of(vllm, is_mm_prefix_lm=True).build(0, of.common)
    kv_cache = empty_cache(vllm, of, "LBHNC", torch.float32, 2 * HEAD_SIZE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = (j <= i) if window is None else (j <= i) & (i - j < window)
        for first, last in ranges[b]:
            inside = (i >= first) & (i <= last) & (j >= first) & (j <= last)
            near = near | (inside & (i - j < window) if clamps and window is not None else inside)
        return near

    layer = layer_of(mm_prefix_clamp_sliding_window=clamps)
    judge(step(impl_of(vllm, sliding_window=window), layer, of, kv_cache, metadata), of, Meaning(mask_mod=mask))

    def own(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i + j) % 2 == 0

    def both(b: Any, h: Any, i: Any, j: Any) -> Any:
        near = own(b, h, i, j) if window is None else own(b, h, i, j) & (i - j < window) & (j - i < window)
        for first, last in ranges[b]:
            inside = (i >= first) & (i <= last) & (j >= first) & (j <= last)
            near = near | (inside & (i - j < window) if clamps and window is not None else inside)
        return near

    layer.logical_mask_mod = own
    judge(step(impl_of(vllm, sliding_window=window), layer, of, kv_cache, metadata), of, Meaning(mask_mod=both))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kind", ["ENCODER", "ENCODER_ONLY"])
def test_encoders_read_no_cache(vllm: Any, kind: str, window: int | None) -> None:
    of = batch_of(vllm, [(9, 9), (1, 1), (30, 30), (0, 0)], causal=False)
    impl = impl_of(vllm, attn_type=vllm.api.AttentionType[kind], sliding_window=window)
    metadata = builder_of(vllm).build(0, of.common)
    band = (-1, -1) if window is None else (window - 1, window - 1)
    judge(step(impl, layer_of(), of, torch.empty(0), metadata), of, Meaning(window_size=band))


def test_cross_attention(vllm: Any) -> None:
    """More keys than queries or fewer, none of which is hidden; vLLM writes the encoder's keys once."""
    of = batch_of(vllm, [(3, 20), (1, 20), (1, 7)], causal=False)
    impl = impl_of(vllm, attn_type=vllm.api.AttentionType.ENCODER_DECODER)
    metadata = builder_of(vllm).build(0, of.common)
    kv_cache = empty_cache(vllm, of, "LBNHC", torch.float32, 2 * HEAD_SIZE)
    judge(step(impl, layer_of(), of, kv_cache, metadata), of, Meaning())
    with pytest.raises(ValueError, match="cross attention has a logical_mask_mod"):
        impl.forward(layer_of(logical_mask_mod=lambda b, h, q, kv: q >= kv), of.query, None, None, kv_cache, metadata, of.query)


def test_a_run_without_metadata(vllm: Any) -> None:
    """vLLM measures memory so."""
    output = torch.ones(3, HEADS, HEAD_SIZE)
    assert not impl_of(vllm).forward(layer_of(), output, None, None, torch.empty(0), None, output).any()


def test_what_is_refused(vllm: Any) -> None:
    impl, x = impl_of(vllm), torch.ones(3, HEADS, HEAD_SIZE)
    with pytest.raises(NotImplementedError, match="not quantised"):
        impl.forward(layer_of(), x, None, None, torch.empty(0), None, x, torch.ones(()))
    with pytest.raises(ValueError, match="sinks has shape"):
        impl_of(vllm, sinks=torch.ones(3))
    with pytest.raises(ValueError, match="kv_cache_dtype='nvfp4'"):
        impl_of(vllm, kv_cache_dtype="nvfp4")
    metadata = builder_of(vllm).build(0, batch_of(vllm).common)
    with pytest.raises(ValueError, match=r"vLLM 0\.33"):
        impl.forward(layer_of(), x, None, None, torch.zeros(2, 9, 16, 2, 32), metadata, x)


needs_scales = pytest.mark.skipif(
    "k_descale" not in inspect.signature(anyattn.flash_attn_with_kvcache).parameters, reason="this anyattn reads no 8-bit caches"
)
QUANTISED = [name for name, stored in FORMATS.items() if stored.dtype is not None]


@needs_scales
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize("page_size", [16, 13])
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_caches(vllm: Any, name: str, page_size: int, layout: str) -> None:
    """Beside the definition on the numbers that the cache holds."""
    scales = {"k_scale": 0.37, "v_scale": 1.7}
    quantised(vllm, name, impl_of(vllm, kv_cache_dtype=name), layer_of(**scales), Meaning(causal=True), page_size, layout)


@needs_scales
def test_scales_of_heads(vllm: Any) -> None:
    layer = layer_of(k_scale=torch.tensor([0.5, 0.3]), v_scale=torch.tensor([2.0, 0.7]))
    quantised(vllm, "fp8", impl_of(vllm, kv_cache_dtype="fp8"), layer, Meaning(causal=True))


@needs_scales
@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_caches_with_options(vllm: Any, name: str) -> None:
    sinks = torch.randn(HEADS, generator=torch.Generator().manual_seed(3))
    options = {"sliding_window": 20, "sinks": sinks, "logits_soft_cap": 3.0, "alibi_slopes": SLOPES}
    meaning = Meaning(causal=True, window_size=(19, 0), sink=sinks, softcap=3.0, alibi_slopes=torch.tensor(SLOPES))
    quantised(vllm, name, impl_of(vllm, kv_cache_dtype=name, **options), layer_of(), meaning)

    def mask(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return (kv <= q) & (kv % 3 == h % 3)

    quantised(vllm, name, impl_of(vllm, kv_cache_dtype=name), layer_of(logical_mask_mod=mask), Meaning(mask_mod=mask))


def quantised(vllm: Any, name: str, impl: Any, layer: Any, meaning: Meaning, page_size: int = 16, layout: str = "LBNHC") -> None:
    of = batch_of(vllm, page_size=page_size, dtype=torch.bfloat16)
    kv_cache = cache_of(vllm, of, layout, name, page_size)
    metadata = builder_of(vllm, page_size).build(0, of.common)
    out = step(impl, layer, of, kv_cache, metadata)
    judge(out, held_by(of, kv_cache, layer, name), meaning, f"{name} {layout}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, lambda b, h, q, kv: kv <= q])
def test_the_output_is_vllms_own_buffer(vllm: Any, mask: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has the queries' dtype; and rows of padding stay as they are."""
    given: list[Any] = []
    own = anyattn.flash_attn_with_kvcache
    noted = lambda *rows, **options: (given.append(options.get("out")), own(*rows, **options))[1]
    monkeypatch.setattr(anyattn, "flash_attn_with_kvcache", noted)
    of = batch_of(vllm, dtype=torch.bfloat16, padding=(3, 0))
    metadata = builder_of(vllm, 16).build(0, of.common)
    kv_cache = empty_cache(vllm, of, "LBNHC", torch.bfloat16, 2 * HEAD_SIZE, 16)
    layer, impl = layer_of(**({} if mask is None else {"logical_mask_mod": mask})), impl_of(vllm)
    output = torch.full(of.query.shape, 7.0, dtype=dtype)
    with torch.inference_mode():
        write(impl, layer, of, kv_cache)
        found = impl.forward(layer, of.query, of.key, of.value, kv_cache, metadata, output)
    tokens = metadata.num_actual_tokens
    assert found is output and tokens < len(output) and (output[tokens:] == 7.0).all() and not (output[:tokens] == 7.0).all()
    (out,) = given
    assert (out is None) is (dtype is torch.float32) and (out is None or out.data_ptr() == output.data_ptr())
