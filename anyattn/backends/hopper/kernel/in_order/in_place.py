"""MMA role of the kernel in the order of keys for wide heads: weights take the place of scores, whose registers hold columns of Q."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from anyattn.backends.hopper.kernel.fragment import narrowed_to, rows_and_columns
from anyattn.backends.hopper.kernel.in_order.arithmetic import product, total
from anyattn.backends.hopper.kernel.in_order.mma import _PARTS, _TILES, MultipliesInOrder
from anyattn.sequences.sections import LAG

__all__ = ["MultipliesInPlace"]


class MultipliesInPlace(MultipliesInOrder):
    """The MMA role of ``HopperInPlaceForward``.

    A guess needs a tile's scores and its weights at once. Here threads compare the scores that they have with the maxima held instead, and
    need no other thread's: if no exponent of a warp's rows is above ``LAG`` no maximum moves, and the weights by the maxima held are those
    of the rule. They are computed in the scores' registers while the product with V of the tile before is in flight.
    """

    @cute.jit
    def _step(self, fixed, sums, p, given, q_state, k_state, v_state, is_masked: cutlass.Constexpr):
        _, _, shape_s, positions, pipes, _, group, thread, in_smem = fixed
        acc, row_max, _, row_scale, sections = sums
        facts, _, rate, captured, limits = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        n = sections.tile[0] = sections.tile[0] + 1
        is_new, moves = n % _TILES == 0, Boolean(False)
        pipes[1].consumer_wait(k_state)
        self._my_turn(group)
        self._scores(fixed, scores, sections.q, q_state, k_state)
        self._second(fixed, acc, p, v_state)
        self._next_turn(group)
        self._scored(pipes, k_state, v_state)
        if const_expr(is_masked):
            self.masked(scores, positions, n, facts, captured, limits, Int32(1), True)
        if const_expr(sections.tops is not None):
            self.raise_tops(sections.tops, scores, None)
        if is_new:
            self._kept(sums, rate)
            self._weights(scores, sums, rate, True)
        elif self._moves(scores, row_max, rate):
            moves = self._weights(scores, sums, rate, False)
        else:
            self._weights_by_held(scores, sums, rate)
        self._values_read(pipes[2], v_state)
        narrowed_to(p, scores, self.dtype)
        if is_new:
            self._merged(acc, sections, self.of_sections(in_smem, captured), self._again(thread), False)
        elif moves:
            out = rows_and_columns(acc)
            for r in cutlass.range_constexpr(cute.size(row_scale)):
                for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                    out[r, c] = product(out[r, c], row_scale[r])

    def _moves(self, scores: Any, row_max: Any, rate: Any) -> Any:
        """Whether the maximum of any of a warp's rows moves."""
        s, moves = rows_and_columns(scores), Boolean(False)
        for r in range(cute.size(row_max)):
            top = s[r, 0]
            for c in range(1, cute.size(s, mode=[1])):
                top = cute.arch.fmax(top, s[r, c])
            moves = moves | (cute.math.fma(top, rate, -product(row_max[r], rate)) > LAG)
        return cute.arch.vote_any_sync(moves)

    def _weights_by_held(self, scores: Any, sums: tuple, rate: Any) -> None:
        """``_weights`` of a tile by which no maximum moves."""
        _, row_max, _, _, sections = sums
        s = rows_and_columns(scores)
        for r in range(cute.size(row_max)):
            self._weights_by(s, s, r, product(row_max[r], rate), rate)
            for part in range(_PARTS):
                sections.sums[r, part] = total(self._added(s, r, part), sections.sums[r, part])
