"""MMA role of a kernel that skips: a warp group decides for its 64 rows, from their scores, whether a key tile is left out."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.fragment import narrowed_to, rows_and_columns
from anyattn.backends.hopper.kernel.mma import VOTE, Multiplies, all_of_group

__all__ = ["MultipliesSkipping", "thresholds_of"]


class _Tops(NamedTuple):
    """Registers of a thread. rows: the highest score of each row so far, the same in the four threads of a row; inf for rows that are not
    stored, which never need a tile. of_tile: the same in the tile at hand. below: base-2 logarithm of the threshold. pending: 1 if ``p``
    holds the probabilities of the tile before, 0 if that was skipped. skipped: tiles skipped so far."""

    rows: Any
    of_tile: Any
    below: Any
    pending: Any
    skipped: Any


def thresholds_of(config: Any, captured: Any) -> tuple[Any, Any]:
    """(``Skip.below``, ``Skip.counts`` or None): the last captured tensors, before those of dropout."""
    tensors = captured[1][: len(captured[1]) - config.has_dropout]
    return (tensors[-2], tensors[-1]) if config.counts_skips else (tensors[-1], None)


class MultipliesSkipping(Multiplies):
    """The MMA role of ``HopperSkippingForward``.

    A tile's scores are computed, modified and masked as in ``Multiplies``. Then the warp group's threads compare the tile's row maxima with
    those so far: if all rows are below the threshold, the tile is neither exponentiated nor multiplied, and its stage of V is released
    unread in the step after. Nothing of a skipped tile enters the sums, so the maximum that they subtract, which may lag behind
    ``_Tops.rows``, stays. No tile is guessed at: its maxima are known, and registers for a guess are not there.
    """

    dtype: Any

    def tops_of(self, acc: Any) -> Any:
        of_rows = (cute.make_rmem_tensor(cute.size(rows_and_columns(acc), mode=[0]), Float32) for _ in range(2))
        return _Tops(*of_rows, cute.make_rmem_tensor(1, Float32), *(cute.make_rmem_tensor(1, Int32) for _ in range(2)))

    def start_tops(self, tops: Any, positions: Any, facts: Any, captured: Any) -> None:
        self._start_rows(tops, positions, facts, captured)
        tops.pending[0] = Int32(1)  # a row tile's first key tile is never skipped
        tops.skipped[0] = Int32(0)

    def _start_rows(self, tops: Any, positions: Any, facts: Any, captured: Any) -> None:
        first, end = self.first_row(positions, facts), self.rows_ends(positions, facts)[0]  # type: ignore[attr-defined]
        for r in range(cute.size(tops.rows)):
            tops.rows[r] = select(first + self.apart(r) < end, -Float32.inf, Float32.inf, "float")  # type: ignore[attr-defined]
        threshold = thresholds_of(self.config, captured)[0][self.head(positions, facts)]  # type: ignore[attr-defined]
        tops.below[0] = cute.math.log2(Float32(threshold), fastmath=True)

    def raise_tops(self, tops: Any, scores: Any, lifts: Any) -> None:
        self._are_low(tops, scores, lifts, 1.0)

    def _are_low(self, tops: Any, scores: Any, lifts: Any, rate: Any) -> Any:
        """Updates the rows' highest scores. Returns whether those of this tile are all below the threshold; NaN, the distance in rows that
        have seen nothing and see nothing here, is not."""
        s, are_low = rows_and_columns(scores), Boolean(True)
        for r in range(cute.size(tops.rows)):
            top = tops.of_tile[r] = self.highest_of(s, r, lifts, -Float32.inf)  # type: ignore[attr-defined]
            are_low = are_low & ((top - tops.rows[r]) * rate < tops.below[0])
            tops.rows[r] = cute.arch.fmax(tops.rows[r], top)
        return are_low

    def _narrow_to(self, p: Any, powers: Any) -> None:
        narrowed_to(p, powers, self.dtype)

    def highest(self, tops: Any, rate: Any) -> Any:
        return super().highest(tops.rows if self.config.has_max else None, rate)  # type: ignore[misc]

    @cute.jit
    def _step(self, fixed, sums, p, given, q_state, k_state, v_state, is_masked: cutlass.Constexpr):
        """Two programs, with and without the second product of the tile before: where paths join while it is in flight, ptxas would wait
        for every product."""
        if sums[4].pending[0] != 0:
            self._step_after(fixed, sums, p, given, q_state, k_state, v_state, is_masked, True)
        else:
            self._step_after(fixed, sums, p, given, q_state, k_state, v_state, is_masked, False)

    @cute.jit
    def _step_after(
        self, fixed, sums, p, given, q_state, k_state, v_state, is_masked: cutlass.Constexpr, is_pending: cutlass.Constexpr
    ):  # fmt: skip
        """A tile after one that was not skipped (is_pending) or was."""
        (mma_qk, _), (q, k, _), shape_s, positions, pipes, board, group, _, _ = fixed
        acc, (facts, _, rate, captured, _), tops = sums[0], given, sums[4]
        asks = is_masked or len(self.config.always) > 0
        scores = cute.make_rmem_tensor(shape_s, Float32)
        pipes[1].consumer_wait(k_state)
        n = Int32(0)
        if const_expr(asks or self.config.score is not None or self.config.has_dropout):
            n = board[1][k_state.index] // 2
        self._my_turn(group)
        self._product(mma_qk, scores, q[None, None, None, q_state.index], k[None, None, None, k_state.index], True)
        if const_expr(is_pending):
            self._second(fixed, acc, p, v_state)
        self._next_turn(group)
        ahead = None
        if const_expr(self.foresees):
            ahead = self.foreseen(positions, n, facts, captured)
        dropping = None
        if const_expr(self.config.has_dropout):
            dropping = (captured[2], n, self.words_ahead(captured[2], n))
        if const_expr(is_pending):
            self._scored(pipes, k_state, v_state)
        else:
            warpgroup.wait_group(0)
            self._keys_read(pipes, k_state)
            pipes[2].consumer_wait(v_state)  # of a stage that is not read: its copy has ended before the next one begins
        of_tile = (scores, ahead, n, v_state, dropping)
        lifts = self._modified(fixed, given, of_tile, is_masked, asks)
        if all_of_group(self._are_low(tops, scores, lifts, rate), VOTE + group):
            self._values_read(pipes[2], v_state)
            tops.pending[0] = Int32(0)
            tops.skipped[0] = tops.skipped[0] + 1
        else:
            rescales = self._taken(fixed, sums, p, given, of_tile, lifts, asks, tops.of_tile)
            self._rescaled(acc, sums[3], rescales)
            tops.pending[0] = Int32(1)

    @cute.jit
    def _last(self, fixed, sums, p, v_state):
        if sums[4].pending[0] != 0:
            self._second(fixed, sums[0], p, v_state)
            warpgroup.wait_group(0)
        else:
            fixed[4][2].consumer_wait(v_state)
