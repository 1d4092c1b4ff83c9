"""The benchmarks of documents and caches: that a wrong result is not timed, whichever it is, and that every bar finds its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from anyattn.testing.harness import runner
from anyattn.testing.harness.case import OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.peers import PEERS, Entry
from anyattn.testing.harness.timing import Limits
from benchmarks import report
from benchmarks.bars import Found, bar_rows
from benchmarks.cpu.bars import BARS
from benchmarks.cpu.cases import CASES

LIMITS = Limits(rounds=3, seconds=0.0, least=3, sample=0.02)
SMALL = {"varlen": Shape.square(1200, heads=2, head_dim=16), "decode": Shape(3, 6, 2, 1, 256, 16)}
MINE = [case for case in CASES if case.group == "sequences"]


@pytest.mark.parametrize("case", MINE, ids=lambda case: case.name)
def test_every_case_is_judged_and_timed(case: Case) -> None:
    record = runner.run_case(replace(case, shape=SMALL[case.kind]), LIMITS)
    assert record.refused is None and set(record.timings) == set(record.budget) == {OURS, *case.peers}
    assert all(share <= 1.0 for share in record.budget.values()), record.budget
    assert report.describe(record)


SPOILED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a scale 1 % off": lambda out: out * 1.01,
    "another row's result": lambda out: out.roll(1, dims=0),
    "another head's result": lambda out: out.flip(-2),
}


@pytest.mark.parametrize("how", SPOILED)
@pytest.mark.parametrize("kind", SMALL)
def test_a_wrong_result_is_not_timed(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PEERS[OURS]

    def spoiled(inputs: Inputs) -> Entry:
        call, layout = right.prepare(inputs)
        return lambda: SPOILED[how](call()), layout

    monkeypatch.setitem(PEERS, OURS, replace(right, prepare=spoiled))
    case = next(case for case in MINE if case.kind == kind)
    record = runner.run_case(replace(case, shape=SMALL[case.kind]), LIMITS)
    assert not record.timings and record.refused is not None and "error budget" in record.refused


def test_every_bar_finds_its_figures() -> None:
    """Times of 1, 2, 3, ... seconds for the contenders in order: what a bar calls faster must be."""

    def record(case: Case) -> Record:
        timings = {name: Timing((1.0 + i,) * 3) for i, name in enumerate((OURS, *case.peers))}
        return replace(Record.of(case), timings=timings, budget={OURS: 0.5}, flops=1)

    found = Found({case.name: record(case) for case in MINE}, {})
    rows = {row[0]: row for row in bar_rows(found, BARS)}
    measured = {bar.name: rows[bar.name][1] for bar in BARS if rows[bar.name][1] != "not measured"}
    for dtype in ("float32", "bfloat16"):
        mine = {name: figure for name, figure in measured.items() if dtype in name}
        wanted = {
            "padded batch": "2 x",
            "one call a document": "0.333 x",
            "SDPA enable_gqa": "2 x",
            "pages of 128": "3 x",
            "pages of 16": "4 x",
        }
        for words, figure in wanted.items():
            assert [f for name, f in mine.items() if words in name] == [figure], words
