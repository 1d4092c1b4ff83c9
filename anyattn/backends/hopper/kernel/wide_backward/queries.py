"""``HopperQueryGradient``: dq of wide heads; a thread block keeps 64 query rows, of Q and dO, and streams the keys that they see."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline

from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.codegen.emit import emit, select
from anyattn.backends.hopper.kernel.base import rows_first
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.backends.hopper.kernel.producer import Loads
from anyattn.backends.hopper.kernel.softmax import Softmax
from anyattn.backends.hopper.kernel.tile_scheduler import Facts, Sizes, Tables, Visits
from anyattn.backends.hopper.kernel.wide_backward.base import WideGradient
from anyattn.backends.hopper.kernel.wide_backward.twice import MultipliesTwice

__all__ = ["HopperQueryGradient"]


class HopperQueryGradient(MultipliesTwice, Visits, Softmax, WideGradient):
    """dq for one ``WideBackwardConfig``. Visits go through keys from the last to the first, as in the forward pass."""

    _drawn, _left, _visit = Loads._drawn, Loads._left, Loads._visit

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor | None,
        dout: cute.Tensor,
        target: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        partial_count: cute.Tensor | None,
        partial_index: cute.Tensor | None,
        full_count: cute.Tensor | None,
        full_index: cute.Tensor | None,
        order: cute.Tensor | None,
        counter: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        rows: Int32,
        spread: Int32,
        section: Int32,
        workers: Int32,
        scalars: tuple,
        tensors: tuple,
        stream: cuda.CUstream,
    ):
        """q, dout, target (dq): (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D), strides multiples of 16 bytes, the last 1; v is None where it is
        the first columns of k. lse, delta: (B, Hq, M,
        64) float32: see ``HopperBackward``. partial_count to order: see ``tile_scheduler.Tables``. counter: two zeros, int32, left as
        zeros. scale: the softmax scale; scale_log2: times log2(e). rows, spread, section: see ``tile_scheduler.Sizes``. workers: thread
        blocks. scalars, tensors: captured values, expression by expression of ``config.exprs``."""
        lengths, heads = (q.shape[2], k.shape[2]), q.shape[1]
        sizes = (rows, spread, section, heads, heads // k.shape[1], Int32(0))
        tables = (partial_count, partial_index, full_count, full_index, order, None, None)
        about = ((lse, delta), rows_first(target), (scale, scale_log2), tables, counter, lengths, sizes, (scalars, tensors))
        values = None if const_expr(self.config.streams_one) else rows_first(v)
        kept, streamed = (rows_first(q), rows_first(dout)), (rows_first(k), values)
        self.launched(kept, streamed, about, self._layouts(), workers, stream)

    def facts_of(self, board: Any, state: Any) -> Facts:
        return Facts(*(board[i, state.index] for i in range(len(Facts._fields))))

    def rows_of(self, block: Any, facts: Any) -> tuple[Any, tuple]:
        """(the gradient's rows in global memory, (the tile's first row, the end))."""
        return block.target[None, None, facts.head, facts.entry], (facts.m_block * self.config.tiles.tile_m, facts.seqlen_q)

    @cute.jit
    def load(self, copies, block, statistics, tables, counter, lengths, sizes):
        """Draws row tiles, and loads each with the key tiles that it visits."""
        producer, tiles = pipeline.PipelineUserType.Producer, self.config.tiles
        tables, sizes, pipes, smem, captured = Tables(*tables), Sizes(*sizes), block.pipes, block.smem, block.captured
        x0, x1, y0, y1 = (pipeline.make_pipeline_state(producer, n) for n in tiles.stages)
        kept_state, work_state = pipeline.make_pipeline_state(producer, 1), pipeline.make_pipeline_state(producer, 2)
        workers, _, _ = cute.arch.grid_dim()
        total = sizes.rows * sizes.spread
        work = cute.arch.block_idx()[0]
        while work < total:
            m_block, head, entry = self.row_tile(work, tables, sizes)
            _, _, seqlen_q, _, _, seqlen_k, q_first = self.storage(entry, tables, lengths)
            left, right = Int32(0), Int32(0)
            if const_expr(self.config.lists is None):
                left, right = self.band(entry, head, q_first, captured)
                visits, masked, bare, behind, plan = self.band_visits(m_block, seqlen_q, seqlen_k, left, right)
            else:
                of_lists = self.head_of_lists(head, sizes)
                (visits, masked, bare, behind), plan = self.list_visits(m_block, entry, of_lists, seqlen_k, tables)
            first = Int32(0)
            facts = Facts(
                Int32(1), m_block, head, entry, visits, masked, bare, behind, seqlen_q, seqlen_k, entry, first, q_first, left, right
            )  # fmt: skip
            self._post(block.board[0], block.work_pipe, work_state, facts)
            work_state.advance()
            if visits > 0:
                rows = cute.local_tile(copies.kept[1][None, None, head, entry], (tiles.tile_m, self.config.head_dim), (m_block, 0))
                self.part_loaded(copies.kept, smem.kept, rows, pipes.kept, kept_state)
                rows = cute.local_tile(copies.also_kept[1][None, None, head, entry], (tiles.tile_m, self.config.head_dim_v), (m_block, 0))
                self.part_loaded(copies.also_kept, smem.also_kept, rows, pipes.also_kept, kept_state)
                kept_state.advance()
                n, asks = self._visit(Int32(0), plan)
                for i in cutlass.range(visits, unroll=1):
                    after, after_asks = self._visit(cutlass.min(i + 1, visits - 1), plan)  # loaded before it is needed
                    is_masked = Int32(1)
                    if (i > masked) & (i <= masked + bare):
                        is_masked = Int32(0)
                    self._keys_loaded(copies, block, (head // sizes.ratio, entry), (n, asks, is_masked), (x0, x1, y0, y1))
                    x0.advance()
                    x1.advance()
                    y0.advance()
                    y1.advance()
                    n, asks = after, after_asks
            work = self._drawn(counter, total, workers)
        self._post(block.board[0], block.work_pipe, work_state, Facts(*(Int32(0) for _ in Facts._fields)))
        work_state.advance()
        self._left(counter, total, workers)
        # if the thread block ended earlier, another one could reuse memory that copies are still reading
        block.work_pipe.producer_tail(work_state.clone())
        states = (kept_state, kept_state, x0, x1, *(() if const_expr(self.config.streams_one) else (y0, y1)))
        for pipe, state in zip(pipes, states, strict=False):
            pipe.producer_tail(state.clone())

    @cute.jit
    def _keys_loaded(self, copies, block, place, visit, states):
        """Loads the four parts of a key tile of K and V, with the visit beside the first part."""
        (kv_head, entry), (n, _, _), (x0, x1, y0, y1) = place, visit, states
        pipes, smem = block.pipes, block.smem
        k0, k1 = (copy[1][None, None, kv_head, entry] for copy in (copies.x0, copies.x1))
        source, to = self._partition(copies.x0[0], smem.x0, self.part_of(k0, 0, n))
        pipes.x0.sync_object_empty.wait(x0.index, x0.phase)
        for i in cutlass.range_constexpr(len(visit)):
            block.board[1][i, x0.index] = visit[i]
        pipes.x0.sync_object_full.arrive(x0.index, None)
        cute.copy(copies.x0[0], source, to[None, x0.index], tma_bar_ptr=pipes.x0.producer_get_barrier(x0))
        if const_expr(not self.config.streams_one):
            v0, v1 = (copy[1][None, None, kv_head, entry] for copy in (copies.y0, copies.y1))
            self.part_loaded(copies.y0, smem.y0, self.part_of(v0, 2, n), pipes.y0, y0)
            self.part_loaded(copies.y1, smem.y1, self.part_of(v1, 3, n), pipes.y1, y1)
        # the stage of the last part is free last: dS is multiplied by it
        self.part_loaded(copies.x1, smem.x1, self.part_of(k1, 1, n), pipes.x1, x1)

    def deltas_held(self, positions: Any) -> int:
        return cute.size(positions, mode=[0])

    @cute.jit
    def begun(self, block, facts, positions, statistic, is_first: cutlass.Constexpr):
        """Reads the statistic of a thread's rows: lse for the first warp group, delta for the second."""
        source = block.statistics[0 if const_expr(is_first) else 1]
        for r in cutlass.range_constexpr(cute.size(positions, mode=[0])):
            statistic[r] = source[facts.entry, facts.head, facts.m_block, positions[r, 0][0]]

    def deltas(self, delta: Any, block: Any, positions: Any, state: Any) -> None:
        """They are those of the rows that are kept."""

    @cute.jit
    def factors(self, scores, positions, lse, block, state, facts):
        """Replaces products by P, times the score mod's derivative if the config's mod has one."""
        n, asks, is_masked = (block.board[1][i, state.index] for i in range(3))
        s, captured, slopes = rows_and_columns(scores), block.captured, None
        if const_expr(self.config.score is None):
            for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
                for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                    s[r, c] = s[r, c] * block.scales[1]
        else:
            slopes = self._modified(s, positions, n, facts, block)
        if const_expr(len(self.config.always) > 0):
            self.masked(scores, positions, n, facts, captured, self.row_limits(positions, facts, captured), asks, True)
        else:
            if is_masked != 0:
                self.masked(scores, positions, n, facts, captured, self.row_limits(positions, facts, captured), asks, True)
        for r in cutlass.range_constexpr(cute.size(s, mode=[0])):
            for c in cutlass.range_constexpr(cute.size(s, mode=[1])):
                p = cute.math.exp2(s[r, c] - lse[r], fastmath=True)
                if const_expr(slopes is not None):
                    # if the probability is 0, the derivative may be inf or NaN
                    p = select(p == 0.0, Float32(0.0), p * slopes[r, c], "float")
                s[r, c] = p

    def _modified(self, s: Any, positions: Any, n: Any, facts: Any, block: Any) -> Any:
        """Replaces products by the mod's values, in base 2. Returns the derivatives, None if all are 1."""
        slopes, are_ones = cute.make_rmem_tensor((cute.size(s, mode=[0]), cute.size(s, mode=[1])), Float32), [True]

        def read(r: int, c: int) -> Any:
            return s[r, c] * block.scales[0]

        def store(r: int, c: int, value: Any, derivative: Any) -> None:
            s[r, c] = Float32(value) * Float32(LOG2E)
            if not (isinstance(derivative, (int, float)) and derivative == 1.0):
                slopes[r, c], are_ones[0] = Float32(derivative), False

        emit(self.config.score, *self.captured(block.captured, 0), self._places(positions, n, facts, True), read, store)
        return None if are_ones[0] else slopes

    def differences(self, p: Any, dp: Any, delta: Any) -> None:
        """Replaces dP by dS, given P times the derivative."""
        p, dp = rows_and_columns(p), rows_and_columns(dp)
        for r in range(cute.size(p, mode=[0])):
            for c in range(cute.size(p, mode=[1])):
                dp[r, c] = p[r, c] * (dp[r, c] - delta[r])
