"""Gradients of k and v that are not rounded, for a sum with others': on the torch backend, and by ``ANYATTN_TEST_BACKEND`` on Triton's."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.torch.compiled import build
from anyattn.call_cache.attention import FlexCall, flex_call
from anyattn.problem import Problem
from tests.support import machines, poison
from tests.support.compiled_loops import for_small_calls
from tests.support.wide_gradients import in_turns

BACKEND = os.environ.get("ANYATTN_TEST_BACKEND", "torch")
# how the torch backend computes: products in 16 bits, products in float32, compiled loops
PATHS = {
    "bf16": lambda: machines.planned_for(machines.WITH_FP16),
    "float32": lambda: machines.planned_for(machines.PLAIN),
    "loops": for_small_calls,
}
BF16, FP16 = torch.bfloat16, torch.float16
S = 70
IDS = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 1, 49]))
ENDS = torch.tensor([0, 30, 30, 65], dtype=torch.int32)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=["bf16"] if BACKEND != "torch" else PATHS)
def path(request: pytest.FixtureRequest) -> Any:
    if request.param == "loops" and build.reason_against() is not None:
        pytest.skip("no C++ compiler")
    with PATHS[request.param]():
        yield request.param


def flex(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sink: Tensor, name: str) -> Tensor:
    """One call of each kind. table: a captured tensor, (heads, S)."""
    options: dict[str, Any] = {
        "plain": {},
        "causal": {"mask_mod": masks.causal(), "deterministic": True},
        "window and a sink": {"mask_mod": masks.sliding_window(20, 3), "sink": sink.to(q.dtype)},
        "captured": {"score_mod": lambda s, b, h, i, j: s + table[h, i], "mask_mod": masks.causal()},
        "lists": {"mask_mod": lambda b, h, i, j: (i + j) % 5 != 0},
        "documents": {"block_mask": anyattn.create_block_mask(masks.document(IDS), None, None, S, S, device="cpu")},
        "transposed": {"mask_mod": masks.prefix_lm(30)},
    }[name]
    if name == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
    return anyattn.flex_attention(q, k, v, enable_gqa=True, **options)  # type: ignore[return-value]


def varlen(q: Tensor, k: Tensor, v: Tensor, table: Tensor, sink: Tensor, name: str) -> Tensor:
    """name: "packed", with rows of no sequence, or "pages", one of which two sequences share."""
    q, k, v = (t[0].transpose(0, 1) for t in (q, k, v))
    where: dict[str, Any] = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "causal": True}
    if name == "pages":
        k, v = (in_pages(t) for t in (k, v))
        pages = torch.tensor([[3, 0, 2, 1], [3, 2, 0, 1], [1, 3, 0, 2]], dtype=torch.int32)
        where = {"cu_seqlens_q": ENDS, "seqused_k": torch.tensor([40, 61, 9], dtype=torch.int32), "page_table": pages}
    return anyattn.flash_attn_varlen_func(q, k, v, **where)  # type: ignore[return-value]


def in_pages(t: Tensor) -> Tensor:
    return t[:64].unflatten(0, (4, 16))


CASES = {**dict.fromkeys(("plain", "causal", "window and a sink", "captured", "lists", "documents", "transposed"), flex)}
CASES |= dict.fromkeys(("packed", "pages"), varlen)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


@pytest.mark.parametrize(
    ("name", "dtype", "d", "dv"), [(name, *((BF16, 64, 64), (FP16, 24, 40))[n % 2]) for n, name in enumerate(CASES)], ids=str
)
def test_wide_gradients_are_closer_and_leave_the_others_as_they_are(name: str, dtype: torch.dtype, d: int, dv: int, path: str) -> None:
    given = [t.to(dtype) for t in (random(1, 2, S, d), random(1, 1, S, d, seed=1), random(1, 1, S, dv, seed=2))]
    others = random(2, S, seed=3), random(2, seed=4)

    def gradients(dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in given] + [t.clone().requires_grad_() for t in others]
        out = CASES[name](*leaves, name)
        return torch.autograd.grad(out, leaves, random(*out.shape, seed=5).to(given[0].dtype).to(dtype), allow_unused=True)

    with in_turns() as found, poison.enabled():
        gradients(dtype)
    exact = gradients(torch.float32)
    (both,) = found
    for other, (narrow, wide) in zip(exact[1:3], both.of_keys, strict=True):
        if name == "pages":
            other = in_pages(other[0].transpose(0, 1)).transpose(1, 2)  # type: ignore[index]
        assert distance(wide, other) < distance(narrow, other)
        if path != "bf16" or BACKEND != "torch":  # else products whose results are 16 bits become products in float32
            assert torch.equal(wide.to(dtype), narrow)
    same = zip((both.narrow[0], *both.narrow[3:]), (both.wide[0], *both.wide[3:]), strict=True)
    assert all(a is b if a is None or b is None else torch.equal(a, b) for a, b in same)


def test_sums_of_wide_gradients_are_closer(path: str) -> None:
    """As on two ranks, each with half of the rows."""
    q, k, v, dout = (random(1, 2, 160, 64, seed=n).to(BF16) for n in range(4))
    sums = [[torch.zeros(k.shape) for _ in range(2)] for _ in range(2)]
    with in_turns() as found:
        for rows in (slice(0, 80), slice(80, 160)):
            leaves = [t.clone().requires_grad_() for t in (q[:, :, rows], k, v)]
            torch.autograd.grad(anyattn.flex_attention(*leaves), leaves, dout[:, :, rows])
    for half in found:
        for i, pair in enumerate(half.of_keys):
            for total, grad in zip(sums, pair, strict=True):
                total[i] += grad
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    exact = torch.autograd.grad(anyattn.flex_attention(*leaves), leaves[1:], dout.float())
    assert all(distance(wide, e) < distance(narrow, e) for narrow, wide, e in zip(*sums, exact, strict=True))


@pytest.mark.parametrize("name", "kv")
def test_a_gradient_that_is_not_wanted(name: str, path: str) -> None:
    q, *others = (random(1, 2, 40, 16, seed=n).to(BF16) for n in range(3))
    leaves = [t.requires_grad_(n == name) for n, t in zip("kv", others, strict=True)]
    with in_turns() as found:
        torch.autograd.grad(anyattn.flex_attention(q, *leaves), [t for t in leaves if t.requires_grad], q)
    (both,) = found
    assert [g is not None for g in both.wide[:3]] == [g is not None for g in both.narrow[:3]]
    assert both.wide["qkv".index(name)].dtype is torch.float32  # type: ignore[union-attr]


def test_a_warm_problem_can_be_made_wide() -> None:
    q = random(1, 2, 40, 16).to(BF16).requires_grad_()
    call = FlexCall(q, q, q, None, None, None, None, None, False, None, True, False, False)
    with machines.planned_for(machines.PLAIN):
        first, plan = flex_call(call, None, None)  # type: ignore[misc]
        wide = first.like(wide_kv_grads=True)
        warm, again = flex_call(call, None, None)  # type: ignore[misc]
    assert again is plan and not warm.wide_kv_grads and {f.name for f in fields(Problem)} <= vars(warm).keys()
    assert wide.kv_grad_dtype is torch.float32 and warm.like(wide_kv_grads=True).kv_grad_dtype is torch.float32
    assert warm.kv_grad_dtype is BF16 and wide.like(wide_kv_grads=False).kv_grad_dtype is BF16
