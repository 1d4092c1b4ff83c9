"""The producer: one warp that asks the copy engine (TMA) for Q once, and for tile after tile of K and V while there is room for them."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import pipeline
from cutlass.cute.nvgpu import cpasync

__all__ = ["Loads"]


class Loads:
    """The loading role of ``HopperForward``."""

    config: Any

    @cute.jit
    def load(self, copies, tiles_in_smem, pipes, place, n_min, n_max):
        """copies: (atom, tensor) of q, k, v. place: (m_block, query head, K/V head, batch entry). Tiles go from the last to the first."""
        tile_m, tile_n, head_dim = self.config.tiles.tile_m, self.config.tiles.tile_n, self.config.head_dim
        (q_atom, q), (k_atom, k), (v_atom, v) = copies
        m_block, head, kv_head, entry = place
        q_pipe, k_pipe, v_pipe = pipes
        q_from, q_to = self._partition(
            q_atom, tiles_in_smem[0], cute.local_tile(q[None, None, head, entry], (tile_m, head_dim), (m_block, 0))
        )
        k_from, k_to = self._partition(
            k_atom, tiles_in_smem[1], cute.local_tile(k[None, None, kv_head, entry], (tile_n, head_dim), (None, 0))
        )
        v_from, v_to = self._partition(
            v_atom, tiles_in_smem[2], cute.local_tile(v[None, None, kv_head, entry], (head_dim, tile_n), (0, None))
        )
        producer = pipeline.PipelineUserType.Producer
        q_state = pipeline.make_pipeline_state(producer, 1)
        k_state = pipeline.make_pipeline_state(producer, self.config.tiles.stages)
        v_state = pipeline.make_pipeline_state(producer, self.config.tiles.stages)
        q_pipe.producer_acquire(q_state)
        cute.copy(q_atom, q_from, q_to[None, 0], tma_bar_ptr=q_pipe.producer_get_barrier(q_state))
        for i in cutlass.range(n_max - n_min, unroll=1):
            n_block = n_max - 1 - i
            k_pipe.producer_acquire(k_state)
            cute.copy(k_atom, k_from[None, n_block], k_to[None, k_state.index], tma_bar_ptr=k_pipe.producer_get_barrier(k_state))
            k_state.advance()
            v_pipe.producer_acquire(v_state)
            cute.copy(v_atom, v_from[None, n_block], v_to[None, v_state.index], tma_bar_ptr=v_pipe.producer_get_barrier(v_state))
            v_state.advance()
        # a block that ends while its copies are still being read would hand their memory to another
        k_pipe.producer_tail(k_state)
        v_pipe.producer_tail(v_state)

    def _partition(self, atom: Any, in_smem: Any, in_gmem: Any) -> tuple[Any, Any]:
        """(source, target) of the copies, the target with a mode for the stages."""
        target, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(in_smem, 0, 2), cute.group_modes(in_gmem, 0, 2)
        )
        return source, target
