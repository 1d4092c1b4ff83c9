"""Backward MMA role of a single warp group: the products of a row tile one after another, beside those of the other thread block."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.kernel.backward.mma import EXCHANGED, MultipliesBack, transposed
from anyattn.backends.hopper.kernel.fragment import narrowed

__all__ = ["MultipliesAlone"]

_EMPTIED = 5  # named barrier: all warps have read dS


class MultipliesAlone(MultipliesBack):
    """The MMA role of ``HopperAloneBackward``.

    dK and dV of 64 keys take half of a thread's registers and leave no room for all columns of dQ, which is computed in parts: while the
    first part is handed to the adding warp, dK is multiplied.
    """

    config: Any
    dtype: Any

    def operands(self, slices: Any, in_smem: Any) -> tuple[Any, ...]:
        """Those of ``MultipliesBack``, with K as the second operand of dQ in ``dq_parts``."""
        (_, _, _, of_q), tiles = slices, self.config.tiles
        shape = (tiles.tile_n, self.config.head_dim // tiles.dq_parts, 1)
        parts = [transposed(cute.local_tile(in_smem[2], shape, (0, i, 0))) for i in range(tiles.dq_parts)]
        found = MultipliesBack.operands(self, slices, in_smem)
        return (*found[:-1], tuple(of_q.make_fragment_B(of_q.partition_B(part)) for part in parts))

    @cute.jit
    def _row_tile(self, fixed, sums, scales, captured, states, stage, is_last):
        """As in ``MultipliesBack``."""
        q_state, do_state, work_state, _ = states
        mmas, operands, shapes, _, pipes, board, _, _, _, exchange = fixed
        _, _, _, _, dout_t, q_t, ds_t, k_parts = operands
        _, to_v, to_k, to_q = mmas
        dk, dv = sums
        tiles = self.config.tiles
        slots = (board, q_state, work_state)
        scores, dp, _ = self._p_and_ds(fixed, states, slots, scales, captured)
        p, ds = narrowed(scores, self.dtype), narrowed(dp, self.dtype)
        cute.arch.barrier(barrier_id=_EMPTIED, number_of_threads=128)
        self._stored((exchange.store, exchange.ds[None, None, stage]), dp)
        self._product(to_v, dv, p, dout_t[None, None, None, do_state.index], False)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=128)
        for step in cutlass.range_constexpr(tiles.dq_parts):
            dq = cute.make_rmem_tensor(shapes[1], Float32)
            self._product(to_q, dq, ds_t[None, None, None, stage], k_parts[step][None, None, None, 0], True)
            if const_expr(step == 0):
                self._product(to_k, dk, ds, q_t[None, None, None, q_state.index], False)
                warpgroup.wait_group(1)
                pipes[1].consumer_release(do_state)
            else:
                warpgroup.wait_group(0)
            self._post_dq(fixed, dq, slots)
        warpgroup.wait_group(0)
        pipes[0].consumer_release(q_state)
