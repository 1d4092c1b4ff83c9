"""The backward kernels compiled for sm_90a without a GPU: no loop over row tiles spills; and which calls the kernel takes."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, planner
from anyattn.backends.hopper.backward_config import BackwardConfig, BackwardTiles, backward_tiles_for
from anyattn.backends.hopper.make_backward_config import reason_against_backward, specialised_backward
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from tests.support.hopper.pretended import H200
from tests.support.processes import python

BIAS = torch.zeros(2)


def problem(**changes: Any) -> Problem:
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1} | changes))


def traced(*given: Any) -> tuple:
    return tuple(trace(m, "mask") for m in given)


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(
    ("head_dim", "names"),
    [
        (64, ("capped",)),
        (128, ("full", "causal", "packed causal")),
        pytest.param(64, (), marks=pytest.mark.slow),
        pytest.param(128, (), marks=pytest.mark.slow),
    ],
)
def test_kernels_compile_without_spilling_in_their_loops(head_dim: int, names: tuple[str, ...], tmp_path: Path) -> None:
    module = "tests.support.hopper.cross_compile_backward"
    done = python("-m", module, str(tmp_path), str(head_dim), str(head_dim), *names, CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == (len(names) or 17) + 4
    # at head dimension 128 dK and dV take 128 registers of 240, and long mods leave a few numbers of a tile to local memory
    most = {"capped": 3, "alibi": 7, "relative": 8, "document": 1, "document and causal": 9, "packed alibi": 2, "packed capped": 7}
    most |= {"packed lists": 5, "packed document": 28}  # the latter evaluates a predicate in every tile: a deterministic sum's way
    most = {} if head_dim == 64 else most
    assert {name: accesses for name, (_, accesses) in found.items() if accesses > most.get(name, 0)} == {}


def test_a_plan_names_the_backend_of_the_gradients() -> None:
    p = problem()
    plan = planner.choose(p, H200, "hopper")
    assert plan.backward == "hopper" and "backward: hopper" in plan.why
    assert planner.for_backward(plan, p, H200).backend == "hopper"
    wide = dict.fromkeys("qkv", torch.randn(1, 2, 64, 256, dtype=torch.bfloat16))
    plan = planner.choose(problem(**wide), H200, "hopper")
    assert plan.backward == "triton" and any("goes up to 128" in why for why in plan.why)


def test_what_it_takes_and_why_not_the_rest() -> None:
    for mask in (masks.causal(), masks.sliding_window(9, 0), masks.prefix_lm(5), masks.dilated(3, 2)):
        assert reason_against_backward(problem(predicates=traced(mask))) is None
    assert reason_against_backward(problem(score=trace(lambda s, b, h, i, j: 30 * torch.tanh(s / 30), "score"))) is None
    learned = trace(lambda s, b, h, i, j: s + BIAS[h], "score")
    learned = type(learned).of_fields(vars(learned) | {"tensors": (BIAS.clone().requires_grad_(),)})
    small = anyattn.compute_block_sparsity(48, 48, 1, 1, 64, 64, masks.causal(), device="cpu")
    for changes, words in (
        ({"score": learned}, "captured tensors"),
        ({"blocks": small, "predicates": traced(masks.causal())}, "tiles of 48 x 48"),
        ({"deterministic": True, "predicates": traced(masks.prefix_lm(5))}, "no fixed order"),
    ):
        assert words in str(reason_against_backward(problem(**changes))), words


def test_what_a_problem_becomes() -> None:
    causal = specialised_backward(problem(predicates=traced(masks.causal()))).config
    assert (causal.lists, causal.has_left, causal.has_right, causal.head_dim) == (None, False, True, 128)
    listed = specialised_backward(problem(predicates=traced(masks.prefix_lm(5), masks.causal())))
    assert (listed.config.lists, listed.list_tile, listed.config.list_cut) == ("dense", (128, 128), (2, 1))
    few = dict.fromkeys("qkv", torch.randn(1, 2, 64, 72, dtype=torch.bfloat16))
    assert specialised_backward(problem(**few)).config.head_dim == 128
    one, other = (specialised_backward(problem(predicates=traced(masks.sliding_window(n, 0)))) for n in (5, 500))
    assert one.config == other.config and hash(one.config) == hash(other.config)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BackwardTiles(96, 128), "tile_m=96; wanted 64 or 128"),
        (lambda: BackwardTiles(64, 64), "tile_n=64; wanted 128"),
        (lambda: BackwardTiles(64, 128, 3), "q_stages=3"),
        (lambda: BackwardConfig(96, 96, True, BackwardTiles(64, 128)), "head_dim=96"),
        (lambda: BackwardConfig(128, 128, True, BackwardTiles(128, 128)), "bytes of shared memory"),
    ],
)
def test_configs_judge_themselves(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_tiles_of_head_dimensions() -> None:
    assert backward_tiles_for(64, 128) == BackwardTiles(64, 128)
    assert backward_tiles_for(256, 64) is None
