"""``anyattn bench --context``: the fit is that of the times, and plans read what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from anyattn import distributed as ad
from anyattn.cli import BAD_ARGUMENTS, bench_context
from anyattn.distributed.placement import CostModel, Rates, costs_of
from anyattn.mods import masks
from tests.support.command_line import call

SETTING = bench_context.Setting((4, 2), 16, 256, "float32", "cpu", 3, 1)
SMALL = ("--context", "--heads", 4, "--heads-kv", 2, "--head-dim", 16, "--seqlen", 256, "--rounds", 3, "--device", "cpu")


def test_rates_of_one_process_are_those_of_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 2 us a call, 1 ns a pair, and half as much again for a mask."""
    times = iter([2e-6 + 1e-9 * 256**2, 2e-6 + 1e-9 * 128**2, 1.5 * (2e-6 + 1e-9 * 256**2), 4e-6 + 1e-9 * 256**2])
    monkeypatch.setattr(bench_context, "_seconds", lambda *_: next(times))
    rates = bench_context._rates_alone(SETTING, torch.device("cpu"))
    assert rates._asdict() == pytest.approx({**rates._asdict(), "flops": 4 * 16 * 4 / 1e-9, "partial": 0.5, "call_seconds": 2e-6})
    assert rates.costs((4, 2), 16, 2).pair_seconds == pytest.approx(1e-9)
    assert rates.costs((8, 2), 32, 2).pair_seconds == pytest.approx(4e-9)


def test_times_that_are_noise_give_rates_that_are_no_negative_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1e-3, 2e-3, 0.5e-3, 0.5e-3])
    monkeypatch.setattr(bench_context, "_seconds", lambda *_: next(times))
    rates = bench_context._rates_alone(SETTING, torch.device("cpu"))
    assert rates.flops > 0 and rates.partial == rates.call_seconds == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_serves_plans(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "costs.json"
    code, out, err = call("bench", *SMALL, "--ranks", ranks, "--json", path)
    assert code == 0, err
    assert all(name in out for name in ("TFLOP/s", "causal", "window", "documents", "ratio", "wrote"))
    found = json.loads(path.read_text())
    assert [case["case"] for case in found["cases"]] == ["causal", "window", "documents"]
    assert all(case["predicted"] > 0 and case["measured"] > 0 for case in found["cases"])
    rates = Rates.read(path)
    assert (rates.bandwidth is None) == (rates.fixed_seconds is None) == (ranks == 1)
    costs = rates.costs((16, 4), 128, 2)
    assert costs.bandwidth == (rates.bandwidth or CostModel.of((16, 4), 128, 2).bandwidth)
    plan = ad.plan(masks.causal(), ranks=2, S=4096, device="cpu", costs=path)
    assert plan.stats == ad.plan(masks.causal(), ranks=2, S=4096, device="cpu", costs=costs).stats
    assert plan.stats.seconds != ad.plan(masks.causal(), ranks=2, S=4096, device="cpu").stats.seconds
    code, out, err = call("plan", "causal", "--S", "4k", "--ranks", 2, "--costs", path)
    assert code == 0 and "fold" in out, err


def test_figures_on_stdout_are_json_alone() -> None:
    code, out, err = call("bench", *SMALL, "--ranks", 1, "--json", "-")
    assert code == 0 and json.loads(out)["setting"]["ranks"] == 1 and "TFLOP/s" in err


@pytest.mark.parametrize("text", ["", "[]", '{"rates": {}}', '{"rates": {"flops": -1, "partial": 0, "call_seconds": 0}}'])
def test_another_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"costs=.*wanted.*anyattn bench --context --json"):
        ad.plan(masks.causal(), ranks=2, S=256, device="cpu", costs=path)
    code, _, err = call("plan", "causal", "--costs", path)
    assert code == BAD_ARGUMENTS and "anyattn bench --context" in err
    with pytest.raises(TypeError, match="costs is a dict; wanted the path"):
        costs_of({}, (16, 4), 128, 2)


@pytest.mark.parametrize("more", [("causal",), ("--seqlen", 512), ("--batch", 2), ("--out", "speed.svg")], ids=str)
def test_mistakes(more: tuple[object, ...]) -> None:
    code, _, err = call("bench", *SMALL, *more)
    assert code == BAD_ARGUMENTS and "--context has masks of its own" in err
