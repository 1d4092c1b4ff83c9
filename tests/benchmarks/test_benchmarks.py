"""The benchmark's own machinery, on small shapes: that it judges, refuses, interleaves and reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks import report, runner
from benchmarks.bars import BARS, Found
from benchmarks.case import OURS, Case, Record, Shape, Timing
from benchmarks.cases import CASES, GALLERY
from benchmarks.peers import PEERS, Inputs, Peer, Unavailable
from benchmarks.sequences import document_lengths
from benchmarks.variants import VARIANTS, visible_pairs

SMALL = Shape.square(192, heads=2, head_dim=16)
MACHINE = {"date": "", "commit": "", "command": "", "cpu": "", "threads": 1, "capability": "", "torch": "", "python": "", "system": ""}


def test_cases_name_known_variants_and_peers() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        if case.group == "sequences":
            continue  # these bring their own, tested below
        assert case.variant in VARIANTS and set(case.peers) <= set(PEERS), case.name


@pytest.mark.parametrize("variant", ["full", *GALLERY])
def test_every_variant_passes_its_budget(variant: str) -> None:
    record = runner.run_case(Case("t", "forward", variant, ("sdpa-mask",), SMALL, "bfloat16"), rounds=3, budget_s=0)
    assert record.refused is None, record.refused
    assert record.budget[OURS] <= 1.0 and record.flops == 2 * 2 * 16 * record.extra["pairs"]


def test_backward_is_judged_and_timed() -> None:
    record = runner.run_case(Case("t", "backward", "causal", ("sdpa", "flex"), SMALL), rounds=3, budget_s=0)
    assert record.refused is None and set(record.timings) == {OURS, "sdpa"}
    assert "no backward" in record.unavailable["flex"]
    assert record.budget["sdpa"] <= 1.0


def _wrong(kind: str) -> Peer:
    def prepare(inputs: Inputs):
        right = PEERS["sdpa"].prepare(inputs)
        if kind == "forward":
            return lambda: right() * 1.01  # a scale 1 % off
        return lambda: tuple(g.roll(1, dims=2) for g in right())

    return Peer(OURS, prepare)


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_a_wrong_result_is_not_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, OURS, _wrong(kind))
    record = runner.run_case(Case("t", kind, "causal", ("sdpa",), SMALL), rounds=3, budget_s=0)
    assert not record.timings and record.refused is not None and "error budget" in record.refused
    assert "REFUSED" in report.describe_record(record)


def test_wrong_block_lists_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("t", "mask", "causal", (), Shape.square(1024), dtype="")
    assert runner.run_case(case, rounds=3, budget_s=0).refused is None
    right = Inputs.of(case)
    shifted = replace(right.variant, mask=lambda b, h, q_idx, kv_idx: q_idx > kv_idx + 128)
    monkeypatch.setitem(PEERS, OURS, Peer(OURS, lambda inputs: _ours_for(replace(right, variant=shifted))))
    record = runner.run_case(case, rounds=3, budget_s=0)
    assert record.refused is not None and "lists differ" in record.refused


def _ours_for(inputs: Inputs):
    import anyattn

    return lambda: anyattn.create_block_mask(inputs.variant.masked(), *inputs.grid(), device="cpu")


def test_rounds_are_interleaved() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}

    def seconds(call, times: int) -> float:
        call()
        return 1.0

    timings, about = runner.interleave(calls, 4, seconds, budget_s=60)
    tried = (len(order) - 4) // 2  # each call is warmed and measured once before
    assert len(timings["a"].seconds) >= 3 and tried >= len(timings["a"].seconds)
    assert order[4:8] == ["a", "b", "b", "a"]
    assert about["disturbed_rounds"] + len(timings["a"].seconds) >= tried


def test_visible_pairs_counts_unmasked_only() -> None:
    causal = VARIANTS["causal"](100, 1, "cpu").mask
    assert visible_pairs(causal, 100, 100, "cpu", rows_at_once=33) == 5050
    assert visible_pairs(None, 7, 9, "cpu") == 63


def test_unavailable_peers_do_not_stop_a_case() -> None:
    with pytest.raises(Unavailable):
        PEERS["sdpa"].prepare(Inputs.of(Case("t", "forward", "alibi", (), SMALL)))


def test_records_survive_json() -> None:
    record = Record("c", "g", "forward", "v", "float32", "s", {OURS: Timing((1.0, 2.0))}, {OURS: 0.5}, {}, None, 7, {"pairs": 3})
    again = Record.from_json(json.loads(json.dumps(record.as_json())))
    assert again == record and again.is_quiet
    assert not replace(record, extra={"disturbed_used": True}).is_quiet and not replace(record, timings={}).is_quiet


def test_bars_and_reports() -> None:
    def record(name: str, mine: float, peer: str, theirs: float) -> Record:
        case = Case("forward", "forward", name, (peer,), dtype="float32")
        timings = {OURS: Timing((mine,) * 3), peer: Timing((theirs,) * 3)}
        return replace(Record.of(case), timings=timings, budget={OURS: 0.5}, flops=10**9)

    records = [record("full", 1.0, "sdpa", 0.8), *(record(v, 1.0, "flex", 2.0) for v in GALLERY)]
    found = Found({r.case: r for r in records}, {"import": {"package_s": 0.01, "with_flex_attention_s": 0.1}})
    rows = {row[0]: row for row in report.bar_rows(found)}
    assert len(rows) == len(BARS)
    assert rows["forward full float32 vs SDPA"][1:] == ("0.8 x", "≥ 0.9 x", "1 x", "**short**")
    assert rows["gallery forward float32 vs compiled flex, geometric mean"][4] == "pass"
    assert rows["import anyattn beyond torch"][4] == "pass"
    assert rows["backward full float32 vs SDPA"][1] == "not measured"
    records[0].extra["disturbed_used"] = True
    assert report.bar_rows(found)[0][4] == "**short** (disturbed)"
    text = report.as_markdown({**MACHINE, "bf16_instructions": True}, found)
    assert "| forward/full/4096/float32 (disturbed) |" in text and "0.80x" in text
    assert json.loads(json.dumps(report.as_json(MACHINE, found)))["cases"][0]["contenders"]["sdpa"]["anyattn_is_times_as_fast"] == 0.8


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CASES", [Case("forward", "forward", "softcap", (), SMALL)])
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

    monkeypatch.setitem(PEERS, OURS, Peer(OURS, broken))
    monkeypatch.setattr(command, "CASES", [Case("forward", "forward", "full", (), SMALL)])
    done = CliRunner().invoke(command.main, ["--filter", "full", "--rounds", "3"])
    assert done.exit_code == 1 and "no such instruction" in done.output


def test_inputs_are_random_and_reproducible() -> None:
    a, b = (Inputs.of(Case("t", "forward", "full", (), SMALL)) for _ in range(2))
    assert a.q is not None and b.q is not None
    assert torch.equal(a.q, b.q) and float(a.q.std()) > 0.9


@pytest.mark.parametrize(
    "case",
    [
        Case("sequences", "documents", "documents", ("sdpa-padded", "per-document"), Shape.square(1200, heads=2, head_dim=16), "bfloat16"),
        Case("sequences", "decode", "decode", ("sdpa-gqa", "paged-128", "paged-16"), Shape(3, 4, 2, 1, 256, 16)),
    ],
    ids=lambda case: case.kind,
)
def test_sequences_are_judged_and_timed(case: Case) -> None:
    record = runner.run_case(case, rounds=3, budget_s=0)
    assert record.refused is None, record.refused
    assert set(record.timings) == {OURS, *case.peers} and all(share <= 1.0 for share in record.budget.values())
    assert record.flops == case.flops(record.extra["pairs"]) > 0


def test_documents_add_up() -> None:
    lengths = document_lengths(16_384)
    assert len(lengths) == 64 and sum(lengths) == 16_384 and min(lengths) < 20 and max(lengths) > 1000
