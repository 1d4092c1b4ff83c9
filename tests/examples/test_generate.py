"""The decoder of examples/generate.py: a cached batch equals recomputing, whatever the pool, and the comparison would notice if not."""

from __future__ import annotations

from types import ModuleType

import click
import pytest
import torch
from click.testing import CliRunner

import anyattn
from tests.support.examples import example


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return example("generate")


def pool(generate: ModuleType, pages: int, page_size: int) -> anyattn.PagedKVCache:
    return anyattn.PagedKVCache(pages, page_size, generate.HEADS_KV, generate.HEAD_DIM, num_layers=generate.LAYERS, dtype=torch.float32)


def run(generate: ModuleType, pages: int, page_size: int) -> list:
    model, requests, cache = generate.Decoder(0), generate.make_requests(0), pool(generate, pages, page_size)
    for layer in range(generate.LAYERS):
        cache.k_cache(layer).fill_(torch.nan)  # what nobody wrote must not matter
        cache.v_cache(layer).fill_(torch.nan)
    compare = generate.Comparison(model)
    generate.Generator(model, cache, compare).run(requests)
    assert cache.free_pages == pages and compare.count == sum(r.wanted for r in requests)
    assert [len(r.generated) for r in requests] == [r.wanted for r in requests]
    return requests


def test_texts_do_not_depend_on_the_pool(generate: ModuleType) -> None:
    early, long, word, late = run(generate, 14, 8)
    assert [r.starts for r in (early, long, word, late)] == [1, 1, 1, 1]
    assert set(late.pages) <= set(early.pages) and late.reused == len(late.pages) > 3, "a new sequence on the pages of one that ended"
    assert all(len(set(r.generated)) > 3 for r in (early, long, word, late)), "one token again and again would compare little"
    texts = [r.text for r in (early, long, word, late)]
    tight = run(generate, 9, 8)
    assert max(r.starts for r in tight) > 1, "in a smaller pool somebody had to stop"
    assert [r.text for r in tight] == texts
    assert [r.text for r in run(generate, 3, 64)] == texts


def test_a_damaged_cache_is_noticed(generate: ModuleType) -> None:
    """One element of one key of one layer: less than that the comparison need not see."""
    model, cache = generate.Decoder(0), pool(generate, 14, 8)

    class Careless(generate.Generator):
        def _step(self) -> None:
            first = self.running[0]
            if len(first.generated) == 3:
                self.cache.k_cache(1)[int(self.cache.page_table(first.handle)[0, 2]), 5, 1, 7] += 0.01
            super()._step()

    with pytest.raises(click.ClickException, match=r"the logits of token 3 of request 'early' use .* of their error budget"):
        Careless(model, cache, generate.Comparison(model)).run(generate.make_requests(0))


def test_the_comparison_names_the_request(generate: ModuleType) -> None:
    model, requests = generate.Decoder(0), generate.make_requests(0)[:2]
    for request in requests:
        request.text = [*request.prompt, 7]
    with torch.inference_mode():
        good = generate.from_scratch(model, [r.text for r in requests])
        compare = generate.Comparison(model)
        compare(requests, good)
        assert compare.count == 2 and 0 < requests[1].worst <= 1
        wrong = good.clone()
        wrong[1, good[1].argmin()] = 100.0
        with pytest.raises(click.ClickException, match=r"token 1 of request 'long' is \d+ with the cache but \d+ from scratch"):
            compare(requests, wrong)
        for bad in (good * (1 + 1e-4), torch.where(good == good.amin(-1, keepdim=True), torch.nan, good)):
            with pytest.raises(click.ClickException):
                compare(requests, bad)


def test_command(generate: ModuleType) -> None:
    done = CliRunner().invoke(generate.main, [])
    assert done.exit_code == 0, done.output
    assert "all 80 tokens equal" in done.output and "14 of them free" in done.output
    done = CliRunner().invoke(generate.main, ["--pages", "8"])
    assert done.exit_code == 1 and "one request alone needs more" in done.output
