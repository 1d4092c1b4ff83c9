"""The benchmarks of ragged batches and caches, on small shapes: that they judge what they time, and that every bar finds its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import report, runner, sequence_probes, sequences
from benchmarks.bars import BARS, Found
from benchmarks.case import OURS, Case, Record, Shape, Timing

SMALL = {
    "varlen": Shape.square(1200, heads=2, head_dim=16),
    "decode": Shape(batch=3, heads_q=6, heads_kv=2, seqlen_q=1, seqlen_k=300, head_dim=16),
}


@pytest.mark.parametrize("case", sequences.CASES, ids=lambda case: case.name)
def test_every_case_is_judged_and_timed(case: Case) -> None:
    record = runner.run_case(replace(case, shape=SMALL[case.kind]), rounds=3, budget_s=0)
    assert record.refused is None, record.refused
    assert set(record.timings) == {OURS, *case.peers} == set(record.budget) and record.flops > 0
    assert all(share <= 1.0 for share in record.budget.values()), record.budget
    assert report.describe_record(record)


def _spoiled(right: Callable[[], Any], kind: str) -> Callable[[], Any]:
    if kind == "a scale 1 % off":
        return lambda: right() * 1.01
    if kind == "documents one row late":
        return lambda: right().roll(1, dims=0)
    return lambda: right().flip(2)  # another head's result


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (sequences.CASES[0], "a scale 1 % off"),
        (sequences.CASES[0], "documents one row late"),
        (sequences.CASES[2], "a scale 1 % off"),
        (sequences.CASES[2], "another head"),
    ],
    ids=str,
)
def test_a_wrong_result_is_not_timed(case: Case, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = sequences.PEERS[OURS]
    monkeypatch.setitem(sequences.PEERS, OURS, lambda inputs: _spoiled(ours(inputs), kind))
    record = runner.run_case(replace(case, shape=SMALL[case.kind]), rounds=3, budget_s=0)
    assert not record.timings and record.refused is not None and "error budget" in record.refused


@pytest.mark.parametrize("total", [16_384, 1200, 256, 5])
def test_document_lengths(total: int) -> None:
    lengths = sequences.document_lengths(total)
    assert sum(lengths) == total and min(lengths) >= 1 and len(lengths) == max(1, total // 256)
    if total == 16_384:
        assert len(lengths) == 64 and max(lengths) > 700 and min(lengths) < 50, "mixed"


def test_decoding_again_changes_nothing() -> None:
    inputs = sequences.Decode.of(replace(sequences.CASES[2], shape=SMALL["decode"]))
    step = sequences.PEERS[OURS](inputs)
    assert torch.equal(step(), step())


def test_probes_on_small_sizes() -> None:
    host = sequence_probes._decode_host(calls=5)
    assert host["batch_1_us"] > 0 and host["batch_16_us"] >= host["batch_16_paged_us"]
    lists = sequence_probes._ragged_lists(sequences=7, longest=300, repeats=2)
    assert lists["causal"]["seconds"] > 0 and lists["window-512"]["lists_mib"] > 0


def test_every_bar_finds_its_figures() -> None:
    def record(case: Case) -> Record:
        timings = {name: Timing((1.0 + i,) * 3) for i, name in enumerate((OURS, *case.peers))}
        return replace(Record.of(case), timings=timings, budget={OURS: 0.5}, flops=1)

    probes = {
        "decode-host": {"batch_1_us": 250.0, "batch_16_us": 350.0},
        "ragged-lists": {"causal": {"seconds": 0.5}, "window-512": {"seconds": 2.0}},
    }
    found = Found({case.name: record(case) for case in sequences.CASES}, probes)
    mine = [bar for bar in BARS if any(word in bar.name for word in ("documents", "decode", "1,000 sequences"))]
    rows = {row[0]: row for row in report.bar_rows(found)}
    assert len(mine) == 14 and all(rows[bar.name][1] != "not measured" for bar in mine)
    assert rows["64 documents of 16,384 tokens float32 vs SDPA on the padded batch"][1:5] == ("2 x", "≥ 3 x", "", "**short**")
    assert rows["64 documents of 16,384 tokens bfloat16, time over one call per document"][1] == "0.333 x"
    assert rows["decode float32, time of shuffled pages of 16 over contiguous"][1] == "3 x"
    assert rows["host time of a decode call, batch 1"][4] == "pass" and rows["host time of a decode call, batch 16"][4] == "**short**"
    assert rows["block lists of 1,000 sequences of 1 to 4,096, window-512"][4] == "**short**"
