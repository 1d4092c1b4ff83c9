"""Covering subsets of test cases: ``make test`` runs enough for every parameter value, or every pair of values; the others are slow.

A full product of parameters tests the same code path many times. ``@pytest.mark.covering(1)`` keeps cases until each value has occurred in
one of them, ``covering(2)`` until each two values of different parameters have occurred together; ``make test-long`` runs all. A case that
is a tuple, including a NamedTuple, has one parameter per element. ``covering(1, of=choose)`` uses ``choose(**parameters)``, a tuple,
instead; with ``cost=of_case``, a positive number by ``of_case(**parameters)``, cases are kept that add most for what they cost.

The choice depends on the cases alone: every process of a run makes the same one.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import pytest

__all__ = ["few", "mark_the_rest_slow"]


def mark_the_rest_slow(items: Iterable[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("covering") is not None and item.get_closest_marker("slow") is None:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        mark = cases[0].get_closest_marker("covering")
        assert mark is not None
        (strength,) = mark.args
        choose, cost = mark.kwargs.get("of"), mark.kwargs.get("cost")
        costs = [cost(**case.callspec.params) for case in cases] if cost else None  # type: ignore[attr-defined]
        kept = covering([values_of(case, choose) for case in cases], strength, costs)
        for at, case in enumerate(cases):
            if at not in kept:
                case.add_marker(pytest.mark.slow)


def values_of(item: pytest.Item, choose: object = None) -> list[Hashable]:
    """What one case says of each parameter; what has no text of its own is told apart by its place among its parameter's values."""
    callspec = item.callspec  # type: ignore[attr-defined]
    if callable(choose):
        return list(enumerate(map(repr, choose(**callspec.params))))
    found: list[Hashable] = []
    for name, value in callspec.params.items():
        parts = value if isinstance(value, tuple) else (value,)
        for at, part in enumerate(parts):
            text = repr(part)
            found.append((name, at, callspec.indices[name] if " at 0x" in text else text))
    return found


def covering(cases: list[list[Hashable]], strength: int, costs: list[float] | None = None) -> set[int]:
    """The places of few cases in which all combinations of ``strength`` values occur that occur in any: each time one of those that add
    most, for what they cost, of them one whose values have been met least, of them the first. At last those go, the dearest first, whose
    combinations all occur in the others."""
    costs = costs or [1.0] * len(cases)
    combined = [set(itertools.combinations(values, min(strength, len(values)))) for values in cases]
    missing: set[Hashable] = set().union(*combined)
    met: Counter[Hashable] = Counter()
    kept: set[int] = set()
    while missing:
        best = max(
            range(len(cases)), key=lambda at: (len(combined[at] & missing) / costs[at], -sum(met[value] for value in cases[at]), -at)
        )
        kept.add(best)
        met.update(cases[best])
        missing -= combined[best]
    times = Counter(combination for at in kept for combination in combined[at])
    for at in sorted(kept, key=lambda at: (-costs[at], at)):
        if all(times[combination] > 1 for combination in combined[at]):
            kept.remove(at)
            times.subtract(combined[at])
    return kept


def few(cases: Iterable[Any], *quick: Any) -> list:
    """Values of one parameter, of which all but ``quick``, representatives that are named, are slow. A ``pytest.param`` keeps its marks."""
    cases = list(cases)
    assert all(one in cases for one in quick), f"{quick} of {cases}"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    is_param = isinstance(case, type(pytest.param()))
    return pytest.param(*(case.values if is_param else (case,)), marks=[*(case.marks if is_param else ()), pytest.mark.slow])
