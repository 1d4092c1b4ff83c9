"""The backward kernels compiled for sm_90a without a GPU: no loop over row tiles spills; and which calls the kernel takes."""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, planner
from anyattn.backends import repeater_of
from anyattn.backends.hopper import backward_launches
from anyattn.backends.hopper.backward import _of_captured, _totals
from anyattn.backends.hopper.backward_config import (
    HEAD_DIMS,
    SHARED_MEMORY,
    BackwardConfig,
    BackwardTiles,
    backward_tiles_for,
    fits_halved,
    padded_for_backward,
)
from anyattn.backends.hopper.captured_sums import CapturedSum, with_derivatives
from anyattn.backends.hopper.make_backward_config import backward_spec, reason_against_backward
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from tests.support.hopper.pretended import H200
from tests.support.processes import python

BIAS = torch.zeros(2)
IDS = torch.arange(64) // 9
LEARNED: dict[str, Any] = {  # by kind of sum
    "head": lambda t: lambda s, b, h, i, j: s + t[h, 0],
    "key": lambda t: lambda s, b, h, i, j: s + t[h, j],
    "row": lambda t: lambda s, b, h, i, j: s + t[h, i],
    "diagonal": lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, 0, 9)],
    "pair": lambda t: lambda s, b, h, i, j: s + t[h, j] * t[0, i],
    "any": lambda t: lambda s, b, h, i, j: s + t[IDS[i] % 2, IDS[j]],
}


def problem(**changes: Any) -> Problem:
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1} | changes))


def traced(*given: Any) -> tuple:
    return tuple(trace(m, "mask") for m in given)


# at head dimension 128 dK and dV take 128 registers of 240, and long mods leave a few numbers of a tile to local memory
MOST = {"capped": 3, "relative": 8, "video": 1, "packed capped": 2, "packed lists": 2, "dropout document": 4, "document parts": 1}
MOST |= {"short document": 8}  # of 232 registers
# without their sums these mods, which read something for every row or pair, leave 7, 23, 14 and 75 numbers there
MOST |= {"summed by row": 5, "summed distance": 10, "summed pairs": 18, "summed looked up": 20}
MOST |= {"summed each pair": 16, "summed buckets": 14, "summed factor": 2}


# at each width that has tiles of its own the mod that needs most registers, which test_families_compile.py compiles
FAMILIES = (
    (64, 64, "summed capped"),
    (128, 128, "tall packed causal", "short alibi", "dropout causal", "document parts", "rows"),
    (192, 128, "capped"),
    (256, 256, "capped"),
)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (64, 256), (128, 192)], ids=str)
def test_every_kernel_compiles_without_spilling_in_its_loops(dims: tuple[int, int], tmp_path: Path) -> None:
    done = python("-m", "tests.support.hopper.cross_compile_backward", str(tmp_path), *map(str, dims), CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    check_loops((dims,), json.loads(done.stdout.splitlines()[-1]))


def check_loops(parts: tuple[tuple, ...], results: list[dict[str, tuple[int, int]]]) -> None:
    """parts: head dimensions and which kernels of them, all if none is named. results: of each what ``cross_compile_backward`` found."""
    for (head_dim, head_dim_v, *names), found in zip(parts, results, strict=True):
        of_wide, is_tall = 27 if fits_halved(head_dim, head_dim_v) else 22, any(name.startswith("tall") for name in found)
        count = of_wide if max(head_dim, head_dim_v) > 128 else {64: 52, 96: 51, 128: 51 + 11}[head_dim]
        count = len(set(names) - {"rows"}) if names else count
        assert len(found) == count + 8 * (1 + is_tall) * (not names or "rows" in names)
        spilled = {name: accesses for name, (_, accesses) in found.items() if accesses > (MOST.get(name, 0) if head_dim == 128 else 0)}
        assert not spilled, f"of {head_dim}, {head_dim_v}: {spilled}"


def test_a_plan_names_the_backend_of_the_gradients() -> None:
    p = problem()
    plan = planner.choose(p, H200, "hopper")
    assert plan.backward == "hopper" and "backward: hopper" in plan.why
    assert planner.for_backward(plan, p, H200).backend == "hopper"
    for d in (136, 192, 256):
        wide = dict.fromkeys("qkv", torch.randn(1, 2, 64, d, dtype=torch.bfloat16))
        assert planner.choose(problem(**wide), H200, "hopper").backward == "hopper"


def test_what_it_takes_and_why_not_the_rest() -> None:
    for mask in (masks.causal(), masks.sliding_window(9, 0), masks.prefix_lm(5), masks.dilated(3, 2)):
        assert reason_against_backward(problem(predicates=traced(mask))) is None
    assert reason_against_backward(problem(score=trace(lambda s, b, h, i, j: 30 * torch.tanh(s / 30), "score"))) is None
    table = BIAS[:, None].repeat(1, 64).requires_grad_()
    for learned in LEARNED.values():
        assert reason_against_backward(problem(score=trace(learned(table), "score"))) is None
    by_row, often = (
        trace(m, "score")
        for m in (lambda s, b, h, i, j: torch.tanh(s + table[h, i]), lambda s, b, h, i, j: s + sum(table[h, n] for n in range(5)))
    )
    few = dict.fromkeys("qkv", torch.randn(1, 2, 64, 64, dtype=torch.bfloat16))
    assert reason_against_backward(problem(**few, score=by_row)) is None
    by_head = trace(LEARNED["head"](table), "score")
    by_score = trace(lambda s, b, h, i, j: s + table[h, torch.clamp(s.to(torch.int64), 0, 9)], "score")
    wide = dict.fromkeys("qkv", torch.randn(1, 2, 64, 256, dtype=torch.bfloat16))
    q, v = (torch.randn(1, 2, 64, d, dtype=torch.bfloat16) for d in (192, 128))
    packed = {"sequences": Sequences(*(torch.zeros(1, dtype=torch.int64) for _ in range(7)))}
    longest = {"q": q, "k": q, "v": v, **packed}
    for mask in ((), traced(masks.causal()), traced(masks.sliding_window(9, 0))):
        for is_deterministic in (False, True):
            assert reason_against_backward(problem(**longest, predicates=mask, deterministic=is_deterministic)) is None
    every = torch.zeros(1, 2, 64, 64, requires_grad=True)
    by_pair = trace(lambda s, b, h, i, j: s + every[b, h, i, j], "score")
    assert reason_against_backward(problem(score=by_pair, deterministic=True)) is None
    assert reason_against_backward(problem(deterministic=True, predicates=traced(masks.prefix_lm(5)))) is None
    small = anyattn.compute_block_sparsity(48, 48, 1, 1, 64, 64, masks.causal(), device="cpu")
    for changes, words in (
        ({"score": by_row}, "no registers"),
        ({"score": by_score}, "depends on the score"),
        ({"score": by_head, **wide}, "for head dimensions above 128"),
        ({"score": by_head, **packed}, "for packed"),
        ({**wide, **packed}, "these have 256 and 256, padded"),
        ({**longest, "score": trace(lambda s, b, h, i, j: s * 2.0, "score")}, "without score mods, block lists and masks"),
        ({**longest, "predicates": traced(masks.dilated(3, 2))}, "without score mods, block lists and masks"),
        ({"score": often}, "5 times"),
        ({"score": by_head, "deterministic": True}, "no exact sums"),
        ({"blocks": small, "predicates": traced(masks.causal())}, "tiles of 48 x 48"),
    ):
        assert words in str(reason_against_backward(problem(**changes))), words


def test_what_a_problem_becomes() -> None:
    causal = backward_spec(problem(predicates=traced(masks.causal()))).config
    assert (causal.lists, causal.has_left, causal.has_right, causal.head_dim) == (None, False, True, 128)
    listed = backward_spec(problem(predicates=traced(masks.prefix_lm(5), masks.causal())))
    assert (listed.config.lists, listed.list_tile, listed.config.list_cut) == ("dense", (128, 128), (2, 1))
    few = dict.fromkeys("qkv", torch.randn(1, 2, 64, 72, dtype=torch.bfloat16))
    assert backward_spec(problem(**few)).config.head_dim == 96
    q, v = (torch.randn(1, 2, 256, d, dtype=torch.bfloat16) for d in (136, 128))
    wide = backward_spec(problem(q=q, k=q, v=v, predicates=traced(masks.prefix_lm(5))))
    assert (wide.config.head_dim, wide.config.head_dim_v, wide.config.tiles.tile_n) == (192, 128, 64)
    assert (wide.list_tile, wide.config.list_cut) == ((128, 128), (2, 2))
    blocks = anyattn.compute_block_sparsity(64, 64, 1, 1, 256, 256, masks.causal(), device="cpu")
    wide = backward_spec(problem(q=q, k=q, v=v, blocks=blocks, predicates=traced(masks.causal())))
    assert (wide.list_tile, wide.config.list_cut) == ((64, 64), (1, 1))
    one, other = (backward_spec(problem(predicates=traced(masks.sliding_window(n, 0)))) for n in (5, 500))
    assert one.config == other.config and hash(one.config) == hash(other.config)


def test_lengths_choose_tall_tiles() -> None:
    """Where they take less time: not where many rows of the last tile do not exist, nor under a causal edge that is most of the work."""

    def rows(length: int, d: int = 128, *mods: Any, **changes: Any) -> int:
        given = dict.fromkeys("qkv", torch.empty(1, 1, length, d, dtype=torch.bfloat16))
        return backward_spec(problem(**given, predicates=traced(*mods), **changes)).config.tiles.tile_m

    assert [rows(n) for n in (64, 80, 512, 1000, 2048, 8192)] == [64, 64, 64, 80, 80, 80]  # 80 keys are one tile, and dQ^T is not stored
    assert [rows(n, 128, masks.causal()) for n in (512, 2048, 8192)] == [64, 64, 80]
    assert rows(8192, 104) == 80 and rows(8192, 64) == 128 and rows(8192, 128, masks.prefix_lm(5)) == 64
    few, unknown = (Sequences(*(torch.zeros(n, dtype=torch.int64) for _ in range(7))) for n in (4, 0))
    assert rows(8192, sequences=few) == 80 and rows(8192, sequences=unknown) == 64
    nothing = dict.fromkeys("qkv", torch.empty(0, 1, 80, 128, dtype=torch.bfloat16))
    assert backward_spec(problem(**nothing, sequences=unknown)).config.tiles.tile_m == 64


@pytest.mark.parametrize("name", [name for name in LEARNED if name != "pair"])
def test_which_sums_a_learned_tensor_has(name: str) -> None:
    table = BIAS[:, None].repeat(1, 64).requires_grad_()
    p = problem(score=trace(LEARNED[name](table), "score"))
    spec = backward_spec(p)
    assert p.score is not None and [p.score.tensors[slot].requires_grad for slot in spec.wanted] == [True]
    assert [(s.kind, s.total) for s in spec.config.sums] == [(name, 0)]
    assert (spec.config.scratch > 0) == (name == "diagonal")
    plan = planner.choose(p, H200, "hopper")
    assert plan.backward == "hopper" and "backward: hopper" in plan.why


def test_gradients_of_captured_tensors_and_their_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch is given, what it may leave there, and what becomes of it."""
    head, every, unread = (
        torch.zeros(2).requires_grad_(),
        torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16).requires_grad_(),
        torch.zeros(3).requires_grad_(),
    )
    mod = trace(lambda s, b, h, i, j: s + head[h] + every[b, h, i, j] + torch.where(unread[0] > 1, 1.0, 0.0), "score")
    p = problem(score=mod)
    spec = backward_spec(p)
    totals = _totals(p, spec)
    named = {t.data_ptr(): total for t, total in zip((mod.tensors[i] for i in spec.wanted), totals, strict=True)}
    assert named[head.data_ptr()].shape == (2, 1024) and named[head.data_ptr()].dtype is torch.float32
    assert named[every.data_ptr()].shape == every.shape and named[every.data_ptr()].dtype is torch.bfloat16
    for total in totals:
        assert not total.any()
        total += 1.0
    found = dict(zip([t.data_ptr() for t in mod.tensors], _of_captured(p, spec, totals), strict=True))
    assert found[head.data_ptr()].tolist() == [1024.0, 1024.0]
    assert found[every.data_ptr()].dtype is torch.bfloat16 and found[every.data_ptr()].shape == every.shape


def test_backward_passes_of_a_plan_may_want_other_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    launched, module = [], backward_launches
    monkeypatch.setattr(module, "launch", lambda config, arguments: launched.append((config, arguments)))
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "counter_of", lambda device: torch.zeros(2, dtype=torch.int32))
    head = torch.zeros(2)
    p = problem(score=trace(lambda s, b, h, i, j: s + head[h], "score"))
    plan = planner.choose(p, H200, "hopper")
    for is_wanted in (False, True, False):
        head.requires_grad_(is_wanted)
        launched.clear()
        found = repeater_of(p, plan).backward(p, p.q, torch.zeros(1, 2, 64), p.q, None)
        assert len(found) == 5 and (found[4] is not None) == is_wanted
        config, arguments = launched[1]
        assert len(config.sums) == is_wanted and len(arguments[-1]) == is_wanted


SQUARE = with_derivatives(trace(lambda s, b, h, i, j: s * s, "score").expr)[0]
REFUSED: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [  # what is said, (head dimensions, tile_m, tile_n), other fields
    ("tile_m=96; wanted 64 or 128", (64, 64, 96, 128), {}),
    ("tile_m=80 at head_dim 96; wanted 128", (96, 96, 80, 128), {}),
    ("tile_m=80 with lists", (128, 128, 80, 128), {"lists": "dense"}),
    ("tile_n=96; wanted 128", (64, 64, 64, 96), {}),
    ("dq_steps=3", (64, 64, 64, 128), {"dq_steps": 3}),
    ("holds_k=48; wanted 0, 32, a multiple of 64, or", (64, 64, 64, 128), {"holds_k": 48}),
    ("holds_v=128; wanted .* the head dimension, 64", (64, 64, 64, 128), {"holds_v": 128}),
    ("delta='after' with tile_n=128; wanted one of 'before', 'between', 'behind'", (64, 64, 64, 128), {"delta": "after"}),
    ("delta='behind' with tile_n=64; wanted 'before'", (64, 64, 64, 64), {}),
    ("stores_dq with BackwardTiles", (128, 128, 64, 128), {"stores_dq": True, "is_deterministic": True}),
    ("stores_dq with BackwardTiles", (128, 128, 64, 128), {"stores_dq": True, "has_entries": True}),
    ("stores_dq with BackwardTiles", (128, 128, 80, 128), {"stores_dq": True}),
    ("tile_m=128, ds_stages=2 where warp groups share keys", (64, 64, 128, 64), {}),
    ("take 160 registers of a thread; wanted at most 128", (192, 128, 64, 128), {}),
    ("dp_steps=3; wanted 1 or 2", (64, 64, 64, 128), {"dp_steps": 3}),
    ("delta='behind' with dp_steps=2; wanted 'before'", (64, 64, 64, 128), {"dq_steps": 2, "dp_steps": 2}),
    ("dq_steps=1 with dp_steps=2; wanted 2", (64, 64, 64, 128), {"dp_steps": 2, "delta": "before"}),
    ("dp_steps=2 with a score mod", (64, 64, 64, 128), {"dq_steps": 2, "dp_steps": 2, "delta": "before", "score": SQUARE}),
    ("with entries, whose cut tiles", (256, 256, 64, 64), {"delta": "before", "has_entries": True}),
    ("bytes of shared memory", (256, 256, 64, 64), {"delta": "before"}),
    ("q_stages=3", (64, 64, 64, 128), {"q_stages": 3}),
    ("wanted 2 stages of dS", (64, 128, 64, 128), {"ds_stages": 1, "has_entries": True}),
    ("head_dim=80", (80, 80, 64, 128), {}),
    ("bytes of shared memory", (128, 128, 128, 128), {}),
    ("sums without score", (64, 64, 64, 128), {"sums": (CapturedSum(0, "head", None),)}),
    ("wanted 128: half of 96", (96, 192, 64, 64), {"delta": "before"}),
]


@pytest.mark.parametrize(("words", "sizes", "fields"), REFUSED)
def test_configs_judge_themselves(words: str, sizes: tuple[int, ...], fields: dict[str, Any]) -> None:
    of_tiles = {name: value for name, value in fields.items() if name in BackwardTiles.__dataclass_fields__}
    others = {name: value for name, value in fields.items() if name not in of_tiles}
    with pytest.raises(ValueError, match=words):
        BackwardConfig(*sizes[:2], True, BackwardTiles(*sizes[2:], **of_tiles), **others)


def test_tiles_of_head_dimensions() -> None:
    """Whatever the planner chooses, the kernel takes."""
    padded = [padded_for_backward(*dims) for dims in ((40, 80), (96, 72), (104, 96), (96, 136))]
    assert padded == [(64, 96), (96, 96), (128, 96), (128, 192)]
    for d, dv in itertools.product(HEAD_DIMS, HEAD_DIMS):
        if padded_for_backward(d, dv) != (d, dv):
            continue
        for *choice, is_fixed in itertools.product((False, True), repeat=4):
            tiles = backward_tiles_for(d, dv, *choice)
            config = BackwardConfig(d, dv, True, tiles, is_deterministic=is_fixed, has_entries=choice[2] and not tiles.shares_keys)
            assert config.shared_memory <= SHARED_MEMORY and config.tiles.shares_keys == (max(d, dv) > 128 and not tiles.halves_dp)
