"""Decoding at 576 and 512 dimensions on a GPU: one cache for keys and values and two, pages, many heads, appended keys, the batch mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, MODE

pytestmark = pytest.mark.gpu
judging.needs_the_backend("triton")

D, DV, ROWS = 576, 512, 1024
LENGTHS = (700, ROWS, 3)


def caches(is_one: bool, stored: torch.dtype, page: int, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
    """k and v (sequences, ROWS, 1, dims) by position, the caches that hold them, and the options of a call."""
    k = torch.randn(len(LENGTHS), ROWS, 1, D, generator=g, device=DEVICE).to(stored)
    v = k[..., :DV] if is_one else torch.randn(len(LENGTHS), ROWS, 1, DV, generator=g, device=DEVICE).to(stored)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE), "backend": judging.BACKEND}
    if not page:
        return k, v, k, v, options
    order = torch.randperm(len(LENGTHS) * ROWS // page, generator=g, device=DEVICE)
    k_pages = pages_of(k, page, order)
    v_pages = k_pages[..., :DV] if is_one else pages_of(v, page, order)
    return k, v, k_pages, v_pages, options | {"page_table": order.argsort().int().view(len(LENGTHS), -1)}


def pages_of(cache: Tensor, page: int, order: Tensor) -> Tensor:
    as_bytes = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache  # torch does not index all 8-bit types
    return as_bytes.view(-1, page, *as_bytes.shape[2:])[order].view(cache.dtype)


def judged(out: Tensor, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...]) -> None:
    for b, n in enumerate(lengths):
        own = [x.transpose(0, 1)[None] for x in (q[b], k[b, :n].to(q.dtype), v[b, :n].to(q.dtype))]
        right, rounded = oracle.attention(*own), oracle.same_dtype(*own)
        budget.check(f"entry {b}", out[b].transpose(0, 1)[None], right.out, rounded.out, rounding(*own).out)


@pytest.mark.parametrize("heads", [3, 16, 128])
@pytest.mark.parametrize("page", [0, 16, 64, 256])
@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_decoding(stored: torch.dtype, is_one: bool, page: int, heads: int) -> None:
    g = torch.Generator(DEVICE).manual_seed(heads + page)
    k, v, *held, options = caches(is_one, stored, page, g)
    q = torch.randn(len(LENGTHS), 1, heads, D, generator=g, device=DEVICE).bfloat16()
    judged(anyattn.flash_attn_with_kvcache(q, *held, **options), q, k, v, LENGTHS)


@pytest.mark.parametrize("page", [0, 64])
def test_keys_alone_are_appended(page: int) -> None:
    """Several times, so that warm calls and replays write too."""
    g = torch.Generator(DEVICE).manual_seed(page)
    k, v, *held, options = caches(True, torch.bfloat16, page, g)
    lengths = [100, 500, 3]
    for _ in range(4):
        new = torch.stack([k[b, n : n + 1] for b, n in enumerate(lengths)])
        held[0].view(-1, *held[0].shape[2:])[places(options, lengths, page)] = float("nan")
        q = torch.randn(len(lengths), 1, 16, D, generator=g, device=DEVICE).bfloat16()
        options["cache_seqlens"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        out = anyattn.flash_attn_with_kvcache(q, *held, k=new, **options)
        lengths = [n + 1 for n in lengths]
        judged(out, q, k if page else held[0], v if page else held[1], tuple(lengths))


def places(options: dict[str, Any], positions: list[int], page: int) -> list[int]:
    """The rows of a flattened cache at positions of its sequences."""
    if not page:
        return [b * ROWS + n for b, n in enumerate(positions)]
    return [int(options["page_table"][b, n // page]) * page + n % page for b, n in enumerate(positions)]


@pytest.mark.skipif(MODE != "gpu", reason="the CPU's mode has tests of its own")
@pytest.mark.parametrize("is_one", [True, False])
def test_bits_of_decoding_are_those_of_a_prefill(is_one: bool) -> None:
    """One sequence, decoded from pages beside others, and prefilled alone, by values in its keys and apart."""
    g = torch.Generator(DEVICE).manual_seed(1)
    k, v, *held, options = caches(is_one, torch.bfloat16, 64, g)
    rows = torch.randn(1, ROWS, 16, D, generator=g, device=DEVICE).bfloat16()
    alone = anyattn.flash_attn_func(rows, k[1:2], v[1:2].clone(), causal=True, deterministic="batch", backend="triton")
    last = rows[:, -1:]
    q = torch.cat([last * 0.5, last, last * 2])
    out = anyattn.flash_attn_with_kvcache(q, *held, deterministic="batch", **options)
    assert torch.equal(out[1, 0], alone[0, -1])
