"""The online softmax on a fragment: mods and masks first, then exp2 with the scale folded in, the row's maximum and sum carried along."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from anyattn.backends.hopper.emit import emit, select
from anyattn.backends.hopper.fragment import rows_and_columns

__all__ = ["LOG2E", "Softmax"]

LOG2E = math.log2(math.e)


class Softmax:
    """What ``HopperForward`` does to the scores of one tile."""

    config: Any

    @cute.jit
    def modified(self, scores, positions, origin, place, lengths, scale_log2, mods, is_edge: cutlass.Constexpr):
        """Applies the score mod to the tile whose first row and key are ``origin``. is_edge: the tile may reach past the last key."""
        if const_expr(self.config.score is not None):
            s = rows_and_columns(scores)
            rows, columns = cute.size(s, mode=[0]), cute.size(s, mode=[1])
            scale = scale_log2 * Float32(1.0 / LOG2E)
            # a row past the last one is computed and never stored; a mod must not be asked about it
            q_idx = [cutlass.min(positions[r, 0][0] + origin[0], lengths[0] - 1) for r in range(rows)]
            kv_idx = [positions[0, c][1] + origin[1] for c in range(columns)]
            if const_expr(is_edge):
                kv_idx = [cutlass.min(k, lengths[1] - 1) for k in kv_idx]
            places = {"b": place[3], "h": place[1], "q_idx": q_idx, "kv_idx": kv_idx}
            scalars, tensors = mods
            emit(
                self.config.score, scalars, tensors, places, lambda r, c: s[r, c] * scale, lambda r, c, x: s.__setitem__((r, c), Float32(x))
            )  # fmt: skip

    @cute.jit
    def masked(self, scores, positions, origin, lengths, band):
        """-inf for the keys that a row does not see, and for those past the last."""
        s = rows_and_columns(scores)
        for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
            row = positions[r, 0][0] + origin[0]
            end = lengths[1] - origin[1]
            if const_expr(self.config.has_right):
                end = cutlass.min(end, row + band[1] - origin[1])
            for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                column = positions[0, c][1]
                seen = column < end
                if const_expr(self.config.has_left):
                    seen = seen & (column >= row + band[0] - origin[1])
                s[r, c] = select(seen, s[r, c], -Float32.inf, "float")

    @cute.jit
    def exponentials(self, scores, row_max, row_sum, row_scale, scale_log2, is_first: cutlass.Constexpr, may_be_blind: cutlass.Constexpr):
        """Turns scores into exp2((score - row's maximum) * scale) in place; ``row_scale`` is what earlier sums are to be multiplied by.

        may_be_blind: a row may have seen nothing yet; its maximum is then taken as 0, so that -inf minus it is -inf and not NaN.
        """
        scale = Float32(LOG2E) if const_expr(self.config.score is not None) else scale_log2
        s = rows_and_columns(scores)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            row = s[r, None].load()
            top = row.reduce(cute.ReductionOp.MAX, -Float32.inf if const_expr(is_first) else row_max[r], 0)
            for offset in (2, 1):  # four threads hold a row
                top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, offset=offset))
            if const_expr(may_be_blind):
                top = select(top == -Float32.inf, Float32(0.0), top, "float")
            if const_expr(not is_first):
                row_scale[r] = cute.math.exp2((row_max[r] - top) * scale, fastmath=True)
            p = cute.math.exp2(row * scale - top * scale, fastmath=True)
            total = p.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
            row_sum[r] = total if const_expr(is_first) else row_sum[r] * row_scale[r] + total
            row_max[r] = top
            s[r, None].store(p)
