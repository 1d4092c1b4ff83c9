"""The consumers: S = Q K^T, softmax, O += P V, with the next tile's first product running under this tile's exponentials."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.fragment import narrowed, rows_and_columns
from anyattn.backends.hopper.visits import Facts

__all__ = ["Multiplies"]

_TURN = 1  # the first of the named barriers by which warp groups take turns
_CLEANED = 8  # the first of those at which each warp group meets after wiping V


class Multiplies:
    """The multiplying role of ``HopperForward``."""

    config: Any

    @cute.jit
    def multiply(self, thread, mmas, in_smem, pipes, board, outputs, sink, scale_log2, captured):
        """Row tile after row tile, as the board says. outputs: (copy of out, out, lse, highest scores)."""
        tiles = self.config.tiles
        mma_qk, mma_pv = mmas
        group = cute.arch.make_warp_uniform(thread // 128)
        groups = cute.make_layout(tiles.warp_groups, stride=128)
        qk, pv = mma_qk.get_slice(groups(group)), mma_pv.get_slice(groups(group))
        operands = (
            qk.make_fragment_A(qk.partition_A(in_smem[0])),
            qk.make_fragment_B(qk.partition_B(in_smem[1])),
            pv.make_fragment_B(pv.partition_B(in_smem[2])),
        )
        positions = rows_and_columns(mma_qk.get_slice(thread).partition_C(cute.make_identity_tensor((tiles.tile_m, tiles.tile_n))))
        consumer = pipeline.PipelineUserType.Consumer
        q_state, q_done, k_state, v_state, work_state = (
            pipeline.make_pipeline_state(consumer, n) for n in (self.config.q_stages, self.config.q_stages, tiles.stages, tiles.stages, 2)
        )
        rate = self.rate(scale_log2, captured)
        self._first_turn(group)
        more, owed = Int32(1), Int32(0)  # owed: Q's memory of the row tile before, from which O may still be leaving
        while more != 0:
            pipes[3].consumer_wait(work_state)
            facts = self._facts(board[0], work_state)
            more = facts.more
            if more != 0:
                acc = cute.make_rmem_tensor(mma_pv.get_slice(thread).partition_shape_C((tiles.tile_m, self.config.head_dim_v)), Float32)
                acc.fill(0.0)
                row_max, row_sum, row_scale = (cute.make_rmem_tensor(cute.size(rows_and_columns(acc), mode=[0]), Float32) for _ in range(3))
                row_max.fill(-Float32.inf)
                row_sum.fill(0.0)
                if facts.total > 0:
                    pipes[0].consumer_wait(q_state)
                    shape_s = mma_qk.get_slice(thread).partition_shape_C((tiles.tile_m, tiles.tile_n))
                    of_tile = (operands[0][None, None, None, q_state.index], operands[1], operands[2])
                    fixed = (mmas, of_tile, shape_s, positions, pipes, board[1], group)
                    sums = (acc, row_max, row_sum, row_scale)
                    given = (facts, scale_log2, rate, captured, self.row_limits(positions, facts, captured))
                    p = self._first(fixed, sums, given, k_state, v_state, in_smem[2], thread)
                    k_state.advance()
                    if const_expr(self.config.q_stages > 1):
                        if owed != 0:
                            self._give_back(pipes[0], q_done, thread)
                            q_done.advance()
                    owed = Int32(1)
                    k_state, v_state = self._visits(fixed, sums, p, given, k_state, v_state)
                    facts = self._facts(board[0], work_state)  # read again rather than kept in registers
                    self.finished(acc, row_max, row_sum, rate, sink, facts.head)
                    self.stored(acc, row_max, row_sum, mma_pv, thread, group, outputs, in_smem[3][None, None, q_state.index], facts)
                    if const_expr(self.config.q_stages == 1):
                        self._give_back(pipes[0], q_state, thread)
                    q_state.advance()
                else:
                    self.finished(acc, row_max, row_sum, rate, sink, facts.head)
                    self.stored(acc, row_max, row_sum, mma_pv, thread, group, outputs, None, facts)
            pipes[3].consumer_release(work_state)
            work_state.advance()
        if const_expr(self.config.q_stages > 1):
            if owed != 0:
                self._give_back(pipes[0], q_done, thread)

    def _facts(self, board: Any, state: Any) -> Facts:
        return Facts(*(board[i, state.index] for i in range(len(Facts._fields))))

    @cute.jit
    def _give_back(self, pipe, state, thread):
        """Q's memory to the loader, once O, which took its place, has been read out of it."""
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        pipe.consumer_release(state)

    @cute.jit
    def _first(self, fixed, sums, given, k_state, v_state, v_in_smem, thread):
        """The first product and softmax of a row tile; its probabilities."""
        (mma_qk, _), (q, k, _), shape_s, positions, pipes, board, group = fixed
        _, row_max, row_sum, row_scale = sums
        facts, scale_log2, rate, captured, limits = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        pipes[1].consumer_wait(k_state)
        visit = board[k_state.index]
        self._my_turn(group)
        self._product(mma_qk, scores, q, k[None, None, None, k_state.index], True)
        self._next_turn(group)
        warpgroup.wait_group(0)
        pipes[1].consumer_release(k_state)
        n = visit // 2
        lifts = self.modified(scores, None, positions, n, facts, scale_log2, captured, True)
        self.masked(scores, positions, n, facts, captured, limits, visit % 2, True)
        if const_expr(self.config.is_bounded):
            self.unshifted(scores, row_max, row_sum, rate, True)
        else:
            self.exponentials(scores, lifts, row_max, row_sum, row_scale, rate, True, True)
        if const_expr(self.config.has_entries):
            self._wiped(v_in_smem, pipes[2], v_state, facts.seqlen_k - n * self.config.tiles.tile_n, thread, group)
        return narrowed(scores, self.dtype)

    @cute.jit
    def _visits(self, fixed, sums, p, given, k_state, v_state):
        """The key tiles of a row tile after its first: masked, bare and again masked ones."""
        (_, mma_pv), operands, _, _, pipes, _, _ = fixed
        acc, facts = sums[0], given[0]
        for _ in cutlass.range(facts.masked, unroll=1):
            self._step(fixed, sums, p, given, k_state, v_state, True)
            k_state.advance()
            v_state.advance()
        for _ in cutlass.range(facts.bare, unroll=1):
            self._step(fixed, sums, p, given, k_state, v_state, False)
            k_state.advance()
            v_state.advance()
        if const_expr(self.config.has_left):
            for _ in cutlass.range(facts.behind, unroll=1):
                self._step(fixed, sums, p, given, k_state, v_state, True)
                k_state.advance()
                v_state.advance()
        pipes[2].consumer_wait(v_state)
        self._product(mma_pv, acc, p, operands[2][None, None, None, v_state.index], False)
        warpgroup.wait_group(0)
        pipes[2].consumer_release(v_state)
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def _step(self, fixed, sums, p, given, k_state, v_state, is_masked: cutlass.Constexpr):
        """The first product of a tile and the second of the tile before it, then the softmax of the tile."""
        (mma_qk, mma_pv), (q, k, v), shape_s, positions, pipes, board, group = fixed
        acc, row_max, row_sum, row_scale = sums
        facts, scale_log2, rate, captured, limits = given
        asks = is_masked or len(self.config.always) > 0
        scores = cute.make_rmem_tensor(shape_s, Float32)
        pipes[1].consumer_wait(k_state)
        n = Int32(0)
        if const_expr(asks or self.config.score is not None):
            n = board[k_state.index] // 2
        self._my_turn(group)
        self._product(mma_qk, scores, q, k[None, None, None, k_state.index], True)
        pipes[2].consumer_wait(v_state)
        self._product(mma_pv, acc, p, v[None, None, None, v_state.index], False)
        self._next_turn(group)
        ahead = None
        if const_expr(self.foresees):
            ahead = self.foreseen(positions, n, facts, captured)
        warpgroup.wait_group(1)
        pipes[1].consumer_release(k_state)
        lifts = self.modified(scores, ahead, positions, n, facts, scale_log2, captured, False)
        if const_expr(asks):
            self.masked(scores, positions, n, facts, captured, limits, Int32(1) if is_masked else Int32(0), False)
        rescales = cutlass.Boolean(False)
        if const_expr(self.config.is_bounded):
            self.unshifted(scores, row_max, row_sum, rate, asks)
        else:
            rescales = self.exponentials(scores, lifts, row_max, row_sum, row_scale, rate, False, asks)
        warpgroup.wait_group(0)
        pipes[2].consumer_release(v_state)
        p.store(narrowed(scores, self.dtype).load())
        if const_expr(not self.config.is_bounded):
            if rescales:
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
    def _wiped(self, v, pipe, state, room, thread, group):
        """Zeros in V's rows from ``room`` on: what lies past the last key may be NaN, which a probability of 0 does not undo.

        Each warp group wipes all of them, so that none has to wait for another.
        """
        tile_n, head_dim = self.config.tiles.tile_n, self.config.head_dim_v
        if room < tile_n:
            pipe.consumer_wait(state)
            tile = v[None, None, state.index]
            for i in cutlass.range(room * head_dim + thread % 128, tile_n * head_dim, 128, unroll=1):
                tile[i % head_dim, i // head_dim] = self.dtype(0.0)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=_CLEANED + group, number_of_threads=128)

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
