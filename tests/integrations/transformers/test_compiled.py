"""``torch.compile`` as one graph, ``generate`` with a compiled decoding step, and ``torch.export``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache, StaticCache

from anyattn.custom_ops import dynamo
from anyattn.integrations.transformers import NAME
from tests.support.covering import few
from tests.support.transformers_models import IS_FIVE, decoder, generated, logits, padded, tokens

# gpt-oss of Transformers 4 loops over the experts that were hit, which is no graph whatever the attention
GPT_OSS = pytest.param("gpt_oss", marks=pytest.mark.skipif(not IS_FIVE, reason="its experts are no graph in Transformers 4"))


def _in_turn(*names: Any, every: int = 1) -> list[Any]:
    """Every name, or one of ``every``, with one of two ways, in turn; the others in ``make test-long``."""
    found = []
    for i, name in enumerate(names):
        plain, marks = (name, []) if isinstance(name, str) else (name.values[0], [*name.marks])
        for way in (False, True):
            found.append(pytest.param(plain, way, marks=[*marks, pytest.mark.slow] if (i // every + way) % 2 or i % every else marks))
    return found


def _counter() -> CompileCounterWithBackend:
    torch._dynamo.reset()
    dynamo.run_uncompiled(False)
    return CompileCounterWithBackend("aot_eager")


def _config(counter: CompileCounterWithBackend) -> Any:
    from transformers import CompileConfig

    # generate copies its settings, and with them a counter that is no function
    config = CompileConfig(fullgraph=True, backend=lambda graph, inputs: counter(graph, inputs), mode=None)
    config._compile_all_devices = True
    return config


@pytest.mark.parametrize(("name", "is_padded"), _in_turn("gemma2", "llama", GPT_OSS, every=2))
def test_forward_is_one_graph(name: str, is_padded: bool) -> None:
    model, ids = decoder(name), tokens(2, 11)
    mask = padded(2, 11, [11, 6]) if is_padded else None
    expected = logits(model, NAME, input_ids=ids, attention_mask=mask, use_cache=False)
    counter = _counter()
    found = torch.compile(model, backend=counter, fullgraph=True)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert counter.frame_count == 1
    keep = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    assert torch.equal(found[keep].argmax(-1), expected[keep].argmax(-1))


@pytest.mark.parametrize("name", few(["llama", "mistral"], "mistral"))
def test_training_step_is_one_graph(name: str) -> None:
    model, ids = decoder(name), tokens(2, 11)
    model.set_attn_implementation(NAME)

    def loss() -> torch.Tensor:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    loss().backward()
    eager = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    counter = _counter()
    torch.compile(loss, backend=counter, fullgraph=True)().backward()
    assert counter.frame_count == 1
    for n, p in model.named_parameters():
        assert torch.nn.functional.cosine_similarity(p.grad.flatten(), eager[n].flatten(), dim=0) > 1 - 1e-6


@pytest.mark.parametrize("name", few(["llama", "mistral", GPT_OSS], "mistral"))
def test_decoding_with_a_static_cache_is_one_graph(name: str) -> None:
    """The user compiles the model: masks are described inside the graph, the cache's length is a tensor."""
    model, ids = decoder(name), tokens(2, 6)
    model.set_attn_implementation(NAME)
    steps = 5
    with torch.no_grad():
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False, cache_implementation="static"
        )
        cache = StaticCache(config=model.config, max_cache_len=24)
        found = [ids]
        out = model(input_ids=ids, past_key_values=cache, **_positions(0, 6))
        compiled = torch.compile(model, backend=_counter(), fullgraph=True)
        for step in range(steps):
            found.append(out.logits[:, -1:].argmax(-1))
            out = compiled(input_ids=found[-1], past_key_values=cache, **_positions(6 + step, 1))
    assert torch.equal(torch.cat(found, 1), expected)


def _positions(first: int, count: int) -> dict[str, Any]:
    return {} if IS_FIVE else {"cache_position": torch.arange(first, first + count)}


@pytest.mark.parametrize(("name", "is_padded"), _in_turn("llama", "gemma2", "mistral", GPT_OSS, every=4))
def test_generate_with_a_compiled_step(name: str, is_padded: bool) -> None:
    model, ids = decoder(name), tokens(2, 6)
    mask = padded(2, 6, [6, 3]) if is_padded else None
    counter = _counter()
    config = _config(counter)
    found = generated(model, NAME, ids, mask, cache_implementation="static", compile_config=config)
    assert counter.frame_count > 0
    assert torch.equal(found, generated(model, "eager", ids, mask))


@pytest.mark.slow
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_compiled_step_is_compiled_as_rarely_as_with_sdpa(is_padded: bool) -> None:
    ids = tokens(2, 6)
    mask = padded(2, 6, [6, 3]) if is_padded else None
    graphs = []
    for how in (NAME, "sdpa"):
        counter = _counter()
        model, config = decoder("mistral"), _config(counter)
        for _ in range(2):
            generated(model, how, ids, mask, cache_implementation="static", compile_config=config, new=8)
        graphs.append(counter.frame_count)
    assert graphs[0] <= graphs[1]


@pytest.mark.parametrize(("name", "is_strict"), _in_turn("gemma2", "llama", "mistral", GPT_OSS, every=2))
def test_export(name: str, is_strict: bool) -> None:
    model, ids = decoder(name), tokens(2, 11)
    expected = logits(model, NAME, input_ids=ids, use_cache=False)
    torch._dynamo.reset()
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=is_strict)
        found = program.module()(input_ids=ids, use_cache=False).logits
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.slow
def test_a_growing_cache_may_be_compiled() -> None:
    model, ids = decoder("mistral"), tokens(2, 9)
    model.set_attn_implementation(NAME)
    torch._dynamo.reset()
    with torch.no_grad():
        caches = [DynamicCache(config=model.config), DynamicCache(config=model.config)]
        compiled = torch.compile(model, backend="aot_eager", dynamic=True)
        for call, cache in zip((model, compiled), caches, strict=True):
            call(input_ids=ids[:, :6], past_key_values=cache)
        for at in range(6, 9):
            pair = [
                call(input_ids=ids[:, at : at + 1], past_key_values=c).logits for call, c in zip((model, compiled), caches, strict=True)
            ]
            assert torch.equal(*[x.argmax(-1) for x in pair])
