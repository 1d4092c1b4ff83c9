"""Speculative softmax: reuse the previous row maximum, verify, and redo on failure; the scores are kept until verified."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from anyattn.arithmetic import LN2
from anyattn.backends.hopper.codegen.emit import emit_rows, select, tanh
from anyattn.backends.hopper.kernel.exp2_poly import FAR_FROM_CAP, TANH, polynomial, sum_of
from anyattn.backends.hopper.kernel.fragment import rows_and_columns

__all__ = ["Guesses"]

_MOST = 2.0**13  # bound of a thread's part of a row sum: float16 holds probabilities to 2^16, and sums are float32
_FACTORS = (2.0**-20, 2.0**20)  # range of the factor before tanh: its fifth power is a normal number


class Guesses:
    """The speculative part of ``HopperForward``'s softmax, for tiles without a mask.

    It assumes that a row's maximum hardly changes, which fails in few tiles: no maximum is computed, and no thread waits for the others
    of its row. For capped scores, whose maximum does not matter, it assumes that they are so far from the cap
    that tanh is a short polynomial.
    """

    config: Any

    @cute.jit
    def guessed(self, scores, lifts, powers, sums, row_max, positions, facts, scale_log2, rate, captured):
        """Computes powers and their sums by row and thread; returns whether all of a warp's are valid. lifts: as in ``exponentials``."""
        if const_expr(self.shortens):
            return self._far_from_cap(scores, powers, sums, self._before_cap(positions, facts, scale_log2, captured), rate)
        return self._by_held(scores, lifts, powers, sums, row_max, rate)

    def _by_held(self, scores: Any, lifts: Any, powers: Any, sums: Any, row_max: Any, rate: Any) -> Any:
        """exp2((score - held maximum) * rate). For a row that has seen no key the held maximum makes sums NaN, which fail the check."""
        s, to, right = rows_and_columns(scores), rows_and_columns(powers), Boolean(True)
        for r in range(cute.size(row_max)):
            shifted = (row_max[r] if lifts is None else row_max[r] - lifts[r]) * rate
            for c in range(cute.size(s, mode=[1])):
                to[r, c] = cute.math.exp2(cute.math.fma(s[r, c], rate, -shifted), fastmath=True)
            sums[r] = sum_of(to, r)
            right = right & (sums[r] <= _MOST)
        return cute.arch.vote_all_sync(right)

    def raise_tops_under_cap(self, tops: Any, scores: Any, positions: Any, facts: Any, scale_log2: Any, captured: Any) -> None:
        """``raise_tops`` after tanh, from raw products: tanh is monotonic, so each row takes it of one score only."""
        s, before = rows_and_columns(scores), self._before_cap(positions, facts, scale_log2, captured)
        for r in range(cute.size(tops)):
            top = s[r, 0] * before  # the factor may be negative: then the largest product is not the largest score's
            for c in range(1, cute.size(s, mode=[1])):
                top = cute.arch.fmax(top, s[r, c] * before)
            tops[r] = cute.arch.fmax(tops[r], tanh(top))

    def _before_cap(self, positions: Any, facts: Any, scale_log2: Any, captured: Any) -> Any:
        """The factor of a raw product before tanh."""
        scale = scale_log2 * Float32(LN2)
        if self.score.before is None:
            return scale
        head = self.head(positions, facts)
        return scale * Float32(emit_rows(self.score.before, *self.captured(captured, 0), facts.entry, head, [Int32(0)])[0][0])

    def _far_from_cap(self, scores: Any, powers: Any, sums: Any, before: Any, rate: Any) -> Any:
        """exp2(tanh(score * before) * rate), with the factors folded into the coefficients."""
        s, to = rows_and_columns(scores), rows_and_columns(powers)
        square, factor = before * before, before * rate
        coefficients = []
        for x in TANH:
            coefficients.append(factor * Float32(x))
            factor = factor * square
        size = cute.math.absf(before)
        most = select((size >= _FACTORS[0]) & (size <= _FACTORS[1]), cute.arch.rcp_approx(size) * Float32(FAR_FROM_CAP), -1.0, "float")
        tops = [Float32(0.0)] * 4  # four independent maxima
        for r in range(cute.size(sums)):
            for c in range(cute.size(s, mode=[1])):
                x = s[r, c]
                tops[c % 4] = cute.arch.fmax(tops[c % 4], cute.math.absf(x))
                to[r, c] = cute.math.exp2(x * polynomial(coefficients, x * x), fastmath=True)
            sums[r] = sum_of(to, r)
        top = cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))
        return cute.arch.vote_all_sync(top <= most)
