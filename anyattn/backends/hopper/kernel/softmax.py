"""Online softmax on a fragment: mods and masks, then exp2 with the scale folded in, with running row maximum and row sum."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.codegen.emit import emit, emit_lines, emit_rows, holds, select
from anyattn.backends.hopper.codegen.mask_words import Line, are_wide, at_least, below, emit_each, emit_words, holds_at, in_ranges
from anyattn.backends.hopper.codegen.score_analysis import NEAR_BOX, is_even, parts_if_wide, parts_of
from anyattn.backends.hopper.config import slots
from anyattn.backends.hopper.kernel.exp2_poly import exp2, exp2_of_product, sum_of
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.mods.analysis.separated import separated

__all__ = ["Softmax"]

_SLACK = 8.0  # probabilities grow to 2^8 at most, which 16 bits hold as precisely as 1


class Softmax:
    """What ``HopperForward`` does to the scores of one tile.

    pairs_are_words: what is asked of each pair because captured divisors are small becomes words first.
    """

    config: Any
    pairs_are_words = True

    def captured(self, captured: Any, at: int) -> tuple[tuple, tuple]:
        """The numbers and tensors of expression ``at`` of ``config.exprs``, out of all of them."""
        before = [slots(expr) for expr in self.config.exprs[: at + 1]]
        numbers, tensors = (sum(count[i] for count in before[:-1]) for i in (0, 1))
        return captured[0][numbers : numbers + before[-1][0]], captured[1][tensors : tensors + before[-1][1]]

    def _places(self, positions: Any, n: Any, facts: Any, is_edge: bool) -> dict[str, Any]:
        """The positions of a thread's scores, as mods see them. Rows and keys past the last are clamped, and their scores are not used."""
        rows, columns = cute.size(positions, mode=[0]), cute.size(positions, mode=[1])
        apart, steps = [self.apart(r) for r in range(rows)], [_column(c) for c in range(columns)]
        row, column = self.first_row(positions, facts), positions[0, 0][1] + n * self.config.tiles.tile_n
        q_idx = [cutlass.min(row + a, facts.seqlen_q - 1) + facts.q_first for a in apart]
        kv_idx = [column + s for s in steps]
        if is_edge:
            kv_idx = [cutlass.min(k, facts.seqlen_k - 1) for k in kv_idx]
        return {"b": facts.entry, "h": self.head(positions, facts), "q_idx": q_idx, "kv_idx": kv_idx, "apart": apart, "steps": steps}

    def apart(self, r: int) -> int:
        """How far the position of a thread's ``r``-th row lies from its first's: rows lie 8 apart, those of 64-row blocks beside."""
        return r * 8 // self.config.heads_per_tile

    def first_row(self, positions: Any, facts: Any) -> Any:
        """The position in its entry of a thread's first row."""
        first, heads = positions[0, 0][0], self.config.heads_per_tile
        return (first if heads == 1 else first >> (heads.bit_length() - 1)) + facts.m_block * self.config.tile_q

    def head(self, positions: Any, facts: Any) -> Any:
        """The query head of a thread's rows, the last one of the tile's where the tile has no such head."""
        heads = self.config.heads_per_tile
        return facts.head if heads == 1 else facts.head + cutlass.min(positions[0, 0][0] & (heads - 1), facts.more - 1)

    def rows_end(self, positions: Any, facts: Any) -> Any:
        """Of a thread's rows those before this position are stored: none where the tile has no such head."""
        heads = self.config.heads_per_tile
        if heads == 1:
            return facts.seqlen_q
        return select((positions[0, 0][0] & (heads - 1)) < facts.more, facts.seqlen_q, 0, "int")

    @cute.jit
    def modified(self, scores, ahead, positions, n, facts, scale_log2, captured, is_edge: cutlass.Constexpr):
        """Applies the score mod to key tile ``n``. ahead: what ``foreseen`` found. is_edge: the tile may reach past the last key.

        Returns for each row what is still to be added to its scores, None for nothing.
        """
        lifts = None
        if const_expr(self.config.score is not None):
            if const_expr(self.lifts):
                lifts = cute.make_rmem_tensor(cute.size(rows_and_columns(scores), mode=[0]), Float32)
                lifts.fill(0.0)
            if const_expr(ahead is None):
                self._by_case(scores, lifts, positions, n, facts, scale_log2, captured, is_edge, 0)
            else:
                self._add_foreseen(scores, lifts, ahead, positions, n, facts, scale_log2, captured, 0)
        return lifts

    @cute.jit
    def foreseen(self, positions, n, facts, captured):
        """(the case that holds, a bias by diagonal where the case has no simpler way), computed while scores are still being multiplied."""
        places = self._places(positions, n, facts, False)
        slots_of = _diagonals(places)
        which, found = cute.make_rmem_tensor(1, Int32), cute.make_rmem_tensor(len(slots_of), Float32)
        found.fill(0.0)
        self._foresee(which, found, positions, n, facts, captured, 0)
        return which[0], found

    @cute.jit
    def _foresee(self, which, found, positions, n, facts, captured, at: cutlass.Constexpr):
        which[0] = Int32(at)
        if const_expr(at == len(self.cases)):
            self._read(found, self.whole, False, positions, n, facts, captured)
        else:
            places = self._places(positions, n, facts, False)
            if cute.arch.vote_all_sync(holds(self.cases[at].conditions, *self.captured(captured, 0), places)):
                if const_expr(not is_even(self.cases[at].expr)):
                    self._read(found, self.cases[at].expr, True, positions, n, facts, captured)
            else:
                self._foresee(which, found, positions, n, facts, captured, at + 1)

    def _read(self, found: Any, expr: Any, reads_ahead: bool, positions: Any, n: Any, facts: Any, captured: Any) -> None:
        places = self._places(positions, n, facts, False)
        slots_of = _diagonals(places)
        firsts = {(r, c): slot for slot, (r, c) in slots_of.values()}

        def store(r: int, c: int, value: Any) -> None:
            if (r, c) in firsts:
                found[firsts[r, c]] = Float32(value)

        emit(expr, *self.captured(captured, 0), places, None, store, reads_ahead)

    @cute.jit
    def _add_foreseen(self, scores, lifts, ahead, positions, n, facts, scale_log2, captured, at: cutlass.Constexpr):
        """Adds a bias to scores: what was foreseen, or what an even case makes of it."""
        even = [i for i in range(at, len(self.cases)) if is_even(self.cases[i].expr)]
        if const_expr(not even):
            s, places = rows_and_columns(scores), self._places(positions, n, facts, False)
            slots_of = _diagonals(places)
            unscaled = cute.arch.rcp_approx(scale_log2 * Float32(1.0 / LOG2E))
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    value = ahead[1][slots_of[places["apart"][r] - places["steps"][c]][0]]
                    s[r, c] = cute.math.fma(value, unscaled, s[r, c])
        else:
            if ahead[0] == even[0]:
                self._apply(self.cases[even[0]].expr, False, scores, lifts, positions, n, facts, scale_log2, captured, False)
            else:
                self._add_foreseen(scores, lifts, ahead, positions, n, facts, scale_log2, captured, even[0] + 1)

    @cute.jit
    def _by_case(self, scores, lifts, positions, n, facts, scale_log2, captured, is_edge: cutlass.Constexpr, at: cutlass.Constexpr):
        """The score mod as it is in the first case from the ``at``-th on whose conditions hold for a whole warp; else as it is written."""
        given = (scores, lifts, positions, n, facts, scale_log2, captured, is_edge)
        if const_expr(at == len(self.cases)):
            self._apply(self.whole, False, *given)
        elif const_expr(not self.cases[at].conditions):
            self._apply(self.cases[at].expr, False, *given)
        elif const_expr(is_edge):  # a read with a literal offset might be past the end
            self._by_case(scores, lifts, positions, n, facts, scale_log2, captured, is_edge, at + 1)
        else:
            places = self._places(positions, n, facts, False)
            if cute.arch.vote_all_sync(holds(self.cases[at].conditions, *self.captured(captured, 0), places)):
                self._apply(self.cases[at].expr, True, *given)
            else:
                self._by_case(scores, lifts, positions, n, facts, scale_log2, captured, is_edge, at + 1)

    def _apply(
        self,
        expr: Any,
        reads_ahead: bool,
        scores: Any,
        lifts: Any,
        positions: Any,
        n: Any,
        facts: Any,
        scale_log2: Any,
        captured: Any,
        is_edge: bool,
    ) -> None:
        s, places, (scalars, tensors) = rows_and_columns(scores), self._places(positions, n, facts, is_edge), self.captured(captured, 0)
        scale = scale_log2 * Float32(1.0 / LOG2E)
        if self.is_bias:
            unscaled = cute.arch.rcp_approx(scale)
            if is_even(expr):
                self._lift(s, lifts, emit_lines(expr, scalars, tensors, places), unscaled)
            else:

                def add(r: int, c: int, value: Any) -> None:
                    s[r, c] = cute.math.fma(Float32(value), unscaled, s[r, c])

                emit(expr, scalars, tensors, places, None, add, reads_ahead)
        else:
            if self.score.before is not None:
                factor = emit_rows(self.score.before, scalars, tensors, places["b"], places["h"], [Int32(0)])[0][0]
                scale = scale * Float32(factor)
            read, write = (lambda r, c: s[r, c] * scale), (lambda r, c, x: s.__setitem__((r, c), Float32(x)))
            emit(expr, scalars, tensors, places, read, write, reads_ahead)

    def _lift(self, s: Any, lifts: Any, lines: list, unscaled: Any) -> None:
        """Adds what of a bias changes along a row, in units of the raw products; the rest is kept for the row."""
        for r, (start, change) in enumerate(lines):
            lifts[r] = start * unscaled
            if not (isinstance(change, float) and change == 0.0):
                step = Float32(change) * unscaled
                for c in range(cute.size(s, mode=[1])):
                    s[r, c] = s[r, c] + step * Float32(float(_column(c)))

    def rate(self, scale_log2: Any, captured: Any) -> Any:
        """By what a fragment's scores are multiplied in the exponent of 2."""
        if self.config.score is None or self.is_bias:
            return scale_log2
        if self.score.after is None:
            return Float32(LOG2E)
        return Float32(emit_rows(self.score.after, *self.captured(captured, 0), Int32(0), Int32(0), [Int32(0)])[0][0]) * Float32(LOG2E)

    @cute.jit
    def row_limits(self, positions, facts, captured):
        """For each predicate with row ranges: for each row of the thread lo, hi, lo, hi, ... of the keys that it sees."""
        found = []
        for at, ask in self.asked:
            if const_expr(ask.by_row):
                scalars, tensors = self.captured(captured, at)
                places = self._places(positions, Int32(0), facts, False)
                found.append(emit_rows(ask.expr, scalars, tensors, places["b"], places["h"], places["q_idx"]))
            else:
                found.append(None)
        return found

    def limits_again(self, limits: Any, positions: Any, facts: Any, captured: Any) -> Any:
        """``row_limits`` for one tile of keys: computed again, so that no register holds them between tiles, unless they read a tensor."""
        reads = any(ask.by_row and ask.expr.tensor_slots for _, ask in self.asked)
        return limits if reads else self.row_limits(positions, facts, captured)

    @cute.jit
    def masked(self, scores, positions, n, facts, captured, limits, is_partial, is_edge: cutlass.Constexpr):
        """-inf for the keys of tile ``n`` that a row does not see. is_partial: whether the partial predicate is evaluated."""
        s = rows_and_columns(scores)
        rows = cute.size(s, mode=[0])
        if const_expr(not self.asked):
            # columns are counted from the thread's first, so that what is compared is a literal
            first = positions[0, 0][1] + n * self.config.tiles.tile_n
            for r in cutlass.range_constexpr(rows):
                self._hide(s, r, self._band(r, first, positions, facts, is_edge))
        else:
            line, places = self._line(positions, n), self._places(positions, n, facts, is_edge)
            seen = cute.make_rmem_tensor(rows * line.words, Int32)
            seen.fill(-1)
            for r in cutlass.range_constexpr(rows):
                self._see_band(seen, r, line, self._band(r, line.origin, positions, facts, is_edge))
            self._see(seen, False, line, places, captured, limits)
            if const_expr(self.config.partial is not None):
                if is_partial != 0:
                    self._see(seen, True, line, places, captured, limits)
            self._keep(s, seen, line)
            self._ask(s, False, line, places, captured)
            if const_expr(self.config.partial is not None):
                if is_partial != 0:
                    self._ask(s, True, line, places, captured)

    def _line(self, positions: Any, n: Any) -> Line:
        """The keys of a tile, of which a thread has many for each row."""
        tile_n = self.config.tiles.tile_n
        return Line("kv_idx", n * tile_n, positions[0, 0][1], cute.size(positions, mode=[1]), tile_n)

    def _band(self, r: int, first: Any, positions: Any, facts: Any, is_edge: bool) -> tuple[Any, Any]:
        """(lo, hi) of the keys that row ``r`` sees, counted from key ``first``; None is no bound."""
        row = self.first_row(positions, facts) + self.apart(r)
        low = row + facts.left - first if self.config.has_left else None
        high = facts.seqlen_k - first if is_edge else None
        if self.config.has_right:
            right = row + facts.right - first
            high = right if high is None else cutlass.min(high, right)
        return low, high

    def _see_band(self, seen: Any, r: int, line: Line, band: tuple[Any, Any]) -> None:
        low, high = band
        if low is not None:
            self._narrow(seen, r, at_least(low, line), line)
        if high is not None:
            self._narrow(seen, r, below(high, line), line)

    def _hide(self, s: Any, r: int, band: tuple[Any, Any]) -> None:
        """-inf in row ``r`` but where a column, counted from the thread's first, lies in the band."""
        low, high = band
        if low is None and high is None:
            return
        for c in range(cute.size(s, mode=[1])):
            place, seen = _column(c), None
            if high is not None:
                seen = Int32(place) < high
            if low is not None:
                seen = Int32(place) >= low if seen is None else seen & (Int32(place) >= low)
            s[r, c] = select(seen, s[r, c], -Float32.inf, "float")

    def _keep(self, s: Any, seen: Any, line: Line) -> None:
        """-inf where a row does not see a column."""
        for r in range(cute.size(s, mode=[0])):
            words = tuple(seen[r * line.words + i] for i in range(line.words))
            for c in range(line.positions):
                s[r, c] = select(holds_at(words, c), s[r, c], -Float32.inf, "float")

    def _narrow(self, seen: Any, r: int, words: Any, line: Line) -> None:
        for i, word in enumerate(words):
            seen[r * line.words + i] = seen[r * line.words + i] & word

    def _parts(self, is_partial: bool, line: Line) -> list[tuple[int, tuple, Any]]:
        """(place, what of it is words, what is asked of each pair) of the predicates without row ranges."""
        chosen = [(at, ask) for at, ask in self.asked if (ask is self.config.partial) is is_partial and not ask.by_row]
        return [(at, *parts_of(ask.expr, False, line.along, line.extent)) for at, ask in chosen]

    def _see(self, seen: Any, is_partial: bool, line: Line, places: dict[str, Any], captured: Any, limits: Any) -> None:
        """Takes from ``seen`` what the partial predicate hides, or those that hold always, as far as they are words."""
        for i, (_, ask) in enumerate(self.asked):
            if ask.by_row and (ask is self.config.partial) is is_partial:
                for r, of_row in enumerate(limits[i]):
                    self._narrow(seen, r, in_ranges(of_row, line), line)
        for at, known, rest in self._parts(is_partial, line):
            self._see_words(seen, known, at, line, places, captured)
            if rest is not None:
                self._see_if_wide(seen, rest, at, line, places, captured)

    def _see_words(self, seen: Any, known: tuple, at: int, line: Line, places: dict[str, Any], captured: Any) -> None:
        for expr in known:
            for r, words in enumerate(emit_words(expr, *self.captured(captured, at), places, line)):
                self._narrow(seen, r, words, line)

    @cute.jit
    def _see_if_wide(self, seen, expr, at, line, places, captured):
        known, _ = parts_if_wide(expr, line.along, line.extent)
        if const_expr(len(known) > 0):
            if are_wide(known, *self.captured(captured, at), places, line):
                self._see_words(seen, known, at, line, places, captured)
            elif const_expr(self.pairs_are_words):
                for r, words in enumerate(emit_each(expr, *self.captured(captured, at), places, line)):
                    self._narrow(seen, r, words, line)

    def _ask(self, s: Any, is_partial: bool, line: Line, places: dict[str, Any], captured: Any) -> None:
        """Hides what predicates hide and no word says."""
        for at, _, rest in self._parts(is_partial, line):
            if rest is not None:
                self._ask_rest(s, rest, at, line, places, captured)

    @cute.jit
    def _ask_rest(self, s, expr, at, line, places, captured):
        """Asks each pair what is no word, or one only where captured divisors are large."""
        known, rest = parts_if_wide(expr, line.along, line.extent)
        if const_expr(len(known) == 0):
            self._ask_each(s, at, expr, places, captured)
        elif const_expr(rest is not None or not self.pairs_are_words):
            if are_wide(known, *self.captured(captured, at), places, line):
                if const_expr(rest is not None):
                    self._ask_each(s, at, rest, places, captured)
            elif const_expr(not self.pairs_are_words):
                self._ask_each(s, at, expr, places, captured)

    def _ask_each(self, s: Any, at: int, expr: Any, places: dict[str, Any], captured: Any) -> None:
        def store(r: int, c: int, seen: Any) -> None:
            s[r, c] = select(Boolean(seen) if not isinstance(seen, bool) else seen, s[r, c], -Float32.inf, "float")

        emit(separated(expr, NEAR_BOX), *self.captured(captured, at), places, None, store)

    @cute.jit
    def exponentials(self, scores, lifts, row_max, row_sum, row_scale, rate, is_first: cutlass.Constexpr, may_be_blind: cutlass.Constexpr):
        """Turns scores into exp2((score - row's maximum) * rate) in place; ``row_scale`` is what earlier sums are to be multiplied by, and
        the result whether any row of the warp needs that. lifts: what is to be added to a thread's scores of each row, or None.

        What is taken off may lag behind the true maximum by some powers of 2, so that sums are seldom rescaled. may_be_blind: a row may
        have seen nothing yet; 0 then stands for its maximum, so that -inf minus it is -inf and not NaN.
        """
        s = rows_and_columns(scores)
        rescales = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            row = s[r, None].load()
            held = -Float32.inf if const_expr(is_first or lifts is not None) else row_max[r]
            top = row.reduce(cute.ReductionOp.MAX, held, 0)
            if const_expr(lifts is not None):  # a thread's own: its columns begin where they begin
                top = top + lifts[r]
            for offset in (2, 1):  # four threads hold a row
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            if const_expr(not is_first):
                moves = (top - row_max[r]) * rate > _SLACK
                top = select(moves, top, row_max[r], "float")
                rescales = rescales | moves
            base = top
            if const_expr(may_be_blind or self.config.score is not None):  # a score mod may hide what it likes
                base = select(top == -Float32.inf, Float32(0.0), top, "float")
            if const_expr(not is_first):
                row_scale[r] = cute.math.exp2((row_max[r] - base) * rate, fastmath=True)
            shifted = base * rate if const_expr(lifts is None) else (base - lifts[r]) * rate
            total = self._powers(s, r, rate, shifted)
            row_sum[r] = total if const_expr(is_first) else row_sum[r] * row_scale[r] + total
            row_max[r] = top
        return cute.arch.vote_any_sync(rescales)

    def raise_tops(self, tops: Any, scores: Any, lifts: Any) -> None:
        """Each row's highest score, of this thread's columns, where highest scores are wanted. What is taken off before exponentials are
        may lag behind it: asking for it changes no bit of the output."""
        s = rows_and_columns(scores)
        for r in range(cute.size(tops)):
            top = s[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            tops[r] = cute.arch.fmax(tops[r], top if lifts is None else top + lifts[r])

    def unshifted(self, scores: Any, row_max: Any, row_sum: Any, rate: Any, is_masked: bool) -> None:
        """What ``exponentials`` does where scores are bounded: 0 stands for a row's maximum, and sums are never rescaled."""
        s, emulated = rows_and_columns(scores), self.config.tiles.emulated
        for r in range(cute.size(row_max)):
            for c in range(cute.size(s, mode=[1])):
                if c % 8 >= emulated:
                    s[r, c] = cute.math.exp2(s[r, c] * rate, fastmath=True)
                elif is_masked:
                    s[r, c] = exp2(s[r, c] * rate)
                else:
                    s[r, c] = exp2_of_product(s[r, c], rate)
            row_sum[r] = row_sum[r] + sum_of(s, r)
            row_max[r] = Float32(0.0)

    def _powers(self, s: Any, r: int, rate: Any, shifted: Any) -> Any:
        """Turns a row's scores into exp2(score * rate - shifted); their sum."""
        emulated = self.config.tiles.emulated
        if emulated == 0:
            row = s[r, None].load()
            s[r, None].store(cute.math.exp2(row * rate - shifted, fastmath=True))
        else:
            for c in range(cute.size(s, mode=[1])):
                power = s[r, c] * rate - shifted
                s[r, c] = exp2(power) if c % 8 < emulated else cute.math.exp2(power, fastmath=True)
        return sum_of(s, r)


def _column(c: int) -> int:
    """The column, from a thread's first, of its ``c``-th score of a row: wgmma gives a thread pairs that lie 8 apart."""
    return c // 2 * 8 + c % 2


def _diagonals(places: dict[str, Any]) -> dict[int, tuple[int, tuple[int, int]]]:
    """For each diagonal of a thread's scores its number, and the first (row, column) that lies on it."""
    found: dict[int, tuple[int, tuple[int, int]]] = {}
    for c, step in enumerate(places["steps"]):
        for r, apart in enumerate(places["apart"]):
            found.setdefault(apart - step, (len(found), (r, c)))
    return found
