"""Backward MMA role for wide heads: each warp group holds dK and dV of its own 64 keys, and half of dP at a time."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import warp, warpgroup

from anyattn.backends.hopper.kernel.backward.mma import EXCHANGED, MultipliesBack, transposed
from anyattn.backends.hopper.kernel.fragment import columns_of, narrowed

__all__ = ["MultipliesHalves"]


class MultipliesHalves(MultipliesBack):
    """The MMA role of ``HopperHalvedBackward``, for kernels without a score mod.

    dK and dV take up to 160 registers of a thread, which leaves room for S and half of dP: the halves are the first and the last rows of a
    row tile. The first half of dS is stored before the product of the second half begins; dK reads dS^T from shared memory, as dQ reads dS.
    """

    config: Any
    dtype: Any
    half_of_dp: Any

    def operands(self, slices: Any, in_smem: Any) -> tuple[Any, ...]:
        """Those of ``MultipliesBack``, but dO in halves for dP and for dV; then dS^T as the first operand of dK."""
        (_, of_v, of_k, _), tiles = slices, self.config.tiles
        shape, of_half = (tiles.tile_m // 2, self.config.head_dim_v, tiles.do_stages), self.half_of_dp().get_slice(0)
        halves = [cute.local_tile(in_smem[1], shape, (i, 0, 0)) for i in range(2)]
        to_dp = tuple(of_half.make_fragment_B(of_half.partition_B(half)) for half in halves)
        to_dv = tuple(of_v.make_fragment_B(of_v.partition_B(transposed(half))) for half in halves)
        found = MultipliesBack.operands(self, slices, in_smem)
        return (*found[:3], to_dp, to_dv, *found[5:], of_k.make_fragment_A(of_k.partition_A(in_smem[4])))

    @cute.jit
    def _row_tile(self, fixed, sums, scales, captured, states, stage, is_last):
        """As in ``MultipliesBack``."""
        q_state, do_state, work_state, _ = states
        mmas, operands, shapes, positions, pipes, board, _, thread, statistics, exchange = fixed
        k, q, v, dout, dout_t, q_t, ds_t, k_t, ds = operands
        to_scores, to_v, to_k, to_q = mmas
        dk, dv = sums
        scores, dp = (cute.make_rmem_tensor(shapes[0], Float32) for _ in range(2))
        slots, delta = (board, q_state, work_state), statistics[1][None, do_state.index]
        pipes[1].consumer_wait(do_state)
        self.begin_dp(columns_of(dp, 0, 2), self.of_rows(delta, positions, 0, 2))
        pipes[0].consumer_wait(q_state)
        self._scores(to_scores, scores, k, q[None, None, None, q_state.index], 0, True)
        self._scores(self.half_of_dp(), columns_of(dp, 0, 2), v, dout[0][None, None, None, do_state.index], 0, False)
        warpgroup.wait_group(1)
        self.probabilities(scores, self.of_rows(statistics[0][None, q_state.index], positions), scales[1])
        self.hidden((scores,), positions, slots, captured)
        warpgroup.wait_group(0)
        p = self._half_of_ds(scores, dp, exchange, stage, 0, thread)
        self.begin_dp(columns_of(dp, 1, 2), self.of_rows(delta, positions, 1, 2))
        self._scores(self.half_of_dp(), columns_of(dp, 1, 2), v, dout[1][None, None, None, do_state.index], 0, False)
        self._product(to_v, dv, p, dout_t[0][None, None, None, do_state.index], False)
        warpgroup.wait_group(1)
        p = self._half_of_ds(scores, dp, exchange, stage, 1, thread)
        self._product(to_v, dv, p, dout_t[1][None, None, None, do_state.index], False)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=128 * self.config.tiles.warp_groups)
        warpgroup.wait_group(0)
        pipes[1].consumer_release(do_state)
        dq = cute.make_rmem_tensor(shapes[1], Float32)
        self._product(to_q, dq, ds_t[None, None, None, stage], k_t[None, None, None, 0], True)
        self._product(to_k, dk, ds[None, None, None, stage], q_t[None, None, None, q_state.index], False)
        warpgroup.wait_group(1)
        self._passed_on(fixed, dq, slots, scales[0])
        warpgroup.wait_group(0)
        pipes[0].consumer_release(q_state)

    @cute.jit
    def _half_of_ds(self, scores, dp, exchange, stage, half: cutlass.Constexpr, thread):
        """Replaces one half of dP by dS, stores it, and returns this half of P in 16 bits."""
        p, ds = columns_of(scores, half, 2), columns_of(dp, half, 2)
        self.score_gradients(p, ds, None)
        tiles = self.config.tiles
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), self.half_of_dp())
        target = cute.local_tile(exchange.ds[None, None, stage], (tiles.tile_n, tiles.tile_m // 2), (0, half))
        self._stored((store.get_slice(thread), target), ds)
        return narrowed(p, self.dtype)
