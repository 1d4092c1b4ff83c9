"""Mutants of the Hopper kernels' roles, which the simulated thread blocks have to find: a few of each kind of mistake and each role.

``killer`` is "schedules", random schedules of the forward roles (``tests/backends/hopper/test_protocol.py``), "wide schedules", those of
wide heads (``test_wide_protocol.py``), "wide backward schedules" (``test_wide_backward_protocol.py``), "skipping schedules", those of a
kernel that skips (``test_skipping_protocol.py``), "schedules in order", those of the kernel in the order of keys
(``test_in_order_protocol.py``), "machine code", that of a compiled kernel (``test_loads_before_release.py``), or names
a case of the backward roles with numbers (``test_backward_roles.py``; "packed: ..." of ``test_backward_packed.py``). ``left_out`` makes
many more.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from tests.mutants.mutant import Mutant, by_name
from tests.support.hopper.role_source import Changes, text_of

__all__ = ["MUTANTS", "left_out", "planted"]

_KERNEL = "backends.hopper.kernel"
_MULTIPLIES, _LOADS, _VISITS = f"{_KERNEL}.mma:Multiplies", f"{_KERNEL}.producer:Loads", f"{_KERNEL}.tile_scheduler:Visits"
_MULTIPLIES_WIDE, _LOADS_WIDE = f"{_KERNEL}.wide.mma:MultipliesWide", f"{_KERNEL}.wide.producer:LoadsWide"
_TWICE, _ONCE = f"{_KERNEL}.wide_backward.twice:MultipliesTwice", f"{_KERNEL}.wide_backward.once:MultipliesOnce"
_OF_KEYS = f"{_KERNEL}.wide_backward.keys:_OfKeys"
_SKIPS, _LOADS_SKIPPING = f"{_KERNEL}.skipping.mma:MultipliesSkipping", f"{_KERNEL}.skipping.producer:LoadsSkipping"
_IN_PLACE = f"{_KERNEL}.in_order.in_place:MultipliesInPlace"
_IN_ORDER, _LOADS_IN_ORDER = f"{_KERNEL}.in_order.mma:MultipliesInOrder", f"{_KERNEL}.in_order.producer:LoadsInOrder"
_BACK, _ADDS = f"{_KERNEL}.backward.mma:MultipliesBack", f"{_KERNEL}.backward.adder:Adds"
_ALONE = f"{_KERNEL}.backward.alone_mma:MultipliesAlone"
_WIDE, _HALVES = f"{_KERNEL}.backward.wide_mma:MultipliesWide", f"{_KERNEL}.backward.halved_mma:MultipliesHalves"
_ROWS, _SCHEDULER = f"{_KERNEL}.backward.producer:LoadsRows", f"{_KERNEL}.backward.scheduler:VisitsRows"
_SCORES, _SUMS = f"{_KERNEL}.backward.scores", f"{_KERNEL}.captured.sums"
_KEYS, _PACKED, _AFTER = f"{_KERNEL}.backward.epilogue:StoresKeys", f"{_KERNEL}.backward.packed:Packed", f"{_KERNEL}.backward.rows"
_DROPS = f"{_KERNEL}.dropout:Drops"
_ADDED = "cute.arch.barrier(barrier_id=_ADDED, number_of_threads=_BOTH)"
_TAKEN = "cute.arch.barrier_arrive(barrier_id=_TAKEN, number_of_threads=_BOTH)"
_FENCE = "cute.arch.fence_proxy('async.shared', space='cta')"


def _forward(where: str, name: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(name, where, old, new, "schedules")


def _skipping(where: str, name: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(name, where, old, new, "skipping schedules")


def _in_order(where: str, name: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(name, where, old, new, "schedules in order")


def _wide(where: str, name: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(name, where, old, new, "wide schedules")


def _wide_back(where: str, name: str, old: str, new: str = "pass") -> Mutant:
    return Mutant(name, where, old, new, "wide backward schedules")


MUTANTS = by_name(
    # deadlocks, and memory that is released too often
    _forward(f"{_MULTIPLIES}._give_back", "Q is never released", "pipe.consumer_release(state)"),
    _forward(_MULTIPLIES, "a Q that waits is never noted", "due = Int32(1)"),
    _forward(_MULTIPLIES, "a work slot is released twice", "pipes[3].consumer_release(__)",
             "pipes[3].consumer_release(__); pipes[3].consumer_release(__)"),
    _forward(_LOADS, "the loader's Q stage is not advanced", "q_state.advance()"),
    _forward(f"{_MULTIPLIES}._first_turn", "the first turn is nobody's", "group == 0", "group < 0"),
    _forward(f"{_MULTIPLIES}._next_turn", "turns go round among two of three", "(group + 1) % self.config.tiles.warp_groups",
             "(group + 1) % 2"),
    # memory that is overwritten while it is read, or read before it is written
    _forward(_MULTIPLIES, "Q is released while O is leaving", "cute.arch.cp_async_bulk_wait_group(0, read=True)"),
    _forward(f"{_MULTIPLIES}._scored", "K is released while it is being read", "warpgroup.wait_group(1)", "warpgroup.wait_group(2)"),
    _forward(f"{_MULTIPLIES}._values_read", "V is released while it is being read", "0", "1"),
    _forward(f"{_MULTIPLIES}._row_tiles", "facts are not waited for", "pipes[3].consumer_wait(work_state)"),
    _forward(f"{_MULTIPLIES}._second", "V is not waited for", "pipes[2].consumer_wait(v_state)"),
    _forward(_LOADS, "K is copied without its memory being free", "pipe.sync_object_empty.wait(state.index, state.phase)"),
    _forward(f"{_MULTIPLIES}._product", "registers are not fenced", "warpgroup.fence()"),
    _forward(f"{_MULTIPLIES}._product", "gathered keys are not fenced", "self.config.gathers", "False"),
    _forward(f"{_MULTIPLIES}._wiped", "groups meet after wiping at one barrier", "MEETING + group", "MEETING"),
    _forward(f"{_MULTIPLIES}._first", "V is wiped from a key too late", "facts.seqlen_k", "facts.seqlen_k + 1"),
    # P with another V, sums of another row tile
    _forward(f"{_MULTIPLIES}._row_tiles", "K's state is not advanced", "k_state.advance()"),
    _forward(f"{_MULTIPLIES}._first", "the sums keep the row tile before", "row_sum.fill(0.0)"),
    _forward(f"{_MULTIPLIES}._rescaled", "O is not rescaled", "if rescales: ...", "if False: ..."),
    _forward(f"{_MULTIPLIES}._weighed", "masked tiles are guessed at", "self.guesses and (not asks)", "self.guesses"),
    _forward(f"{_MULTIPLIES}._guessed", "a wrong guess stays", "if is_right: ...", "if True: ..."),
    _forward(f"{_MULTIPLIES}._steps", "masked tiles are one too few", "facts.masked", "facts.masked - 1"),
    _forward(f"{_MULTIPLIES}._row_tiles", "rows of another tile drop", "self.words_of_rows(positions, facts, captured)", "('rows', 0)"),
    _forward(_LOADS, "the last key tile is loaded twice", "i + 1", "i"),
    # work, pages, groups of heads
    _forward(f"{_VISITS}.counted", "row tiles are computed that the order does not count", "tables.order[sizes.rows, 0]", "sizes.rows"),
    _forward(f"{_VISITS}.row_tile", "without an order all row tiles are the first entry's", "(Int32(0), Int32(0), row)",
             "(Int32(0), Int32(0), Int32(0))"),
    _forward(f"{_VISITS}.storage", "more keys than there is room for are visited", "minimum(Int32(tables.entries[entry]), room)",
             "Int32(tables.entries[entry])"),
    _forward(f"{_VISITS}.storage", "a negative number of keys counts", "maximum(minimum(__, __1), 0)", "minimum(__, __1)"),
    _forward(f"{_VISITS}.storage", "an entry has room for one page", "seqlen_k * tables.pages.shape[1]", "seqlen_k"),
    _forward(f"{_VISITS}.head_of_lists", "lists are those of another K/V head", "head // sizes.ratio", "head % 2"),
    _forward(f"{_VISITS}.packed", "a smaller group has as many heads", "minimum(sizes.ratio - before, most)", "most"),
    _forward(f"{_LOADS}._page", "pages are those of the first entry", "entry", "0"),
    _forward(f"{_LOADS}._start_copies", "pieces are written one over the other", "group * LANES + i", "0"),
    # ---- backward of wide heads: two warp groups that pass P and dS to one another
    _wide_back(f"{_KERNEL}.wide_backward.keys:HopperKeyGradient.deltas", "delta may be loaded after its stage is released", "self.read()"),
    _wide_back(f"{_KERNEL}.wide_backward.once:MultipliesOnce._given", "lse may be loaded after its stage is released", "self.read()"),
    _wide_back(f"{_TWICE}._gradients_taken", "dS is taken before it is there",
               "cute.arch.barrier(barrier_id=RETURNED, number_of_threads=BOTH)"),
    _wide_back(f"{_TWICE}._gradients_given", "P is taken before it is there",
               "cute.arch.barrier(barrier_id=PASSED, number_of_threads=BOTH)"),
    _wide_back(f"{_TWICE}._factors_given", "the second group is never told",
               "cute.arch.barrier_arrive(barrier_id=PASSED, number_of_threads=BOTH)"),
    _wide_back(f"{_TWICE}.multiply_second", "a streamed part is released while dS is multiplied by it", "warpgroup.wait_group(2)",
               "warpgroup.wait_group(3)"),
    _wide_back(f"{_TWICE}.multiply_second", "the kept tile is not waited for", "kept_pipe.consumer_wait(kept_state)"),
    _wide_back(f"{_TWICE}.multiply_first", "held columns are those of the tile before", "self.hold(kept[0], smem.kept, thread)"),
    _wide_back(f"{_TWICE}._second_scores", "half of dO is not waited for", "pipes.y1.consumer_wait(states[1])"),
    _wide_back(f"{_TWICE}._operands", "columns past 512 are those before", "HALF // widths[-1]", "0"),
    _wide_back(f"{_TWICE}._second_scores", "dP is of the first columns alone", "HALF // 16", "0"),
    _wide_back(f"{_ONCE}._given", "P of dv is overwritten before it is taken",
               "cute.arch.barrier(barrier_id=RETURNED, number_of_threads=BOTH)"),
    _wide_back(f"{_ONCE}.multiply_second", "the second half of dO is always the first stage's", "y1.advance()"),
    _wide_back(f"{_OF_KEYS}.load", "keys that no row sees are loaded", "if visits > 0: ...", "if visits >= 0: ..."),
    _wide_back(f"{_OF_KEYS}._rows_loaded", "rows are copied without their memory being free",
               "pipes.x0.sync_object_empty.wait(x0.index, x0.phase)"),
    # ---- forward of wide heads: two warp groups, and two thread blocks
    _wide(_MULTIPLIES_WIDE, "P is taken before it is passed on", "cute.arch.barrier(barrier_id=_PASSED, number_of_threads=__)"),
    _wide(_MULTIPLIES_WIDE, "P is overwritten before it is taken", "cute.arch.barrier(barrier_id=_TAKEN, number_of_threads=__)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "the first P waits for ever",
          "cute.arch.barrier_arrive(barrier_id=_TAKEN, number_of_threads=_BOTH)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "the second half of O is never rescaled",
          "if cute.arch.vote_any_sync(self.rescales(factors)): ...", "if False: ..."),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "the second half of O keeps the row tile before", "acc.fill(0.0)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "the second half of O is not divided", "self._take(exchange, thread, None, factors); __",
          "self._take(exchange, thread, None, factors)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "V is released while the second group reads it", "warpgroup.wait_group(0)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "both groups multiply the same half", "self.values_of(in_smem[2], 1)",
          "self.values_of(in_smem[2], 0)"),
    _wide(f"{_MULTIPLIES_WIDE}.multiply_rest", "the second group does not release Q", "self._give_back(pipes[0], q_state, thread)"),
    _wide(f"{_MULTIPLIES_WIDE}._scored", "V is released while the first group reads it", "warpgroup.wait_group(1)"),
    _wide(f"{_MULTIPLIES_WIDE}._scored", "scores are read before they are there", "warpgroup.wait_group(0)"),
    _wide(f"{_MULTIPLIES_WIDE}._keys_read", "K is released where V is read there", "int(self.config.has_one_kv)", "0"),
    _wide(f"{_MULTIPLIES_WIDE}._keys_awaited", "the first part of K is not waited for", "pipes.keys[0].consumer_wait(state)"),
    _wide(f"{_MULTIPLIES}._product", "the second part of K is not waited for", "rest[1].consumer_wait(rest[2])"),
    _wide(f"{_MULTIPLIES}._product", "the second part of K is waited for too late", "16 * i == rest[0]", "16 * i == rest[0] + 16"),
    _wide(f"{_MULTIPLIES_WIDE}._values_awaited", "the other group's V is wiped before it comes", "pipes.other_values.consumer_wait(state)"),
    _wide(f"{_MULTIPLIES_WIDE}._scored", "the second group waits for a product that has ended",
          "cute.arch.barrier_arrive(barrier_id=_ADDED, number_of_threads=_BOTH)"),
    _wide(f"{_MULTIPLIES_WIDE}._last", "the second group waits for scores that do not follow",
          "cute.arch.barrier_arrive(barrier_id=_ADDED, number_of_threads=_BOTH)"),
    _wide(f"{_MULTIPLIES_WIDE}._take", "nobody waits for the first group's product",
          _ADDED),
    _wide(f"{_MULTIPLIES_WIDE}._take", "the first group may arrive twice before the second waits",
          f"if const_expr(p is not None):\n    {_ADDED}\n{_TAKEN}", f"{_TAKEN}\nif const_expr(p is not None):\n    {_ADDED}"),
    _wide(f"{_LOADS}._fetch_all", "a tile's number comes with its last part", "i == 0", "i == 1"),
    _wide(f"{_LOADS_WIDE}.parts_of_tile", "both parts are a tensor's first columns", "(0, part.first, 0, 0)", "(0, 0, 0, 0)"),
    _wide(f"{_LOADS_WIDE}.parts_of_tile", "columns of V are taken for rows", "(part.first, 0, 0, 0)", "(0, part.first, 0, 0)"),
    _wide(f"{_LOADS_WIDE}.parts", "the first part is half as wide", "cut = self.config.columns", "cut = self.config.columns // 2"),
    _wide(f"{_LOADS_WIDE}.readers", "the second group does not release a part that is K and V", "{0, 1}", "{0}"),
    _wide(f"{_LOADS_WIDE}.pipes_of_roles", "both groups release the same part of V", "Pipes(q, None, of_v[1], work, of_v[0])",
          "Pipes(q, None, of_v[0], work, of_v[1])"),
    _wide(f"{_LOADS_WIDE}.own_tile", "both thread blocks compute the first rows", "m_block * 2 + rank", "m_block * 2"),
    _wide(f"{_LOADS_WIDE}.own_heads", "both thread blocks compute the first heads", "head + before", "head"),
    _wide(f"{_LOADS_WIDE}.own_heads", "the first block has the heads of both",
          "cutlass.min(heads - before, self.config.own_heads)", "heads - before"),
    _wide(f"{_VISITS}.share", "every split visits the last keys", "last - begin", "last"),
    _wide(f"{_VISITS}.share", "a split's last masked tile is taken for a bare one", "minimum(end, 1 + masked)", "minimum(end, masked)"),
    _wide(f"{_VISITS}.share", "masked tiles are visited again as bare ones", "maximum(after, 1 + masked)", "after"),
    _wide(_LOADS, "splits write over one another", "q_row + split * lengths[2]", "q_row"),
    _wide(f"{_LOADS_WIDE}.receivers", "a half is copied to one thread block", "_BOTH_BLOCKS", "1"),
    _wide(f"{_LOADS}.part_of_tile", "both thread blocks load the same half", "self._partition(atom, in_smem, source, rank, __)",
          "self._partition(atom, in_smem, source, 0, __)"),
    _wide(f"{_VISITS}.next_in_turn", "every round begins with the first worker", "workers - 1 - work % workers", "work % workers"),
    # ---- forward that skips
    _skipping(f"{_SKIPS}._step_after", "a skipped tile is multiplied", "tops.pending[0] = Int32(0)"),
    _skipping(f"{_SKIPS}._step_after", "a tile after a skipped one is not multiplied", "tops.pending[0] = Int32(1)"),
    _skipping(f"{_SKIPS}.start_tops", "a row tile starts as the one before has ended", "tops.pending[0] = Int32(1)"),
    _skipping(f"{_SKIPS}._step_after", "unread values are not waited for", "pipes[2].consumer_wait(v_state)"),
    _skipping(f"{_SKIPS}._last", "a last tile's unread values are not waited for", "fixed[4][2].consumer_wait(v_state)"),
    _skipping(f"{_SKIPS}._last", "the last product is not waited for", "warpgroup.wait_group(0)"),
    _skipping(f"{_SKIPS}._step_after", "scores alone are not waited for", "warpgroup.wait_group(0)"),
    _skipping(f"{_SKIPS}._step_after", "a skipped tile's step releases no values", "self._values_read(pipes[2], v_state)"),
    _skipping(f"{_SKIPS}._step_after", "K is not released after a skipped tile", "self._keys_read(pipes, k_state)"),
    _skipping(f"{_SKIPS}._step_after", "all groups vote at one barrier", "VOTE + group", "VOTE"),
    _skipping(f"{_SKIPS}._step_after", "O is not rescaled after a vote", "self._rescaled(acc, sums[3], rescales)"),
    _skipping(f"{_LOADS_SKIPPING}._visit", "bare tiles go from the last to the first", "part.first + part.last - i", "i"),
    _skipping(f"{_LOADS_SKIPPING}.planned", "a bare tile takes part in no turn", "masked + bare", "masked + bare - 1"),
    # ---- forward in the order of keys
    _in_order(f"{_IN_ORDER}._weighed", "V is released before its product has ended", "self._values_read(pipes[2], v_state)",
              "pipes[2].consumer_release(v_state)"),
    _in_order(f"{_IN_ORDER}._weighed", "P is stored before the product that reads it has ended", "self._values_read(pipes[2], v_state)",
              "p.store(narrowed(scores, self.dtype).load()); self._values_read(pipes[2], v_state)"),
    _in_order(f"{_IN_ORDER}._weighed", "O is rescaled before the product that adds to it has ended", "self._values_read(pipes[2], v_state)",
              "rows_and_columns(acc)[0, 0] = product(rows_and_columns(acc)[0, 0], rate); self._values_read(pipes[2], v_state)"),
    _in_order(f"{_IN_ORDER}._weighed", "a section is not merged where the next begins",
              "self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)"),
    _in_order(f"{_IN_ORDER}._step", "sections begin a tile too early", "n % _TILES", "(n + 1) % _TILES"),
    _in_order(f"{_IN_ORDER}._weighed", "O is rescaled before a section is merged",
              "self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)",
              "acc[0, 0] = product(acc[0, 0], rate)\n"
              "self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)"),
    _in_order(f"{_IN_ORDER}._weighed", "a section's first tile is guessed at", "not is_new", "True"),
    _in_order(f"{_IN_ORDER}._weighed", "the weights of a guess are not added up",
              "sections.sums[r, part] = total(added[r, part], sections.sums[r, part])"),
    _in_order(f"{_IN_ORDER}._weighed", "a right guess is not used", "narrowed_to(p, powers, self.dtype)"),
    _in_order(f"{_IN_ORDER}._weighed", "a wrong guess is taken for scores",
              "self._scores(fixed, scores, q_state, k_state, self._q_held(sections))"),
    _in_order(f"{_IN_ORDER}._weighed", "scores are read before they have been computed again", "warpgroup.wait_group(0)"),
    _in_order(f"{_IN_ORDER}._weighed", "K is kept after a guess", "self._keys_read(pipes, k_state)"),
    _in_order(f"{_IN_ORDER}._scored", "K is released before scores are computed again", "not self.config.recomputes", "True"),
    _in_order(f"{_IN_ORDER}._guessed_at", "each warp decides whether a product is repeated", "all_of_group(right, VOTE + group)", "right"),
    _in_order(f"{_IN_ORDER}._guessed_at", "all groups vote on their guesses at one barrier", "VOTE + group", "VOTE"),
    _in_order(f"{_IN_ORDER}._step", "highest scores are of a row tile's first keys", "self.raise_tops(sections.tops, scores, None)"),
    _in_order(f"{_IN_ORDER}._guessed_at", "a guess is taken though weights are large", "added[r, part] <= _MOST",
              "added[r, part] <= 2**40"),
    _in_order(f"{_IN_ORDER}._kept", "a section's maximum begins at the one before", "row_max[r] = self._lowest(rate)"),
    _in_order(f"{_IN_ORDER}._kept", "a section is merged by its maximum alone", "power_of_2(difference(x, highest))",
              "power_of_2(difference(x, top))"),
    _in_order(f"{_IN_ORDER}._kept", "the factors of a section and of those before are confused", "sections.factors[r, i] = __",
              "sections.factors[r, 1 - i] = __"),
    _in_order(f"{_IN_ORDER}._weights", "a section's sums begin at those before", "sections.sums[r, part] = found",
              "sections.sums[r, part] = total(found, sections.sums[r, part])"),
    _in_order(f"{_IN_ORDER}._weights", "a maximum moves with every higher score", "cute.math.fma(top, rate, -product(held, rate)) > LAG",
              "top > held"),
    _in_order(f"{_IN_ORDER}._first", "a row tile takes up the output of the one before", "sections.earlier[0] = Int32(0)"),
    _in_order(f"{_IN_ORDER}._merged", "what was never written is read", "select(earlier, fours[i][j], Float32(0.0), __)",
              "fours[i][j]"),
    _in_order(f"{_IN_ORDER}._merged", "what was never written is read from global memory", "if earlier: ...", "if True: ..."),
    _in_order(f"{_IN_ORDER}._merged", "a row tile's first section is merged with infinity", "fours[i].fill(0.0)",
              "fours[i].fill(Float32.inf)"),
    _in_order(f"{_IN_ORDER}._merged", "all places have the first columns", "before += count"),
    _in_order(f"{_IN_ORDER}._ended", "Q's memory is given back before a fence", "cute.arch.fence_proxy('async.shared', space='cta')"),
    _in_order(f"{_IN_ORDER}._step", "sums are where another row tile's Q is", "(scores, __, v_state, q_state, k_state)",
              "(scores, __, v_state, _Stage(0), k_state)"),
    _in_order(f"{_IN_ORDER}._kept", "the sums of a quad are half of it", "(2, 1)", "(2,)"),
    _in_order(f"{_IN_ORDER}._first", "Q stays that of the row tile before", "to_registers(__, __1, __2, __3, __4, __5)",
              "facts.m_block != 0 or to_registers(__, __1, __2, __3, __4, __5)"),
    _in_order(f"{_IN_ORDER}._steps", "V's rows behind a sequence's end are not wiped", "self._wiped(__, __1, __2, __3, __4, __5)"),
    _in_order(f"{_IN_ORDER}._steps", "V is wiped from the end of the tile before", "sums[4].tile[0]", "(sums[4].tile[0] + 1)"),
    _in_order(f"{_IN_ORDER}._steps", "a window's first tile is visited twice", "left -= 1"),
    _in_order(f"{_IN_ORDER}._q_held", "registers hold more of Q than was read", "self._columns_held()", "self.config.head_dim"),
    _in_order(f"{_IN_PLACE}._weighed", "in place, V is released before its product has ended", "self._values_read(pipes[2], v_state)",
              "pipes[2].consumer_release(v_state)"),
    _in_order(f"{_IN_PLACE}._weighed", "in place, P is stored before the product that reads it has ended",
              "self._values_read(pipes[2], v_state)", "narrowed_to(p, scores, self.dtype); self._values_read(pipes[2], v_state)"),
    _in_order(f"{_IN_PLACE}._weighed", "in place, a section is not merged where the next begins",
              "self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)"),
    _in_order(f"{_IN_PLACE}._weighed", "a section's first tile is one of the section before", "self._kept(sums, rate)"),
    _in_order(f"{_IN_PLACE}._weighed", "no maximum moves", "self._moves(scores, row_max, rate)", "False"),
    _in_order(f"{_IN_PLACE}._weighed", "O is never rescaled", "moves = self._weights(scores, sums, rate, False)",
              "self._weights(scores, sums, rate, False)"),
    _in_order(f"{_IN_PLACE}._moves", "a maximum moves by the first column alone", "top = cute.arch.fmax(top, s[r, c])"),
    _in_order(f"{_IN_PLACE}._moves", "the last row decides", "moves | (__)", "(__)"),
    _in_order(f"{_IN_PLACE}._weights_by_held", "weights are not added up",
              "sections.sums[r, part] = total(self._added(s, r, part), sections.sums[r, part])"),
    _in_order(f"{_LOADS_IN_ORDER}._visit", "keys are visited from the last", "plan + i", "plan - i"),
    _in_order(f"{_LOADS_IN_ORDER}.planned", "a row tile's first keys are left out", "plan - (visits - 1)", "plan - (visits - 2)"),
    # ---- backward: what waits for whom
    Mutant("dS is not exchanged", _BACK, "cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=__)", "pass", "full"),
    Mutant("dS has one stage and nobody waits", _BACK, "tiles.ds_stages == 1", "False", "one stage of dS"),
    Mutant("dQ is not fenced", f"{_BACK}._post_dq", _FENCE, "pass", "full"),
    Mutant("S is not waited for", f"{_BACK}._p_begun", "warpgroup.wait_group(1); self.probabilities(scores, lse, scales[1])",
           "self.probabilities(scores, lse, scales[1])", "full"),
    Mutant("Q is not released", f"{_BACK}._row_tile", "pipes[0].consumer_release(q_state)", "pass", "full"),
    Mutant("the adder is not told of the end", _BACK, "Int32(END)", "Int32(0)", "full"),
    Mutant("dQ is overwritten while it is leaving", _ADDS,
           "cute.arch.cp_async_bulk_commit_group(); cute.arch.cp_async_bulk_wait_group(0, read=True)",
           "cute.arch.cp_async_bulk_commit_group()", "full"),
    Mutant("dS is written while dV leaves", _BACK, "self.await_dv_read()", "pass", "window"),
    Mutant("dV is called gone before it is read", _ADDS, "cute.arch.cp_async_bulk_wait_group(1, read=True)",
           "cute.arch.cp_async_bulk_wait_group(2, read=True)", "window"),
    Mutant("dK leaves when one group has written it", _ADDS, "group == groups - 1", "group == 0", "window"),
    Mutant("dK is written while dQ leaves", _KEYS, "cute.arch.barrier(barrier_id=FREE + group, number_of_threads=__)", "pass", "window"),
    Mutant("keys are released a row tile too early", _BACK, "i + 1 == total", "i + 2 == total", "window"),
    Mutant("keys are released twice", _KEYS, "facts.total == 0", "True", "window"),
    Mutant("keys come with each row tile", _ROWS, "waits_for_keys = Int32(0)", "pass", "window"),
    Mutant("unseen keys do not come", _ROWS, "if waits_for_keys != 0: self._k_and_v(copies, in_smem, pipes, key_state, place)", "pass",
           "sees nothing"),
    # two adding warps and their turns
    Mutant("both adding warps take the first part", _ADDS, "cute.arch.barrier(barrier_id=_YOURS + warp, number_of_threads=__)", "pass",
           "deterministic"),
    Mutant("the end leaves the next part to nobody", _ADDS, "self._freed(); self._hand_to(1 - warp)", "self._freed()", "deterministic"),
    Mutant("the other adding warp is not told of the end", _BACK, "self.config.adding_warps - 1", "0", "deterministic"),
    Mutant("a turn is passed on before the sums are written", f"{_ADDS}._pass_on", "cute.arch.cp_async_bulk_wait_group(0, read=False)",
           "pass", "deterministic lists"),
    Mutant("turns are not passed on", _ADDS, "self._pass_on(turns, __)", "pass", "deterministic"),
    Mutant("a turn too many is awaited", f"{_SCHEDULER}.turn_of", "return turn", "return turn + 1", "deterministic"),
    Mutant("rows see whole folds", f"{_SCHEDULER}.folded_turn", "cutlass.min(seen, tiles)", "tiles", "folds of key tiles"),
    Mutant("the last row's edge is one key early", f"{_SCHEDULER}.folded_turn", "__ + right - 1", "__ + right - 2", "folds of key tiles"),
    Mutant("parts of a list's tile take one turn", _SCHEDULER, "__ * cut_n + n_block % cut_n", "__ * cut_n", "deterministic wide lists"),
    # which rows see which keys
    Mutant("the band's right side is off by one", _SCORES, "apart - visit.right + 1", "apart - visit.right", "causal"),
    Mutant("masked tiles are taken for bare ones", _SCHEDULER, "(m >= bare_first) & (m < bare_last)", "m >= 0", "causal"),
    Mutant("the first row tile is one too late", _SCHEDULER, "first = __ // tile_m", "first = __ // tile_m + 1", "causal"),
    Mutant("bands are the first head's", _ROWS, "self.plan_of(n_block, head, __, __1, __2, __3, __4)",
           "self.plan_of(n_block, 0, __, __1, __2, __3, __4)", "by head"),
    Mutant("interleaved rows are of one head after another", _SCHEDULER, "at = i // ratio", "at = i % of_head", "interleaved"),
    Mutant("full tiles of lists are the first part alone", _SCHEDULER, "full_list[__] * cut", "full_list[__]", "lists"),
    Mutant("keys are listed for another K/V head", f"{_SCHEDULER}.head_of_lists", "head // __", "head % 2", "lists of K/V heads"),
    Mutant("parts of a K/V head's heads have lists of their own", f"{_SCHEDULER}.head_of_lists", "sizes.ratio * sizes.parts", "sizes.ratio",
           "parts, lists of K/V heads"),
    Mutant("sorted key tiles are the first alone", _SCHEDULER, "n_block = tables.order[n_block, 0]", "n_block = tables.order[0, 0]",
           "sorted lists"),
    Mutant("what is no word is not asked", _SCORES, "self._ask_rest(fragments, rest, at, line, places, captured)", "pass",
           "words and pairs"),
    # sums
    Mutant("dK keeps the tile before", _BACK, "sums[0].fill(0.0)", "facts.n_block != 0 or sums[0].fill(0.0)", "several blocks"),
    Mutant("delta is subtracted twice", _BACK, "self.config.tiles.delta != 'behind'", "False", "delta before"),
    Mutant("held keys are those of the tile before", _BACK, "self.hold(fixed, in_smem)",
           "facts.n_block != 0 or self.hold(fixed, in_smem)", "held keys"),
    Mutant("one tile: grouped heads write to one", _BACK, "target[None, None, visit.head, __]", "target[None, None, facts.kv_head, __]",
           "one tile of keys"),
    Mutant("tall: dQ is not transposed", _BACK, "of_dq[::-1] if tiles.transposes_dq else of_dq", "of_dq", "tall tiles"),
    Mutant("tall: the second group's columns are the first one's", _AFTER, "(warp // 4) * chunks + chunk", "chunk", "tall tiles"),
    Mutant("the derivative is left out", _SCORES, "ds * Float32(derivative)", "ds", "softcap"),
    Mutant("P keeps dropped weights", _DROPS, "p[r, c] = weight", "pass", "dropout"),
    Mutant("dV lacks the kept weights' factor", _BACK, "sums[1].store(sums[1].load() * self.factor(captured))", "pass", "dropout, causal"),
    Mutant("a head's sum leaves out half of the lanes", _SUMS, "(1, 2, 4, 8, 16)", "(1, 2, 4, 8)", "per head"),
    Mutant("diagonals are read before they are written", _SUMS, "cute.arch.sync_warp(); found = []", "found = []", "distances"),
    Mutant("keys past the last have entries", _SUMS, "moved(target, __, key + 8, facts.seqlen_k)", "moved(target, __, 0, 1)", "pairs"),
    Mutant("what waits is lost", _SUMS, "pending + value", "value", "looked up"),
    Mutant("hidden pairs stay in running sums", _SCORES, "self.words[word] & ~bit", "self.words[word] | bit", "temperature"),
    # one warp group
    Mutant("alone: dO is not released", _ALONE, "pipes[1].consumer_release(do_state)", "pass", "alone"),
    Mutant("alone: all of dQ is of the first columns", _ALONE, "k_parts[step]", "k_parts[0]", "alone"),
    # wide heads
    Mutant("wide: P is not exchanged", _WIDE, "self._exchanged(exchange, scores, stage, _P_WRITTEN)",
           "self._stored((exchange.store, exchange.ds[None, None, stage]), scores)", "wide"),
    Mutant("wide: dO is not released", _WIDE, "pipes[1].consumer_release(do_state)", "pass", "wide"),
    Mutant("wide: both groups send dK", _WIDE, "group == 0", "group >= 0", "wide"),
    Mutant("halves: both are stored in one place", _HALVES, "(0, half)", "(0, 0)", "dP by halves"),
    Mutant("halves: dS is not exchanged", _HALVES, "cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=__)", "pass", "dP by halves"),
    # sequences
    Mutant("sequences begin with storage", _PACKED, "(place[1], 0)", "(0, 0)", "packed: packed"),
    Mutant("rows past the last stay", _BACK, "self.rows_wiped(__, __1, __2, __3, group, thread)", "pass", "packed: gaps"),
    Mutant("interleaved: the last head's rows past the last stay", _BACK, "i + 1 >= self.visits_wiped(board[0], work_state)",
           "i + 2 >= self.visits_wiped(board[0], work_state)", "packed: interleaved"),
    Mutant("zeros are not fenced", _PACKED, _FENCE, "pass", "packed: packed"),
    Mutant("a key of the next sequence is written", _PACKED, "row < end", "row <= end", "packed: packed"),
    Mutant("cut tiles are sent whole", f"{_KEYS}._post_keys", "self.is_cut(group, facts)", "False", "packed: packed"),
    Mutant("tiles are taken that there are not", _PACKED, "tables.order[tables.order.shape[0] - 1, 0]", "sizes[0]", "packed: packed"),
    Mutant("every tile of keys is the first sequence's", _SCHEDULER, "tables.order[n_block, 2]", "tables.order[0, 2]", "packed: packed"),
    Mutant("dQ goes to the first sequence", _BACK, "(slot, visit.head, entry, turn)", "(visit.m_block, visit.head, entry, turn)",
           "packed: packed"),
    Mutant("dQ begins with storage", _AFTER, "(row, start + before, rest)", "(row, before, rest)", "packed: packed"),
    Mutant("flat lists begin with the first index", _SCHEDULER, "tables.entries[entry, 8] + line * rows", "line * rows",
           "packed: flat lists"),
    Mutant("a stage is released before it is read", f"{_KERNEL}.wide_backward.base:WideGradient.read", _FENCE, "pass", "machine code"),
)  # fmt: skip


def planted(*edits: Mutant) -> Changes:
    """The texts of the kernel's modules with these edits together."""
    trees: dict[str, ast.Module] = {}
    for edit in edits:
        module = edit.where.partition(":")[0].removeprefix(f"{_KERNEL}.").replace(".", "/")
        trees[module] = edit.edited(trees.get(module) or ast.parse(text_of(module)))
    return tuple((module, ast.unparse(tree)) for module, tree in trees.items())


def left_out(*modules: str, but: Collection[str] = ()) -> Iterator[tuple[str, Changes]]:
    """Each statement of the modules' functions that calls or assigns, and the text without it. but: functions that others stand in for."""
    for module in modules:
        text = text_of(module)
        lines = text.splitlines(keepends=True)
        functions = [f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef) and f.name not in but]
        for node in (node for f in functions for node in ast.walk(f)):
            if isinstance(node, ast.Assign) or (isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)):
                first = lines[node.lineno - 1]
                kept = [*lines[: node.lineno - 1], first[: node.col_offset] + "pass\n", *lines[node.end_lineno :]]
                yield first.strip(), ((module, "".join(kept)),)
