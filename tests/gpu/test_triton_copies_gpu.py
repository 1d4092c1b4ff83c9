"""Gradients of captured tensors to whose few entries many pairs add, on a GPU: sums with private copies.

Additions to one address wait for one another on a GPU. The sums are right at the sizes that they are for, in a CUDA graph too, and take no
more memory than they may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.testing import budget
from tests.support.flex_calls import judge
from tests.support.gpu import judging
from tests.support.gpu.graphs import captured as in_a_graph
from tests.support.gpu.judging import DEVICE, qkv, random

pytestmark = pytest.mark.gpu
judging.needs_the_backend(only="triton")

LENGTH = 1337 if judging.MODE == "gpu" else 50
HEADS = 4
IDS = (torch.arange(LENGTH) * 5 % 7).to(DEVICE)
RUNS = (torch.arange(LENGTH) * 3 // LENGTH).to(DEVICE)
MODS: dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], Any]]] = {
    "buckets": ((32, HEADS), lambda t: anyattn.scores.t5_bias(t)),
    "buckets of keys before": ((8, HEADS), lambda t: anyattn.scores.t5_bias(t, bidirectional=False, max_distance=50)),
    "rows": ((7,), lambda t: lambda s, b, h, i, j: s * (1 + 0.1 * t[IDS[i]])),
    "keys": ((HEADS, 7), lambda t: lambda s, b, h, i, j: s + t[h, IDS[j]]),
    "pairs": ((HEADS, 7, 7), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i], IDS[j]]),
    "runs": ((3, 3), lambda t: lambda s, b, h, i, j: s + t[RUNS[i], RUNS[j]]),
    "one copy": ((HEADS, 7, 2**17), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i], IDS[j] * 1000]),
}


def table(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return random(*MODS[name][0]).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_gradients(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(2, HEADS, 2, LENGTH, LENGTH, 64, dtype=dtype)
    for mask in (None, masks.causal()):
        own = table(name)
        judge(q, k, v, score=MODS[name][1](own), mask=mask, captured=[own], label=name, backend=judging.BACKEND)


def gradients(name: str, own: torch.Tensor, leaves: list[torch.Tensor], backend: str | None) -> torch.Tensor:
    """Of the table."""
    out = anyattn.flex_attention(*leaves, score_mod=MODS[name][1](own), enable_gqa=True, backend=backend)
    return torch.autograd.grad(out, own, random(*out.shape, seed=5).to(DEVICE, torch.bfloat16).to(out.dtype))[0]


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["buckets", "buckets of keys before"])
def test_in_a_graph(name: str) -> None:
    """What a replay adds up begins at nothing, every time, with the inputs that are there then. (No lookups of lookups: the front door
    looks at what they hold, for which a graph cannot wait.)"""
    leaves, others = qkv(2, HEADS, 2, LENGTH, LENGTH, 64), qkv(2, HEADS, 2, LENGTH, LENGTH, 64, seed=3)
    own, dout = table(name, torch.float32).requires_grad_(), random(2, HEADS, LENGTH, 64, seed=5).to(DEVICE, torch.bfloat16)

    def call() -> torch.Tensor:
        out = anyattn.flex_attention(*leaves, score_mod=MODS[name][1](own), enable_gqa=True, backend=judging.BACKEND)
        return torch.autograd.grad(out, own, dout)[0]

    graph, found = in_a_graph(call)
    for turn in (0, 0, 1):
        if turn:
            for to, source in zip(leaves, others, strict=True):
                to.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        exact = gradients(name, own.detach().double().requires_grad_(), [t.double() for t in leaves], "torch")
        budget.check(f"{name} {turn}", found, exact, gradients(name, own, leaves, "torch"))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["buckets", "pairs", "one copy"])
def test_how_much_room_it_takes(name: str) -> None:
    """A few MiB at most beside a sum of the table's own size."""
    leaves, peaks = qkv(1, HEADS, 2, LENGTH, LENGTH, 64), []
    for wants in (False, True):
        own, q = table(name, torch.float32).requires_grad_(wants), leaves[0].detach().requires_grad_()
        for _ in range(2):
            out = anyattn.flex_attention(q, *leaves[1:], score_mod=MODS[name][1](own), enable_gqa=True, backend=judging.BACKEND)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.autograd.grad(out, [q, own] if wants else [q], torch.ones_like(out))
            torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] <= (5 << 20) + 2 * own.nbytes, peaks
