"""The benchmark of chosen blocks: what it chooses, and that its calls run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks.gpu import chosen
from benchmarks.gpu.chosen import Shape


@pytest.mark.parametrize("block", [(64, 64), (1, 64), (128, 64)])
def test_choices_begin_at_or_before_their_queries(block: tuple[int, int]) -> None:
    shape = Shape(4, 2, 512, block, 3)
    found = chosen.chosen(shape, "cpu")
    rows = torch.arange(found.shape[2])[:, None]
    assert found.shape == (1, 2, 512 // block[0], 3)
    assert bool((found * block[1] <= rows * block[0]).all()) and bool((found >= -1).all())
    there = (found >= 0).sum(-1)
    assert torch.equal(there, (rows[:, 0] * block[0] // block[1] + 1).clamp(max=3).expand_as(there))
    assert all(len(set(row)) == len(row) for row in found[0, :, -1].tolist())


@pytest.mark.parametrize("block", [(64, 64), (1, 64), (1, 1)])
def test_calls_run(block: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, Any] = {}

    def run(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
        ran.update({name: call() for name, call in calls.items()})
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(chosen, "medians", run)
    monkeypatch.setattr(chosen, "_ROWS", 60)
    length = 256 if block[0] > 1 else 70
    chosen.times_of(Shape(4, 2, length, block, 2), None, 1, "cpu")
    assert ran["forward"].shape == (1, 4, length, 128) and ran["dense causal"].shape == (1, length, 4, 128)
    assert ran["mask, rows"].q_indices is None and ("mask, both" in ran) == (block[0] > 1)
    assert ("forward + backward" in ran) == ("dense causal + backward" in ran) == (block == (1, 64))
    for name in (n for n in ran if n.endswith("+ backward")):
        assert [t.shape[-1] for t in ran[name]] == [128] * 3 and all(t.isfinite().all() for t in ran[name])
