"""MMA roles for wide heads: two warp groups have the same rows, each with half of the output's columns; the first computes the scores."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.kernel.fragment import narrowed, rows_and_columns
from anyattn.backends.hopper.kernel.mma import Multiplies

__all__ = ["MultipliesWide"]

# named barriers: a tile's probabilities are in shared memory; they have been read there; the second group may multiply
_PASSED, _TAKEN, _ADDED = 11, 12, 13
_BOTH = 256  # threads of both warp groups
_AT_ONCE = 4  # words per instruction


class MultipliesWide(Multiplies):
    """The MMA roles of ``HopperWideForward``.

    The first warp group computes S = Q K^T and the softmax as ``Multiplies`` does, and passes P on through shared memory, with the factors
    of the rows: thread by thread, since both groups' fragments are alike. Each multiplies P by its half of V's columns. The second product
    starts as soon as P is known, so that its part of the tile (``producer.Part``) is released early; the second group starts when the
    first one's has ended, or where no scores follow at once. While both were under way together, neither part was free before both had
    ended. Microseconds then and now (H200, 8/4 heads of 512, 8,192 rows): K = V causal 1,010 and 860, full 1,930 and 1,620; apart, causal
    1,140 and 1,060. A start after the scores, beside the exponentials, leaves the second part to be loaded when it is needed: K = V full
    1,900.
    """

    dtype: Any
    multiplies_values_first = True

    def values_of(self, v: Any, group: int) -> Any:
        return cute.local_tile(v, (self.config.columns, self.config.tiles.tile_n), (group, 0, None))

    def _keys_awaited(self, pipes: Any, state: Any) -> None:
        pipes.keys[0].consumer_wait(state)

    def _keys_read(self, pipes: Any, state: Any) -> None:
        for pipe in pipes.keys[int(self.config.has_one_kv) :]:
            pipe.consumer_release(state)

    def _values_awaited(self, pipes: Any, state: Any) -> None:
        if const_expr(not self.config.has_one_kv):  # else all columns have been read as K's
            pipes.values.consumer_wait(state)
            pipes.other_values.consumer_wait(state)  # the second group's, which it does not release before P is passed on

    def _scores(self, fixed: tuple, scores: Any, q_state: Any, k_state: Any, held: Any = None, rest: Any = None) -> None:
        super()._scores(fixed, scores, q_state, k_state, rest=(self.config.columns, fixed[4].keys[1], k_state))

    def _stored(self, fixed: tuple, p: Any, row_scale: Any, rescales: Any) -> None:
        self._pass_on(fixed, p, self.factors_of(row_scale, rescales))

    def _values_read(self, pipe: Any, state: Any) -> None:
        """The second product of the tile before has ended: see ``_scored``."""

    def _scored(self, pipes: Any, k_state: Any, v_state: Any) -> None:
        warpgroup.wait_group(1)
        pipes.values.consumer_release(v_state)
        cute.arch.barrier_arrive(barrier_id=_ADDED, number_of_threads=_BOTH)
        warpgroup.wait_group(0)
        self._keys_read(pipes, k_state)

    def _last(self, fixed: tuple, sums: tuple, p: Any, v_state: Any) -> None:
        cute.arch.barrier_arrive(barrier_id=_ADDED, number_of_threads=_BOTH)
        super()._last(fixed, sums, p, v_state)

    def _inverses(self, row_scale: Any) -> Any:
        return row_scale

    def _divided(self, fixed: tuple, inverses: Any) -> None:
        self._pass_on(fixed, None, inverses)

    @cute.jit
    def _pass_on(self, fixed, p, factors):
        """Writes a thread's probabilities, None for none, and the factors of its rows to shared memory once what was there is read."""
        thread, (words, of_rows) = self._again(fixed[7]), fixed[8][4]
        cute.arch.barrier(barrier_id=_TAKEN, number_of_threads=_BOTH)
        if const_expr(p is not None):
            parts = cute.logical_divide(cute.recast_tensor(p, Int32), cute.make_layout(_AT_ONCE))
            for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
                cute.autovec_copy(parts[None, i], words[None, thread, i])
        cute.autovec_copy(factors, of_rows[None, thread])
        cute.arch.barrier_arrive(barrier_id=_PASSED, number_of_threads=_BOTH)

    @cute.jit
    def _take(self, exchange, thread, p, factors):
        """Reads what the other warp group's thread of the same number has passed on; waits until P may be multiplied. That is before
        ``_TAKEN``, without which the first group does not go on: it would arrive at ``_ADDED`` twice."""
        words, of_rows = exchange
        cute.arch.barrier(barrier_id=_PASSED, number_of_threads=_BOTH)
        if const_expr(p is not None):
            parts = cute.logical_divide(cute.recast_tensor(p, Int32), cute.make_layout(_AT_ONCE))
            for i in cutlass.range_constexpr(cute.size(parts, mode=[1])):
                cute.autovec_copy(words[None, thread, i], parts[None, i])
        cute.autovec_copy(of_rows[None, thread], factors)
        if const_expr(p is not None):
            cute.arch.barrier(barrier_id=_ADDED, number_of_threads=_BOTH)
        cute.arch.barrier_arrive(barrier_id=_TAKEN, number_of_threads=_BOTH)

    @cute.jit
    def multiply_rest(self, thread, mmas, in_smem, pipes, board, outputs):
        """The second warp group's part of the row tiles that the board lists. outputs: those of ``multiply``."""
        tiles, (mma_qk, mma_pv), exchange = self.config.tiles, mmas, in_smem[4]
        pv = mma_pv.get_slice(0)
        v = pv.make_fragment_B(pv.partition_B(self.values_of(in_smem[2], 1)))
        shape_s = mma_qk.get_slice(thread).partition_shape_C((tiles.tile_m, tiles.tile_n))
        p = narrowed(cute.make_rmem_tensor(shape_s, Float32), self.dtype)
        acc = cute.make_rmem_tensor(mma_pv.get_slice(thread).partition_shape_C((tiles.tile_m, self.config.columns)), Float32)
        factors = cute.make_rmem_tensor(cute.size(rows_and_columns(acc), mode=[0]), Float32)
        q_state, _, v_state, work_state = self._states()
        more = Int32(1)
        cute.arch.barrier_arrive(barrier_id=_TAKEN, number_of_threads=_BOTH)
        while more != 0:
            pipes[3].consumer_wait(work_state)
            facts = self._facts(board[0], work_state)
            more = facts.more
            if facts.total > 0:
                pipes[0].consumer_wait(q_state)
                acc.fill(0.0)
                for _ in cutlass.range(facts.total, unroll=1):
                    self._take(exchange, thread, p, factors)
                    if cute.arch.vote_any_sync(self.rescales(factors)):
                        self.rescaled(acc, factors)
                    pipes.values.consumer_wait(v_state)
                    self._product(mma_pv, acc, p, v[None, None, None, v_state.index], False)
                    warpgroup.wait_group(0)
                    pipes.values.consumer_release(v_state)
                    v_state.advance()
                self._take(exchange, thread, None, factors)
                self.rescaled(acc, factors)
                self.stored(acc, None, None, mma_pv, thread, 1, (*outputs[:3], None, None), in_smem[3][None, None, q_state.index], facts)
                self._give_back(pipes[0], q_state, thread)
                q_state.advance()
            pipes[3].consumer_release(work_state)
            work_state.advance()
