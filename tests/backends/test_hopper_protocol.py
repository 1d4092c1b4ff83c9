"""The roles of the Hopper kernel between them: no deadlock, nothing given back twice or never, every P with its V, every O in its place.

The kernel's own text is run, thread by thread, in schedules drawn at random (``hopper_protocol``); planted bugs show that it can fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import count, islice

import pytest
from hopper_cases import random_case
from hopper_roles import Changes, run_block, text_of, wiped_by_a_group
from hopper_schedule import Broken

SCHEDULES = 320


@pytest.mark.parametrize("part", range(4))
def test_every_schedule_ends_with_every_output(part: int) -> None:
    for seed in range(part, SCHEDULES, 4):
        case = random_case(seed)
        try:
            run_block(case, seed)
        except Broken as error:
            raise AssertionError(f"seed {seed}: {case}\n{error}") from error


def test_a_seed_repeats_a_schedule() -> None:
    case = random_case(3, rows=8)
    assert len({run_block(case, 5) for _ in range(3)}) == 1
    assert len({run_block(case, seed) for seed in range(8)}) == 8


def test_the_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(SCHEDULES)]
    kinds = {(c.config.tiles.stages, c.config.q_stages, c.config.tiles.warp_groups) for c in cases}
    assert len(kinds) == 12
    assert {len(t.visits) for c in cases for t in c.tiles} >= {0, 1, 2, 3, 5}
    assert any(len(c.tiles) >= 12 for c in cases) and any(not c.tiles for c in cases)
    assert any(t.room is not None for c in cases for t in c.tiles)


@pytest.mark.parametrize("head_dim_v", [64, 96, 128, 192, 256])
def test_a_warp_group_wipes_every_key_past_the_last_once(head_dim_v: int) -> None:
    for tile_n in (48, 80, 128):
        for room in (1, 17, tile_n - 1, tile_n, tile_n + 5):
            found = wiped_by_a_group(tile_n, head_dim_v, room)
            assert sorted(found) == [(i, key) for i in range(head_dim_v) for key in range(room, tile_n)]


# Planted bugs: module, text, text that takes its place.
MULTIPLY, LOAD, VISITS = "multiply", "load", "visits"
GIVEN_BACK_FIRST = """            if owed != 0:  # of a row tile with one visit; the loader waits for it before it says what comes next
                self._give_back(pipes[0], _Stage(q_state.index), thread)
                owed = Int32(0)
            pipes[3].consumer_wait(work_state)
            facts = self._facts(board[0], work_state)
"""
FACTS_FIRST = """            pipes[3].consumer_wait(work_state)
            facts = self._facts(board[0], work_state)
            if owed != 0:
                self._give_back(pipes[0], _Stage(q_state.index), thread)
                owed = Int32(0)
"""
RETURNED = "                k_state, v_state, owed = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state, owed)\n"
GIVEN_BACK_LATER = """                self._give_back(fixed[4][0], _Stage(1 - q_state.index), fixed[7])
                owed = Int32(0)
"""
WORK_OPEN = "                    pipes[3].consumer_release(work_open)\n                    "
K_ADVANCED = "                k_state.advance()\n                is_open"
END_POSTED = "        self._post(board[0], pipes[3], work_state, Facts(*(Int32(0) for _ in Facts._fields)))\n        work_state.advance()\n"
POSTED = "self._post(board[0], pipes[3], work_state, facts)\n                work_state.advance()"
LAST = "                    self._last(fixed, sums, p, v_state)\n"
ENDED = "            self._ended(fixed, before, acc, given[1:4], outputs, sink, q_done, work_done)\n        acc.fill(0.0)"
BARE = "v_state, False)\n            k_state.advance()\n            v_state.advance()"
WAITED_FOR_V = "        pipes[2].consumer_wait(v_state)\n        self._product(mma_pv, acc"
ON_BOARD = "            board[state.index] = n * 2 + asked\n        pipe.sync_object_full.arrive(state.index, None)"
P_STORED = "        p.store(narrowed(scores, self.dtype).load())\n"
STORED_FIRST = """        warpgroup.wait_group(0)
        pipes[2].consumer_release(v_state)
        p.store(narrowed(scores, self.dtype).load())
        if const"""
MUTANTS: dict[str, tuple[str, str, str]] = {
    "facts are waited for before Q is given back": (MULTIPLY, GIVEN_BACK_FIRST, FACTS_FIRST),
    "Q of the last row tile is never given back": (MULTIPLY, "self._give_back(pipes[0], q_open, thread)\n", "pass\n"),
    "Q is never given back": (MULTIPLY, "        pipe.consumer_release(state)", "        pass"),
    "Q is given back while O is leaving": (MULTIPLY, "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),
    "owed is never set": (MULTIPLY, "owed = Int32(1)", "owed = Int32(0)"),
    "owed is not reset in the loop": (MULTIPLY, GIVEN_BACK_LATER, GIVEN_BACK_LATER.splitlines()[0] + "\n"),
    "what the steps say of owed is lost": (MULTIPLY, RETURNED, RETURNED.replace("v_state, owed =", "v_state, _ =")),
    "the open Q's stage is the new one's": (
        MULTIPLY,
        "q_open, work_open = _Stage(1 - q_state.index)",
        "q_open, work_open = _Stage(q_state.index)",
    ),
    "the owed Q's stage is the new one's": (MULTIPLY, "fixed[4][0], _Stage(1 - q_state.index)", "fixed[4][0], _Stage(q_state.index)"),
    "the owed Q's stage is the other one": (
        MULTIPLY,
        "(pipes[0], _Stage(q_state.index), thread)",
        "(pipes[0], _Stage(1 - q_state.index), thread)",
    ),
    "the open row tile's facts are the new one's": (MULTIPLY, "_Stage(1 - work_state.index)", "_Stage(work_state.index)"),
    "a work slot is given back twice": (MULTIPLY, WORK_OPEN + "owed", WORK_OPEN + WORK_OPEN.lstrip(" ") + "owed"),
    "an open work slot is not given back": (MULTIPLY, WORK_OPEN + "is_open", "                    is_open"),
    "the new row tile's work slot is given back": (
        MULTIPLY,
        K_ADVANCED,
        "                pipes[3].consumer_release(work_state)\n" + K_ADVANCED,
    ),
    "K's state is not advanced": (MULTIPLY, K_ADVANCED, "                is_open"),
    "V's state is advanced before the last product": (MULTIPLY, LAST, "                    v_state.advance()\n" + LAST),
    "V's state is advanced before its product": (MULTIPLY, K_ADVANCED, "                v_state.advance()\n" + K_ADVANCED),
    "V's state is not advanced in bare steps": (MULTIPLY, BARE, BARE.replace("\n            v_state.advance()", "")),
    "what the steps advanced is lost": (MULTIPLY, RETURNED, RETURNED.replace("k_state, v_state, owed =", "_, _, owed =")),
    "Q's state is not advanced": (MULTIPLY, "            q_state.advance()\n            else", "            pass\n            else"),
    "row tiles without visits take a Q": (
        LOAD,
        "                if visits > 0:\n                    pipes[0]",
        "                if visits >= 0:\n                    pipes[0]",
    ),
    "K is given back while it is being read": (MULTIPLY, "warpgroup.wait_group(1)", "warpgroup.wait_group(2)"),
    "K is not given back": (
        MULTIPLY,
        "        warpgroup.wait_group(0)\n        pipes[1].consumer_release(k_state)",
        "        warpgroup.wait_group(0)",
    ),
    "V is given back while it is being read": (MULTIPLY, STORED_FIRST, STORED_FIRST.replace("wait_group(0)", "wait_group(1)")),
    "V is not waited for": (MULTIPLY, WAITED_FOR_V, "        self._product(mma_pv, acc"),
    "P is replaced before its product": (MULTIPLY, STORED_FIRST, P_STORED + STORED_FIRST.replace(P_STORED, "")),
    "turns are not taken": (MULTIPLY, "        self._my_turn(group)\n", ""),
    "turns are not passed on": (MULTIPLY, "        self._next_turn(group)\n", ""),
    "the first turn is not given": (MULTIPLY, "if group == 0 and self", "if group < 0 and self"),
    "turns go round among two of three": (MULTIPLY, "(group + 1) % 3", "(group + 1) % 2"),
    "V is wiped in the wrong stage": (MULTIPLY, "        following.advance()\n", ""),
    "V is wiped without a fence": (MULTIPLY, 'cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    "V is wiped from a key too late": (MULTIPLY, "given[0].seqlen_k - visit // 2", "given[0].seqlen_k + 1 - visit // 2"),
    "V is wiped before it came": (MULTIPLY, "            pipe.consumer_wait(state)\n            tile = v", "            tile = v"),
    "O keeps the row tile before": (MULTIPLY, ENDED, ENDED.replace("\n        acc.fill(0.0)", "")),
    "the new row tile's sums divide the old one's": (
        MULTIPLY,
        "self._ended(fixed, before, acc",
        "self._ended(fixed, (row_max, row_sum), acc",
    ),
    "a product does not add": (MULTIPLY, "not from_zero)", "False)"),
    "registers are not fenced": (MULTIPLY, "        warpgroup.fence()\n", ""),
    "masked tiles are one too few": (MULTIPLY, "cutlass.range(facts.masked,", "cutlass.range(facts.masked - 1,"),
    "tiles behind are forgotten": (MULTIPLY, "if const_expr(self.config.has_left)", "if const_expr(False)"),
    "facts are posted before they are acquired": (LOAD, "        pipe.producer_acquire(state)\n        for i", "        for i"),
    "facts are posted in one slot": (LOAD, POSTED, POSTED.splitlines()[0]),
    "the end is not posted": (LOAD, END_POSTED, ""),
    "Q is copied without its memory being free": (
        LOAD,
        "pipes[0].producer_acquire(q_state)",
        "pipes[0].sync_object_full.arrive(q_state.index, None)",
    ),
    "K is copied without its memory being free": (LOAD, "        pipe.sync_object_empty.wait(state.index, state.phase)\n", ""),
    "the loader's Q stage is not advanced": (LOAD, "                    q_state.advance()\n", ""),
    "V is told at K's barrier": (LOAD, "self._fetch(pipes[2], v_state", "self._fetch(pipes[1], v_state"),
    "V is one tile behind": (LOAD, "v_copy, n, entry", "v_copy, after, entry"),
    "the tile goes on the board in another place": (LOAD, ON_BOARD, ON_BOARD.replace("[state.index] =", "[1 - state.index] =")),
    "the last key tile is loaded twice": (LOAD, "cutlass.min(i + 1, visits - 1)", "cutlass.min(i, visits - 1)"),
    "a visit more than loaded": (VISITS, "return total, masked, bare, maximum(", "return total, masked, bare + 1, maximum("),
}


def found_by(changes: Changes, most: int = 60) -> str:
    """What the first of ``most`` schedules that fails says."""
    for seed in islice(count(1000), most):
        try:
            run_block(random_case(seed), seed, changes)
        except Broken as error:
            return str(error)
    return ""


def test_the_text_itself_is_found_sound() -> None:
    assert not found_by(())


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by((MUTANTS[name],))
    assert told.startswith("Broken: "), told


def test_a_deadlock_is_told_with_where_everyone_stands() -> None:
    told = found_by((MUTANTS["facts are waited for before Q is given back"],))
    assert told.startswith("Broken: deadlock")
    assert "loader (waits for q" in told and "pipes[0].producer_acquire(q_state)" in told
    assert "pipes[3].consumer_wait(work_state)" in told


# What may be left out: the loader's stay until all is given back, for the others stay themselves; a name's first value for the tracer.
NEEDLESS = {"pipe.producer_tail(state)", "rescales = cutlass.Boolean(False)"}
# of the multiplying role; the rest is set up for arithmetic that is not run here
RUN = ("_overlapped", "_one_by_one", "_give_back", "_first", "_turned_over", "_first_softmax", "_first_wiped", "_steps", "_last", "_ended",
       "_step", "_product", "_wiped", "_first_turn", "_my_turn", "_next_turn")  # fmt: skip


def left_out() -> Iterator[tuple[str, Changes]]:
    """Each statement of the roles that calls or assigns, and the text without it."""
    for module in (LOAD, MULTIPLY):
        text = text_of(module)
        lines = text.splitlines(keepends=True)
        functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef) and (module == LOAD or f.name in RUN)]
        for node in (node for f in functions for node in ast.walk(f)):
            if isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
                first = lines[node.lineno - 1]
                kept = [*lines[: node.lineno - 1], first[: node.col_offset] + "pass\n", *lines[node.end_lineno :]]
                yield first.strip(), ((module, text, "".join(kept)),)


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    needless = {line for line, changes in left_out() if not found_by(changes)}
    assert needless == NEEDLESS
