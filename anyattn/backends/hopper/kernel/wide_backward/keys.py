"""``HopperKeyGradient`` and ``HopperValueGradient``: dk and dv of wide heads; a thread block keeps 64 keys and streams the rows that see
them, head after head of those that share the keys."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline

from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.codegen.emit import emit, select
from anyattn.backends.hopper.kernel.backward.producer import LoadsRows
from anyattn.backends.hopper.kernel.backward.scheduler import KeyFacts, KeySizes, KeyTables, Visit, VisitsRows
from anyattn.backends.hopper.kernel.backward.scores import Scores
from anyattn.backends.hopper.kernel.base import rows_first
from anyattn.backends.hopper.kernel.bulk_copy import load_bytes
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.backends.hopper.kernel.wide_backward.base import WideGradient
from anyattn.backends.hopper.kernel.wide_backward.once import MultipliesOnce
from anyattn.backends.hopper.kernel.wide_backward.twice import MultipliesTwice

__all__ = ["HopperKeyGradient", "HopperValueGradient"]


class _OfKeys(VisitsRows, Scores, WideGradient):
    """The common part of the two kernels: the loading role, and the pointwise part of S^T."""

    _drawn, _left = LoadsRows._drawn, LoadsRows._left

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
        """q, dout: (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D), strides multiples of 16 bytes, the last 1; v is None for dv, and where it is
        the first columns of k. target: dk or dv, as k and v, or (B, Hkv * parts, Sk, D) float32: each head's parts, one after another.

        lse, delta: (B, Hq, M, tile_m) float32: see ``HopperBackward``. partial_count to order: see ``backward.scheduler.KeyTables``. The
        other arguments are those of ``HopperBackward``.
        """
        lengths, heads, k_heads, parts = (q.shape[2], k.shape[2]), q.shape[1], target.shape[1], None
        if const_expr(self.config.stores_float32):
            parts = target.shape[1] // k.shape[1]
        kept = (rows_first(k),) if const_expr(self.config.keeps_one) else (rows_first(k), rows_first(v))
        streamed, layouts = (rows_first(q), rows_first(dout)), self._layouts()
        sizes = (rows, spread, section, k_heads, heads // k_heads, parts)
        tables = (partial_count, partial_index, full_count, full_index, None, order, None)
        about = ((lse, delta), rows_first(target), (scale, scale_log2), tables, counter, lengths, sizes, (scalars, tensors))
        self.launched(kept, streamed, about, layouts, workers, stream)

    def facts_of(self, board: Any, state: Any) -> KeyFacts:
        return KeyFacts(*(board[i, state.index] for i in range(len(KeyFacts._fields))))

    def visit_at(self, block: Any, state: Any) -> Visit:
        """The visit of the stage of the first stream."""
        return Visit(*(block.board[1][i, state.index] for i in range(len(Visit._fields) - 1)))

    def read_slots(self, slots: Any) -> Any:
        """(visit, key tile): they are in registers already."""
        return slots

    def rows_of(self, block: Any, facts: Any) -> tuple[Any, tuple]:
        """(the gradient's rows in global memory, (the tile's first row, the end))."""
        return block.target[None, None, facts.kv_head, facts.entry], (facts.n_block * self.config.tiles.tile_n, facts.seqlen_k)

    @cute.jit
    def load(self, copies, block, statistics, tables, counter, lengths, sizes):
        """Draws key tiles, and loads each with the row tiles that see it."""
        producer, tiles = pipeline.PipelineUserType.Producer, self.config.tiles
        tables, sizes, pipes, smem, captured = KeyTables(*tables), KeySizes(*sizes), block.pipes, block.smem, block.captured
        x0, x1, y0, y1 = (pipeline.make_pipeline_state(producer, n) for n in tiles.stages)
        kept_state, work_state = pipeline.make_pipeline_state(producer, 1), pipeline.make_pipeline_state(producer, 2)
        workers, _, _ = cute.arch.grid_dim()
        total = sizes.rows * sizes.spread
        work = cute.arch.block_idx()[0]
        while work < total:
            n_block, kv_head, entry = self.key_tile(work, tables, sizes)
            visits, of_each = Int32(0), Int32(0)
            for which in cutlass.range(sizes.ratio, unroll=1):
                of_each, _ = self.plan_of(n_block, kv_head * sizes.ratio + which, entry, lengths, tables, captured, sizes)
                visits += of_each
            facts = KeyFacts(Int32(1), n_block, kv_head, entry, visits, *lengths)
            begins_last = self.begins_last(work, sizes, workers) if const_expr(self.config.interleaves_heads) else Int32(0)
            self._post(block.board[0], block.work_pipe, work_state, facts)
            work_state.advance()
            if visits > 0:
                own_head = kv_head // sizes.parts if const_expr(self.config.stores_float32) else kv_head
                keys = cute.local_tile(copies.kept[1][None, None, own_head, entry], (tiles.tile_n, self.config.head_dim), (n_block, 0))
                self.part_loaded(copies.kept, smem.kept, keys, pipes.kept, kept_state)
                if const_expr(not self.config.keeps_one):
                    values = copies.also_kept[1][None, None, own_head, entry]
                    values = cute.local_tile(values, (tiles.tile_n, self.config.head_dim_v), (n_block, 0))
                    self.part_loaded(copies.also_kept, smem.also_kept, values, pipes.also_kept, kept_state)
                kept_state.advance()
            # interleaved heads have the same plan, and one loop over all visits
            for which in cutlass.range(1 if const_expr(self.config.interleaves_heads) else sizes.ratio, unroll=1):
                head = kv_head * sizes.ratio + which
                of_head, plan = self.plan_of(n_block, head, entry, lengths, tables, captured, sizes)
                for i in cutlass.range(visits if const_expr(self.config.interleaves_heads) else of_head, unroll=1):
                    at = i
                    if const_expr(self.config.interleaves_heads):
                        of_group, at = self.interleaved(i, of_head, sizes.ratio, begins_last)
                        head = kv_head * sizes.ratio + of_group
                    visit = self.visit_of(at, n_block, head, lengths, plan)
                    self._rows_loaded(copies, block, statistics, entry, visit, (x0, x1, y0, y1))
                    x0.advance()
                    x1.advance()
                    y0.advance()
                    y1.advance()
            work = self._drawn(counter, total, workers)
        self._post(block.board[0], block.work_pipe, work_state, KeyFacts(*(Int32(0) for _ in KeyFacts._fields)))
        work_state.advance()
        self._left(counter, total, workers)
        # if the thread block ended earlier, another one could reuse memory that copies are still reading
        block.work_pipe.producer_tail(work_state.clone())
        for pipe, state in zip(pipes, (kept_state, kept_state, x0, x1, y0, y1), strict=True):
            if const_expr(pipe is not None):
                pipe.producer_tail(state.clone())

    @cute.jit
    def _rows_loaded(self, copies, block, statistics, entry, visit, states):
        """Loads the four parts of a row tile's Q and dO, with the visit and the rows' statistics beside the first parts."""
        pipes, smem, m, head = block.pipes, block.smem, visit.m_block, visit.head
        q, dout = copies.x0[1][None, None, head, entry], copies.y0[1][None, None, head, entry]
        lse, delta = (x[entry, head, m, None] for x in statistics)
        x0, x1, y0, y1 = states
        source, to = self._partition(copies.x0[0], smem.x0, self.part_of(q, 0, m))
        pipes.x0.sync_object_empty.wait(x0.index, x0.phase)
        for i in cutlass.range_constexpr(len(visit)):
            if const_expr(visit[i] is not None):
                block.board[1][i, x0.index] = visit[i]
        pipes.x0.sync_object_full.arrive(x0.index, None)
        barrier = pipes.x0.producer_get_barrier(x0)
        cute.copy(copies.x0[0], source, to[None, x0.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            load_bytes(block.statistics[0][None, x0.index].iterator, lse.iterator, 4 * self.config.tiles.tile_m, barrier)
        q1, dout1 = copies.x1[1][None, None, head, entry], copies.y1[1][None, None, head, entry]
        if const_expr(self.config.of == "dv"):
            self.part_loaded(copies.x1, smem.x1, self.part_of(q1, 1, m), pipes.x1, x1)
        self.part_loaded(copies.y0, smem.y0, self.part_of(dout, 2, m), pipes.y0, y0)
        if const_expr(self.config.of == "dk"):
            barrier = pipes.y0.producer_get_barrier(y0)
            with cute.arch.elect_one():
                load_bytes(block.statistics[1][None, y0.index].iterator, delta.iterator, 4 * self.config.tiles.tile_m, barrier)
        self.part_loaded(copies.y1, smem.y1, self.part_of(dout1, 3, m), pipes.y1, y1)
        if const_expr(self.config.of == "dk"):  # its stage is free last: dS is multiplied by it
            self.part_loaded(copies.x1, smem.x1, self.part_of(q1, 1, m), pipes.x1, x1)

    def factors_of(self, scores: Any, positions: Any, lse: Any, slots: Any, block: Any) -> None:
        """Replaces products by P, times the score mod's derivative if the config's mod has one. slots: (visit, key tile)."""
        if self.config.score is None:
            self.probabilities(scores, lse, block.scales[1])
        else:
            self._modified(rows_and_columns(scores), positions, lse, slots, block)
        self.hidden((scores,), positions, slots, block.captured)

    def _modified(self, s: Any, positions: Any, lse: Any, slots: Any, block: Any) -> None:
        visit, facts = slots

        def read(r: int, c: int) -> Any:  # the emitter's rows are query rows, and its columns are keys
            return s[c, r] * block.scales[0]

        def store(r: int, c: int, value: Any, derivative: Any = 1.0) -> None:
            p = cute.math.exp2(cute.math.fma(Float32(value), Float32(LOG2E), -lse[r]), fastmath=True)
            if not (isinstance(derivative, (int, float)) and derivative == 1.0):
                # if the probability is 0, the derivative may be inf or NaN
                p = select(p == 0.0, Float32(0.0), p * Float32(derivative), "float")
            s[c, r] = p

        emit(self.config.score, *self.captured(block.captured, 0), self._places(positions, visit, facts), read, store)


class HopperKeyGradient(MultipliesTwice, _OfKeys):
    """dk for one ``WideBackwardConfig``."""

    def deltas_held(self, positions: Any) -> int:
        return cute.size(positions, mode=[1])

    def begun(self, block: Any, facts: Any, positions: Any, statistic: Any, is_first: bool) -> None:
        """Statistics come with streamed rows."""

    def deltas(self, delta: Any, block: Any, positions: Any, state: Any) -> None:
        delta.store(self.of_rows(block.statistics[1][None, state.index], positions).load())
        self.read()

    def factors(self, scores: Any, positions: Any, lse: Any, block: Any, state: Any, facts: Any) -> None:
        lse = self.of_rows(block.statistics[0][None, state.index], positions)
        self.factors_of(scores, positions, lse, (self.visit_at(block, state), facts), block)

    def differences(self, p: Any, dp: Any, delta: Any) -> None:
        self.score_gradients(p, dp, delta)


class HopperValueGradient(MultipliesOnce, _OfKeys):
    """dv for one ``WideBackwardConfig``."""
