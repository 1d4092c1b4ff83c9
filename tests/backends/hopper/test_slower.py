"""Calls for which the planner prefers Triton to a Hopper kernel that could compute them, on a machine that is taken for an H200."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

import anyattn
from anyattn import hardware
from anyattn.plan import Plan
from tests.support.hopper.pretended import H200

pytestmark = pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("triton", "cutlass")), reason="needs both backends")

PAIRS, ODD, TABLE, BUCKETS = (
    torch.zeros(8, 640, 640),
    torch.zeros(8, 640, 641),
    torch.zeros(99, 8),
    torch.zeros(512, 512, dtype=torch.int64),
)
DISTANCES, SLOPES = torch.zeros(8, 1024), torch.zeros(8)
SCORES: dict[str, Any] = {
    "none": None,
    "pairs": lambda s, b, h, i, j: s + PAIRS[h, i, j],
    "odd pairs": lambda s, b, h, i, j: s + ODD[h, i, j],
    "buckets": lambda s, b, h, i, j: s + TABLE[BUCKETS[i, j], h],
    "distances": lambda s, b, h, i, j: s + DISTANCES[h, i - j + 512],
    "slopes": lambda s, b, h, i, j: s + SLOPES[h] * (i - j),
}


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "of", lambda *_: H200)


def planned(batch: int, seqlen: int, score: str = "none", d: int = 64, kv_heads: int = 8, **options: Any) -> Plan:
    q, k = (torch.zeros(batch, n, seqlen, d, dtype=torch.bfloat16).requires_grad_() for n in (8, kv_heads))
    return anyattn.explain(q, k, k, SCORES[score], enable_gqa=True, **options).plan


@pytest.mark.parametrize(
    ("batch", "seqlen", "score", "chosen"),
    [
        (512, 64, "none", ("triton", "triton")),
        (512, 49, "pairs", ("triton", "triton")),
        (1, 64, "buckets", ("triton", "triton")),
        (512, 65, "none", ("hopper", "hopper")),
        (64, 256, "buckets", ("triton", "hopper")),
        (1, 512, "buckets", ("triton", "triton")),
        (1, 512, "pairs", ("triton", "triton")),
        (64, 256, "pairs", ("triton", "hopper")),
        (1, 512, "odd pairs", ("triton", "hopper")),
        (64, 512, "odd pairs", ("hopper", "hopper")),
        (1, 512, "distances", ("triton", "hopper")),
        (1, 512, "slopes", ("hopper", "hopper")),
    ],
)
def test_the_faster_backend_is_chosen_for_each_pass(batch: int, seqlen: int, score: str, chosen: tuple[str, str]) -> None:
    plan = planned(batch, seqlen, score)
    assert (plan.backend, plan.backward) == chosen
    assert ("triton" in chosen) == any("it takes longer" in why for why in plan.why)
    named = planned(batch, seqlen, score, backend="hopper")
    assert (named.backend, named.backward) == ("hopper", "hopper")
    named = planned(batch, seqlen, score, backend="triton")
    assert (named.backend, named.backward) == ("triton", "triton")


def test_narrow_heads_with_a_load_for_every_pair() -> None:
    assert planned(64, 256, "odd pairs", d=32).backend == "triton" and planned(64, 513, "odd pairs", d=32).backend == "hopper"
    assert planned(64, 256, "pairs", d=32).backward == "triton" and planned(64, 513, "pairs", d=32).backend == "triton"
    assert planned(512, 65, "buckets", d=32).backward == planned(512, 65, "buckets").backward == "hopper"
    assert planned(64, 256, "slopes", d=32).backend == planned(64, 256, d=32).backend == "hopper"


def test_short_calls_with_wide_heads() -> None:
    for score in ("none", "pairs", "buckets"):
        plan, wider = planned(512, 64, score, d=128), planned(512, 64, score, d=136)
        assert (plan.backend, plan.backward) == ("hopper", "triton") and (wider.backend, wider.backward) == ("hopper", "hopper")


@pytest.mark.parametrize("options", [{"d": 136}, {"kv_heads": 2}, {"dropout_p": 0.1}], ids=str)
def test_calls_of_kinds_that_were_not_measured_stay(options: dict[str, Any]) -> None:
    assert planned(512, 64, **options).backend == "hopper"


def test_learned_tables_and_deterministic_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    assert planned(1, 64, deterministic=True).backward == "hopper"
    learned = TABLE.clone().requires_grad_()
    monkeypatch.setitem(SCORES, "learned", lambda s, b, h, i, j: s + learned[BUCKETS[i, j], h])
    assert planned(1, 512, "learned").backward == "hopper" and planned(1, 64, "learned").backward == "triton"
    own = torch.zeros(64, 99, 8).requires_grad_()
    monkeypatch.setitem(SCORES, "own table", lambda s, b, h, i, j: s + own[b, BUCKETS[i, j], h])
    assert planned(64, 64, "own table").backward == "hopper"
    pairs = torch.zeros(8, 512, 512).requires_grad_()
    monkeypatch.setitem(SCORES, "learned pairs", lambda s, b, h, i, j: s + pairs[h, i, j])
    chosen = {(64, 512): "triton", (64, 256): "hopper", (512, 64): "triton"}
    assert {shape: planned(*shape, "learned pairs").backward for shape in chosen} == chosen
    assert planned(64, 512, "pairs", deterministic=True).backward == "hopper"


def test_without_triton_the_kernel_that_exists_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn import planner

    monkeypatch.setattr(planner, "_reason_against_triton", lambda *_: "triton is not installed")
    plan = planned(512, 64)
    assert (plan.backend, plan.backward) == ("hopper", "hopper")


@pytest.mark.parametrize(
    ("width", "seqlen", "shares", "chosen"),
    [(64, 512, False, "triton"), (64, 256, False, "hopper"), (8, 512, False, "hopper"), (64, 512, True, "hopper")],
)
def test_learned_tables_by_row_and_distance(width: int, seqlen: int, shares: bool, chosen: str) -> None:
    """Triton's where most pairs are far apart and the places near the diagonal not many more than the table's, which a head has alone."""
    table = torch.zeros(2, 8, 512, width, dtype=torch.bfloat16, requires_grad=True)

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[b, h * 0 if shares else h, i, torch.clamp(i - j, -20, 20) % width]

    q, k = (torch.zeros(2, 8, seqlen, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    assert anyattn.explain(q, k, k, score).plan.backward == chosen
