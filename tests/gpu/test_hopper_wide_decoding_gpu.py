"""Decoding of wide heads by the Hopper kernel: heads that fill row tiles, in pairs of thread blocks and alone, and split keys."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.backends.hopper import make_config
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

DV, ROOM = 512, 1024
LENGTHS = (1000, ROOM, 0, 1, 64, 65)


class Cache:
    """One cache of keys and values of a K/V head. Rows behind those in use hold NaN: the first ``new`` of them are appended by a call."""

    def __init__(self, page: int, d: int = 576, lengths: tuple[int, ...] = LENGTHS, new: int = 0, dtype: torch.dtype = torch.bfloat16):
        self.generator, self.page, self.d, self.new = torch.Generator(DEVICE).manual_seed(page + d), page, d, new
        self.rows = self.random(len(lengths), ROOM, 1, d).to(dtype)
        self.used = torch.empty(len(lengths), dtype=torch.int32, device=DEVICE)
        self.held, self.options = torch.empty_like(self.rows), {}
        if page:
            self.order = torch.randperm(len(lengths) * ROOM // page, generator=self.generator, device=DEVICE)
            self.held = self.held.view(-1, page, 1, d)
            self.options = {"page_table": self.order.argsort().int().view(len(lengths), -1)}
        self.fill(lengths)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=DEVICE)

    def fill(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.used.copy_(torch.tensor(lengths) - self.new)
        hidden = torch.arange(ROOM, device=DEVICE)[None, :] >= self.used[:, None]
        rows = self.rows.masked_fill(hidden[..., None, None], math.nan)
        self.held.copy_(rows.view(-1, self.page, 1, self.d)[self.order] if self.page else rows)

    def call(self, q: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        new = {"k": torch.stack([self.rows[b, n - self.new : n] for b, n in enumerate(self.lengths)])} if self.new else {}
        given = {
            "cache_seqlens": self.used,
            "return_lse": True,
            "backend": judging.BACKEND,
            "causal": True,
            **self.options,
            **new,
            **options,
        }
        found: tuple[Tensor, Tensor] = anyattn.flash_attn_with_kvcache(q, self.held, self.held[..., :DV], **given)
        return found

    def judge(self, q: Tensor, results: tuple[Tensor, Tensor], left: int = ROOM, sink: Tensor | None = None) -> None:
        """q: (B, S, H, D). left: keys before its own that a query sees."""
        out, lse = results
        if not judging.RUNS:
            return
        for b, n in enumerate(self.lengths):
            if n == 0:
                wanted = torch.full_like(lse[b], -math.inf) if sink is None else sink[:, None].expand_as(lse[b])
                assert not out[b].any()
                budget.check(f"lse of entry {b}", lse[b][None], wanted[None].double(), wanted[None])
                continue
            k, shift = self.rows[b, :n].transpose(0, 1)[None], n - q.shape[1]
            given = (q[b].transpose(0, 1)[None], k, k[..., :DV])
            mods: dict[str, Any] = {"mask": lambda _, h, i, j, s=shift: (i + s >= j) & (i + s - j <= left)}
            mods |= {} if sink is None else {"sink": sink}
            right, rounded = (f(*given, **mods) for f in (oracle.attention, oracle.same_dtype))
            noise = functools.cache(functools.partial(rounding, *given, **mods))
            budget.check(f"entry {b}", out[b].transpose(0, 1)[None], right.out, rounded.out, lambda noise=noise: noise().out)
            budget.check(f"lse of entry {b}", lse[b][None], right.lse, rounded.lse, lambda noise=noise: noise().lse)


def queries(cache: Cache, heads: int, tokens: int = 1) -> Tensor:
    return cache.random(len(cache.lengths), tokens, heads, cache.d).to(cache.rows.dtype)


@pytest.mark.parametrize("splits", [0, 1, 2, 3])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("heads", [64, 128])
def test_pages_and_splits(heads: int, page: int, splits: int) -> None:
    cache = Cache(page)
    q = queries(cache, heads)
    cache.judge(q, cache.call(q, num_splits=splits))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("page", [0, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_numbers_of_keys_that_are_wrong(dtype: torch.dtype, page: int) -> None:
    """They mean all keys that there is room for, or none."""
    cache = Cache(page)
    q, rows = queries(cache, 64), cache.rows.masked_fill(cache.rows.isnan(), 1.0)
    cache.held.copy_(rows.view(-1, page, 1, cache.d)[cache.order] if page else rows)
    given = [torch.tensor(n, device=DEVICE).to(dtype) for n in ((-5, ROOM + 3, 2**31 - 1, 7, -(2**31), 0), (0, ROOM, ROOM, 7, 0, 0))]
    for splits in (1, 3):
        found, wanted = (cache.call(q, cache_seqlens=n, num_splits=splits) for n in given)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_more_splits_than_tiles() -> None:
    cache = Cache(64, lengths=(200, 0, 65))
    q = queries(cache, 128)
    cache.judge(q, cache.call(q, num_splits=30))


@pytest.mark.parametrize("heads", [16, 100, 128, 130])
@pytest.mark.parametrize("tokens", [2, 3])
def test_several_tokens(tokens: int, heads: int) -> None:
    cache = Cache(64, lengths=(1000, ROOM, 3, 64, 65))
    q = queries(cache, heads, tokens)
    for splits in (1, 3):
        cache.judge(q, cache.call(q, num_splits=splits))


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [64, 128])
def test_windows_and_sinks(heads: int, splits: int) -> None:
    cache = Cache(64)
    q, sink = queries(cache, heads), torch.linspace(-2, 3, heads, device=DEVICE)
    cache.judge(q, cache.call(q, num_splits=splits, window_size=(70, 0), sink=sink), 70, sink)
    cache.judge(q, cache.call(q, num_splits=splits, sink=sink), sink=sink)


@pytest.mark.parametrize("page", [2, 64])
def test_thread_blocks_alone(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_config, "_pairs", lambda *_: False)
    anyattn.call_cache.attention.clear()
    cache = Cache(page, lengths=(200, 0, 65))
    q = queries(cache, 128)
    for splits in (1, 3):
        cache.judge(q, cache.call(q, num_splits=splits))
    anyattn.call_cache.attention.clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_512_dimensions(dtype: torch.dtype) -> None:
    cache = Cache(64, 512, dtype=dtype)
    q = queries(cache, 128)
    cache.judge(q, cache.call(q, num_splits=2))


@pytest.mark.parametrize("page", [0, 64])
def test_appended_keys_are_seen(page: int) -> None:
    """Several times, so that warm calls and replays append too."""
    cache = Cache(page, lengths=(100, 500, 3, ROOM - 6), new=1)
    for step in range(6):
        cache.fill(tuple(n + step for n in (100, 500, 3, ROOM - 6)))
        q = queries(cache, 128)
        cache.judge(q, cache.call(q, num_splits=2))


def test_packed_queries() -> None:
    cache = Cache(64, lengths=(1000, 700, 65))
    q = queries(cache, 128, 2)
    spare = cache.random(3, 128, cache.d).to(q.dtype)  # rows of no sequence
    ends = torch.tensor([0, 2, 4, 6], dtype=torch.int32, device=DEVICE)
    for splits in (1, 3):
        out, lse = cache.call(torch.cat([q.flatten(0, 1), spare]), num_splits=splits, cu_seqlens_q=ends, max_seqlen_q=2)
        cache.judge(q, (out[:6].view(3, 2, 128, DV), lse[:, :6].view(128, 3, 2).transpose(0, 1)))
        assert not judging.RUNS or (not out[6:].any() and bool((lse[:, 6:] == -math.inf).all()))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("splits", [0, 3])
def test_a_graph_replays_with_other_lengths(splits: int) -> None:
    cache = Cache(64)
    q = queries(cache, 128)
    cache.call(q, num_splits=splits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = cache.call(q, num_splits=splits)
    for lengths in (LENGTHS, LENGTHS[::-1], (5,) * len(LENGTHS), (ROOM,) * len(LENGTHS)):
        cache.fill(lengths)
        graph.replay()
        torch.cuda.synchronize()
        cache.judge(q, found)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("heads", [64, 128])
def test_reruns_agree_bitwise(heads: int) -> None:
    cache = Cache(64)
    q = queries(cache, heads)
    first = cache.call(q, num_splits=3)
    assert all(torch.equal(a, b) for _ in range(30) for a, b in zip(first, cache.call(q, num_splits=3), strict=True))
