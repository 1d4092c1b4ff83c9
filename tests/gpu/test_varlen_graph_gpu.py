"""On a Hopper GPU: packed sequences without a wait for the device, and in CUDA graphs whose replays read what the tables hold by then."""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.gpu.waiting import no_waiting

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None
pytestmark = pytest.mark.gpu
if not HAS_HOPPER:
    pytest.skip("needs a Hopper GPU and nvidia-cutlass-dsl", allow_module_level=True)

FIRST, SECOND = [0, 100, 100, 500, 777], [0, 1, 300, 301, 777]
SHORT = [0, 50, 60, 300, 301]  # the rows behind 301 belong to no sequence


def ends(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def qkv(total: int = 777) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(total)
    return [torch.randn(total, 4, 128, generator=generator, device="cuda").bfloat16() for _ in range(3)]


def call(inputs: list[torch.Tensor], cu_q: torch.Tensor, cu_k: torch.Tensor, **options: Any) -> Any:
    given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": 777, "max_seqlen_k": 777, "return_lse": True, "backend": "hopper"}
    return anyattn.flash_attn_varlen_func(*inputs, **given | options)


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


OPTIONS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window_size": (70, 0)}}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("apart", [False, True], ids=["one table", "two tables"])
def test_replays_read_the_tables_anew(name: str, apart: bool) -> None:
    inputs, cu_q = qkv(), ends(FIRST)
    cu_k = cu_q.clone() if apart else cu_q
    with torch.no_grad():
        eager = call(inputs, cu_q, cu_k, **OPTIONS[name])  # compiles, outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(inputs, cu_q, cu_k, **OPTIONS[name])
        for numbers in (FIRST, SECOND, SHORT, [0, 0, 0, 0, 0], FIRST):
            for table in {id(t): t for t in (cu_q, cu_k)}.values():
                table.copy_(ends(numbers))
            for t in captured:
                t.fill_(math.nan)
            graph.replay()
            fresh = ends(numbers)
            wanted = call(inputs, fresh, fresh.clone() if apart else fresh, **OPTIONS[name], validate=None)
            assert same(captured, wanted), numbers
            if numbers == FIRST:
                assert same(captured, eager)


def documents() -> Any:
    """A mask that needs lists of tiles, which come without."""
    ids = (torch.rand(4, 777, generator=torch.Generator().manual_seed(3)) < 0.01).long().cumsum(1).cuda()
    return masks.document(ids)


@pytest.mark.parametrize("causal", [False, True])
def test_replays_make_lists_anew(causal: bool) -> None:
    inputs, cu_q = qkv(), ends(FIRST)
    cu_k, options = cu_q.clone(), {"mask_mod": documents(), "causal": causal}
    with torch.no_grad():
        eager = call(inputs, cu_q, cu_k, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(inputs, cu_q, cu_k, **options)
        for numbers in (FIRST, SECOND, SHORT, [0, 0, 0, 0, 0], FIRST):
            for table in (cu_q, cu_k):
                table.copy_(ends(numbers))
            for t in captured:
                t.fill_(math.nan)
            graph.replay()
            assert same(captured, call(inputs, ends(numbers), ends(numbers), **options, validate=None)), numbers
            # the lists of the host, from lengths that it has read
            assert same(captured, call(inputs, ends(numbers), ends(numbers), **options, validate=numbers[-1] == 777 or None)), numbers
            if numbers == FIRST:
                assert same(captured, eager)


def test_pages_and_lengths_of_a_captured_call() -> None:
    """A decoder's step: the page table and the lengths change in place."""
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(3, 4, 128, generator=generator, device="cuda").bfloat16()
    k, v = (torch.randn(20, 64, 4, 128, generator=generator, device="cuda").bfloat16() for _ in range(2))
    table = torch.randperm(20, generator=generator, device="cuda")[:18].view(3, 6).int()
    used, cu = torch.tensor([70, 1, 300], device="cuda", dtype=torch.int32), ends([0, 1, 2, 3])
    options = {"cu_seqlens_q": cu, "seqused_k": used, "page_table": table, "causal": True, "max_seqlen_q": 1, "max_seqlen_k": 384}
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(q, k, v, **options, backend="hopper")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = anyattn.flash_attn_varlen_func(q, k, v, **options, backend="hopper")
        for step in range(3):
            used.add_(1)
            table.copy_(table.flip(0))
            graph.replay()
            apart = {"page_table": table.clone(), "seqused_k": used.clone()}
            assert torch.equal(captured, anyattn.flash_attn_varlen_func(q, k, v, **options | apart, backend="hopper")), step


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits(name: str) -> None:
    inputs, cu = qkv(), ends(FIRST)
    with no_waiting():
        for _ in range(3):  # the first plans, the others are recalled; no table is seen twice
            call(inputs, cu.clone(), cu.clone(), **OPTIONS[name])


def test_nothing_waits_with_other_options() -> None:
    inputs, cu = qkv(), ends(FIRST)
    slopes, bias = anyattn.scores.alibi_slopes(4).cuda(), torch.zeros(4, 2000, device="cuda")
    with no_waiting():
        call(inputs, cu, cu.clone(), alibi_slopes=slopes, softcap=30.0, causal=True)
        call(inputs, cu, cu.clone(), score_mod=lambda s, b, h, i, j: s + bias[h, i - j + 999])
        call(inputs, cu, cu, seqused_q=cu.diff() // 2, seqused_k=cu.diff() // 3, causal=True)
        call(inputs, cu, cu, max_seqlen_q=None, max_seqlen_k=None, causal=True)


def test_nothing_waits_for_lists() -> None:
    inputs, cu, mask, prefix = qkv(), ends(FIRST), documents(), masks.prefix_lm(torch.tensor([3, 70, 0, 200], device="cuda"))
    with no_waiting():
        for _ in range(2):
            call(inputs, cu.clone(), cu.clone(), mask_mod=mask, causal=True)
            call(inputs, cu.clone(), cu.clone(), mask_mod=prefix)
            call(inputs, cu.clone(), cu.clone(), mask_mod=lambda b, h, i, j: (i - j) % (h + 2) == 0)


@pytest.mark.parametrize("numbers", [FIRST, SHORT, [0, 0, 0, 0, 0]])
def test_against_the_oracle(numbers: list[int]) -> None:
    """Every sequence by itself; rows of none are 0 and -inf. Keys have another packing than queries."""
    inputs, keys = qkv(), SECOND
    out, lse = call(inputs, ends(numbers), ends(keys), causal=True)
    for (a, b), (c, d) in zip(pairwise(numbers), pairwise(keys), strict=True):
        if a == b:
            continue
        q, k, v = (t[x:y].transpose(0, 1)[None].cpu() for t, x, y in zip(inputs, (a, c, c), (b, d, d), strict=True))
        mods = {"mask": masks.causal((d - c) - (b - a))}
        want, plain, noise = oracle.attention(q, k, v, **mods), oracle.same_dtype(q, k, v, **mods), rounding(q, k, v, **mods)
        budget.check("out", out[a:b].transpose(0, 1)[None].cpu(), want.out, plain.out, noise.out)
        budget.check("lse", lse[None, :, a:b].cpu(), want.lse, plain.lse, noise.lse)
    assert bool((out[numbers[-1] :] == 0).all()) and bool((lse[:, numbers[-1] :] == -math.inf).all())


def test_gradients_survive_tables_that_change_before_the_backward_pass() -> None:
    inputs, cu = qkv(), ends(FIRST)
    leaves = [t.clone().requires_grad_() for t in inputs]
    out, _ = call(leaves, cu, cu.clone(), causal=True)
    cu.copy_(ends(SECOND))
    found = torch.autograd.grad(out.float().sum(), leaves)
    leaves = [t.clone().requires_grad_() for t in inputs]
    out, _ = call(leaves, ends(FIRST), ends(FIRST), causal=True, validate=False)
    assert same(found, torch.autograd.grad(out.float().sum(), leaves))
