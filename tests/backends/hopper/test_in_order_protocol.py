"""The roles of the Hopper forward kernel in the order of keys between them, as ``test_protocol.py`` has it, with exact numbers.

Sections are of 1 to 16 key tiles. Each has the sums of its own tiles and a maximum that moves by one rule, guessed at or not; they are
merged once, in ascending order. O, lse and the highest scores are compared with those of the whole row.
"""

from __future__ import annotations

import pytest

from tests.backends.hopper.test_protocol import SCHEDULES, every_output, found_by
from tests.mutants.hopper_role_mutants import MUTANTS, left_out, planted
from tests.support.covering import few
from tests.support.hopper.cases import random_case
from tests.support.hopper.in_order_stubs import InOrderStubs


@pytest.mark.parametrize("part", few(range(4), 0))
def test_every_schedule_ends_with_every_output(part: int) -> None:
    InOrderStubs.outcomes.clear()
    every_output(part, in_order=True)
    assert InOrderStubs.outcomes == {False, True}


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_case(seed, in_order=True) for seed in range(SCHEDULES)]
    assert {(c.config.tiles.stages, c.config.q_stages) for c in cases} == {(n, of_q) for n in (1, 2, 3, 4) for of_q in (1, 2)}
    assert {(c.config.tiles.warp_groups, c.config.tiles.ping_pong) for c in cases} == {
        (groups, turns) for groups in (1, 2, 3, 4) for turns in (False, True) if groups > 1 or not turns
    }
    assert {(c.config.has_left, c.config.has_right) for c in cases if c.tiles} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {(c.config.has_max, c.config.has_sink) for c in cases if c.tiles} == {(a, b) for a in (False, True) for b in (False, True)}
    assert {(c.config.head_dim, c.config.q_stages, c.config.tiles.warp_groups) for c in cases if c.tiles} >= {
        (dim, of_q, groups) for dim in (64, 256) for of_q in (1, 2) for groups in (1, 2, 3)
    }
    sections = {len({n // c.config.section_tiles for n, _, _ in t.visits}) for c in cases for t in c.tiles}
    assert sections >= {0, 1, 2, 3, 4, 5, 9}
    firsts = {t.visits[0][0] % c.config.section_tiles for c in cases for t in c.tiles if t.visits}
    assert firsts >= {0, 1, 2} and any(t.room is not None for c in cases for t in c.tiles)


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer == "schedules in order"])
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by(planted(MUTANTS[name]), in_order=True)
    assert told.startswith("Broken: "), told


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    """But a guess, without which all weights are computed by the rule, what finite scores below ``_LOWEST`` would need, which no case has,
    and what the one thread that stands for a warp need not wait for."""
    statements = left_out("in_order/mma", "in_order/in_place", "in_order/producer")
    needless = {line for line, changes in statements if not found_by(changes, in_order=True)}
    assert needless == {
        "is_right = self._guessed_at(scores, powers, added, sums, rate, group)",
        "added[r, part] = self._added(to, r, part)",
        'tops[r] = select(weight == 0.0, -Float32.inf, tops[r], "float")',
        "cute.arch.sync_warp()  # one lane gives the memory back",
    }
