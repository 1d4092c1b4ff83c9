"""Continuous batching of Transformers with ``paged|anyattn``: the answers are those of ``generate`` with eager attention, one by one."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import anyattn
from anyattn.integrations import transformers as integration
from anyattn.integrations.transformers import paged
from tests.integrations.transformers.tiny_decoders import IS_4, KINDS, WINDOW, batched, batching, decoder, one_by_one, prompts
from tests.support.covering import few
from tests.support.limits import HANG

NEW = 12
needs_5 = pytest.mark.skipif(IS_4, reason="Transformers 4.57 has no such thing")


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


class Calls:
    """What anyattn's entry points were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, list[dict[str, Any]]] = {}
        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache"):
            monkeypatch.setattr(anyattn, name, self._recording(name, getattr(anyattn, name)))

    def _recording(self, name: str, original: Any) -> Any:
        self.of[name] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            self.of[name].append({key: x.clone() if isinstance(x, torch.Tensor) else x for key, x in kwargs.items()})
            return original(*args, **kwargs)

        return call


def use(model: Any, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # 5.23 strips "paged|" and says so
        model.set_attn_implementation(name)


@pytest.mark.parametrize("kind", few(KINDS, "llama", "gemma2", "gpt_oss"))
def test_answers_are_those_of_eager(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts longer than a batch, than a page and than the window: prefill in chunks, mixed with decoding."""
    model, texts = decoder(kind), prompts((1, 5, 40, 17, 70, 3))
    expected = one_by_one(model, texts, NEW)
    assert sum(len(set(answer)) for answer in expected) > 25, "the same token again and again would compare little"
    if IS_4 and kind != "llama":
        pytest.skip("Transformers 4.57 loses keys of requests longer than the window")
    use(model, "paged|anyattn")
    before = model.config._attn_implementation
    calls = Calls(monkeypatch)
    assert batched(model, texts, NEW) == expected
    assert model.config._attn_implementation == before, "the manager sets the user's implementation again"

    mixed = [c["cu_seqlens_q"].diff() for c in calls.of["flash_attn_varlen_func"]]
    assert any((lengths == 1).any() and (lengths > 1).any() for lengths in mixed), "no batch mixed prefill and decoding"
    windows = {c["window_size"] for c in calls.of["flash_attn_varlen_func"]}
    expected_windows = {"llama": {(-1, -1)}, "mistral": {(WINDOW - 1, 0)}}
    assert windows == expected_windows.get(kind, {(-1, -1), (WINDOW - 1, 0)})
    has_tables = kind == "llama" and not IS_4
    assert bool(calls.of["flash_attn_with_kvcache"]) == has_tables, "block tables are for models of full attention alone"


@pytest.mark.skipif(not IS_4, reason="for Transformers 4.57")
@pytest.mark.parametrize("kind", KINDS)
def test_4_57_within_the_window(kind: str, recwarn: pytest.WarningsRecorder) -> None:
    model, texts = decoder(kind), prompts((1, 4, 2, 3))
    expected = one_by_one(model, texts, WINDOW - 4)
    use(model, "paged|anyattn")
    assert batched(model, texts, WINDOW - 4, max_batch_tokens=5) == expected
    assert any("wrong cached keys" in str(w.message) for w in recwarn) == (kind != "llama")


@needs_5
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_no_mask_is_made(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching import input_outputs

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dense mask was filled")

    monkeypatch.setattr(input_outputs, "build_attention_mask", refuse)
    seen = []
    original = input_outputs.ContinuousBatchingIOs.get_model_kwargs

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(self, *args, **kwargs)
        seen.append((self.attention_mask, found["attention_mask"], found.get("is_causal", True)))
        return found

    monkeypatch.setattr(input_outputs.ContinuousBatchingIOs, "get_model_kwargs", watched)
    model, texts = decoder(kind), prompts((30, 4))
    expected = one_by_one(model, texts, NEW)
    use(model, "anyattn")
    assert batched(model, texts, NEW) == expected
    assert seen and set(seen) == {(None, None, True)}


@needs_5  # 4.57 fails where a pool is too small
@pytest.mark.parametrize("kind", few(["llama", "mistral"], "llama"))
def test_a_pool_too_small_for_all(kind: str) -> None:
    """Requests are evicted and start again, on pages that hold the keys of others."""
    model, texts = decoder(kind), prompts((20, 21, 22, 23), seed=3)
    expected = one_by_one(model, texts, NEW)
    use(model, "paged|anyattn")
    assert batched(model, texts, NEW, num_blocks=8) == expected


@needs_5
@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_batches_that_are_filled_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for CUDA graphs and compiled steps: more rows than there are tokens, more requests than there are, tables of -1."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner

    original = ModelRunner.__init__

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.pad_inputs = True

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    model, texts = decoder(kind), prompts((1, 5, 40, 17, 70, 3))
    expected = one_by_one(model, texts, NEW)
    use(model, "anyattn")
    calls = Calls(monkeypatch)
    assert batched(model, texts, NEW, q_padding_interval_size=16, kv_padding_interval_size=32) == expected
    assert any(c["cu_seqlens_q"][-1] == c["cu_seqlens_q"][-2] for c in calls.of["flash_attn_varlen_func"])


@needs_5
def test_shared_prefixes() -> None:
    model = decoder("llama")
    stem = prompts((40,), seed=5)[0]
    texts = [stem + tail for tail in prompts((3, 9, 1), seed=6)]
    expected = one_by_one(model, texts, NEW)
    use(model, "anyattn")
    assert batched(model, texts, NEW, max_batch_tokens=64) == expected


@needs_5
def test_requests_that_come_later() -> None:
    model, texts = decoder("gemma3"), prompts((12, 33, 2), seed=7)
    expected = one_by_one(model, texts, NEW)
    use(model, "anyattn")
    with model.continuous_batching_context_manager(
        generation_config=transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=batching(page_size=8, num_blocks=64, max_batch_tokens=32),
    ) as manager:
        found = {}
        for text in texts:  # the next is sent when the one before has begun to answer
            name = manager.add_request(text, streaming=True)
            while name not in found:
                result = manager.get_result(timeout=HANG)
                assert result is not None, "no answer"
                found[result.request_id] = result
        while not all(result.is_finished() for result in found.values()):
            result = manager.get_result(timeout=HANG)
            assert result is not None, "no answer"
            found[result.request_id] = result
    assert [result.generated_tokens for result in found.values()] == expected


@needs_5
@pytest.mark.parametrize("name", ["sdpa", "paged|eager"])
def test_other_implementations_stay(name: str) -> None:
    integration.register()
    model, texts = decoder("llama"), prompts((5, 18))
    expected = one_by_one(model, texts, NEW)
    use(model, name)
    assert batched(model, texts, NEW) == expected


@needs_5
def test_registering_again_wraps_nothing_again() -> None:
    from transformers.generation.continuous_batching import continuous_api, initialization

    integration.register()
    for function in (
        continuous_api.ContinuousBatchingManager.switch_to_cb_friendly_attn,
        initialization.is_flash_attention_requested,
        initialization.ensure_decode_fast_path_is_available,
    ):
        assert not hasattr(function._anyattn_wraps, "_anyattn_wraps")


@needs_5
def test_an_unknown_release_is_refused_in_the_callers_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the manager's thread would leave empty answers."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    monkeypatch.setattr(PagedAttentionCache, "update", lambda self, states: states)
    model = decoder("llama")
    use(model, "anyattn")
    with pytest.raises(RuntimeError, match=r"transformers [\d.]+ has changed .*use generate\(\) in place of generate_batch"):
        batched(model, prompts((3,)), NEW)


def test_refusals() -> None:
    model = decoder("llama")
    model.config._attn_implementation = paged.IMPLEMENTATION
    with torch.no_grad(), pytest.raises(ValueError, match=r"'anyattn_paged' was called without a paged cache.*set_attn_implementation"):
        model(torch.tensor([[3, 4]]))
    layer, cache = model.model.layers[0].self_attn, object()
    q = torch.zeros(1, 4, 2, 16)
    for option, words in (
        ({"dropout": 0.1}, r"dropout=0\.1.*model\.eval"),
        ({"is_causal": False}, "is_causal=False.*paged|eager"),
        ({"position_bias": q}, "position_bias is not supported"),
    ):
        with pytest.raises(ValueError, match=words):
            paged.paged_attention(layer, q, q[:, :2], q[:, :2], None, cache=cache, **option)
