"""The roles of the backward kernels for wide heads between them: random schedules end with every gradient, and planted bugs are found."""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.mutants.hopper_role_mutants import MUTANTS, left_out, planted
from tests.support.covering import few
from tests.support.hopper.role_source import Changes
from tests.support.hopper.schedule import Broken
from tests.support.hopper.wide_backward_roles import random_case, run_block

SCHEDULES = 400


def found_by(changes: Changes, most: int = 120) -> str:
    """What the first of ``most`` schedules that fails says."""
    for seed in islice(count(1000), most):
        try:
            run_block(random_case(seed), seed, changes)
        except Broken as error:
            return str(error)
    return ""


@pytest.mark.parametrize("part", few(range(4), 0))
def test_every_schedule_ends_with_every_gradient(part: int) -> None:
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        case = random_case(seed)
        try:
            run_block(case, seed)
        except Broken as error:
            raise AssertionError(f"seed {seed}: {case}\n{error}") from error


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(SCHEDULES)]
    kinds = {(c.config.of, c.config.head_dim, c.config.has_one_kv) for c in cases}
    assert kinds == {(of, d, one) for of in ("dq", "dk", "dv") for d in (512, 576) for one in (False, True) if of != "dv" or not one}
    assert {c.config.tiles.stages for c in cases if c.config.of == "dv"} == {(1, 1, 1, 1), (2, 2, 2, 2)}
    assert {len(visits) for c in cases for _, visits in c.kept} >= {0, 1, 2, 3, 5} and {c.ratio for c in cases} == {1, 2, 3}


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer == "wide backward schedules"])
def test_planted_bugs_are_found(name: str) -> None:
    assert found_by(planted(MUTANTS[name])) != ""


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    modules = ("wide_backward/once", "wide_backward/twice")
    needless = {line for line, changes in left_out(*modules) if not found_by(changes, 300)}
    assert needless == set()
