"""The benchmark of Gemma-4-like layers: which layers see all keys, and that both ways to attend train alike."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu import gemma
from benchmarks.gpu.gemma import Size, Stack

SMALL = Size(seqlen=40, hidden=32, inner=48, local=(4, 2, 16), wide=(2, 1, 32), window=7, layers=7)


def test_every_sixth_layer_sees_all_keys_and_has_no_values() -> None:
    layers = list(Stack(SMALL).layers)
    assert [layer.window for layer in layers] == [7, 7, 7, 7, 7, 0, 7]
    assert [layer.qkv.weight.shape[0] for layer in layers[4:6]] == [8 * 16, 3 * 32]


@pytest.mark.parametrize("inner", [0, 48])
def test_both_ways_have_the_same_gradients(inner: int) -> None:
    torch.manual_seed(0)
    size = SMALL._replace(inner=inner)
    stack, x = Stack(size, dtype=torch.float64), torch.randn(1, 40, 32, dtype=torch.float64)
    mine, theirs = (stack.step(x, attend) for attend in (gemma.anyattn_attend, gemma.sdpa_attend))
    used = [(a, b) for a, b in zip(mine, theirs, strict=True) if b is not None]
    assert len(used) >= 3 * size.layers and all(a is not None for a, _ in used)
    assert max(float((a - b).norm() / b.norm()) for a, b in used) < 1e-10
    # the window matters
    changed = Stack(size._replace(window=40), dtype=torch.float64)
    changed.load_state_dict(stack.state_dict())
    others = [g for g in changed.step(x, gemma.sdpa_attend) if g is not None]
    assert max(float((a - b).norm() / b.norm()) for a, (_, b) in zip(others, used, strict=True)) > 1e-3


def test_steps_run() -> None:
    calls = gemma.steps_of(SMALL, "cpu")
    assert list(calls) == ["layers, anyattn", "layers, SDPA", "attention, anyattn", "attention, SDPA"]
    for call in calls.values():
        assert all(g is None or bool(g.isfinite().all()) for g in call())
