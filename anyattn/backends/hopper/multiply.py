"""The consumers: S = Q K^T, softmax, O += P V, with the next tile's first product running under this tile's exponentials."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.fragment import narrowed, rows_and_columns

__all__ = ["Multiplies"]

_TURN = 1  # the first of the named barriers by which warp groups take turns


class Multiplies:
    """The multiplying role of ``HopperForward``."""

    config: Any

    @cute.jit
    def multiply(self, thread, mmas, in_smem, pipes, out_copy, lse, sink, place, lengths, scale_log2, mods, band, blocks):
        """One row tile. blocks: (n_min, n_left, n_right, n_max): key tiles ``n_left <= n < n_right`` need no mask."""
        tiles, head_dim = self.config.tiles, self.config.head_dim
        mma_qk, mma_pv = mmas
        group = cute.arch.make_warp_uniform(thread // 128)
        groups = cute.make_layout(tiles.warp_groups, stride=128)
        qk, pv = mma_qk.get_slice(groups(group)), mma_pv.get_slice(groups(group))
        operands = (
            qk.make_fragment_A(qk.partition_A(in_smem[0])),
            qk.make_fragment_B(qk.partition_B(in_smem[1])),
            pv.make_fragment_B(pv.partition_B(in_smem[2])),
        )
        shape_s = mma_qk.get_slice(thread).partition_shape_C((tiles.tile_m, tiles.tile_n))
        acc = cute.make_rmem_tensor(mma_pv.get_slice(thread).partition_shape_C((tiles.tile_m, head_dim)), Float32)
        acc.fill(0.0)
        rows = cute.size(rows_and_columns(acc), mode=[0])
        row_max, row_sum, row_scale = (cute.make_rmem_tensor(rows, Float32) for _ in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        positions = rows_and_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((tiles.tile_m, tiles.tile_n))))
        consumer = pipeline.PipelineUserType.Consumer
        q_state = pipeline.make_pipeline_state(consumer, 1)
        k_state = pipeline.make_pipeline_state(consumer, tiles.stages)
        v_state = pipeline.make_pipeline_state(consumer, tiles.stages)
        self._first_turn(group)
        pipes[0].consumer_wait(q_state)
        n_min, n_left, n_right, n_max = blocks
        n = n_max - 1
        if n_max > n_min:
            scores = cute.make_rmem_tensor(shape_s, Float32)
            pipes[1].consumer_wait(k_state)
            self._my_turn(group)
            self._product(mma_qk, scores, operands[0][None, None, None, 0], operands[1][None, None, None, k_state.index], True)
            self._next_turn(group)
            warpgroup.wait_group(0)
            pipes[1].consumer_release(k_state)
            k_state.advance()
            origin = (place[0] * tiles.tile_m, n * tiles.tile_n)
            self.modified(scores, positions, origin, place, lengths, scale_log2, mods, True)
            self.masked(scores, positions, origin, lengths, band)
            self.exponentials(scores, row_max, row_sum, row_scale, scale_log2, True, True)
            p = narrowed(scores, self.dtype)
            state = (mmas, operands, shape_s, acc, p, row_max, row_sum, row_scale, positions, pipes, group)
            given = (place, lengths, scale_log2, mods, band)
            if const_expr(self.config.has_right):
                while n > n_min and n > n_right:
                    n -= 1
                    self._step(state, given, k_state, v_state, n, True)
                    k_state.advance()
                    v_state.advance()
            while n > n_min and n > n_left:
                n -= 1
                self._step(state, given, k_state, v_state, n, False)
                k_state.advance()
                v_state.advance()
            if const_expr(self.config.has_left):
                while n > n_min:
                    n -= 1
                    self._step(state, given, k_state, v_state, n, True)
                    k_state.advance()
                    v_state.advance()
            pipes[2].consumer_wait(v_state)
            self._product(mma_pv, acc, p, operands[2][None, None, None, v_state.index], False)
            warpgroup.wait_group(0)
            pipes[2].consumer_release(v_state)
        self.finished(acc, row_max, row_sum, scale_log2, sink, place[1])
        self.stored(acc, row_sum, mma_pv, thread, out_copy, in_smem[3], lse, place, lengths[0])

    @cute.jit
    def _step(self, state, given, k_state, v_state, n, is_masked: cutlass.Constexpr):
        """The first product of tile ``n`` and the second of the tile before it, then the softmax of tile ``n``."""
        (mma_qk, mma_pv), (q, k, v), shape_s, acc, p, row_max, row_sum, row_scale, positions, pipes, group = state
        place, lengths, scale_log2, mods, band = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        pipes[1].consumer_wait(k_state)
        self._my_turn(group)
        self._product(mma_qk, scores, q[None, None, None, 0], k[None, None, None, k_state.index], True)
        pipes[2].consumer_wait(v_state)
        self._product(mma_pv, acc, p, v[None, None, None, v_state.index], False)
        self._next_turn(group)
        warpgroup.wait_group(1)
        pipes[1].consumer_release(k_state)
        origin = (place[0] * self.config.tiles.tile_m, n * self.config.tiles.tile_n)
        self.modified(scores, positions, origin, place, lengths, scale_log2, mods, False)
        if const_expr(is_masked):
            self.masked(scores, positions, origin, lengths, band)
        self.exponentials(scores, row_max, row_sum, row_scale, scale_log2, False, is_masked)
        warpgroup.wait_group(0)
        pipes[2].consumer_release(v_state)
        p.store(narrowed(scores, self.dtype).load())
        out = rows_and_columns(acc)
        for r in cutlass.range_constexpr(cute.size(row_scale)):
            out[r, None].store(out[r, None].load() * row_scale[r])

    @cute.jit
    def _product(self, mma, acc, a, b, from_zero: cutlass.Constexpr):
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, not from_zero)
        for i in cutlass.range_constexpr(cute.size(a, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _first_turn(self, group):
        if group == 0 and self.config.tiles.ping_pong:
            cute.arch.barrier_arrive(barrier_id=_TURN, number_of_threads=256)

    @cute.jit
    def _my_turn(self, group):
        if const_expr(self.config.tiles.ping_pong):
            cute.arch.barrier(barrier_id=_TURN + group, number_of_threads=256)

    @cute.jit
    def _next_turn(self, group):
        if const_expr(self.config.tiles.ping_pong):
            after = 1 - group if const_expr(self.config.tiles.warp_groups == 2) else (group + 1) % 3
            cute.arch.barrier_arrive(barrier_id=_TURN + after, number_of_threads=256)
