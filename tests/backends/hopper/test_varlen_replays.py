"""A replay of a varlen call by Hopper launches what a call that is not replayed launches: the tables' kernel, then attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.arithmetic import LOG2E
from anyattn.validate import sequences
from tests.support.hopper.pretended import Launch, count_in_one_tensor, described
from tests.support.replayed import replayed_and_first


@pytest.fixture(autouse=True)
def unread(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    count_in_one_tensor(monkeypatch)


def batch(seed: int, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(600, h, 64, generator=g).bfloat16() for h in (4, 2, 2))
    ends = torch.tensor([0, 200 + seed, 600], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 500, "max_seqlen_k": 500, **more}


RECIPES: dict[str, Any] = {
    "causal": lambda seed: {"causal": True, "return_lse": True},
    "no lse": lambda seed: {},
    "window, sink": lambda seed: {"window_size": (70, 0), "sink": torch.full((4,), float(seed)), "return_lse": True},
    "sink of 16 bits": lambda seed: {"causal": True, "sink": torch.full((4,), float(seed)).bfloat16()},
    "score": lambda seed: {"causal": True, "score_mod": lambda s, b, h, i, j: s + (j - i) * seed},
    "scale": lambda seed: {"softmax_scale": 0.25, "softcap": 30.0},
}


@pytest.mark.parametrize("name", RECIPES)
def test_launches(name: str, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    def call(seed: int) -> tuple[list[Any], Any]:
        arguments = batch(seed, **RECIPES[name](seed))
        before = len(launched)
        results = anyattn.flash_attn_varlen_func(**arguments)
        results = (results,) if isinstance(results, Tensor) else results
        assert type(results) is tuple
        return described(launched[before:], arguments, results), [(t.shape, t.stride(), t.dtype) for t in results]

    warm, first = replayed_and_first(call, [0, 1] * 6, 1, monkeypatch)
    assert warm == first and len(warm[0]) == 2


def test_scales_have_replays_of_their_own(launched: list[Launch]) -> None:
    """A Hopper kernel is passed the scale times a factor, which is not told apart from other numbers."""
    for scale in (0.25, 0.5, 0.25, 0.5):
        for _ in range(8):
            out = anyattn.flash_attn_varlen_func(**batch(0, softmax_scale=scale))
        assert out.shape == (600, 4, 64)
        assert [x for x in launched[-1][1] if type(x) is float] == [scale * LOG2E]
