"""The roles of the Hopper kernel between them: no deadlock, nothing given back twice or never, every P with its V, every O in its place.

The kernel's own text is run, thread by thread, in schedules drawn at random (``protocol.py``); mutants show that it can fail.
"""

from __future__ import annotations

from itertools import count, islice

import pytest

from tests.mutants.hopper_role_mutants import MUTANTS, left_out, planted
from tests.support.covering import few
from tests.support.hopper.cases import random_case
from tests.support.hopper.role_source import Changes, text_of
from tests.support.hopper.roles import run_block
from tests.support.hopper.schedule import Broken
from tests.support.hopper.threads import rows_gathered, wiped_by_a_group

SCHEDULES = 320


def every_output(part: int, **of_case: bool) -> None:
    """Asserts that a fourth of the schedules, of cases with these properties, end with every output."""
    for seed in range(part * SCHEDULES // 4, (part + 1) * SCHEDULES // 4):
        case = random_case(seed, **of_case)
        try:
            run_block(case, seed)
        except Broken as error:
            raise AssertionError(f"seed {seed}: {case}\n{error}") from error


@pytest.mark.parametrize("part", few(range(4), 0))
def test_every_schedule_ends_with_every_output(part: int) -> None:
    every_output(part)


def test_a_seed_repeats_a_schedule() -> None:
    case = random_case(3, rows=8)
    assert len({run_block(case, 5) for _ in range(3)}) == 1
    assert len({run_block(case, seed) for seed in range(8)}) == 8


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(SCHEDULES)]
    kinds = {(c.config.tiles.stages, c.config.q_stages, c.config.tiles.warp_groups) for c in cases}
    assert len(kinds) == 18
    assert {len(t.visits) for c in cases for t in c.tiles} >= {0, 1, 2, 3, 5}
    assert any(len(c.tiles) >= 12 for c in cases) and any(not c.tiles for c in cases)
    assert {t.facts["more"] for c in cases for t in c.tiles} == {1, 2, 3, 4} and {c.config.heads_per_tile for c in cases} == {1, 4}
    assert any(t.room is not None for c in cases for t in c.tiles)
    counted = [c for c in cases if c.config.has_count]
    assert any(c.rows < c.sizes.rows and c.tiles for c in counted) and any(c.rows == 0 < c.sizes.rows for c in counted)
    assert {c.config.piece for c in cases if c.tiles} == {0, 1, 2, 4, 8, 16}
    paged = [c for c in cases if c.config.is_paged]
    assert {c.sizes.pieces_in_page for c in paged} == {1, 2, 3}
    assert any(tag[3] == -1 for c in paged for t in c.tiles for pieces in t.sources[1] for tag in pieces)


@pytest.mark.parametrize("head_dim_v", [64, 96, 128, 192, 256, 512])
def test_a_warp_group_wipes_every_key_past_the_last_once(head_dim_v: int) -> None:
    for tile_n in (32, 48, 64, 80, 128):
        for room in (1, 17, tile_n - 1, tile_n, tile_n + 5):
            found = wiped_by_a_group(tile_n, head_dim_v, room)
            assert sorted(found) == [(i, key) for i in range(head_dim_v) for key in range(room, tile_n)]


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_lanes_gather_every_row_once(width: int) -> None:
    for tile_n in (16, 48, 80, 112, 128):
        found = rows_gathered(tile_n, width)
        assert found == {(key, entry): [(key, entry)] for key in range(tile_n) for entry in range(0, width, 8)}


def found_by(changes: Changes, most: int = 60, rows: int | None = None, **of_case: bool) -> str:
    """What the first of ``most`` schedules, of cases with these properties, that fails says."""
    for seed in islice(count(1000), most):
        try:
            run_block(random_case(seed, rows, **of_case), seed, changes)
        except Broken as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer == "schedules"])
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by(planted(MUTANTS[name]))
    assert told.startswith("Broken: "), told


def test_work_is_drawn_once_all_keys_are_on_their_way() -> None:
    text, first = text_of("producer"), "            m_block, head, entry = self.row_tile(work, tables, sizes)\n"
    drawn = "self.next_in_turn(work, workers) if const_expr(self.config.pairs) else self._drawn(counter, total, workers)\n"
    assert text.count(first) == text.count(f"work = {drawn}") == 1
    early = text.replace(first, f"            following = {drawn}{first}").replace(f"work = {drawn}", "work = following\n")
    assert found_by((("producer", early),)).startswith("work is drawn before the keys")


def test_a_deadlock_is_told_with_where_everyone_stands() -> None:
    told = found_by(planted(MUTANTS["a Q that waits is never noted"]), rows=12)
    assert told.startswith("Broken: deadlock")
    assert "loader (waits for q" in told and "pipes[0].producer_acquire(q_state)" in told
    assert "pipes[3].consumer_wait(work_state)" in told


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    needless = {
        line
        for line, changes in left_out("producer", "mma", but=("all_of_group",))
        if not found_by(changes, 300) and not found_by(changes, is_wide=True) and not found_by(changes, in_order=True)
    }  # some are of wide heads alone, or of an order of keys
    # what is brought to the L2 cache alone nobody waits for
    assert needless == {"self._start_copies(copy, state.index, n, pages, sizes, None)", "cute.prefetch(atom, source)"}
