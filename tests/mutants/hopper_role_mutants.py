"""Mutants of the Hopper kernel's roles, which the simulator of their schedules has to find (``tests/support/hopper/roles.py``)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

_KERNEL = "backends.hopper.kernel"
_MMA, _PRODUCER, _TILE_SCHEDULER = f"{_KERNEL}.mma", f"{_KERNEL}.producer", f"{_KERNEL}.tile_scheduler"


def _edit(where: str, old: str, new: str = "pass") -> tuple[Mutant, ...]:
    """The fragment ``old`` of the function becomes ``new``, or is left out. A mutant may have several edits."""
    return (Mutant("", where, old, new, "schedules"),)


def _swapped(where: str, first: str, second: str) -> tuple[Mutant, ...]:
    """Two neighbours, the other way round."""
    return _edit(where, f"{first}\n{second}", f"{second}\n{first}")


MUTANTS = {
    "Q is never given back": _edit(f"{_MMA}:Multiplies._give_back", "pipe.consumer_release(state)"),
    "Q is given back twice": _edit(
        f"{_MMA}:Multiplies._give_back", "pipe.consumer_release(state)", "pipe.consumer_release(state)\npipe.consumer_release(state)"
    ),
    "Q is given back while O is leaving": _edit(f"{_MMA}:Multiplies._give_back", "cute.arch.cp_async_bulk_wait_group(0, read=True)"),
    "all stores but the last are waited for": _edit(f"{_MMA}:Multiplies._give_back", "__(0, read=True)", "__(1, read=True)"),
    "Q is given back before O is known to have left": _swapped(
        f"{_MMA}:Multiplies._give_back",
        "if cute.arch.make_warp_uniform(self._again(thread) // 32) % 4 == 0:\n    cute.arch.cp_async_bulk_wait_group(0, read=True)",
        "pipe.consumer_release(state)",
    ),
    "Q is not waited for": _edit(f"{_MMA}:Multiplies._row_tiles", "pipes[0].consumer_wait(q_state)"),
    "the one Q is not given back": _edit(
        f"{_MMA}:Multiplies._row_tiles", "if const_expr(self.config.q_stages == 1):\n    self._give_back(pipes[0], q_state, thread)"
    ),
    "the one Q is given back before O takes its place": _swapped(
        f"{_MMA}:Multiplies._row_tiles",
        "self._ended(fixed, sums, given, outputs, sink, q_state, work_state)",
        "if const_expr(self.config.q_stages == 1):\n    self._give_back(pipes[0], q_state, thread)",
    ),
    "one of two Qs is given back at once and once more": _edit(f"{_MMA}:Multiplies._row_tiles", "self.config.q_stages == 1", "True"),
    "due is never set": _edit(f"{_MMA}:Multiplies._row_tiles", "due = Int32(1)"),
    "due is set before a Q is": _swapped(
        f"{_MMA}:Multiplies._row_tiles",
        "if due != 0:\n    self._give_back(pipes[0], _Stage(1 - q_state.index), thread)",
        "due = Int32(1)",
    ),
    "due is set from the start": _edit(f"{_MMA}:Multiplies._row_tiles", "Int32(0)", "Int32(1)"),
    "what is due is not given back in the loop": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if due != 0:\n    self._give_back(pipes[0], _Stage(1 - q_state.index), thread)\ndue = Int32(1)",
        "due = Int32(1)",
    ),
    "what is due is not given back at the end": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if const_expr(self.config.q_stages > 1):\n    if due != 0:\n        self._give_back(pipes[0], _Stage(1 - q_state.index), thread)",
        "if const_expr(self.config.q_stages > 1):\n    pass",
    ),
    "what is due is the new Q": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if due != 0:\n    self._give_back(pipes[0], _Stage(1 - q_state.index), thread)\ndue = Int32(1)",
        "if due != 0:\n    self._give_back(pipes[0], _Stage(q_state.index), thread)\ndue = Int32(1)",
    ),
    "what is due at the end is the Q before": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if const_expr(self.config.q_stages > 1):\n    if due != 0:\n        self._give_back(pipes[0], _Stage(1 - q_state.index), thread)",
        "if const_expr(self.config.q_stages > 1):\n    if due != 0:\n        self._give_back(pipes[0], _Stage(q_state.index), thread)",
    ),
    "what is due is given back after Q has advanced": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if due != 0:\n    self._give_back(pipes[0], _Stage(1 - q_state.index), thread)\ndue = Int32(1)",
        "q_state.advance()\nif due != 0:\n    self._give_back(pipes[0], _Stage(1 - q_state.index), thread)\ndue = Int32(1)",
    ),
    "Q's state is not advanced": _edit(f"{_MMA}:Multiplies._row_tiles", "q_state.advance()"),
    "Q's state is advanced before O is stored": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)",
        "k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)\nq_state.advance()",
    ),
    "Q's state is advanced by blank row tiles": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "self.blank(mmas[1], self._again(thread), outputs, sink, facts)",
        "self.blank(mmas[1], self._again(thread), outputs, sink, facts)\nq_state.advance()",
    ),
    "blank row tiles are not written": _edit(
        f"{_MMA}:Multiplies._row_tiles", "self.blank(mmas[1], self._again(thread), outputs, sink, facts)"
    ),
    "the end is taken for a blank row tile": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "if more != 0:\n    self.blank(mmas[1], self._again(thread), outputs, sink, facts)",
        "self.blank(mmas[1], self._again(thread), outputs, sink, facts)",
    ),
    "facts are not waited for": _edit(f"{_MMA}:Multiplies._row_tiles", "pipes[3].consumer_wait(work_state)"),
    "a work slot is given back twice": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "pipes[3].consumer_release(work_state)",
        "pipes[3].consumer_release(work_state)\npipes[3].consumer_release(work_state)",
    ),
    "a work slot is not given back": _edit(f"{_MMA}:Multiplies._row_tiles", "pipes[3].consumer_release(work_state)"),
    "a work slot is given back before its facts are read again": _edit(
        f"{_MMA}:Multiplies._row_tiles", "pipes[3].consumer_release(work_state)"
    )
    + _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)",
        "k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)\npipes[3].consumer_release(work_state)",
    )
    + _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "self.blank(mmas[1], self._again(thread), outputs, sink, facts)",
        "self.blank(mmas[1], self._again(thread), outputs, sink, facts)\npipes[3].consumer_release(work_state)",
    ),
    "the work state is not advanced": _edit(f"{_MMA}:Multiplies._row_tiles", "work_state.advance()"),
    "the work state is advanced before its slot is given back": _swapped(
        f"{_MMA}:Multiplies._row_tiles", "pipes[3].consumer_release(work_state)", "work_state.advance()"
    ),
    "row tiles without visits take a Q": _edit(
        f"{_PRODUCER}:Loads.load",
        "if visits > 0:\n    pipes[0].producer_acquire(q_state)\n    cute.copy(__, q_from, __1, tma_bar_ptr=__2)\n    q_state.advance()",
        "if visits >= 0:\n    pipes[0].producer_acquire(q_state)\n    cute.copy(__, q_from, __1, tma_bar_ptr=__2)\n    q_state.advance()",
    ),
    "K's state is not advanced": _edit(f"{_MMA}:Multiplies._row_tiles", "k_state.advance()"),
    "K's state is advanced before the first product": _swapped(
        f"{_MMA}:Multiplies._row_tiles", "self._first(fixed, sums, p, of_tile, q_state, k_state, v_state)", "k_state.advance()"
    ),
    "V's state is advanced with K's": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "self._first(fixed, sums, p, of_tile, q_state, k_state, v_state)",
        "self._first(fixed, sums, p, of_tile, q_state, k_state, v_state)\nv_state.advance()",
    ),
    "V's state is not advanced in bare steps": _edit(
        f"{_MMA}:Multiplies._steps",
        "self._step(fixed, sums, p, given, q_state, k_state, v_state, False)\nk_state.advance()\nv_state.advance()",
        "self._step(fixed, sums, p, given, q_state, k_state, v_state, False)\nk_state.advance()",
    ),
    "V's state is not advanced after the last product": _edit(
        f"{_MMA}:Multiplies._steps", "v_state.advance()\nreturn k_state, v_state", "return k_state, v_state"
    ),
    "V's state is advanced before the last product": _edit(
        f"{_MMA}:Multiplies._steps",
        "pipes[2].consumer_wait(v_state)\nself._product(mma_pv, sums[0], p, __, False)",
        "v_state.advance()\npipes[2].consumer_wait(v_state)\nself._product(mma_pv, sums[0], p, __, False)",
    ),
    "what the steps advanced is lost": _edit(f"{_MMA}:Multiplies._row_tiles", "k_state, v_state = __", "_, _ = __"),
    "K is given back while it is being read": _edit(f"{_MMA}:Multiplies._step", "warpgroup.wait_group(1)", "warpgroup.wait_group(2)"),
    "K is not given back": _edit(f"{_MMA}:Multiplies._first", "pipes[1].consumer_release(k_state)"),
    "K is given back twice": _edit(
        f"{_MMA}:Multiplies._first",
        "pipes[1].consumer_release(k_state)",
        "pipes[1].consumer_release(k_state)\npipes[1].consumer_release(k_state)",
    ),
    "V is given back while it is being read": _edit(f"{_MMA}:Multiplies._taken", "warpgroup.wait_group(0)", "warpgroup.wait_group(1)"),
    "V is given back while it is being read, after a guess": _edit(f"{_MMA}:Multiplies._guessed", "0", "1"),
    "V is not waited for": _edit(f"{_MMA}:Multiplies._step", "pipes[2].consumer_wait(v_state)"),
    "the last V is not waited for": _edit(f"{_MMA}:Multiplies._steps", "pipes[2].consumer_wait(v_state)"),
    "the last product is left out": _edit(
        f"{_MMA}:Multiplies._steps", "self._product(mma_pv, sums[0], p, v[None, None, None, v_state.index], False)"
    ),
    "the last product is not waited for": _edit(f"{_MMA}:Multiplies._steps", "warpgroup.wait_group(0)"),
    "the last V is not given back": _edit(f"{_MMA}:Multiplies._steps", "pipes[2].consumer_release(v_state)"),
    "the last V is given back twice": _edit(
        f"{_MMA}:Multiplies._steps",
        "pipes[2].consumer_release(v_state)",
        "pipes[2].consumer_release(v_state)\npipes[2].consumer_release(v_state)",
    ),
    "P is replaced before its product": _swapped(
        f"{_MMA}:Multiplies._taken",
        "warpgroup.wait_group(0)\npipes[2].consumer_release(v_state)",
        "if const_expr(apart is None): ...",
    ),
    "P is replaced before its product, by a guess": _swapped(
        f"{_MMA}:Multiplies._guessed", "warpgroup.wait_group(0)\npipes[2].consumer_release(v_state)", "if const_expr(apart is None): ..."
    ),
    "rows of another row tile drop": _edit(
        f"{_MMA}:Multiplies._row_tiles",
        "captured = (*captured, self.words_of_rows(positions, facts, captured))",
        "captured = (*captured, ('rows', 0))",
    ),
    "keys of another tile drop": _edit(
        f"{_MMA}:Multiplies._step",
        "dropping = (captured[2], n, self.words_ahead(captured[2], n))",
        "dropping = (captured[2], n + 1, self.words_ahead(captured[2], n + 1))",
    ),
    "a repeated tile drops nothing": _edit(
        f"{_MMA}:Multiplies._store", "if const_expr(dropping is None): ...", "p.store(narrowed(powers, self.dtype).load())"
    ),
    "a wrong guess stays": _edit(f"{_MMA}:Multiplies._guessed", "if is_right: ...", "if True: ..."),
    "a wrong guess stays in P": _edit(f"{_MMA}:Multiplies._guessed", "rescales = __\nself._store(p, scores, dropping)", "rescales = __"),
    "a wrong guess at a cap stays in P": _edit(
        f"{_MMA}:Multiplies._guessed",
        "self.unshifted(scores, sums, rate, False)\nself._store(p, scores, dropping)",
        "self.unshifted(scores, sums, rate, False)",
    ),
    "the excess of rounded weights starts with the last row tile's": _edit(f"{_MMA}:Multiplies._first", "row_scale.fill(0.0)"),
    "rounded weights are divided by a sum of others": _edit(
        f"{_MMA}:Multiplies._ended",
        "excess = row_scale if const_expr(self.config.is_bounded) else None",
        "excess = None",
    ),
    "sums of guesses are lost": _edit(f"{_MMA}:Multiplies._guessed", "row_sum.store(row_sum.load() + added.load())"),
    "O is not rescaled after a wrong guess": _edit(f"{_MMA}:Multiplies._taken", "return rescales", "return False")
    + _edit(f"{_MMA}:Multiplies._guessed", "return rescales", "return False"),
    "masked tiles are guessed at": _edit(f"{_MMA}:Multiplies._step", "self.guesses and (not asks)", "self.guesses"),
    "turns are not taken": _edit(f"{_MMA}:Multiplies._first", "self._my_turn(group)")
    + _edit(f"{_MMA}:Multiplies._step", "self._my_turn(group)"),
    "turns are not passed on": _edit(f"{_MMA}:Multiplies._first", "self._next_turn(group)")
    + _edit(f"{_MMA}:Multiplies._step", "self._next_turn(group)"),
    "the first turn is not given": _edit(f"{_MMA}:Multiplies._first_turn", "group == 0", "group < 0"),
    "turns go round among two of three": _edit(f"{_MMA}:Multiplies._next_turn", "3", "2"),
    "V is not wiped": _edit(
        f"{_MMA}:Multiplies._first",
        "self._wiped(in_smem[2], pipes[2], v_state, __, thread, group)",
        "(in_smem[2], pipes[2], v_state, __, thread, group)",
    ),
    "V is wiped in the wrong stage": _edit(
        f"{_MMA}:Multiplies._first",
        "self._wiped(in_smem[2], pipes[2], v_state, __, thread, group)",
        "self._wiped(in_smem[2], pipes[2], (v_state.advance(), v_state)[1], __, thread, group)",
    ),
    "V is wiped without a fence": _edit(f"{_MMA}:Multiplies._product", "cute.arch.fence_proxy('async.shared', space='cta')")
    + _edit(f"{_MMA}:Multiplies._wiped", "cute.arch.fence_proxy('async.shared', space='cta')"),
    "V is wiped from a key too late": _edit(f"{_MMA}:Multiplies._first", "facts.seqlen_k", "facts.seqlen_k + 1"),
    "V is wiped before it came": _edit(f"{_MMA}:Multiplies._wiped", "pipe.consumer_wait(state)"),
    "groups meet after wiping at one barrier": _edit(f"{_MMA}:Multiplies._wiped", "_CLEANED + group", "_CLEANED"),
    "O keeps the row tile before": _edit(f"{_MMA}:Multiplies._first", "acc.fill(0.0)"),
    "the sums keep the row tile before": _edit(f"{_MMA}:Multiplies._first", "row_sum.fill(0.0)"),
    "the maximum is that of the row tile before": _edit(f"{_MMA}:Multiplies._first", "row_max.fill(-Float32.inf)"),
    "the highest scores are those of the row tile before": _edit(f"{_MMA}:Multiplies._first", "tops.fill(-Float32.inf)"),
    "the highest score is sought before what is hidden is": _swapped(
        f"{_MMA}:Multiplies._first",
        "self.masked(scores, positions, n, facts, captured, limits, visit % 2, True)",
        "if const_expr(tops is not None):\n    self.raise_tops(tops, scores, lifts)",
    ),
    "a guessed tile's highest scores are lost": _edit(f"{_MMA}:Multiplies._guessed", "self.raise_tops(tops, scores, lifts)"),
    "O is not rescaled": _edit(f"{_MMA}:Multiplies._step", "if rescales: ...", "if False: ..."),
    "a product does not add": _edit(f"{_MMA}:Multiplies._product", "not from_zero", "False"),
    "a group multiplies another's rows": _edit(
        f"{_MMA}:Multiplies.multiply", "mma_qk.get_slice(groups(group))", "mma_qk.get_slice(groups(0))"
    )
    + _edit(f"{_MMA}:Multiplies.multiply", "groups(group)", "groups(0)"),
    "registers are not fenced": _edit(f"{_MMA}:Multiplies._product", "warpgroup.fence()"),
    "masked tiles are one too few": _edit(f"{_MMA}:Multiplies._steps", "facts.masked", "facts.masked - 1"),
    "tiles behind are forgotten": _edit(f"{_MMA}:Multiplies._steps", "self.config.has_left", "False"),
    "facts are posted before they are acquired": _edit(f"{_PRODUCER}:Loads._post", "pipe.producer_acquire(state)"),
    "facts are posted in one slot": _edit(
        f"{_PRODUCER}:Loads.load",
        "self._post(board[0], pipes[3], work_state, facts)\nwork_state.advance()",
        "self._post(board[0], pipes[3], work_state, facts)",
    ),
    "the end is not posted": _edit(
        f"{_PRODUCER}:Loads.load",
        "self._post(board[0], pipes[3], work_state, Facts(*(Int32(0) for _ in Facts._fields)))\nwork_state.advance()",
    ),
    "Q is copied without its memory being free": _edit(
        f"{_PRODUCER}:Loads.load", "pipes[0].producer_acquire(q_state)", "pipes[0].sync_object_full.arrive(q_state.index, None)"
    ),
    "K is copied without its memory being free": _edit(
        f"{_PRODUCER}:Loads._fetch", "pipe.sync_object_empty.wait(state.index, state.phase)"
    ),
    "the loader's Q stage is not advanced": _edit(f"{_PRODUCER}:Loads.load", "q_state.advance()"),
    "V is told at K's barrier": _edit(f"{_PRODUCER}:Loads.load", "pipes[2]", "pipes[1]"),
    "V is one tile behind": _edit(
        f"{_PRODUCER}:Loads.load",
        "self._fetch(pipes[2], v_state, v_copy, n, pages, sizes, None, asked)",
        "self._fetch(pipes[2], v_state, v_copy, after, pages, sizes, None, asked)",
    ),
    "the tile goes on the board in another place": _edit(
        f"{_PRODUCER}:Loads._fetch", "board[state.index] = __", "board[1 - state.index] = __"
    ),
    "the last key tile is loaded twice": _edit(f"{_PRODUCER}:Loads.load", "i + 1", "i"),
    "row tiles are computed that the order does not count": _edit(
        f"{_TILE_SCHEDULER}:Visits.counted", "tables.order[sizes.rows, 0]", "sizes.rows"
    ),
    "a piece is not copied": _edit(
        f"{_PRODUCER}:Loads._fetch", "min(pieces - group * LANES, LANES)", "min(pieces - group * LANES, LANES) - 1"
    ),
    "a piece too many is copied": _edit(
        f"{_PRODUCER}:Loads._fetch", "min(pieces - group * LANES, LANES)", "min(pieces - group * LANES, LANES) + 1"
    ),
    "pieces are written one over the other": _edit(f"{_PRODUCER}:Loads._fetch", "group * LANES + i", "0"),
    "a piece's page is the one of the lane before": _edit(
        f"{_PRODUCER}:Loads._fetch", "__(pages[group], i)", "__(pages[group], max(i - 1, 0))"
    ),
    "a piece's place is the one of the lane before": _edit(
        f"{_PRODUCER}:Loads._fetch", "__(places[group], i)", "__(places[group], max(i - 1, 0))"
    ),
    "pages are those of the tile before": _edit(
        f"{_PRODUCER}:Loads.load", "n, asked, pages = (after, asks, pages_after)", "n, asked = (after, asks)"
    ),
    "V's pages are those of the tile after": _edit(
        f"{_PRODUCER}:Loads.load",
        "self._fetch(pipes[2], v_state, v_copy, n, pages, sizes, None, asked)",
        "self._fetch(pipes[2], v_state, v_copy, n, pages_after, sizes, None, asked)",
    ),
    "pages are those of the first entry": _edit(f"{_PRODUCER}:Loads._page", "entry", "0"),
    "the table is asked about what lies past the last key": _edit(
        f"{_PRODUCER}:Loads._page", "at * self.config.piece < seqlen_k", "at >= 0"
    ),
    "pages are asked for one piece too late": _edit(f"{_PRODUCER}:Loads._page", "at * self.config.piece", "(at + 1) * self.config.piece"),
    "pieces are counted by tiles": _edit(f"{_PRODUCER}:Loads._pieces", "n * pieces", "n"),
    "every page begins where its first piece does": _edit(f"{_PRODUCER}:Loads._fetch", "sizes.pieces_in_page", "1"),
    "gathered keys are not fenced": _edit(f"{_MMA}:Multiplies._product", "self.config.gathers", "False"),
    "gathered keys go to the first stage": _edit(f"{_PRODUCER}:Loads._fetch", "(None, None, state.index)", "(None, None, 0)"),
    "gathered keys are on the pages of the tile after": _edit(f"{_PRODUCER}:Loads._fetch", "self._pieces(n)", "self._pieces(n + 1)"),
    "keys are divided along the rows": _edit(f"{_PRODUCER}:Loads._sources", "(None, None, None, 0, None)", "(None, None, 0, None, None)"),
    "heads are cut into a group too many": _edit(
        f"{_TILE_SCHEDULER}:Visits.packed", "ceil_div(sizes.ratio, most)", "sizes.ratio // most + 1"
    ),
    "a smaller group has as many heads": _edit(f"{_TILE_SCHEDULER}:Visits.packed", "minimum(sizes.ratio - before, most)", "most"),
    "a group's heads are the first ones": _edit(
        f"{_TILE_SCHEDULER}:Visits.packed", "group // groups * sizes.ratio + before", "group // groups * sizes.ratio"
    ),
    "Q is of the first group's heads": _edit(f"{_PRODUCER}:Loads._sources", "head % sizes.ratio", "0"),
    "Q is as far as heads apart have it": _edit(f"{_PRODUCER}:Loads._sources", "(0, m_block)", "(0, m_block * 4)"),
    "packed row tiles see what unpacked ones do": _edit(f"{_TILE_SCHEDULER}:Visits.band_visits", "config.tile_q", "config.tiles.tile_m"),
    "a visit more than loaded": _edit(
        f"{_TILE_SCHEDULER}:Visits.band_visits", "(total, masked, bare, __, n_max - 1)", "(total, masked, bare + 1, __, n_max - 1)"
    ),
}
