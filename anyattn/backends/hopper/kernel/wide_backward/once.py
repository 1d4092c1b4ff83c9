"""MMA roles of dv: one warp group computes P^T and passes it on in 16 bits; each multiplies it by half of dO's columns.

The first group's product with dO of a tile is issued before the next tile's scores; meanwhile the second group multiplies. Source of the
division: ``kernel.wide.mma``, whose rows are queries.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.kernel.fragment import narrowed
from anyattn.backends.hopper.kernel.wide_backward.base import BOTH, PASSED, RETURNED, Roles
from anyattn.backends.hopper.wide_backward_config import HALF

__all__ = ["MultipliesOnce"]


class MultipliesOnce(Roles):
    """The MMA roles of ``HopperValueGradient``."""

    visit_at: Any
    of_rows: Any
    factors_of: Any

    def _own(self, mma: Any, part: Any) -> Any:
        return mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(self.transposed(part)))

    @cute.jit
    def multiply_first(self, thread, mmas, block):
        """The first warp group's role: scores, and the gradient's first 256 columns."""
        to_scores, to_own = mmas
        pipes, smem, tiles = block.pipes, block.smem, self.config.tiles
        consumer = pipeline.PipelineUserType.Consumer
        of_scores = to_scores.get_slice(0)
        kept = (self.held(), of_scores.make_fragment_A(of_scores.partition_A(smem.kept))[None, None, None, 0])
        x = tuple(of_scores.make_fragment_B(of_scores.partition_B(part)) for part in (smem.x0, smem.x1))
        own, positions = self._own(to_own, smem.y0), self.positions(to_scores, thread)
        scores = cute.make_rmem_tensor(self.shape_of(to_scores, thread, tiles.streamed), Float32)
        p = narrowed(scores, self.dtype)
        acc = cute.make_rmem_tensor(self.shape_of(to_own, thread, HALF), Float32)
        x0, x1, y0 = (pipeline.make_pipeline_state(consumer, tiles.stages[i]) for i in range(3))
        kept_state, work_state = pipeline.make_pipeline_state(consumer, 1), pipeline.make_pipeline_state(consumer, 2)
        more = Int32(1)
        while more != 0:
            block.work_pipe.consumer_wait(work_state)
            facts = self.facts_of(block.board[0], work_state)
            more = facts.more
            if more != 0:
                acc.fill(0.0)
                if facts.total > 0:
                    pipes.kept.consumer_wait(kept_state)
                    self.hold(kept[0], smem.kept, thread)
                    self._scores(to_scores, scores, kept, x, pipes, (x0, x1))
                    warpgroup.wait_group(0)
                    self._given(block, p, scores, positions, (x0, x1), facts, thread)
                    x0.advance()
                    x1.advance()
                    for _ in cutlass.range(facts.total - 1, unroll=1):
                        pipes.y0.consumer_wait(y0)
                        self.multiplied(to_own, acc, p, own[None, None, None, y0.index])
                        self._scores(to_scores, scores, kept, x, pipes, (x0, x1))
                        warpgroup.wait_group(2)
                        pipes.y0.consumer_release(y0)
                        warpgroup.wait_group(0)
                        self._given(block, p, scores, positions, (x0, x1), facts, thread)
                        x0.advance()
                        x1.advance()
                        y0.advance()
                    pipes.kept.consumer_release(kept_state)
                    kept_state.advance()
                    pipes.y0.consumer_wait(y0)
                    self.multiplied(to_own, acc, p, own[None, None, None, y0.index])
                    warpgroup.wait_group(0)
                    pipes.y0.consumer_release(y0)
                    y0.advance()
                target, rows = self.rows_of(block, self.facts_of(block.board[0], work_state))
                self.stored(acc, to_own, thread, HALF, 0, target, rows)
            block.work_pipe.consumer_release(work_state)
            work_state.advance()

    def _scores(self, mma: Any, scores: Any, kept: Any, x: Any, pipes: Any, states: Any) -> None:
        """Issues the product S^T of the next tile."""
        pipes.x0.consumer_wait(states[0])
        self.scored(mma, scores, kept, x[0][None, None, None, states[0].index], 0)
        pipes.x1.consumer_wait(states[1])
        self.scored(mma, scores, kept, x[1][None, None, None, states[1].index], HALF // 16)

    def _given(self, block: Any, p: Any, scores: Any, positions: Any, states: Any, facts: Any, thread: Any) -> None:
        """Replaces finished scores by P^T and passes it on. Its statistics lie beside the tile, which is free when they are read."""
        lse, visit = self.of_rows(block.statistics[0][None, states[0].index], positions), self.visit_at(block, states[0])
        self.read()
        block.pipes.x0.consumer_release(states[0])
        block.pipes.x1.consumer_release(states[1])
        self.factors_of(scores, positions, lse, (visit, facts), block)
        p.store(narrowed(scores, self.dtype).load())
        cute.arch.barrier(barrier_id=RETURNED, number_of_threads=BOTH)
        self.given(cute.recast_tensor(p, Int32), block.passed[1], thread)
        cute.arch.barrier_arrive(barrier_id=PASSED, number_of_threads=BOTH)

    @cute.jit
    def multiply_second(self, thread, mmas, block):
        """The second warp group's role: the gradient's other columns."""
        to_scores, to_own = mmas
        pipes, tiles = block.pipes, self.config.tiles
        own = self._own(to_own, block.smem.y1)
        p = narrowed(cute.make_rmem_tensor(self.shape_of(to_scores, thread, tiles.streamed), Float32), self.dtype)
        acc = cute.make_rmem_tensor(self.shape_of(to_own, thread, HALF), Float32)
        consumer = pipeline.PipelineUserType.Consumer
        y1, work_state = pipeline.make_pipeline_state(consumer, tiles.stages[3]), pipeline.make_pipeline_state(consumer, 2)
        more = Int32(1)
        cute.arch.barrier_arrive(barrier_id=RETURNED, number_of_threads=BOTH)
        while more != 0:
            block.work_pipe.consumer_wait(work_state)
            facts = self.facts_of(block.board[0], work_state)
            more = facts.more
            if more != 0:
                acc.fill(0.0)
                for _ in cutlass.range(facts.total, unroll=1):
                    cute.arch.barrier(barrier_id=PASSED, number_of_threads=BOTH)
                    self.taken(cute.recast_tensor(p, Int32), block.passed[1], thread)
                    cute.arch.barrier_arrive(barrier_id=RETURNED, number_of_threads=BOTH)
                    pipes.y1.consumer_wait(y1)
                    self.multiplied(to_own, acc, p, own[None, None, None, y1.index])
                    warpgroup.wait_group(0)
                    pipes.y1.consumer_release(y1)
                    y1.advance()
                target, rows = self.rows_of(block, self.facts_of(block.board[0], work_state))
                self.stored(acc, to_own, thread, HALF, HALF, target, rows)
            block.work_pipe.consumer_release(work_state)
            work_state.advance()
