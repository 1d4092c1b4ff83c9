"""Backward MMA role for wide heads: warp groups share a tile's keys, divide its scores by rows and dV, dK and dQ by columns."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.kernel.backward.epilogue import READ, STORED
from anyattn.backends.hopper.kernel.backward.mma import MultipliesBack

__all__ = ["MultipliesWide"]

_P_WRITTEN = 4  # named barrier: both warp groups have written their rows of P
_DS_WRITTEN = 5  # named barrier: both warp groups have written their rows of dS


class MultipliesWide(MultipliesBack):
    """The MMA role of ``HopperWideBackward``.

    P and dS go through shared memory, where both warp groups read all of them. Two barriers per row tile synchronise the groups: one after
    P is written, one after dS is written. A group that arrives at the first barrier has finished all its products of the previous row tile,
    so dS, which is written after this barrier, needs one stage; P is written before the barrier and has two.
    """

    config: Any
    dtype: Any
    _into: Any
    _store_part: Any

    def operands(self, slices: Any, in_smem: Any) -> tuple[Any, ...]:
        """Those of ``MultipliesBack``, then P^T and dS^T as the first operands of dV and dK."""
        _, of_v, of_k, _ = slices
        exchanged = in_smem[4]
        firsts = (of_v.make_fragment_A(of_v.partition_A(exchanged)), of_k.make_fragment_A(of_k.partition_A(exchanged)))
        return (*MultipliesBack.operands(self, slices, in_smem), *firsts)

    @cute.jit
    def _row_tile(self, fixed, sums, scales, captured, states, stage, is_last):
        """As in ``MultipliesBack``; stage: of P."""
        q_state, do_state, work_state, _ = states
        mmas, operands, shapes, _, pipes, board, _, _, _, exchange = fixed
        _, _, _, _, dout_t, q_t, ds_t, k_t, p, ds = operands
        _, to_v, to_k, to_q = mmas
        dk, dv = sums
        of_ds = self.config.tiles.ds_stages
        slots = (board, q_state, work_state)
        scores, dp, _ = self._p_begun(fixed, states, slots, scales, captured)
        self._exchanged(exchange, scores, stage, _P_WRITTEN)
        self._product(to_v, dv, p[None, None, None, stage], dout_t[None, None, None, do_state.index], False)
        if const_expr(self.config.score is None):
            warpgroup.wait_group(1)
            self.score_gradients(scores, dp, None)
        self._exchanged(exchange, dp, of_ds, _DS_WRITTEN)
        dq = cute.make_rmem_tensor(shapes[1], Float32)
        self._product(to_q, dq, ds_t[None, None, None, of_ds], k_t[None, None, None, 0], True)
        self._product(to_k, dk, ds[None, None, None, of_ds], q_t[None, None, None, q_state.index], False)
        warpgroup.wait_group(2)
        pipes[1].consumer_release(do_state)
        warpgroup.wait_group(1)
        self._passed_on(fixed, dq, slots, scales[0])
        warpgroup.wait_group(0)
        pipes[0].consumer_release(q_state)

    @cute.jit
    def _exchanged(self, exchange, rows, stage, barrier: cutlass.Constexpr):
        """Writes a warp group's rows of P or dS to shared memory, as operands of both groups."""
        self._stored((exchange.store, exchange.ds[None, None, stage]), rows)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=barrier, number_of_threads=128 * self.config.tiles.warp_groups)

    @cute.jit
    def _tile_stored(self, sums, mmas, leaving, keys, about, facts, place):
        """Each warp group has half the columns of dK and of dV. The first group stores dK to global memory, the second dV."""
        _, to_v, to_k, _ = mmas
        group, thread, _ = about
        threads = 128 * self.config.tiles.warp_groups
        # another warp group's product dQ of the last row tile may still read K
        cute.arch.barrier(barrier_id=READ, number_of_threads=threads)
        self._into(sums[0], to_k, leaving[0], thread)
        self._into(sums[1], to_v, leaving[1], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STORED, number_of_threads=threads)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            if group == 0:
                self._store_part(keys[0], leaving[0], self.config.head_dim, 0, facts.kv_head, facts.n_block, place)
            else:
                self._store_part(keys[1], leaving[1], self.config.head_dim_v, 0, facts.kv_head, facts.n_block, place)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
