"""MMA role of the kernel in the order of keys for values of more than 128 columns: weights in the place of scores."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean

from anyattn.backends.hopper.kernel.fragment import narrowed_to, rows_and_columns
from anyattn.backends.hopper.kernel.in_order.arithmetic import product, total
from anyattn.backends.hopper.kernel.in_order.mma import _PARTS, MultipliesInOrder
from anyattn.sequences.sections import LAG

__all__ = ["MultipliesInPlace"]


class MultipliesInPlace(MultipliesInOrder):
    """The MMA role of ``HopperInPlaceForward``.

    A guess needs a tile's scores and its weights at once; here columns of Q are in the registers of one of them. Threads compare the scores
    that they have with the maxima held instead, and need no other thread's: if no exponent of a warp's rows is above ``LAG`` no maximum
    moves, and the weights by the maxima held are those of the rule. They are computed in the scores' registers while the product with V of
    the tile before is in flight.
    """

    @cute.jit
    def _weighed(self, fixed, sums, p, given, of_tile, is_masked: cutlass.Constexpr, asks: cutlass.Constexpr):
        _, _, _, _, pipes, _, _, thread, in_smem = fixed
        acc, row_max, _, row_scale, sections = sums
        _, _, rate, captured, _ = given
        scores, is_new, v_state, q_state, _ = of_tile
        moves = Boolean(False)
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
            self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)
        else:
            self._rescaled(acc, row_scale, moves)

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
