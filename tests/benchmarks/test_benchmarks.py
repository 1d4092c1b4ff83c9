"""The benchmark's own machinery, on small shapes: that it judges, refuses, interleaves and reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from anyattn.testing.harness import peers, runner, timing
from anyattn.testing.harness.case import OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs, visible_pairs
from anyattn.testing.harness.peers import PEERS, Peer, Unavailable
from anyattn.testing.harness.timing import CpuClock, Limits
from anyattn.testing.harness.variants import VARIANTS, Setting, spread_lengths
from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.bars import Found, bar_rows
from benchmarks.cpu.bars import BARS
from benchmarks.cpu.cases import CASES, GALLERY

LIMITS = Limits(rounds=3, seconds=0.0, least=3, sample=0.02)
SMALL = Shape.square(192, heads=2, head_dim=16)
MACHINE = {"date": "", "commit": "", "command": "", "cpu": "", "threads": 1, "capability": "", "torch": "", "python": "", "system": ""}


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


def _scaled() -> Peer:
    def prepare(inputs: Inputs):
        right, layout = PEERS["sdpa"].prepare(inputs)
        return lambda: right() * 1.01, layout  # a scale 1 % off

    return Peer(prepare)


def _rolled(right):
    def backward_of(entry, inputs: Inputs):
        call, layout = right(entry, inputs)
        return lambda: tuple(g.roll(1, dims=2) for g in call()), layout

    return backward_of


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_wrong_result_is_not_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "forward":
        monkeypatch.setitem(PEERS, OURS, _scaled())
    else:
        monkeypatch.setattr(peers, "backward_of", _rolled(peers.backward_of))
    record = runner.run_case(Case("t", "flex", "causal", SMALL, ("sdpa",), is_backward=kind == "backward"), LIMITS)
    assert not record.timings and record.refused is not None and "error budget" in record.refused
    assert "REFUSED" in report.describe(record)


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


def test_visible_pairs_counts_unmasked_only() -> None:
    causal = VARIANTS["cpu"]["causal"].mods(Setting(100, 1)).mask
    assert visible_pairs(causal, 100, 100, "cpu", rows_at_once=33) == 5050
    assert visible_pairs(None, 7, 9, "cpu") == 63


def test_unavailable_peers_do_not_stop_a_case() -> None:
    with pytest.raises(Unavailable):
        PEERS["sdpa"].prepare(Inputs(Case("t", "flex", "alibi", SMALL)))
    with pytest.raises(Unavailable, match="fa2 does not run on cpu"):
        PEERS["fa2"].entry("fa2", Inputs(Case("t", "flex", "causal", SMALL)))
    record = runner.run_case(Case("t", "flex", "alibi", SMALL, ("sdpa", "fa3")), LIMITS)
    assert set(record.timings) == {OURS} and set(record.unavailable) == {"sdpa", "fa3"}


def test_records_survive_json() -> None:
    record = Record("c", "g", "forward", "v", "float32", "s", {OURS: Timing((1.0, 2.0))}, {OURS: 0.5}, {}, {}, None, 7, {"pairs": 3})
    again = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert again == record and again.is_quiet
    assert not replace(record, extra={"disturbed_used": True}).is_quiet and not replace(record, timings={}).is_quiet


def test_bars_and_reports() -> None:
    def record(name: str, mine: float, peer: str, theirs: float) -> Record:
        case = Case("forward", "flex", name, peers=(peer,), dtype="float32")
        timings = {OURS: Timing((mine,) * 3), peer: Timing((theirs,) * 3)}
        return replace(Record.of(case), timings=timings, budget={OURS: 0.5}, flops=10**9)

    records = [record("full", 1.0, "sdpa", 0.8), *(record(v, 1.0, "flex", 2.0) for v in GALLERY)]
    found = Found({r.case: r for r in records}, {"import": {"package_s": 0.01, "with_flex_attention_s": 0.1}})
    rows = {row[0]: row for row in bar_rows(found, BARS)}
    assert len(rows) == len(BARS)
    assert rows["forward full float32 vs SDPA"][1:] == ("0.8 x", "≥ 0.9 x", "1 x", "**short**")
    assert rows["gallery forward float32 vs compiled flex, geometric mean"][4] == "pass"
    assert rows["import anyattn beyond torch"][4] == "pass"
    assert rows["backward full float32 vs SDPA"][1] == "not measured"
    records[0].extra["disturbed_used"] = True
    assert bar_rows(found, BARS)[0][4] == "**short** (disturbed)"
    text = report.as_markdown({**MACHINE, "bf16_instructions": True}, found, BARS)
    assert "| forward/full/4096/float32 (disturbed) |" in text and "0.80x" in text
    assert json.loads(json.dumps(report.as_json(MACHINE, found, BARS)))["cases"][0]["contenders"]["sdpa"]["anyattn_is_times_as_fast"] == 0.8


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", [Case("forward", "flex", "softcap", SMALL)])
    out = tmp_path / "bench"
    done = CliRunner().invoke(command.main, ["--filter", "soft", "--rounds", "3", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert json.loads(out.with_suffix(".json").read_text())["cases"][0]["variant"] == "softcap"
    assert "softcap" in out.with_suffix(".md").read_text()
    again = CliRunner().invoke(command.main, ["--filter", "soft", "--rounds", "3", "--out", str(out), "--keep"])
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
    done = CliRunner().invoke(command.main, ["--filter", "full", "--rounds", "3"])
    assert done.exit_code == 1 and "no such instruction" in done.output


def test_inputs_are_random_and_reproducible() -> None:
    a, b = (Inputs(Case("t", "flex", "full", SMALL)) for _ in range(2))
    assert torch.equal(a.bshd[0], b.bshd[0]) and float(a.bshd[0].std()) > 0.9


@pytest.mark.parametrize(
    "case",
    [
        Case("s", "varlen", "documents", Shape.square(1200, 2, 16), ("sdpa-padded", "per-document"), dtype="bfloat16"),
        Case("s", "decode", "decode", Shape(3, 4, 2, 1, 256, 16), ("sdpa-gqa", "paged-128", "paged-16")),
    ],
    ids=lambda case: case.kind,
)
def test_sequences_are_judged_and_timed(case: Case) -> None:
    record = runner.run_case(case, LIMITS)
    assert record.refused is None, record.refused
    assert set(record.timings) == {OURS, *case.peers} and all(share <= 1.0 for share in record.budget.values())
    assert record.flops == case.flops(record.extra["pairs"]) > 0


def test_documents_add_up() -> None:
    lengths = spread_lengths(16_384)
    assert len(lengths) == 64 and sum(lengths) == 16_384 and min(lengths) < 20 and max(lengths) > 1000
