"""Bars: the figures to reach, one row each, and their evaluation on a run's records."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anyattn.testing.harness.case import OURS, Record

__all__ = ["Bar", "Found", "bar_rows", "geometric_mean", "one", "probe", "some", "versus"]


@dataclass(frozen=True)
class Found:
    """The results of a run: records by case name, probes by name."""

    records: dict[str, Record]
    probes: dict[str, dict[str, Any]]

    disturbed: set[str] = field(default_factory=set)  # cases whose figures were used although other processes were busy

    def record(self, case: str) -> Record:
        record = self.records[case]
        if not record.timings:
            raise KeyError(case)
        if not record.is_quiet:
            self.disturbed.add(case)
        return record

    def ratio(self, case: str, peer: str) -> float:
        return self.record(case).ratio(peer)

    def seconds(self, case: str, who: str = OURS) -> float:
        return self.record(case).timings[who].median


@dataclass(frozen=True)
class Bar:
    """measure: raises ``KeyError`` if the run did not measure the figure. at_least: else at most. note: text to add to the figure."""

    name: str
    floor: float
    measure: Callable[[Found], float]
    at_least: bool = True
    unit: str = "x"
    aim: float | None = None
    note: Callable[[Found], str] = lambda found: ""

    def passes(self, value: float) -> bool:
        return (operator.ge if self.at_least else operator.le)(value, self.floor)


def bar_rows(found: Found, bars: Sequence[Bar]) -> list[tuple[str, str, str, str, str]]:
    """(bar, measured, floor, aim, verdict) of every bar, in their order."""
    return [_row(bar, found) for bar in bars]


def _row(bar: Bar, found: Found) -> tuple[str, str, str, str, str]:
    sign = "≥" if bar.at_least else "≤"
    floor, aim = f"{sign} {_figure(bar.floor)} {bar.unit}", "" if bar.aim is None else f"{_figure(bar.aim)} {bar.unit}"
    found.disturbed.clear()
    try:
        value, note = bar.measure(found), bar.note(found)
    except KeyError as missing:
        record = found.records.get(str(missing.args[0]))
        return bar.name, "refused" if record is not None else "not measured", floor, aim, "-"
    text = f"{_figure(value)} {bar.unit}" + (f" ({note})" if note else "")
    verdict = "pass" if bar.passes(value) else "**short**"
    return bar.name, text, floor, aim, verdict + (" (disturbed)" if found.disturbed else "")


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean; nan for no values."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def versus(found: Found, case: str, peers: Iterable[str], mine: str = OURS) -> float:
    """The speed relative to the fastest of ``peers`` that computed the same result. ``KeyError`` if none was timed, anyattn was not, or
    its result is wrong."""
    record = found.record(case)
    timed = [p for p in peers if p in record.timings and not record.differs(p)]
    is_wrong = record.differs(mine) or record.budget.get(mine, 0.0) > 1.0
    if mine not in record.timings or is_wrong or not timed:
        raise KeyError(case)
    return min(record.ratio(peer, mine) for peer in timed)


def _all(found: Found, cases: Iterable[str], peers: Iterable[str], mine: str) -> dict[str, float]:
    """The ratios of those cases that have one. Raises ``KeyError`` if none has."""
    ratios: dict[str, float] = {}
    for case in cases:
        try:
            ratios[case] = versus(found, case, peers, mine)
        except KeyError:
            continue
    if not ratios:
        raise KeyError(next(iter(cases)))
    return ratios


def some(
    name: str,
    cases: list[str],
    peers: tuple[str, ...],
    each: float,
    mean: float | None = None,
    aim: float | None = None,
    mine: str = OURS,
    is_time: bool = False,
) -> list[Bar]:
    """Bars on the worst case and on the geometric mean; each states the number of its cases.

    is_time: ``each`` is the largest allowed time, relative to the fastest peer's.
    """

    def count(found: Found) -> str:
        measured = len(_all(found, cases, peers, mine))
        return "" if measured == len(cases) else f"{measured} of {len(cases)} cases"

    def worst(found: Found) -> str:
        by_case = _all(found, cases, peers, mine)
        return ", ".join(part for part in (min(by_case, key=lambda case: by_case[case]), count(found)) if part)

    def ratios(found: Found) -> list[float]:
        return list(_all(found, cases, peers, mine).values())

    if is_time:
        return [Bar(f"{name}, worst", each, lambda found: 1 / min(ratios(found)), at_least=False, note=worst)]
    least = Bar(f"{name}, worst", each, lambda found: min(ratios(found)), aim=None if mean else aim, note=worst)
    if mean is None:
        return [least]
    return [Bar(f"{name}, geometric mean", mean, lambda found: geometric_mean(ratios(found)), aim=aim, note=count), least]


def one(name: str, case: str, peers: tuple[str, ...], floor: float, aim: float | None = None, mine: str = OURS) -> Bar:
    return Bar(name, floor, lambda found: versus(found, case, peers, mine), aim=aim)


def probe(name: str, of: str, key: str, most: float, unit: str, aim: float | None = None) -> Bar:
    return Bar(name, most, lambda found: found.probes[of][key], at_least=False, unit=unit, aim=aim)
