"""Gradients of tables by row and distance from bands, compiled for the GPU that is there, against the row-wise budget."""

from typing import Any
from unittest import mock

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.triton import distance_bands
from anyattn.call_cache import attention
from tests.support import cases
from tests.support.flex_calls import judge

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CALLS: dict[str, tuple[int, int, int, int | None, Any]] = {
    "full": (700, 650, 2, None, None),
    "buckets": (700, 650, 2, 20, None),
    "causal, one K/V head": (515, 900, 1, 20, masks.causal()),
    "window": (900, 900, 2, 20, masks.sliding_window(300, 50)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    rows, keys, kv_heads, max_distance, mask = CALLS[name]
    q, k, v = (t.cuda() for t in cases.inputs("normal", cases.Shape(2, 2, kv_heads, rows, keys, 64, 64), dtype, 0)[:3])
    g = torch.Generator().manual_seed(1)
    tables = [torch.randn(2, 2, n, 16, generator=g, dtype=torch.float64, device="cpu").cuda() for n in (rows, keys)]
    attention.clear()
    with mock.patch.object(distance_bands.Bands, "gradient", autospec=True, side_effect=distance_bands.Bands.gradient) as summed:
        score = anyattn.scores.disentangled(*tables, max_distance)
        judge(q, k, v, score=score, mask=mask, captured=tables, label=name, backend="triton")
    assert summed.call_count >= 2


def test_the_same_bits_every_time() -> None:
    leaves = [torch.randn(1, 4, 2048, d, device="cuda", dtype=torch.bfloat16).requires_grad_() for d in (64, 64, 64, 128, 128)]

    def gradients() -> tuple[torch.Tensor, ...]:
        out = anyattn.flex_attention(*leaves[:3], anyattn.scores.disentangled(*leaves[3:]), backend="triton")
        return torch.autograd.grad(out.float().square().sum(), leaves)

    with mock.patch.object(distance_bands.Bands, "gradient", autospec=True, side_effect=distance_bands.Bands.gradient) as summed:
        first, again = gradients(), gradients()
    assert summed.call_count == 4 and all(map(torch.equal, first, again))
