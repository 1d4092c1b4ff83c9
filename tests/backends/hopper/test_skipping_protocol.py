"""The roles of the Hopper forward kernel that skips between them, as ``test_protocol.py`` has it; low tiles are drawn at random."""

from __future__ import annotations

import pytest

from tests.backends.hopper.test_protocol import SCHEDULES, every_output, found_by
from tests.mutants.hopper_role_mutants import MUTANTS, left_out, planted
from tests.support.covering import few
from tests.support.hopper.cases import random_case

# functions that ``SkippingStubs`` has in the kernel's place
STOOD_IN_FOR = ("tops_of", "_start_rows", "raise_tops", "_are_low", "thresholds_of")
# numbers that the epilogue adds up; no role waits for them
COUNTED_ON_THE_DEVICE = {"tops.skipped[0] = Int32(0)", "tops.skipped[0] = tops.skipped[0] + 1"}


@pytest.mark.parametrize("part", few(range(4), 0))
def test_every_schedule_ends_with_every_output(part: int) -> None:
    every_output(part, skips=True)


def test_the_cases_are_of_every_kind() -> None:
    configs = [random_case(seed, skips=True).config for seed in range(SCHEDULES)]
    assert {(c.tiles.stages, c.tiles.warp_groups, c.tiles.ping_pong) for c in configs} == {
        (stages, groups, turns) for stages in (1, 2, 3) for groups in (1, 2, 3) for turns in (False, True) if groups > 1 or not turns
    }
    assert {(c.has_left, c.has_right, c.lists) for c in configs} == {
        *((left, right, None) for left in (False, True) for right in (False, True)), (False, False, "dense"),
    }  # fmt: skip


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer == "skipping schedules"])
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by(planted(MUTANTS[name]), skips=True)
    assert told.startswith("Broken: "), told


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    needless = {
        line for line, changes in left_out("skipping/mma", "skipping/producer", but=STOOD_IN_FOR) if not found_by(changes, skips=True)
    }
    assert needless == COUNTED_ON_THE_DEVICE
