"""Problems with more row tiles than thread blocks, on a GPU.

A block computes several tiles in turn, with many visits, with one and with none, and ends one while the next begins. The other tests'
problems give most blocks one row tile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, MODE, Capturing, both, judge, qkv, same

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

BATCH, HEADS, LENGTH = (8, 16, 512) if MODE == "gpu" else (1, 2, 512)
_SLOPES = torch.linspace(0.02, 0.3, 16)
_ALIBI = Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s - t[h] * (i - j).abs())(to(_SLOPES)))
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(100, 0),
    "behind": masks.causal(-200),  # the first rows see nothing
}
LISTED: dict[str, Any] = {
    "rows without keys": lambda b, h, i, j: (i // 128 % 3 != 1) & (i // 50 == j // 50),
    "one tile each": lambda b, h, i, j: i // 128 == j // 128,
    "islands": lambda b, h, i, j: ((i // 100 + h) % 2 == 0) & ((j // 70) % 2 == 0) & (j <= i),
}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_bands(name: str, d: int) -> None:
    inputs = qkv(BATCH, HEADS, HEADS, LENGTH, LENGTH, d=d)
    first = judge(inputs, mask=MASKS[name], label=name)
    for _ in range(5):
        assert same(first, judging.flex(*inputs, mask=MASKS[name], return_lse=True)[0])


@pytest.mark.parametrize("name", LISTED)
def test_lists(name: str) -> None:
    inputs, mask = qkv(BATCH, HEADS, HEADS, LENGTH, LENGTH), LISTED[name]
    by = (1, HEADS if name == "islands" else 1)
    lists = anyattn.create_block_mask(both(mask)[0], *by, LENGTH, LENGTH, device=DEVICE)
    first = judge(inputs, mask=mask, block_mask=lists, label=name)
    for _ in range(5):
        assert same(first, judging.flex(*inputs, block_mask=lists, return_lse=True)[0])


@pytest.mark.parametrize("name", ["full", "causal"])
def test_score_mods_and_sinks(name: str) -> None:
    """The score mod takes the registers of the row tile that ends, which is therefore finished before."""
    inputs = qkv(BATCH, HEADS, HEADS, LENGTH, LENGTH)
    judge(inputs, score=_ALIBI, mask=MASKS[name], label="alibi")
    judge(inputs, mask=MASKS[name], sink=torch.linspace(-2, 3, HEADS), label="sink")
    judge(inputs, score=lambda s, b, h, i, j: 5 * torch.tanh(s / 5), mask=MASKS[name], label="softcap")
