"""The backward kernels of wide heads compiled for sm_90a without a GPU: no spills, no product that waits for another; and their configs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anyattn import masks
from anyattn.backends.hopper import wide_backward
from anyattn.backends.hopper.config import SHARED_MEMORY
from anyattn.backends.hopper.make_backward_config import reason_against_backward
from anyattn.backends.hopper.wide_backward import wide_spec
from anyattn.backends.hopper.wide_backward_config import WideBackwardConfig, WideTiles, bytes_of, wide_tiles_for
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from tests.support.processes import python

ALL = [(of, d, one) for of in ("dq", "dk", "dv") for d in (512, 576) for one in (False, True)]


def problem(d: int = 512, dv: int = 512, one: bool = False, sizes: tuple[int, int] = (300, 300), **changes: Any) -> Problem:
    k = torch.randn(1, 2, sizes[1], d, dtype=torch.bfloat16)
    v = k[..., :dv] if one else torch.randn(1, 2, sizes[1], dv, dtype=torch.bfloat16)
    return Problem(**({"q": torch.randn(1, 4, sizes[0], d, dtype=torch.bfloat16), "k": k, "v": v, "scale": 0.1} | changes))


def compiled(folder: Path, *cases: str) -> None:
    done = python("-m", "tests.support.hopper.cross_compile_wide", str(folder), *cases, CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found and (not cases or all(any(name.startswith(case) for name in found) for case in cases))
    for name, (local, in_loops, products, waits) in found.items():
        assert (local, in_loops) == (0, 0) and waits < products / 3, f"{name}: {found[name]}"


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_the_kernels_with_most_registers_compile_without_spilling(tmp_path: Path) -> None:
    compiled(tmp_path, "dq 576 one: capped", "dk 576: alibi", "dv 512: alibi")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_every_kernel_compiles_without_spilling(tmp_path: Path) -> None:
    compiled(tmp_path)


@pytest.mark.parametrize(("of", "d", "one"), ALL, ids=str)
def test_tiles_fit_shared_memory_and_one_size_more_does_not(of: str, d: int, one: bool) -> None:
    tiles = wide_tiles_for(of, d, 512, one)
    assert bytes_of(of, tiles, d, 512, one) <= SHARED_MEMORY
    assert WideBackwardConfig(of, d, 512, True, tiles, has_one_kv=one and of != "dv").tiles is tiles
    if tiles.streamed < 64:
        rows = 2 * tiles.streamed
        least = (2, 2, 1, 1) if of == "dq" and one else (2, 1, 1, 1)
        larger = WideTiles(64, rows, least) if of == "dq" else WideTiles(rows, 64, least)
        assert bytes_of(of, larger, d, 512, one) > SHARED_MEMORY


def test_impossible_configs_are_refused() -> None:
    tiles = {of: wide_tiles_for(of, 512, 512, False) for of in ("dq", "dk", "dv")}
    make = lambda of, d=512, dv=512, **more: WideBackwardConfig(of, d, dv, True, more.pop("tiles", tiles.get(of, tiles["dk"])), **more)
    score = trace(lambda s, b, h, i, j: s * 2, "score").expr
    for given, words in (
        (lambda: make("dx"), "wanted 'dq', 'dk' or 'dv'"),
        (lambda: make("dk", 256, 256), "head_dim=256"),
        (lambda: make("dq", tiles=tiles["dk"]), "wanted 64 rows of what its thread block keeps"),
        (lambda: make("dk", tiles=tiles["dv"]), "wanted 2 first"),
        (lambda: make("dq", has_one_kv=True), "dP of a tile is multiplied before dS"),
        (lambda: make("dk", lists="flat"), "wanted None or 'dense'"),
        (lambda: make("dk", score=score), "wanted 2 for dk"),
        (lambda: make("dq", stores_float32=True), "wanted dk or dv"),
        (lambda: make("dk", tiles=WideTiles(64, 64, (2, 2, 2, 2))), "a thread block has"),
        (lambda: WideTiles(32, 32, (1, 1, 1, 1)), "wanted 64 of the rows"),
        (lambda: WideTiles(64, 48, (1, 1, 1, 1)), "wanted 16, 32 or 64"),
        (lambda: WideTiles(64, 32, (3, 1, 1, 1)), "wanted 1 or 2 of each part"),
        (lambda: WideTiles(64, 32, (2, 1, 1, 1), 32), "wanted a multiple of 64 up to 256"),
    ):
        with pytest.raises(ValueError, match=words):
            given()


def test_configs_of_a_call() -> None:
    of = lambda p: (wide_spec(p).dq, wide_spec(p).dk, wide_spec(p).dv)
    causal, prefix = (trace(m, "mask") for m in (masks.causal(), masks.prefix_lm(100)))
    for one in (False, True):
        dq, dk, dv = (g.config for g in of(problem(576, 512, one, predicates=(causal,))))
        assert (dq.streams_one, dk.keeps_one, dv.keeps_one, dv.has_one_kv) == (one, one, True, False)
        assert all(c.has_right and not c.has_left and c.lists is None for c in (dq, dk, dv))
    dq, dk, dv = of(problem(predicates=(prefix,)))
    assert (dq.config.list_cut, dk.config.list_cut, dv.config.list_cut) == ((2, 4), (4, 2), (2, 2))
    assert dq.config.has_order and not dk.config.has_order and dq.listed == dk.listed == 0
    score = trace(lambda s, b, h, i, j: 20 * torch.tanh(s / 20), "score")
    assert [len(g.config.score.outputs) for g in of(problem(score=score)) if g.config.score is not None] == [2, 2, 1]
    assert all(g.config.stores_float32 is (g is not dq) for dq, *rest in [of(problem(wide_kv_grads=True))] for g in (dq, *rest))


def test_parts_of_few_heads_are_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_backward, "processors_of", lambda _: 132)
    q = torch.randn(1, 16, 2048, 512, dtype=torch.bfloat16)
    k = torch.randn(1, 1, 2048, 512, dtype=torch.bfloat16)
    spec = wide_spec(Problem(q=q, k=k, v=k, scale=0.1, predicates=(trace(masks.causal(), "mask"),)))
    assert spec.parts > 1 and spec.dk.config.stores_float32 and spec.dv.config.stores_float32 and not spec.dq.config.stores_float32


def test_what_is_refused_and_why() -> None:
    bias = torch.zeros(2, requires_grad=True)
    score = trace(lambda s, b, h, i, j: s + bias[h % 2], "score")
    assert reason_against_backward(problem()) is None and reason_against_backward(problem(576, 512, True)) is None
    assert "sums no gradients of captured tensors for head dimensions above 128" in str(reason_against_backward(problem(score=score)))
