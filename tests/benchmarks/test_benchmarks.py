"""The benchmark's own machinery, on small shapes: that it judges, refuses, interleaves and reports."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from anyattn.testing.harness import judge, peers, runner, timing
from anyattn.testing.harness.case import OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.peers import PEERS, Entry, Peer, Unavailable
from anyattn.testing.harness.timing import CpuClock, Limits
from anyattn.testing.harness.variants import VARIANTS
from benchmarks import __main__ as command
from benchmarks import probes, report
from benchmarks.bars import Found, bar_rows
from benchmarks.cpu import cases
from benchmarks.cpu.bars import BARS
from benchmarks.cpu.cases import CASES, GALLERY, TABLES

LIMITS = Limits(rounds=3, seconds=0.0, least=3, sample=0.02)
QUICKLY = ("--rounds", "3", "--seconds", "0", "--patience", "0")
SMALL = Shape.square(192, heads=2, head_dim=16)
SEQUENCES = {"varlen": Shape.square(1200, heads=2, head_dim=16), "decode": Shape(3, 6, 2, 1, 256, 16)}
MINE = [case for case in CASES if case.group == "sequences"]
FORWARD = Case("t", "flex", "causal", SMALL, ("sdpa",))


def test_cases_name_known_variants_and_peers() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.device == "cpu" and case.variant in VARIANTS["cpu"], case.name
        assert all("cpu" in PEERS[name].devices for name in case.contestants), case.name


@pytest.mark.parametrize("variant", ["full", *GALLERY])
def test_every_variant_passes_its_budget(variant: str) -> None:
    record = runner.run_case(Case("t", "flex", variant, SMALL, ("sdpa-mask",), dtype="bfloat16"), LIMITS)
    assert record.refused is None, record.refused
    assert record.budget[OURS] <= 1.0 and record.flops == 2 * 2 * 16 * record.extra["pairs"]


def test_backward_is_judged_and_timed() -> None:
    record = runner.run_case(Case("t", "flex", "causal", SMALL, ("sdpa", "flex"), is_backward=True), LIMITS)
    assert record.refused is None and set(record.timings) == {OURS, "sdpa"}
    assert "no backward" in record.unavailable["flex"]
    assert record.budget["sdpa"] <= 1.0


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
def test_sequences_and_caches_are_judged_and_timed(case: Case) -> None:
    record = runner.run_case(replace(case, shape=SEQUENCES[case.kind]), LIMITS)
    assert record.refused is None and set(record.timings) == set(record.budget) == {OURS, *case.peers}
    assert all(share <= 1.0 for share in record.budget.values()), record.budget


@pytest.mark.parametrize("case", {(c.group, c.variant): c for c in TABLES}.values(), ids=lambda case: case.name)
def test_tables_are_judged_and_timed(case: Case) -> None:
    case = replace(case, shape=Shape.square(70, 3, 16, 4), peers=tuple(name for name in case.peers if name != "flex"))
    record = runner.run_case(case, LIMITS)
    assert record.refused is None and set(record.timings) == set(record.budget) == {OURS, *case.peers}, record.unavailable
    assert all(share <= 1.0 for share in record.budget.values()) and not any(map(record.differs, case.peers)), record


@pytest.mark.parametrize("variant", [name for name, each in VARIANTS["cpu"].items() if each.dense])
def test_sdpa_computes_the_gradient_of_a_table_that_learns(variant: str) -> None:
    inputs = Inputs(Case("t", "flex", variant, Shape.square(49, 2, 16, 3), is_backward=True, learns=True))
    mine, theirs = (PEERS[name].entry(name, inputs)[0]()[3:] for name in (OURS, "sdpa-bias"))
    assert len(mine) == 1 and theirs[0] is not None and judge.difference(mine, theirs) < 1e-4


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The busy processes that the probe starts for one small case, in one round without looking at other processes."""
    started: list[Any] = []

    class Process(subprocess.Popen):
        def __init__(self, *args: Any, **options: Any):
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(probes.subprocess, "Popen", Process)
    monkeypatch.setattr(cases, "BUSY", [FORWARD])
    monkeypatch.setattr(probes, "_BUSY_ROUNDS", 1)
    monkeypatch.setattr(probes, "_BUSY_SAMPLE", 1e-3)
    monkeypatch.setattr(timing.Others, "cores", lambda self: 0.0)
    return started


def test_calls_are_timed_beside_busy_processes_which_end(busy: list[Any]) -> None:
    figures = probes.PROBES["busy"]()
    assert list(figures) == [f"{FORWARD.name}, {count} busy" for count in (1, 2)]
    for each in figures.values():
        assert each["over_sdpa"] == each[OURS] / each["sdpa"] > 0.0
    assert [process.returncode for process in busy] == [-signal.SIGKILL] * 3


def test_busy_processes_end_with_a_call_that_raises(busy: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter([1.0] * 2)  # of the calls beside none
    monkeypatch.setattr(CpuClock, "times", lambda self, call, limits: (1, 0.0))
    monkeypatch.setattr(CpuClock, "sample", lambda self, *args: next(ends))
    with pytest.raises(StopIteration):
        probes.PROBES["busy"]()
    assert [process.returncode for process in busy] == [-signal.SIGKILL]


def test_wrong_results_and_other_processes_end_the_probe(busy: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.Others, "cores", lambda self: 0.9)
    with pytest.raises(RuntimeError, match="other processes were busy"):
        probes.PROBES["busy"]()
    monkeypatch.setitem(PEERS, "sdpa", Peer(lambda inputs: (lambda: inputs.bhsd[2] * 1.01, "bhsd")))
    with pytest.raises(RuntimeError, match="no result within its budget by sdpa"):
        probes.PROBES["busy"]()


# of an output, by whether its heads come before its positions
SPOILED: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "a scale 1 % off": lambda out, heads_first: out * 1.01,
    "another row's result": lambda out, heads_first: out.roll(1, dims=2 if heads_first else 0),
    "another head's result": lambda out, heads_first: out.flip(1 if heads_first else -2),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize(
    "case", [FORWARD, *(next(case for case in MINE if case.kind == kind) for kind in SEQUENCES)], ids=lambda case: case.kind
)
def test_a_wrong_result_is_not_timed(case: Case, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PEERS[OURS]

    def spoiled(inputs: Inputs) -> Entry:
        call, layout = right.prepare(inputs)
        return lambda: SPOILED[how](call(), layout == "bhsd"), layout

    monkeypatch.setitem(PEERS, OURS, replace(right, prepare=spoiled))
    record = runner.run_case(replace(case, shape=SEQUENCES.get(case.kind, SMALL)), LIMITS)
    assert not record.timings and record.refused is not None and "error budget" in record.refused
    assert "REFUSED" in report.describe(record)


def test_wrong_gradients_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = peers.backward_of

    def rolled(entry: Any, inputs: Inputs) -> Entry:
        call, layout = right(entry, inputs)
        return lambda: tuple(g.roll(1, dims=2) for g in call()), layout

    monkeypatch.setattr(peers, "backward_of", rolled)
    record = runner.run_case(replace(FORWARD, is_backward=True), LIMITS)
    assert not record.timings and record.refused is not None and "error budget" in record.refused


def test_wrong_block_lists_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("t", "mask", "causal", Shape.square(1024), dtype="")
    assert runner.run_case(case, LIMITS).refused is None
    monkeypatch.setitem(PEERS, OURS, Peer(lambda inputs: (_shifted_lists(inputs), "mask")))
    record = runner.run_case(case, LIMITS)
    assert record.refused is not None and "lists differ" in record.refused


def _shifted_lists(inputs: Inputs):
    import anyattn

    return lambda: anyattn.create_block_mask(lambda b, h, q_idx, kv_idx: q_idx > kv_idx + 128, *inputs.grid, device="cpu")


def _in_order(order: list[str], busy: list[float], monkeypatch: pytest.MonkeyPatch, limits: Limits = LIMITS):
    """The timings of a and b and what is said about them, while other processes keep so many cores busy, look by look."""
    looks = iter(busy)

    class Clock(CpuClock):
        def sample(self, call, times: int, head_start: float) -> float:
            call()
            return 1.0

    monkeypatch.setattr(timing.Others, "cores", lambda self: next(looks, 0.0))
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: order.append("sleep"))
    about: dict = {}
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    found = timing.measure(calls, Clock(), limits, lambda name, error: None, others=timing.Others(limits.patience), about=about)
    return found, about


def test_rounds_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    timings, about = _in_order(order, [], monkeypatch, replace(LIMITS, rounds=8, seconds=60))
    assert order[:4] == ["a", "a", "b", "b"]  # each call is warmed and measured once before
    rounds = [tuple(order[i : i + 2]) for i in range(4, len(order), 2)]
    assert len(rounds) == len(timings["a"].seconds) == 8 and set(rounds) == {("a", "b"), ("b", "a")}
    assert about == {"disturbed_rounds": 0, "disturbed_used": False}


def test_disturbed_rounds_are_repeated_when_others_are_quiet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    # looks: one before and one after each round, and one after each sleep
    busy = [0.0, 0.0, 0.0, 0.9, 0.9, 0.0]
    timings, about = _in_order(order, busy, monkeypatch, replace(LIMITS, seconds=60, patience=60))
    assert order.count("sleep") == 2 and len(order) - 2 == 4 + 2 * 4  # three quiet rounds and the disturbed one
    assert len(timings["b"].seconds) == 3 and about == {"disturbed_rounds": 1, "disturbed_used": False}


def test_disturbed_rounds_count_where_there_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    timings, about = _in_order([], [0.9] * 100, monkeypatch)
    assert len(timings["a"].seconds) == 3 and about == {"disturbed_rounds": 3, "disturbed_used": True}


def test_unavailable_peers_do_not_stop_a_case() -> None:
    with pytest.raises(Unavailable):
        PEERS["sdpa"].prepare(Inputs(Case("t", "flex", "alibi", SMALL)))
    with pytest.raises(Unavailable, match="fa2 does not run on cpu"):
        PEERS["fa2"].entry("fa2", Inputs(Case("t", "flex", "causal", SMALL)))
    record = runner.run_case(Case("t", "flex", "alibi", SMALL, ("sdpa", "fa3")), LIMITS)
    assert set(record.timings) == {OURS} and set(record.unavailable) == {"sdpa", "fa3"}


def _everything(ours: float) -> Found:
    """A run in which anyattn takes ``ours`` seconds for everything and everyone else 1e-4; what is counted goes with it."""
    records = {}
    for case in CASES:
        seconds = {name: (ours if name == OURS or name.startswith("paged") else 1e-4,) * 3 for name in case.contestants}
        records[case.name] = replace(Record.of(case), timings={name: Timing(s) for name, s in seconds.items()}, extra={"tile_share": 0.5})
    figures = ("worst", "very_first", "extra_ms", "package_s", "with_flex_attention_s", "peak_extra_mib")
    figures += tuple(f"batch {batch}, {stored}" for stored in ("contiguous", "paged") for batch in (1, 16))
    count = 0 if ours < 1e-4 else 10_000
    lists = dict.fromkeys(("seconds", "peak_extra_mib", "lists_s"), count)
    each: dict[str, Any] = defaultdict(lambda: {"us": count, "over_sdpa": count})
    each |= {**dict.fromkeys(figures, count), "causal": lists, "document-causal": lists}
    return Found(records, defaultdict(lambda: each))


def test_every_bar_is_reached_by_what_is_fast_and_missed_by_what_is_slow() -> None:
    fast, slow = ({row[0]: row[4] for row in bar_rows(_everything(ours), BARS)} for ours in (1e-6, 100.0))
    assert len(fast) == len(BARS) and set(fast.values()) == {"pass"}
    assert {verdict for name, verdict in slow.items() if "over contiguous" not in name} == {"**short**"}
    disturbed = _everything(100.0)
    for record in disturbed.records.values():
        record.extra["disturbed_used"] = True
    assert bar_rows(disturbed, BARS)[0][4] == "**short** (disturbed)"
    assert {row[4] for row in bar_rows(Found({}, {}), BARS)} == {"-"}


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", [Case("forward", "flex", "softcap", SMALL)])
    out = tmp_path / "bench"
    done = CliRunner().invoke(command.main, ["--filter", "soft", *QUICKLY, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.with_suffix(".json").read_text())["cases"][0]["variant"] == "softcap"
    assert "softcap" in out.with_suffix(".md").read_text()
    again = CliRunner().invoke(command.main, ["--filter", "soft", *QUICKLY, "--out", str(out), "--keep"])
    assert again.exit_code == 0, again.output
    assert CliRunner().invoke(command.main, ["--filter", "soft", "--keep"]).exit_code == 2
    nothing = CliRunner().invoke(command.main, ["--filter", "no such case"])
    assert nothing.exit_code == 2 and "no case matches" in nothing.output
    listed = CliRunner().invoke(command.main, ["--list"])
    assert "forward/softcap/192/float32" in listed.output


def test_a_case_that_raises_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(inputs: Inputs):
        raise RuntimeError("no such instruction")

    monkeypatch.setitem(PEERS, OURS, Peer(broken))
    monkeypatch.setattr(command, "CASES", [Case("forward", "flex", "full", SMALL)])
    done = CliRunner().invoke(command.main, ["--filter", "full", *QUICKLY])
    assert done.exit_code == 1 and "no such instruction" in done.output
