"""How bars read a run's records: ratios of one case, the worst and the mean of several, a probe's figures."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.bars import Bar, Found
from benchmarks.case import OURS
from benchmarks.gpu.runner import GpuRecord, is_wrong
from benchmarks.runner import geometric_mean

__all__ = ["one", "probe", "some", "versus"]


def versus(found: Found, case: str, peers: Iterable[str], mine: str = OURS) -> float:
    """How many times as fast as the fastest of ``peers`` that did the same job. ``KeyError`` if none was timed, or anyattn was not."""
    record = found.record(case)
    assert isinstance(record, GpuRecord)
    timed = [p for p in peers if p in record.timings and not is_wrong(record, p)]
    if mine not in record.timings or is_wrong(record, mine) or not timed:
        raise KeyError(case)
    return min(record.ratio_of(mine, peer) for peer in timed)


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
    """Bars on the worst case and on the geometric mean; each says of how many of its cases.

    is_time: ``each`` is the most that the time may be, as a multiple of the fastest peer's.
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
