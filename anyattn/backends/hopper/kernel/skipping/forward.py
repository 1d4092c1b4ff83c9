"""``HopperSkippingForward``: the forward kernel of calls with a threshold (``problem.Skip``)."""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.backends.hopper.kernel.forward import HopperForward
from anyattn.backends.hopper.kernel.skipping.mma import MultipliesSkipping, thresholds_of
from anyattn.backends.hopper.kernel.skipping.producer import LoadsSkipping

__all__ = ["HopperSkippingForward"]


class HopperSkippingForward(LoadsSkipping, MultipliesSkipping, HopperForward):
    """Attention forward for one ``Config`` that ``has_skip``. A tile is 64 rows of a row tile, those of a warp group, and its keys."""

    @cute.jit
    def _ended(self, fixed, sums, given, outputs, sink, q_state, work_state):
        if const_expr(self.config.counts_skips):
            self._count(fixed, sums[4], given[2], work_state)
        HopperForward._ended(self, fixed, sums, given, outputs, sink, q_state, work_state)

    @cute.jit
    def _count(self, fixed, tops, captured, work_state):
        """Adds a warp group's tiles to the counts of each head that has rows among its own: one thread per head."""
        thread, (mma_qk, _), board = self._again(fixed[7]), fixed[0], fixed[5]
        facts, positions = self._facts(board[0], work_state), self._positions(mma_qk, thread)
        is_of_head = (positions[0, 0][0] % 64 < self.config.heads_per_tile) & (positions[0, 0][1] == 0)
        if is_of_head & (self.first_row(positions, facts) < self.rows_ends(positions, facts)[0]):
            counts = thresholds_of(self.config, captured)[1]
            to = cute.domain_offset((facts.entry, self.head(positions, facts), 0), counts).iterator
            cute.arch.atomic_add(to, tops.skipped[0])
            cute.arch.atomic_add(to + 1, Int32(facts.total))
