"""Sums of the probabilities, block maxima and skipped tiles on a GPU, against the oracle's dense weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import AuxRequest, masks, oracle
from tests.support.gpu import judging
from tests.support.gpu.judging import BACKEND, DEVICE, RUNS, qkv
from tests.support.reductions import blocks, judged, listed

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
judging.needs_the_backend()
if not RUNS:
    pytest.skip("the reductions are Triton's, which compiles when it launches", allow_module_level=True)

BIAS = torch.linspace(-1, 1, 8)
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(100, 7),
    "sinks": masks.sink_window(4, 90),
    "dilated": masks.dilated(3, 200),
}


def reduced(q: Any, k: Any, v: Any, score: Any = None, block: tuple[int, int] = (64, 64), **more: Any) -> Any:
    """``AuxOutput`` of a call, which has the same bits a second time, and the indices of its lists."""
    backend = BACKEND if q.element_size() == 2 else None  # Hopper's kernel has no float32
    rows, count = -(-q.shape[2] // block[0]), -(-k.shape[2] // block[1])
    indices = torch.randint(-1, count, (q.shape[0], k.shape[1], rows, 4), device=DEVICE)
    request = AuxRequest(lse=True, max_scores=True, key_sums=True, block_sums=block, block_max=block, listed_sums=(indices, block))
    found = [anyattn.flex_attention(q, k, v, score, enable_gqa=True, return_aux=request, backend=backend, **more)[1] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)
    return found[0], indices


def judge(q: Any, k: Any, v: Any, score: Any, mask: Any, sink: Any = None, block: tuple[int, int] = (64, 64), **more: Any) -> None:
    aux, indices = reduced(q, k, v, score, block, sink=sink, **(more or {"mask_mod": mask}))
    weights = tuple(f(q, k, score=score, mask=mask, sink=sink) for f in (oracle.weights, oracle.same_dtype_weights))
    judged("key_sums", aux.key_sums, weights, lambda w: w.probabilities.sum(2))
    judged("block_sums", aux.block_sums, weights, lambda w: blocks(w.probabilities, block, "sum"))
    judged("block_max", aux.block_max, weights, lambda w: blocks(w.scores, block, "max"))
    judged("listed_sums", aux.listed_sums, weights, lambda w: listed(blocks(w.probabilities, block, "sum").cpu(), indices.cpu()).to(DEVICE))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, d: int) -> None:
    judge(*qkv(2, 4, 2, sq=300, sk=333, d=d, dtype=torch.bfloat16)[:3], None, MASKS[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_scores_and_sinks(dtype: torch.dtype) -> None:
    bias, sink = BIAS.to(DEVICE), torch.linspace(-1, 1, 4, device=DEVICE)
    judge(
        *qkv(1, 4, 2, sq=200, sk=260, d=64, dtype=dtype)[:3], lambda s, b, h, i, j: s + bias[h] * (i - j).abs() * 0.01, masks.causal(), sink
    )


@pytest.mark.parametrize("size", [(128, 128), (64, 64), (64, 32), (16, 16)], ids=str)
@pytest.mark.parametrize("block", [(64, 64), (128, 32), (1, 64), (256, 256)], ids=str)
def test_lists(size: tuple[int, int], block: tuple[int, int]) -> None:
    mask = lambda b, h, i, j: ((i // 48 + h) % 3 != (j // 48) % 3) & (i + 200 >= j)
    q, k, v = qkv(1, 4, 2, sq=500, sk=700, d=128, dtype=torch.bfloat16)[:3]
    judge(q, k, v, None, mask, block=block, block_mask=anyattn.create_block_mask(mask, 1, 4, 500, 700, device=DEVICE, BLOCK_SIZE=size))


@pytest.mark.parametrize("last", [1, 64, 200])
def test_last_queries(last: int) -> None:
    q, k, v = qkv(2, 4, 2, sq=300, sk=333, d=128, dtype=torch.bfloat16)[:3]
    request = AuxRequest(key_sums=True, last_queries=last)
    aux = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(33), enable_gqa=True, return_aux=request, backend=BACKEND)[1]
    weights = tuple(f(q, k, mask=masks.causal(33)) for f in (oracle.weights, oracle.same_dtype_weights))
    judged("key_sums", aux.key_sums, weights, lambda w: w.probabilities[:, :, -last:].sum(2))


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_skipping(mask: Any, d: int) -> None:
    q, k, v = qkv(2, 4, 2, sq=1000, sk=1000, d=d, dtype=torch.bfloat16)[:3]
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, :500, 0] = 3.0 * d**0.5
    backend, tiles = ("torch", {"tile_m": 128, "tile_n": 64}) if judging.MODE == "cpu" else ("triton", None)

    def call(below: Any) -> Any:
        request = AuxRequest(lse=True, skipped=below is not None)
        more = {"return_aux": request, "backend": backend, "kernel_options": tiles}
        return anyattn.flex_attention(q, k, v, mask_mod=mask, enable_gqa=True, skip_below=below, **more)

    plain, of_plain = call(None)
    out, aux = call(1e-3)
    nothing, of_nothing = call(torch.zeros(4, device=DEVICE))
    assert (aux.skipped > 0.15).all() and not of_nothing.skipped.any()
    assert (out - plain).abs().max() < 0.05 and (aux.lse - of_plain.lse).abs().max() < 0.05
    assert (nothing - plain).abs().max() < 0.02 and (of_nothing.lse - of_plain.lse).abs().max() < 1e-3
    assert torch.equal(out, call(1e-3)[0])


def test_in_a_cuda_graph_thresholds_change_between_replays() -> None:
    if judging.MODE != "gpu":
        pytest.skip("captures a graph")
    q, k, v = qkv(1, 4, 4, sq=600, sk=600, d=64, dtype=torch.bfloat16)[:3]
    k[:, :, :300, :] *= 4
    below, request = torch.zeros(4, device=DEVICE), AuxRequest(key_sums=True, block_max=(64, 64), skipped=True)
    call = lambda: anyattn.flex_attention(q, k, v, skip_below=below, return_aux=request)[1]
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        aux = call()
    graph.replay()
    torch.cuda.synchronize()
    assert not aux.skipped.any() and torch.equal(aux.key_sums, call().key_sums)
    below.fill_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert aux.skipped.all()
