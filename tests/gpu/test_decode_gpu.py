"""On a GPU: ``flash_attn_with_kvcache`` by the Triton backend, judged by the definition; without a wait; in CUDA graphs."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyattn import flash_attn_combine, flash_attn_with_kvcache
from anyattn.testing import budget
from tests.entry_points import test_flash_cache as cache_tests
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.flash_calls import RECIPES
from tests.support.gpu.waiting import no_waiting

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)
pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SPLITS = (0, 1, 2, 3, 80)
MATRIX = [case for case in cache_tests.MATRIX if case[1] != "no queries"]


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    lists = {n: [t.cuda() for t in v] for n, v in given.items() if isinstance(v, list)}
    return {n: v.cuda() if isinstance(v, torch.Tensor) else v for n, v in given.items()} | lists


def step(given: dict[str, Any], **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return flash_attn_with_kvcache(**{**given, "backend": "triton", "return_lse": True, **more})


@pytest.mark.parametrize(("i", "case"), enumerate(MATRIX), ids=str)
def test_against_the_reference(i: int, case: tuple[str, str, int]) -> None:
    """Out, lse and turned keys by the budget; what else was appended bit for bit, and that nothing else of the caches changed."""
    name, setting, turn = case
    s, recipe = replace(cache_tests.SETTINGS[setting], dtype=DTYPES[i % 3], seed=turn), RECIPES[name]
    given = cache_tests.arguments(s)
    tensors = {n: t.detach() for n, t in recipe.draw(s.heads[0], len(s.cached), s.capacity + 8, s.dtype, s.seed).items()}
    options, there = recipe.options(tensors), on_gpu(given)
    want = reference.cached(**given, **{n: v for n, v in options.items() if n in ("causal", "window_size")})
    out, lse = step(there, **recipe.options({n: t.cuda() for n, t in tensors.items()}), num_splits=SPLITS[turn])
    reference.judge(want.sequences, {"out": out.cpu(), "lse": lse.cpu()}, recipe.options, tensors, label=str(s))
    after = {n: there[n].cpu() for n in ("k_cache", "v_cache")}
    for b, at in enumerate(want.at):
        assert calls.same_bits(after["v_cache"][at], want.values[b]), b
        if s.rotary_dim:
            budget.check(f"keys of entry {b}", after["k_cache"][at], want.keys[b], want.plain_keys[b])
        else:
            assert calls.same_bits(after["k_cache"][at], want.keys[b].to(s.dtype)), b
        for n in after:
            given[n][at] = after[n][at]
    assert all(calls.same_bits(after[n], given[n]) for n in after), "a row that was not appended has changed"


DECODE = cache_tests.Setting(
    cached=(400, 7, 63, 1200), queries=(1,) * 4, capacity=1300, heads=(8, 2), dims=(128, 128), rotary_dim=64, dtype=torch.bfloat16
)
KINDS = {
    "rows": DECODE,
    "other rows": replace(DECODE, rows=(5, 0, 6, 2)),
    "pages": replace(DECODE, page_size=16, leftpad=(40, 0, 33, 5)),
    "packed": replace(DECODE, queries=(3, 0, 8, 1), packed=True),
    "small pages": replace(DECODE, page_size=3, heads=(7, 1), interleaved=False),
}


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_reads_the_tables_anew(kind: str, splits: int) -> None:
    """A decoder's loop: the lengths grow and the page table changes in place; every replay is what an eager call would be."""
    given = on_gpu(cache_tests.arguments(KINDS[kind]))
    given |= {n: given[n].nan_to_num() for n in ("k_cache", "v_cache")}  # rows that nobody uses, until a replay does
    options: dict[str, Any] = {"causal": True, "num_splits": splits}
    step(given, **options)  # compiles, outside the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(given, **options)
    for turn in range(3):
        given["cache_seqlens"].add_(turn)
        if "page_table" in given:
            table = given["page_table"]
            table.copy_(torch.randperm(len(given["k_cache"]), device="cuda")[: table.numel()].view_as(table))
        eager = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}
        for t in captured:
            t.fill_(math.nan)
        graph.replay()
        wanted = step(eager, **options)
        assert all(calls.same_bits(a.cpu(), b.cpu()) for a, b in zip(captured, wanted, strict=True)), turn
        assert all(calls.same_bits(given[n].cpu(), eager[n].cpu()) for n in ("k_cache", "v_cache")), turn


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits(kind: str) -> None:
    given = on_gpu(cache_tests.arguments(KINDS[kind]))
    slopes = torch.rand(KINDS[kind].heads[0], device="cuda")
    step(given, causal=True)
    with no_waiting():
        for more in ({}, {"alibi_slopes": slopes, "softcap": 20.0}, {"window_size": (100, 0)}, {"num_splits": 4}):
            step(given, **{"causal": True, **more})
        step(given, mask_mod=lambda b, h, i, j: (i ^ j) != 5)


def test_where_pages_lie_changes_no_bit() -> None:
    for splits in (1, 5):
        found = []
        for seed in (None, 1, 2):
            given = on_gpu(cache_tests.arguments(replace(DECODE, page_size=16, page_seed=seed)))
            found.append(step(given, causal=True, num_splits=splits))
        assert all(calls.same_bits(a.cpu(), b.cpu()) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_tables_that_make_no_sense_break_nothing() -> None:
    for kind, name, value in (
        ("rows", "cache_seqlens", 2**30), ("rows", "cache_seqlens", -9), ("other rows", "cache_batch_idx", 10**6),
        ("pages", "page_table", 2**30), ("pages", "page_table", -1), ("pages", "cache_leftpad", 10**6), ("packed", "cu_seqlens_q", 10**6),
    ):  # fmt: skip
        given = on_gpu(cache_tests.arguments(KINDS[kind]))
        right = step({n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in given.items()}, causal=True, num_splits=2)
        given[name][-1] = value
        out, _ = step(given, causal=True, num_splits=2)
        torch.cuda.synchronize()
        rows = slice(0, sum(KINDS[kind].queries[:3])) if kind == "packed" else slice(0, 3)
        assert calls.same_bits(out[rows].cpu(), right[0][rows].cpu()), (kind, name)


@pytest.mark.parametrize("parts", [1, 2, 9, 40])
def test_combining(parts: int) -> None:
    """By the kernel as by torch, which also serves gradients."""
    outs, lses = torch.randn(parts, 2, 5, 3, 128, device="cuda"), 3 * torch.randn(parts, 2, 5, 3, device="cuda")
    blind = torch.rand_like(lses) < 0.4
    blind[:, 0, 0] = True
    lses, outs = lses.masked_fill(blind, -math.inf), outs.masked_fill(blind[..., None], math.nan)
    got = flash_attn_combine(outs, lses)
    want = flash_attn_combine(outs.cpu().double(), lses.cpu().double())
    for a, b, unit in zip(got, want, (1.0, 3.0), strict=True):
        assert torch.equal(a.isneginf().cpu(), b.isneginf())
        error = (a.cpu().double() - b).nan_to_num().abs().max()
        assert float(error) <= 16 * unit * torch.finfo(torch.float32).eps * float(b.nan_to_num(neginf=0.0).abs().max())
    leaves = outs.nan_to_num().requires_grad_(), lses.clone().requires_grad_()
    out, lse = flash_attn_combine(*leaves)
    assert out.requires_grad and all(bool(g.isfinite().all()) for g in torch.autograd.grad(out.sum() + lse.nan_to_num().sum(), leaves))
