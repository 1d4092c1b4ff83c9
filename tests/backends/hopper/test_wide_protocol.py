"""The roles of the wide Hopper forward kernel between them, in one thread block and in a cluster of two, as ``test_protocol.py`` has it."""

from __future__ import annotations

import pytest

from tests.backends.hopper.test_protocol import SCHEDULES, every_output, found_by
from tests.mutants.hopper_role_mutants import MUTANTS, left_out, planted
from tests.support.covering import few
from tests.support.hopper.cases import random_case


@pytest.mark.parametrize("part", few(range(4), 0))
def test_every_schedule_ends_with_every_output(part: int) -> None:
    every_output(part, is_wide=True)


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_case(seed, is_wide=True) for seed in range(SCHEDULES)]
    kinds = {(c.config.tiles.stages, c.config.has_one_kv, c.config.pairs) for c in cases}
    assert kinds == {(n, one, two) for n in (1, 2, 3) for one in (False, True) for two in (False, True) if n > one}
    assert {len(t.visits) for c in cases for t in c.tiles} >= {0, 1, 2, 3, 5}
    paired = [c for c in cases if c.config.pairs]
    assert any(t.room is not None for c in paired for t in c.others) and any(c.config.is_paged for c in paired)
    assert any(c.worker > 0 and len(c.tiles) > 2 for c in paired) and any(c.config.heads_per_tile > 1 for c in paired)
    assert {c.config.heads_per_tile for c in cases if c.tiles} == {1, 4, 16, 64, 128} and any(c.config.divides_heads for c in paired)
    split = [c for c in cases if c.config.is_split and c.tiles]
    assert {c.sizes.spread // c.sizes.heads for c in split} == {1, 2, 3} and {c.config.pairs for c in split} == {False, True}
    assert any(c.config.is_paged for c in split) and any(c.config.has_left and c.config.has_right for c in split)
    for case in paired:
        step = 0 if case.config.divides_heads else 1
        assert [t.facts["m_block"] + step for t in case.tiles] == [t.facts["m_block"] for t in case.others]
        assert [t.visits for t in case.tiles] == [t.visits for t in case.others]


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer == "wide schedules"])
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by(planted(MUTANTS[name]), is_wide=True)
    assert told.startswith("Broken: "), told


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    needless = {line for line, changes in left_out("wide/mma") if not found_by(changes, is_wide=True)}
    assert needless == set()
