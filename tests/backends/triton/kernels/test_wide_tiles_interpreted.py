"""Hopper's tiles of wide heads in Triton's interpreter: divided products, and dv's own tiles of keys, against the row-wise budget.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.backends.triton import tile_config
from anyattn.call_cache import attention
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import cases, poison
from tests.support.flex_calls import judge

WINDOW = masks.causal() & masks.sliding_window(70, 0)
SHAPE = (1, 2, 1, 100, 150)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tile_config, "capability_of", lambda device: (9, 0))
    attention.clear()
    yield
    attention.clear()


@pytest.mark.parametrize("d", [512, 576])
@pytest.mark.parametrize("is_one", [False, True])
def test_forward_and_backward(d: int, is_one: bool) -> None:
    q, k, v = cases.inputs("normal", cases.Shape(*SHAPE, d, 512), torch.bfloat16, 0)[:3]
    v = k[..., :512] if is_one else v
    judge(q, k, v, mask=WINDOW, backend="triton")
    bias = torch.tensor([0.5, -0.25], dtype=torch.float64)
    judge(q, k, v, score=lambda s, b, h, i, j: s + bias[h] * (i - j) * 0.05, mask=WINDOW, captured=[bias], backend="triton")


@pytest.mark.parametrize("block", [32, 64, 128])
def test_lists_whose_tiles_are_smaller_than_those_of_dv(block: int) -> None:
    q, k, v = cases.inputs("peaky", cases.Shape(*SHAPE, 512, 512), torch.float16, 0)[:3]
    mask = lambda b, h, i, j: ((i // 32 + j // 32) % 2 == 0) & (i % 7 != 3)
    judge(
        q,
        k,
        v,
        mask=mask,
        block_mask=anyattn.create_block_mask(mask, None, None, 100, 150, device="cpu", BLOCK_SIZE=block),
        backend="triton",
    )


def test_asked_tiles() -> None:
    q, k, v = cases.inputs("normal", cases.Shape(*SHAPE, 512, 512), torch.bfloat16, 0)[:3]
    judge(q, k, v, mask=masks.causal(), kernel_options={"tile_m": 64, "tile_n": 16}, backend="triton")
    judge(q, k, v, mask=masks.causal(), kernel_options={"tile_m": 32, "tile_n": 32}, backend="triton")


@pytest.mark.parametrize("page", [0, 64])
def test_decoding_of_many_heads(page: int) -> None:
    """64 heads share a tile, and values are in the keys; the last tile of 64 keys ends behind the sequence."""
    g = torch.Generator().manual_seed(0)
    q, memory = torch.randn(2, 1, 128, 576, generator=g).bfloat16(), torch.randn(6, 64, 1, 576, generator=g).bfloat16()
    tables = {"page_table": torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)} if page else {}
    cache = memory if page else memory.view(2, 192, 1, 576)
    lengths = torch.tensor([70, 192], dtype=torch.int32)
    with poison.enabled():
        out = anyattn.flash_attn_with_kvcache(q, cache, cache[..., :512], cache_seqlens=lengths, backend="triton", **tables)
    for b, n in enumerate(lengths.tolist()):
        held = (memory[tables["page_table"][b].long()].flatten(0, 1) if page else cache[b])[:n]
        given = [x.transpose(0, 1)[None] for x in (q[b], held, held[..., :512])]
        right, plain = oracle.attention(*given), oracle.same_dtype(*given)
        budget.check("out", out[b].transpose(0, 1)[None], right.out, plain.out, rounding(*given).out)
