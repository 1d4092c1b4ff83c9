"""Gradients of captured tensors, and deterministic ones with block lists, by the Hopper backward kernel on a GPU, judged by the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, scores
from tests.support import flex_calls
from tests.support.gpu import judging
from tests.support.gpu.judging import BACKEND, DEVICE, judge, qkv, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

RERUNS = 100 if judging.MODE == "gpu" else 2
SQ, SK = 300, 333
IDS = (torch.arange(SK) * 3 // 50).to(DEVICE)
SPREAD = (torch.arange(SK) * 5 % 7).to(DEVICE)
BUCKETS = (torch.arange(SQ + SK) // 9 % 5).to(DEVICE)
Mod = Callable[..., Any]
# shapes of the tensors that get gradients, and the score mod made of them; biases of a whole row have none, so they have factors
MODS: dict[str, tuple[tuple[tuple[int, ...], ...], Mod]] = {
    "head": (((4,),), lambda t: lambda s, b, h, i, j: s + t[h] * (j % 3)),
    "one number": (((),), lambda t: lambda s, b, h, i, j: s + t * (j % 3)),
    "entry and head": (((2, 4),), lambda t: lambda s, b, h, i, j: s + t[b, h] * (j % 3)),
    "slopes": (((4,),), lambda t: lambda s, b, h, i, j: s - t[h].abs() * (i - j).abs() * 0.05),
    "temperature": (((4,),), lambda t: lambda s, b, h, i, j: s * (1 + 0.1 * t[h])),
    "learned cap": (((4,),), lambda t: lambda s, b, h, i, j: (5 + t[h]) * torch.tanh(s / (5 + t[h]))),
    "row": (((4, SQ),), lambda t: lambda s, b, h, i, j: s + t[h, i] * (j % 3)),
    "id of a row": (((4, 7),), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i] % 7] * (j % 3)),
    "key": (((4, SK),), lambda t: lambda s, b, h, i, j: s + t[h, j]),
    "id of a key": (((7,),), lambda t: lambda s, b, h, i, j: s + t[SPREAD[j]]),
    "key, capped": (((4, SK),), lambda t: lambda s, b, h, i, j: 5 * torch.tanh((s + t[h, j]) / 5)),
    "distance": (((4, SQ + SK),), lambda t: lambda s, b, h, i, j: s + t[h, i - j + SK]),
    "clamped distance": (((4, 99),), lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, -49, 49) + 49]),
    "looked-up distance": (((4, 5),), lambda t: lambda s, b, h, i, j: s + t[h, BUCKETS[i - j + SK]]),
    "buckets": (((32, 4),), scores.t5_bias),
    "pairs of a head": (((4, SQ, SK),), lambda t: lambda s, b, h, i, j: s + t[h, i, j]),
    "pairs": (((2, 4, SQ, SK),), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "pairs of ids": (((4, 7, 7),), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i] % 7, SPREAD[j]]),
    "turned pairs": (((SK, SQ),), lambda t: lambda s, b, h, i, j: s + t[j, i]),
    "two": (((4, SQ), (4, SK)), lambda t, u: lambda s, b, h, i, j: s + t[h, i] * u[h, j]),
}
# of factors that read the score, for which head dimension 128 has no registers
LATE = {
    "row, capped": (((4, SQ),), lambda t: lambda s, b, h, i, j: 5 * torch.tanh((s + t[h, i]) / 5)),
    "distance, capped": (((4, 99),), lambda t: lambda s, b, h, i, j: 5 * torch.tanh((s + t[h, torch.clamp(i - j, -49, 49) + 49]) / 5)),
    "temperatures": (((4,), (4, SQ)), lambda t, u: lambda s, b, h, i, j: s * (1 + 0.1 * t[h]) * (1 + 0.1 * u[h, i])),
}
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(33),
    "lists": masks.prefix_lm(150),
    "blind": lambda b, h, i, j: (i >= j) & (i % 5 != 0),
}


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


def learned(shapes: tuple[tuple[int, ...], ...], make: Mod, given: list[torch.Tensor], mask: Any = None, **options: Any) -> None:
    """All gradients of a call against the budget; where nothing runs, what it would launch is noted."""
    captured = [random(*shape, seed=11 + i).to(DEVICE, torch.float64) for i, shape in enumerate(shapes)]
    options |= {"backend": BACKEND}
    if judging.RUNS:
        flex_calls.judge(*given, score=make(*captured), mask=mask, captured=captured, **options)
        return
    leaves = [t.detach().requires_grad_() for t in (*given, *captured)]
    mods = {"score_mod": make(*leaves[3:]), "mask_mod": mask, "enable_gqa": True}
    for asked in (True, False):
        out = anyattn.flex_attention(*leaves[:3], **mods, return_lse=asked, **options)
        torch.autograd.grad(out[0] if asked else out, leaves, torch.zeros_like(out[0] if asked else out))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", MODS)
def test_gradients(name: str, mask: str, d: int) -> None:
    learned(*MODS[name], qkv(2, 4, 2, sq=SQ, sk=SK, d=d), MASKS[mask])


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", LATE)
def test_gradients_of_what_changes_with_the_score(name: str, mask: str) -> None:
    learned(*LATE[name], qkv(2, 4, 2, sq=SQ, sk=SK, d=64), MASKS[mask])


@pytest.mark.parametrize("name", ["head", "key", "buckets", "pairs"])
def test_float16(name: str) -> None:
    learned(*MODS[name], qkv(2, 4, 2, sq=SQ, sk=SK, d=64, dtype=torch.float16), masks.causal())


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 300), (63, 127), (64, 128), (65, 129), (257, 31)])
@pytest.mark.parametrize("name", ["row", "key", "clamped distance", "pairs", "pairs of ids"])
def test_lengths(name: str, sq: int, sk: int) -> None:
    """The captured tensors have room for more."""
    learned(*MODS[name], qkv(2, 4, 2, sq=sq, sk=sk, d=128), masks.causal(33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["head", "key", "buckets", "pairs", "pairs of a head"])
@judging.on_the_gpu_alone
def test_dtypes_of_captured_tensors(name: str, dtype: torch.dtype) -> None:
    """The same numbers captured in float64, whose gradients ``test_gradients`` judges, have the same sums before they are rounded."""
    shapes, make = MODS[name]
    leaves = [t.detach().requires_grad_() for t in qkv(2, 4, 2, sq=SQ, sk=SK, d=64)]
    dout, found = random(2, 4, SQ, 64, seed=1).to(leaves[0]), []
    for given in (dtype, torch.float64):
        captured = [random(*shape).bfloat16().to(DEVICE, given).requires_grad_() for shape in shapes]
        out = anyattn.flex_attention(*leaves, make(*captured), enable_gqa=True, backend="hopper")
        found.append(torch.autograd.grad(out, captured, dout))
    for own, exact in zip(*found, strict=True):
        assert own.dtype is dtype and (own.double() - exact).norm() <= 2**-8 * exact.norm()


LISTED: dict[str, Any] = {
    "prefix": masks.prefix_lm(150),
    "sinks": masks.sink_window(4, 90),
    "by head": lambda b, h, i, j: (i - j) % 700 < 200 + 60 * h,
}


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", LISTED)
def test_deterministic_with_lists(name: str, d: int) -> None:
    judge(qkv(2, 4, 2, sq=600, sk=700, d=d), mask=LISTED[name], backward=True, deterministic=True)


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_deterministic_with_block_masks(tile: int) -> None:
    block_mask = anyattn.create_block_mask(LISTED["prefix"], None, None, 600, 700, device=DEVICE, BLOCK_SIZE=tile)
    judge(qkv(2, 4, 2, sq=600, sk=700), mask=LISTED["prefix"], block_mask=block_mask, backward=True, deterministic=True)


def reruns(leaves: list[torch.Tensor], *wanted: torch.Tensor, **options: Any) -> None:
    dout = random(*leaves[0].shape, seed=1).to(leaves[0])

    def gradients() -> tuple[torch.Tensor, ...]:
        out = anyattn.flex_attention(*leaves, enable_gqa=True, backend="hopper", deterministic=True, **options)
        return torch.autograd.grad(out, [*leaves, *wanted], dout)

    first = gradients()
    for _ in range(RERUNS):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", LISTED)
def test_deterministic_reruns_with_lists_agree_bitwise(name: str) -> None:
    reruns([t.detach().requires_grad_() for t in qkv(2, 8, 4, sq=1025, sk=1025, d=64)], mask_mod=LISTED[name])


@judging.on_the_gpu_alone
def test_deterministic_reruns_with_block_masks_agree_bitwise() -> None:
    for tile in (128, 256):
        block_mask = anyattn.create_block_mask(LISTED["prefix"], None, None, 2049, 2049, device=DEVICE, BLOCK_SIZE=tile)
        reruns([t.detach().requires_grad_() for t in qkv(2, 8, 4, sq=2049, sk=2049, d=128)], block_mask=block_mask)


@judging.on_the_gpu_alone
def test_deterministic_reruns_of_pairs_agree_bitwise() -> None:
    every = random(2, 4, SQ, SK).to(DEVICE).requires_grad_()
    leaves = [t.detach().requires_grad_() for t in qkv(2, 4, 2, sq=SQ, sk=SK, d=64)]
    reruns(leaves, every, score_mod=MODS["pairs"][1](every))


def test_the_plan_says_so() -> None:
    if judging.MODE == "cpu":
        pytest.skip("about the hopper backend")
    leaves = [t.requires_grad_() for t in qkv(2, 4, 2, sq=SQ, sk=SK)]
    for shapes, make in MODS.values():
        captured = [random(*shape).to(DEVICE).requires_grad_() for shape in shapes]
        assert anyattn.explain(*leaves, score_mod=make(*captured), enable_gqa=True, backend="hopper").plan.backward == "hopper"
    options = {"mask_mod": masks.prefix_lm(150), "enable_gqa": True, "backend": "hopper", "deterministic": True}
    assert anyattn.explain(*leaves, **options).plan.backward == "hopper"
