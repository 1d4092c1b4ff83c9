"""The roles of the Hopper kernel between them: no deadlock, nothing given back twice or never, every P with its V, every O in its place.

The kernel's own text is run, thread by thread, in schedules drawn at random (``protocol.py``); planted bugs show that it can fail.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import count, islice

import pytest

from tests.support.hopper.cases import random_case
from tests.support.hopper.roles import STOOD_IN, Changes, Stubs, method, run_block, signatures, text_of
from tests.support.hopper.schedule import Broken
from tests.support.hopper.threads import rows_gathered, wiped_by_a_group

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
    assert {t.facts["more"] for c in cases for t in c.tiles} == {1, 2, 3, 4} and {c.config.heads_per_tile for c in cases} == {1, 4}
    assert any(t.room is not None for c in cases for t in c.tiles)
    counted = [c for c in cases if c.config.has_count]
    assert any(c.rows < c.sizes.rows and c.tiles for c in counted) and any(c.rows == 0 < c.sizes.rows for c in counted)
    assert {c.config.piece for c in cases if c.tiles} == {0, 1, 2, 4, 8, 16}
    paged = [c for c in cases if c.config.is_paged]
    assert {c.sizes.pieces_in_page for c in paged} == {1, 2, 3}
    assert any(tag[3] == -1 for c in paged for t in c.tiles for pieces in t.sources[1] for tag in pieces)


@pytest.mark.parametrize("head_dim_v", [64, 96, 128, 192, 256])
def test_a_warp_group_wipes_every_key_past_the_last_once(head_dim_v: int) -> None:
    for tile_n in (48, 80, 128):
        for room in (1, 17, tile_n - 1, tile_n, tile_n + 5):
            found = wiped_by_a_group(tile_n, head_dim_v, room)
            assert sorted(found) == [(i, key) for i in range(head_dim_v) for key in range(room, tile_n)]


@pytest.mark.parametrize("width", [64, 96, 128, 192, 256])
def test_lanes_gather_every_row_once(width: int) -> None:
    for tile_n in (16, 48, 80, 112, 128):
        found = rows_gathered(tile_n, width)
        assert found == {(key, entry): [(key, entry)] for key in range(tile_n) for entry in range(0, width, 8)}


# Planted bugs: text and what takes its place.
MMA, PRODUCER, SCHEDULER = "mma", "producer", "tile_scheduler"


def planted(module: str, old: str, new: str = "") -> Changes:
    return ((module, old, new),)


def exchanged(module: str, first: str, second: str) -> Changes:
    """Two neighbours, the other way round."""
    return ((module, first + second, second + first),)


OWED = """                    if owed != 0:
                        self._give_back(pipes[0], _Stage(1 - q_state.index), thread)
"""
OWED_AT_END = OWED.replace("\n        ", "\n").removeprefix("        ")
NOW_OWED = "                    owed = Int32(1)\n"
FIRST = "                self._first(fixed, sums, p, of_tile, q_state, k_state, v_state)\n"
FIRST_ADVANCED = FIRST + "                k_state.advance()\n"
RETURNED = "                k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)\n"
ENDED = "                self._ended(fixed, sums, given, outputs, sink, q_state, work_state)\n"
GIVEN_BACK = """                if const_expr(self.config.q_stages == 1):
                    self._give_back(pipes[0], q_state, thread)
"""
Q_ADVANCED = "                q_state.advance()\n            elif"
BLANK = "                self.blank(fixed[0][1], thread, outputs, sink, facts)\n"
WORK_GIVEN_BACK = "            pipes[3].consumer_release(work_state)\n"
WORK_ADVANCED = "            work_state.advance()\n"
READ = "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n"
MAY_BE_READ = "        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:\n" + READ
RELEASED = "        pipe.consumer_release(state)\n"
K_THROUGH = "        warpgroup.wait_group(0)\n        pipes[1].consumer_release(k_state)\n"
LAST_WAITED_FOR = "        pipes[2].consumer_wait(v_state)\n        self._product(mma_pv, sums"
LAST = "        self._product(mma_pv, sums[0], p, v[None, None, None, v_state.index], False)\n"
LAST_THROUGH = "        warpgroup.wait_group(0)\n"
LAST_RELEASED = "        pipes[2].consumer_release(v_state)\n"
LAST_ADVANCED = "        v_state.advance()\n        return"
BARE = "v_state, False)\n            k_state.advance()\n            v_state.advance()"
WAITED_FOR_V = "        pipes[2].consumer_wait(v_state)\n        self._product(mma_pv, acc"
WIPED = "            self._wiped(in_smem[2]"
V_THROUGH = "        warpgroup.wait_group(0)\n        pipes[2].consumer_release(v_state)\n"
P_STORED = "        p.store(narrowed(scores, self.dtype).load())\n"
P_GUESSED = "        narrowed_to(p, powers, self.dtype)\n"
SUMS_GUESSED = "            row_sum.store(row_sum.load() + added.load())\n"
END_POSTED = "        self._post(board[0], pipes[3], work_state, Facts(*(Int32(0) for _ in Facts._fields)))\n        work_state.advance()\n"
POSTED = "self._post(board[0], pipes[3], work_state, facts)\n                work_state.advance()"
ON_BOARD = "            board[state.index] = n * 2 + asked\n        pipe.sync_object_full.arrive(state.index, None)"
MUTANTS: dict[str, Changes] = {
    "Q is never given back": planted(MMA, RELEASED, "        pass\n"),
    "Q is given back twice": planted(MMA, RELEASED, RELEASED * 2),
    "Q is given back while O is leaving": planted(MMA, READ, "            pass\n"),
    "all stores but the last are waited for": planted(MMA, "wait_group(0, read=True)", "wait_group(1, read=True)"),
    "Q is given back before O is known to have left": exchanged(MMA, MAY_BE_READ, RELEASED),
    "Q is not waited for": planted(MMA, "                pipes[0].consumer_wait(q_state)\n"),
    "the one Q is not given back": planted(MMA, GIVEN_BACK),
    "the one Q is given back before O takes its place": exchanged(MMA, ENDED, GIVEN_BACK),
    "one of two Qs is given back at once and once more": planted(MMA, GIVEN_BACK.splitlines()[0], " " * 16 + "if const_expr(True):"),
    "owed is never set": planted(MMA, NOW_OWED),
    "owed is set before a Q is": exchanged(MMA, OWED, NOW_OWED),
    "owed is said from the start": planted(MMA, "Int32(1), Int32(0)  # owed", "Int32(1), Int32(1)  # owed"),
    "what is owed is not given back in the loop": planted(MMA, OWED),
    "what is owed is not given back at the end": planted(MMA, "\n" + OWED_AT_END, "\n            pass\n"),
    "what is owed is the new Q": planted(MMA, OWED, OWED.replace("1 - q_state", "q_state")),
    "what is owed at the end is the Q before": planted(MMA, "\n" + OWED_AT_END, "\n" + OWED_AT_END.replace("1 - q_state", "q_state")),
    "what is owed is given back after Q has advanced": planted(MMA, OWED, "                    q_state.advance()\n" + OWED),
    "Q's state is not advanced": planted(MMA, Q_ADVANCED, "            elif"),
    "Q's state is advanced before O is stored": planted(MMA, ENDED, "                q_state.advance()\n" + ENDED),
    "Q's state is advanced by blank row tiles": planted(MMA, BLANK, BLANK + "                q_state.advance()\n"),
    "blank row tiles are not written": planted(MMA, BLANK, "                pass\n"),
    "the end is taken for a blank row tile": planted(MMA, "elif more != 0:", "else:"),
    "facts are not waited for": planted(MMA, "            pipes[3].consumer_wait(work_state)\n"),
    "a work slot is given back twice": planted(MMA, WORK_GIVEN_BACK, WORK_GIVEN_BACK * 2),
    "a work slot is not given back": planted(MMA, WORK_GIVEN_BACK),
    "a work slot is given back before its facts are read again": (
        (MMA, WORK_GIVEN_BACK, ""),
        (MMA, ENDED, "    " + WORK_GIVEN_BACK + ENDED),
        (MMA, BLANK, BLANK + "    " + WORK_GIVEN_BACK),
    ),
    "the work state is not advanced": planted(MMA, WORK_ADVANCED),
    "the work state is advanced before its slot is given back": exchanged(MMA, WORK_GIVEN_BACK, WORK_ADVANCED),
    "row tiles without visits take a Q": planted(
        PRODUCER, "if visits > 0:\n                    pipes[0]", "if visits >= 0:\n                    pipes[0]"
    ),
    "K's state is not advanced": planted(MMA, FIRST_ADVANCED, FIRST),
    "K's state is advanced before the first product": planted(MMA, FIRST_ADVANCED, "                k_state.advance()\n" + FIRST),
    "V's state is advanced with K's": planted(MMA, FIRST, FIRST + "                v_state.advance()\n"),
    "V's state is not advanced in bare steps": planted(MMA, BARE, BARE.replace("\n            v_state.advance()", "")),
    "V's state is not advanced after the last product": planted(MMA, LAST_ADVANCED, "        return"),
    "V's state is advanced before the last product": planted(MMA, LAST_WAITED_FOR, "        v_state.advance()\n" + LAST_WAITED_FOR),
    "what the steps advanced is lost": planted(MMA, RETURNED, RETURNED.replace("k_state, v_state =", "_, _ =")),
    "K is given back while it is being read": planted(MMA, "warpgroup.wait_group(1)", "warpgroup.wait_group(2)"),
    "K is not given back": planted(MMA, K_THROUGH, LAST_THROUGH),
    "K is given back twice": planted(MMA, K_THROUGH, K_THROUGH + K_THROUGH.splitlines(keepends=True)[1]),
    "V is given back while it is being read": planted(
        MMA, V_THROUGH + P_STORED, V_THROUGH.replace("wait_group(0)", "wait_group(1)") + P_STORED
    ),
    "V is given back while it is being read, after a guess": planted(
        MMA, V_THROUGH + P_GUESSED, V_THROUGH.replace("wait_group(0)", "wait_group(1)") + P_GUESSED
    ),
    "V is not waited for": planted(MMA, WAITED_FOR_V, "        self._product(mma_pv, acc"),
    "the last V is not waited for": planted(MMA, LAST_WAITED_FOR, "        self._product(mma_pv, sums"),
    "the last product is left out": planted(MMA, LAST),
    "the last product is not waited for": planted(MMA, LAST + LAST_THROUGH, LAST),
    "the last V is not given back": planted(MMA, LAST_RELEASED + LAST_ADVANCED, LAST_ADVANCED),
    "the last V is given back twice": planted(MMA, LAST_RELEASED + LAST_ADVANCED, LAST_RELEASED * 2 + LAST_ADVANCED),
    "P is replaced before its product": exchanged(MMA, V_THROUGH, P_STORED),
    "P is replaced before its product, by a guess": exchanged(MMA, V_THROUGH, P_GUESSED),
    "a wrong guess stays": planted(MMA, "        if is_right:", "        if True:"),
    "a wrong guess stays in P": planted(MMA, "row_scale, rate, False, True)\n    " + P_STORED, "row_scale, rate, False, True)\n"),
    "a wrong guess at a cap stays in P": planted(MMA, "rate, False)\n    " + P_STORED, "rate, False)\n"),
    "sums of guesses are lost": planted(MMA, SUMS_GUESSED, "            pass\n"),
    "O is not rescaled after a wrong guess": planted(MMA, "        return rescales\n", "        return False\n"),
    "masked tiles are guessed at": planted(MMA, "if const_expr(self.guesses and not asks)", "if const_expr(self.guesses)"),
    "turns are not taken": planted(MMA, "        self._my_turn(group)\n"),
    "turns are not passed on": planted(MMA, "        self._next_turn(group)\n"),
    "the first turn is not given": planted(MMA, "if group == 0 and self", "if group < 0 and self"),
    "turns go round among two of three": planted(MMA, "(group + 1) % 3", "(group + 1) % 2"),
    "V is not wiped": planted(MMA, WIPED, "            (in_smem[2]"),
    "V is wiped in the wrong stage": planted(MMA, WIPED, "            v_state.advance()\n" + WIPED),
    "V is wiped without a fence": planted(MMA, 'cute.arch.fence_proxy("async.shared", space="cta")', "pass"),
    "V is wiped from a key too late": planted(MMA, "facts.seqlen_k - n", "facts.seqlen_k + 1 - n"),
    "V is wiped before it came": planted(MMA, "            pipe.consumer_wait(state)\n            tile = v", "            tile = v"),
    "groups meet after wiping at one barrier": planted(MMA, "barrier_id=_CLEANED + group", "barrier_id=_CLEANED"),
    "O keeps the row tile before": planted(MMA, "        acc.fill(0.0)\n"),
    "the sums keep the row tile before": planted(MMA, "        row_sum.fill(0.0)\n"),
    "the maximum is that of the row tile before": planted(MMA, "        row_max.fill(-Float32.inf)\n"),
    "the highest scores are those of the row tile before": planted(MMA, "            tops.fill(-Float32.inf)\n", "            pass\n"),
    "the highest score is sought before what is hidden is": exchanged(
        MMA,
        "        self.masked(scores, positions, n, facts, captured, limits, visit % 2, True)\n",
        "        if const_expr(tops is not None):\n            self.raise_tops(tops, scores, lifts)\n",
    ),
    "a guessed tile's highest scores are lost": planted(
        MMA, "            self.raise_tops(tops, scores, lifts)\n        is_right", "            pass\n        is_right"
    ),
    "O is not rescaled": planted(MMA, "            if rescales:", "            if False:"),
    "a product does not add": planted(MMA, "not from_zero)", "False)"),
    "a group multiplies another's rows": planted(MMA, "groups(group)", "groups(0)"),
    "registers are not fenced": planted(MMA, "        warpgroup.fence()\n"),
    "masked tiles are one too few": planted(MMA, "cutlass.range(facts.masked,", "cutlass.range(facts.masked - 1,"),
    "tiles behind are forgotten": planted(MMA, "if const_expr(self.config.has_left)", "if const_expr(False)"),
    "facts are posted before they are acquired": planted(PRODUCER, "        pipe.producer_acquire(state)\n        for i", "        for i"),
    "facts are posted in one slot": planted(PRODUCER, POSTED, POSTED.splitlines()[0]),
    "the end is not posted": planted(PRODUCER, END_POSTED),
    "Q is copied without its memory being free": planted(
        PRODUCER, "pipes[0].producer_acquire(q_state)", "pipes[0].sync_object_full.arrive(q_state.index, None)"
    ),
    "K is copied without its memory being free": planted(PRODUCER, "        pipe.sync_object_empty.wait(state.index, state.phase)\n"),
    "the loader's Q stage is not advanced": planted(PRODUCER, "                    q_state.advance()\n"),
    "V is told at K's barrier": planted(PRODUCER, "self._fetch(pipes[2], v_state", "self._fetch(pipes[1], v_state"),
    "V is one tile behind": planted(PRODUCER, "v_copy, n, pages", "v_copy, after, pages"),
    "the tile goes on the board in another place": planted(PRODUCER, ON_BOARD, ON_BOARD.replace("[state.index] =", "[1 - state.index] =")),
    "the last key tile is loaded twice": planted(PRODUCER, "cutlass.min(i + 1, visits - 1)", "cutlass.min(i, visits - 1)"),
    "row tiles are computed that the order does not count": planted(
        SCHEDULER, "Sizes(tables.order[sizes.rows, 0], *", "Sizes(sizes.rows, *"
    ),
    "a piece is not copied": planted(PRODUCER, "min(pieces - group * LANES, LANES)", "min(pieces - group * LANES, LANES) - 1"),
    "a piece too many is copied": planted(PRODUCER, "min(pieces - group * LANES, LANES)", "min(pieces - group * LANES, LANES) + 1"),
    "pieces are written one over the other": planted(PRODUCER, "target[None, group * LANES + i,", "target[None, 0,"),
    "a piece's page is the one of the lane before": planted(
        PRODUCER, "cute.arch.shuffle_sync(pages[group], i)", "cute.arch.shuffle_sync(pages[group], max(i - 1, 0))"
    ),
    "a piece's place is the one of the lane before": planted(
        PRODUCER, "cute.arch.shuffle_sync(places[group], i)", "cute.arch.shuffle_sync(places[group], max(i - 1, 0))"
    ),
    "pages are those of the tile before": planted(PRODUCER, "n, asked, pages = after, asks, pages_after", "n, asked = after, asks"),
    "V's pages are those of the tile after": planted(PRODUCER, "v_copy, n, pages, sizes", "v_copy, n, pages_after, sizes"),
    "pages are those of the first entry": planted(PRODUCER, "tables.pages[entry,", "tables.pages[0,"),
    "the table is asked about what lies past the last key": planted(PRODUCER, "at * self.config.piece < seqlen_k:", "at >= 0:"),
    "pages are asked for one piece too late": planted(PRODUCER, "at * self.config.piece <", "(at + 1) * self.config.piece <"),
    "pieces are counted by tiles": planted(PRODUCER, "n * pieces + i", "n + i"),
    "every page begins where its first piece does": planted(PRODUCER, "% Uint32(sizes.pieces_in_page)", "% Uint32(1)"),
    "gathered keys are not fenced": planted(MMA, "if const_expr(self.config.gathers):", "if const_expr(False):"),
    "gathered keys go to the first stage": planted(PRODUCER, "target[None, None, state.index], pages", "target[None, None, 0], pages"),
    "gathered keys are on the pages of the tile after": planted(PRODUCER, "_pieces(n))\n            if", "_pieces(n + 1))\n            if"),
    "keys are divided along the rows": planted(
        PRODUCER, "flat_divide(k_smem, (piece, d))[None, None, None, 0, None]", "flat_divide(k_smem, (piece, d))[None, None, 0, None, None]"
    ),
    "heads are cut into a group too many": planted(SCHEDULER, "groups = ceil_div(sizes.ratio, most)", "groups = sizes.ratio // most + 1"),
    "a smaller group has as many heads": planted(SCHEDULER, "minimum(sizes.ratio - before, most)", "most"),
    "a group's heads are the first ones": planted(SCHEDULER, "* sizes.ratio + before", "* sizes.ratio"),
    "Q is of the first group's heads": planted(PRODUCER, "((head % sizes.ratio, q_start), 0)", "((0, q_start), 0)"),
    "Q is as far as heads apart have it": planted(PRODUCER, "shape, ((0, m_block), 0))", "shape, ((0, m_block * 4), 0))"),
    "packed row tiles see what unpacked ones do": planted(
        SCHEDULER, "tile_m, tile_n = config.tile_q,", "tile_m, tile_n = config.tiles.tile_m,"
    ),
    "a visit more than loaded": planted(SCHEDULER, "return total, masked, bare, maximum(", "return total, masked, bare + 1, maximum("),
}


def found_by(changes: Changes, most: int = 60, rows: int | None = None) -> str:
    """What the first of ``most`` schedules that fails says."""
    for seed in islice(count(1000), most):
        try:
            run_block(random_case(seed, rows), seed, changes)
        except Broken as error:
            return str(error)
    return ""


def test_the_text_itself_is_found_sound() -> None:
    assert not found_by(())


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    told = found_by(MUTANTS[name])
    assert told.startswith("Broken: "), told


def test_a_deadlock_is_told_with_where_everyone_stands() -> None:
    told = found_by(MUTANTS["owed is never set"], rows=12)
    assert told.startswith("Broken: deadlock")
    assert "loader (waits for q" in told and "pipes[0].producer_acquire(q_state)" in told
    assert "pipes[3].consumer_wait(work_state)" in told


def test_what_the_kernel_lacks_is_said_by_name() -> None:
    for module, old, said in ((MMA, "def multiply(", "no 'multiply'"), (PRODUCER, "class Loads", "no class 'Loads'")):
        with pytest.raises(LookupError, match=said):
            run_block(random_case(0), 0, planted(module, old, old[:-1] + "_of_tomorrow" + old[-1]))
    with pytest.raises(ValueError, match="which does not stand in"):
        run_block(random_case(0), 0, planted(MMA, "yesterday's text"))


@pytest.mark.parametrize("name", STOOD_IN)
def test_stand_ins_take_what_the_kernel_takes(name: str) -> None:
    taken = signatures(STOOD_IN[name])
    assert name in taken, f"{STOOD_IN[name]}.py has no method {name!r}, for which the model has a stand-in"
    assert len(inspect.signature(method(Stubs, name)).parameters) - 1 == taken[name]


NEEDLESS = {"pipe.producer_tail(state)"}  # the loader's stay until all is given back, for the others stay themselves


def left_out() -> Iterator[tuple[str, Changes]]:
    """Each statement of the roles that calls or assigns, and the text without it."""
    for module in (PRODUCER, MMA):
        text = text_of(module)
        lines = text.splitlines(keepends=True)
        functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)]
        for node in (node for f in functions for node in ast.walk(f)):
            if isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
                first = lines[node.lineno - 1]
                kept = [*lines[: node.lineno - 1], first[: node.col_offset] + "pass\n", *lines[node.end_lineno :]]
                yield first.strip(), ((module, text, "".join(kept)),)


@pytest.mark.slow
def test_no_statement_may_be_left_out() -> None:
    needless = {line for line, changes in left_out() if not found_by(changes)}
    assert needless == NEEDLESS
