"""Online softmax on a fragment: mods and masks, then exp2 with the scale folded in, with running row maximum and row sum."""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.codegen.emit import emit, emit_lines, emit_rows, holds, select
from anyattn.backends.hopper.codegen.mask_words import Line, are_wide, at_least, below, emit_each, emit_words, holds_at, in_ranges
from anyattn.backends.hopper.codegen.score_analysis import NEAR_BOX, is_even, parts_if_wide, parts_of
from anyattn.backends.hopper.config import PACKED, slots
from anyattn.backends.hopper.kernel.exp2_poly import exp2, exp2_of_product, sum_of
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.mods.analysis.separated import separated
from anyattn.mods.analysis.tile_lines import LEVELS

__all__ = ["Softmax"]

_SLACK = 8.0  # probabilities are at most 2^8, where 16 bits are as precise as at 1


class Softmax:
    """The part of ``HopperForward`` that processes the scores of one tile."""

    config: Any

    def captured(self, captured: Any, at: int) -> tuple[tuple, tuple]:
        """The captured numbers and tensors of ``config.exprs[at]``, out of those of all expressions."""
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
        """The distance in positions of a thread's ``r``-th row from its first: rows lie 8 apart, and packed heads share a position."""
        return r * 8 // self.config.own_heads

    def first_row(self, positions: Any, facts: Any) -> Any:
        """The position of a thread's first row in its entry."""
        first, heads = positions[0, 0][0], self.config.own_heads
        return (first if heads == 1 else first >> (heads.bit_length() - 1)) + facts.m_block * self.config.own_q

    def head(self, positions: Any, facts: Any, r: int = 0) -> Any:
        """The query head of a thread's ``r``-th row, clamped to the tile's last head. Up to 8 packed heads, all its rows have the same."""
        return facts.head if self.config.own_heads == 1 else facts.head + cutlass.min(self._head_in_tile(positions, r), facts.more - 1)

    def heads(self, positions: Any, facts: Any) -> tuple[Any, ...]:
        """``head`` of each of a thread's rows."""
        return self._of_rows(positions, lambda r: self.head(positions, facts, r))

    def rows_ends(self, positions: Any, facts: Any) -> tuple[Any, ...]:
        """For each of a thread's rows the end of those that are stored; 0 if the tile does not have its head."""
        if self.config.own_heads == 1:
            return self._of_rows(positions, lambda r: facts.seqlen_q)
        return self._of_rows(positions, lambda r: select(self._head_in_tile(positions, r) < facts.more, facts.seqlen_q, 0, "int"))

    def _head_in_tile(self, positions: Any, r: int) -> Any:
        row = positions[0, 0][0] if r == 0 else positions[0, 0][0] + 8 * r
        return row & (self.config.own_heads - 1)

    def _of_rows(self, positions: Any, found: Callable[[int], Any]) -> tuple[Any, ...]:
        """``found`` of each of a thread's rows, computed once if all have the same head."""
        rows = cute.size(positions, mode=[0])
        return tuple(map(found, range(rows))) if self.config.own_heads > PACKED[-1] else (found(0),) * rows

    @cute.jit
    def modified(self, scores, ahead, positions, n, facts, scale_log2, captured, is_edge: cutlass.Constexpr):
        """Applies the score mod to key tile ``n``. ahead: the result of ``foreseen``. is_edge: the tile may reach past the last key.

        Returns for each row the value that is still to be added to its scores, None for none.
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
        """(the case that holds, the bias by diagonal unless the case has a cheaper form), computed while the
        scores' product is in flight."""
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
        """Adds a bias to scores: the prefetched one, or the linear form of an even case."""
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
        """Applies the score mod in the form of the first case from ``at`` on whose conditions hold for the whole warp, else as written."""
        given = (scores, lifts, positions, n, facts, scale_log2, captured, is_edge)
        if const_expr(at == len(self.cases)):
            self._apply(self.whole, False, *given)
        elif const_expr(not self.cases[at].conditions):
            self._apply(self.cases[at].expr, False, *given)
        elif const_expr(is_edge):  # a load with a literal offset might be past the end
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
        """Adds the part of a bias that changes along a row, in units of the raw products; the rest is kept per row in ``lifts``."""
        for r, (start, change) in enumerate(lines):
            lifts[r] = start * unscaled
            if not (isinstance(change, float) and change == 0.0):
                step = Float32(change) * unscaled
                for c in range(cute.size(s, mode=[1])):
                    s[r, c] = s[r, c] + step * Float32(float(_column(c)))

    def rate(self, scale_log2: Any, captured: Any) -> Any:
        """The factor of a fragment's scores in the exponent of 2."""
        if self.config.score is None or self.is_bias:
            return scale_log2
        if self.score.after is None:
            return Float32(LOG2E)
        return Float32(emit_rows(self.score.after, *self.captured(captured, 0), Int32(0), Int32(0), [Int32(0)])[0][0]) * Float32(LOG2E)

    @cute.jit
    def row_limits(self, positions, facts, captured):
        """For each predicate with row ranges and each row of the thread: lo, hi, lo, hi, ... of the keys that the row sees."""
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
        """``row_limits`` recomputed for one key tile, so that no register holds them between tiles;
        unchanged if they load from a tensor."""
        reads = any(ask.by_row and ask.expr.tensor_slots for _, ask in self.asked)
        return limits if reads else self.row_limits(positions, facts, captured)

    @cute.jit
    def masked(self, scores, positions, n, facts, captured, limits, is_partial, is_edge: cutlass.Constexpr):
        """Writes -inf for the keys of tile ``n`` that a row does not see. is_partial: whether the partial predicate is evaluated."""
        s = rows_and_columns(scores)
        rows = cute.size(s, mode=[0])
        if const_expr(not self.asked):
            # columns are counted from the thread's first, so the comparisons are with literals
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
        """The keys of a tile, as the line along which a thread has many positions per row."""
        tile_n = self.config.tiles.tile_n
        return Line("kv_idx", n * tile_n, positions[0, 0][1], cute.size(positions, mode=[1]), tile_n)

    def _band(self, r: int, first: Any, positions: Any, facts: Any, is_edge: bool) -> tuple[Any, Any]:
        """(lo, hi) of the keys that row ``r`` sees, counted from key ``first``; None for no bound."""
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
        """Writes -inf in row ``r`` except where a column, counted from the thread's first, lies in the band."""
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
        """Writes -inf where a row does not see a column."""
        for r in range(cute.size(s, mode=[0])):
            words = tuple(seen[r * line.words + i] for i in range(line.words))
            for c in range(line.positions):
                s[r, c] = select(holds_at(words, c), s[r, c], -Float32.inf, "float")

    def _narrow(self, seen: Any, r: int, words: Any, line: Line) -> None:
        for i, word in enumerate(words):
            seen[r * line.words + i] = seen[r * line.words + i] & word

    def _parts(self, is_partial: bool, line: Line) -> list[tuple[int, tuple, Any]]:
        """(index, parts that are words, part evaluated per pair) of the predicates without row ranges."""
        chosen = [(at, ask) for at, ask in self.asked if (ask is self.config.partial) is is_partial and not ask.by_row]
        return [(at, *parts_of(ask.expr, False, line.along, line.extent)) for at, ask in chosen]

    def _see(self, seen: Any, is_partial: bool, line: Line, places: dict[str, Any], captured: Any, limits: Any) -> None:
        """Clears in ``seen`` the positions that the partial predicate hides, or those in ``always``, as far as they are words."""
        for i, (_, ask) in enumerate(self.asked):
            if ask.by_row and (ask is self.config.partial) is is_partial:
                for r, of_row in enumerate(limits[i]):
                    self._narrow(seen, r, in_ranges(of_row, line), line)
        for at, known, rest in self._parts(is_partial, line):
            self._see_words(seen, known, at, line, places, captured)
            if rest is not None:
                self._see_if_wide(seen, rest, at, line, places, captured)

    def _see_words(self, seen: Any, known: tuple, at: int, line: Line, places: dict[str, Any], captured: Any, level: int = 0) -> None:
        for expr in known:
            for r, words in enumerate(emit_words(expr, *self.captured(captured, at), places, line, level)):
                self._narrow(seen, r, words, line)

    @cute.jit
    def _see_if_wide(self, seen, expr, at, line, places, captured):
        """Clears in ``seen`` what the parts of a mask hide that are words if captured divisors are not tiny; else what all of it hides."""
        known, _ = parts_if_wide(expr, line.along, line.extent, LEVELS[-1])
        if const_expr(len(known) > 0):
            if are_wide(known, *self.captured(captured, at), places, line, LEVELS[-1]):
                for part in known:
                    self._see_part(seen, part, at, line, places, captured, LEVELS[0])
            else:
                self._see_each(seen, expr, at, line, places, captured)

    @cute.jit
    def _see_part(self, seen, part, at, line, places, captured, level: cutlass.Constexpr):
        """``_see_words`` in the fewest pieces that the captured divisor allows, from ``level`` on."""
        if const_expr(level < LEVELS[-1]):
            if are_wide((part,), *self.captured(captured, at), places, line, level):
                self._see_words(seen, (part,), at, line, places, captured, level)
            else:
                self._see_part(seen, part, at, line, places, captured, level + 1)
        else:
            self._see_words(seen, (part,), at, line, places, captured, level)

    @cute.jit
    def _see_each(self, seen, expr, at, line, places, captured):
        """Clears in ``seen`` what a mask hides that is evaluated per pair. Few masks are: a loop takes fewer registers from all others."""
        rows = cute.size(seen) // line.words
        for i in cutlass.range_constexpr(line.words):
            bits = cute.make_rmem_tensor(rows, Int32)
            bits.fill(0)
            for c in cutlass.range(min(32, line.positions - 32 * i), unroll=1):
                for r, bit in enumerate(emit_each(expr, *self.captured(captured, at), places, line, 32 * i + c)):
                    bits[r] = bits[r] | (bit << c)
            for r in cutlass.range_constexpr(rows):
                seen[r * line.words + i] = seen[r * line.words + i] & bits[r]

    def _ask(self, s: Any, is_partial: bool, line: Line, places: dict[str, Any], captured: Any) -> None:
        """Hides the pairs that the per-pair parts of predicates hide."""
        for at, _, rest in self._parts(is_partial, line):
            if rest is not None:
                self._ask_rest(s, rest, at, line, places, captured)

    @cute.jit
    def _ask_rest(self, s, expr, at, line, places, captured):
        """Evaluates per pair the part that is never words; with small captured divisors all of it is words by now."""
        known, rest = parts_if_wide(expr, line.along, line.extent, LEVELS[-1])
        if const_expr(len(known) == 0):
            self._ask_each(s, at, expr, places, captured)
        elif const_expr(rest is not None):
            if are_wide(known, *self.captured(captured, at), places, line, LEVELS[-1]):
                self._ask_each(s, at, rest, places, captured)

    def _ask_each(self, s: Any, at: int, expr: Any, places: dict[str, Any], captured: Any) -> None:
        def store(r: int, c: int, seen: Any) -> None:
            s[r, c] = select(Boolean(seen) if not isinstance(seen, bool) else seen, s[r, c], -Float32.inf, "float")

        emit(separated(expr, NEAR_BOX), *self.captured(captured, at), places, None, store)

    @cute.jit
    def exponentials(
        self, scores, lifts, row_max, row_sum, row_scale, rate, is_first: cutlass.Constexpr, may_be_blind: cutlass.Constexpr, highest=None
    ):  # fmt: skip
        """Replaces scores by exp2((score - row maximum) * rate) in place. ``row_scale`` gets the factor for earlier sums; returns whether
        any row of the warp needs it. lifts: the value to be added to a thread's scores of each row, or None.

        The subtracted maximum may lag behind the true one by up to ``_SLACK`` powers of 2, so that sums are seldom rescaled.
        may_be_blind: a row may have seen no key yet; its maximum is then replaced by 0, so that -inf minus it is -inf and not NaN.
        highest: the rows' highest scores with ``lifts``, the same in the four threads of a row, if they are known.
        """
        s = rows_and_columns(scores)
        rescales = cutlass.Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            if const_expr(highest is not None):
                top = cute.arch.fmax(highest[r], row_max[r])
            else:
                held = -Float32.inf if const_expr(is_first or lifts is not None) else row_max[r]
                top = self.highest_of(s, r, lifts, held)
            if const_expr(not is_first):
                moves = (top - row_max[r]) * rate > _SLACK
                top = select(moves, top, row_max[r], "float")
                rescales = rescales | moves
            base = top
            if const_expr(may_be_blind or self.config.score is not None):  # a score mod may hide any pair
                base = select(top == -Float32.inf, Float32(0.0), top, "float")
            if const_expr(not is_first):
                row_scale[r] = cute.math.exp2((row_max[r] - base) * rate, fastmath=True)
            shifted = base * rate if const_expr(lifts is None) else (base - lifts[r]) * rate
            total = self._powers(s, r, rate, shifted)
            row_sum[r] = total if const_expr(is_first) else row_sum[r] * row_scale[r] + total
            row_max[r] = top
        return cute.arch.vote_any_sync(rescales)

    def highest_of(self, s: Any, r: int, lifts: Any, held: Any) -> Any:
        """The highest score of row ``r``, at least ``held``, over the four threads that hold it. s: ``rows_and_columns`` of a fragment."""
        top = s[r, None].load().reduce(cute.ReductionOp.MAX, held, 0)
        if lifts is not None:  # per thread: columns count from its own first one
            top = top + lifts[r]
        for offset in (2, 1):
            top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
        return top

    def raise_tops(self, tops: Any, scores: Any, lifts: Any) -> None:
        """Updates each row's highest score over this thread's columns, if the call wants them. The subtracted maximum may lag behind it:
        asking for highest scores changes no bit of the output."""
        s = rows_and_columns(scores)
        for r in range(cute.size(tops)):
            top = s[r, None].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0)
            tops[r] = cute.arch.fmax(tops[r], top if lifts is None else top + lifts[r])

    def unshifted(self, scores: Any, sums: tuple[Any, ...], rate: Any, is_masked: bool) -> None:
        """``exponentials`` for bounded scores: 0 replaces the row maximum, and sums are never rescaled. Row scales hold instead by how much
        the rounded exponentials of masked tiles exceed the exponentials: that of a row's only key is not 1, and without the excess the
        output would not be V's row, and dP - delta, 0 there, 1 % of another row's. In rows with a bare tile roundings cancel."""
        (_, row_max, row_sum, row_excess, _), s, emulated = sums, rows_and_columns(scores), self.config.tiles.emulated
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
            if is_masked:
                powers = s[r, None].load()
                excess = powers.to(self.dtype).to(Float32) - powers
                row_excess[r] = row_excess[r] + excess.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)

    def _powers(self, s: Any, r: int, rate: Any, shifted: Any) -> Any:
        """Replaces a row's scores by exp2(score * rate - shifted); returns their sum."""
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
    """The distance of a row's ``c``-th score in a thread from its first, in columns: wgmma gives a thread pairs that lie 8 apart."""
    return c // 2 * 8 + c % 2


def _diagonals(places: dict[str, Any]) -> dict[int, tuple[int, tuple[int, int]]]:
    """For each diagonal of a thread's scores its number, and the first (row, column) on it."""
    found: dict[int, tuple[int, tuple[int, int]]] = {}
    for c, step in enumerate(places["steps"]):
        for r, apart in enumerate(places["apart"]):
            found.setdefault(apart - step, (len(found), (r, c)))
    return found
