"""MMA roles of dq and dk: one warp group computes scores, the other their gradients' other factor dP, and both multiply dS.

For each streamed tile the first group computes P, times the score mod's derivative, and passes it on in float32; the second multiplies it
by dP - delta and passes dS back in 16 bits, each thread to the thread of its own number: both groups' fragments are alike. The answer uses
the memory that it answers to. While the second group computes dS, the first one's next product of scores has begun.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warpgroup

from anyattn.backends.hopper.kernel.fragment import narrowed
from anyattn.backends.hopper.kernel.wide_backward.base import BOTH, PASSED, RETURNED, Roles
from anyattn.backends.hopper.wide_backward_config import HALF

__all__ = ["MultipliesTwice"]


class MultipliesTwice(Roles):
    """The MMA roles of ``HopperQueryGradient`` and ``HopperKeyGradient``."""

    differences: Any  # replaces dP by dS, given P times the derivative
    begun: Any  # reads the lse or the delta of kept rows, if these are queries
    deltas: Any  # reads the delta of streamed rows, if these are queries
    deltas_held: Any  # how many of them a thread has

    @cute.jit
    def multiply_first(self, thread, mmas, block):
        """The first warp group's role: scores, and the gradient's first 256 columns."""
        to_scores, to_own = mmas[0], mmas[1]
        pipes, smem, tiles = block.pipes, block.smem, self.config.tiles
        consumer = pipeline.PipelineUserType.Consumer
        of_scores, of_own = to_scores.get_slice(0), to_own.get_slice(0)
        kept = (self.held(), of_scores.make_fragment_A(of_scores.partition_A(smem.kept))[None, None, None, 0])
        x0, x1 = (of_scores.make_fragment_B(of_scores.partition_B(x)) for x in (smem.x0, smem.x1))
        own = of_own.make_fragment_B(of_own.partition_B(self.transposed(smem.x0)))
        positions = self.positions(to_scores, thread)
        scores = cute.make_rmem_tensor(self.shape_of(to_scores, thread, tiles.streamed), Float32)
        lse = cute.make_rmem_tensor(self.deltas_held(positions), Float32)
        ds = narrowed(scores, self.dtype)
        acc = cute.make_rmem_tensor(self.shape_of(to_own, thread, HALF), Float32)
        ahead, behind = (pipeline.make_pipeline_state(consumer, tiles.stages[0]) for _ in range(2))
        rest = pipeline.make_pipeline_state(consumer, tiles.stages[1])
        kept_state, work_state = pipeline.make_pipeline_state(consumer, 1), pipeline.make_pipeline_state(consumer, 2)
        more, half = Int32(1), HALF // 16
        while more != 0:
            block.work_pipe.consumer_wait(work_state)
            facts = self.facts_of(block.board[0], work_state)
            more = facts.more
            if more != 0:
                acc.fill(0.0)
                if facts.total > 0:
                    self.begun(block, facts, positions, lse, True)
                    pipes.kept.consumer_wait(kept_state)
                    self.hold(kept[0], smem.kept, thread)
                    pipes.x0.consumer_wait(ahead)
                    self.scored(to_scores, scores, kept, x0[None, None, None, ahead.index], 0)
                    pipes.x1.consumer_wait(rest)
                    self.scored(to_scores, scores, kept, x1[None, None, None, rest.index], half)
                    warpgroup.wait_group(0)
                    pipes.x1.consumer_release(rest)
                    self._factors_given(block, scores, positions, lse, ahead, facts, thread)
                    ahead.advance()
                    rest.advance()
                    for _ in cutlass.range(facts.total - 1, unroll=1):
                        pipes.x0.consumer_wait(ahead)
                        self.scored(to_scores, scores, kept, x0[None, None, None, ahead.index], 0)
                        self._gradients_taken(block, ds, thread)
                        self.multiplied(to_own, acc, ds, own[None, None, None, behind.index])
                        pipes.x1.consumer_wait(rest)
                        self.scored(to_scores, scores, kept, x1[None, None, None, rest.index], half)
                        warpgroup.wait_group(1)
                        pipes.x0.consumer_release(behind)
                        warpgroup.wait_group(0)
                        pipes.x1.consumer_release(rest)
                        self._factors_given(block, scores, positions, lse, ahead, facts, thread)
                        ahead.advance()
                        behind.advance()
                        rest.advance()
                    pipes.kept.consumer_release(kept_state)
                    kept_state.advance()
                    self._gradients_taken(block, ds, thread)
                    self.multiplied(to_own, acc, ds, own[None, None, None, behind.index])
                    warpgroup.wait_group(0)
                    pipes.x0.consumer_release(behind)
                    behind.advance()
                    acc.store(acc.load() * block.scales[0])
                target, rows = self.rows_of(block, self.facts_of(block.board[0], work_state))
                self.stored(acc, to_own, thread, HALF, 0, target, rows)
            block.work_pipe.consumer_release(work_state)
            work_state.advance()

    @cute.jit
    def multiply_second(self, thread, mmas, block):
        """The second warp group's role: dP, dS, and the gradient's columns from 256 on."""
        to_scores, past = mmas[0], self.config.head_dim - 2 * HALF
        pipes, smem, tiles = block.pipes, block.smem, self.config.tiles
        consumer = pipeline.PipelineUserType.Consumer
        of_scores = to_scores.get_slice(0)
        kept = (self.held(), of_scores.make_fragment_A(of_scores.partition_A(smem.also_kept))[None, None, None, 0])
        y1 = smem.y1
        if const_expr(self.config.streams_one):
            y1 = cute.local_tile(smem.x1, (tiles.streamed, HALF), (0, 0, None))
        y = tuple(of_scores.make_fragment_B(of_scores.partition_B(part)) for part in (smem.y0, y1))
        positions = self.positions(to_scores, thread)
        dp, p = (cute.make_rmem_tensor(self.shape_of(to_scores, thread, tiles.streamed), Float32) for _ in range(2))
        delta = cute.make_rmem_tensor(self.deltas_held(positions), Float32)
        ds = narrowed(dp, self.dtype)
        widths = (HALF, past) if const_expr(past > 0) else (HALF,)
        sums = tuple(cute.make_rmem_tensor(self.shape_of(mma, thread, n), Float32) for mma, n in zip(mmas[1:], widths, strict=True))
        own = self._operands(mmas[1:], widths, self.transposed(smem.x1))
        x1, y0_state, y1_state = (pipeline.make_pipeline_state(consumer, tiles.stages[i]) for i in (1, 2, 3))
        kept_state, work_state = pipeline.make_pipeline_state(consumer, 1), pipeline.make_pipeline_state(consumer, 2)
        kept_pipe = pipes.kept if const_expr(self.config.keeps_one) else pipes.also_kept
        more = Int32(1)
        while more != 0:
            block.work_pipe.consumer_wait(work_state)
            facts = self.facts_of(block.board[0], work_state)
            more = facts.more
            if more != 0:
                for acc in sums:
                    acc.fill(0.0)
                if facts.total > 0:
                    self.begun(block, facts, positions, delta, False)
                    kept_pipe.consumer_wait(kept_state)
                    self.hold(kept[0], smem.also_kept, thread)
                    self._second_scores(to_scores, dp, kept, y, pipes, (y0_state, y1_state))
                    warpgroup.wait_group(0)
                    self.deltas(delta, block, positions, y0_state)
                    self._second_read(pipes, (y0_state, y1_state))
                    y0_state.advance()
                    y1_state.advance()
                    for _ in cutlass.range(facts.total - 1, unroll=1):
                        self._gradients_given(block, p, dp, ds, delta, thread)
                        pipes.x1.consumer_wait(x1)
                        self._own(mmas[1:], sums, ds, own, x1)
                        self._second_scores(to_scores, dp, kept, y, pipes, (y0_state, y1_state))
                        warpgroup.wait_group(2)
                        pipes.x1.consumer_release(x1)
                        warpgroup.wait_group(0)
                        self.deltas(delta, block, positions, y0_state)
                        self._second_read(pipes, (y0_state, y1_state))
                        x1.advance()
                        y0_state.advance()
                        y1_state.advance()
                    kept_pipe.consumer_release(kept_state)
                    kept_state.advance()
                    self._gradients_given(block, p, dp, ds, delta, thread)
                    pipes.x1.consumer_wait(x1)
                    self._own(mmas[1:], sums, ds, own, x1)
                    warpgroup.wait_group(0)
                    pipes.x1.consumer_release(x1)
                    x1.advance()
                    for acc in sums:
                        acc.store(acc.load() * block.scales[0])
                target, rows = self.rows_of(block, self.facts_of(block.board[0], work_state))
                for i, (acc, mma, width) in enumerate(zip(sums, mmas[1:], widths, strict=True)):
                    self.stored(acc, mma, thread, width, HALF * (i + 1), target, rows)
            block.work_pipe.consumer_release(work_state)
            work_state.advance()

    def _operands(self, mmas: Any, widths: Any, whole: Any) -> Any:
        """The columns of the streamed tile's second part that the gradient's columns come from: the first 256, then the others."""
        found = []
        for mma, width, at in zip(mmas, widths, (0, HALF // widths[-1]), strict=False):
            part = cute.local_tile(whole, (width, self.config.tiles.streamed), (at, 0, None))
            found.append(mma.get_slice(0).make_fragment_B(mma.get_slice(0).partition_B(part)))
        return tuple(found)

    def _own(self, mmas: Any, sums: Any, ds: Any, own: Any, x1: Any) -> None:
        for mma, acc, part in zip(mmas, sums, own, strict=True):
            self.multiplied(mma, acc, ds, part[None, None, None, x1.index])

    def _second_scores(self, mma: Any, dp: Any, kept: Any, y: Any, pipes: Any, states: Any) -> None:
        """Issues the product dP of the next tile."""
        pipes.y0.consumer_wait(states[0])
        self.scored(mma, dp, kept, y[0][None, None, None, states[0].index], 0)
        pipes.y1.consumer_wait(states[1])
        self.scored(mma, dp, kept, y[1][None, None, None, states[1].index], HALF // 16)

    def _second_read(self, pipes: Any, states: Any) -> None:
        """Releases what dP has been multiplied from, but not what dS is still to be multiplied by."""
        pipes.y0.consumer_release(states[0])
        if not self.config.streams_one:
            pipes.y1.consumer_release(states[1])

    def _factors_given(self, block: Any, scores: Any, positions: Any, lse: Any, state: Any, facts: Any, thread: Any) -> None:
        """Replaces a finished tile of scores by P times the derivative, and passes it on. What was there before has been answered."""
        self.factors(scores, positions, lse, block, state, facts)
        self.given(scores, block.passed[0], thread)
        cute.arch.barrier_arrive(barrier_id=PASSED, number_of_threads=BOTH)

    def _gradients_given(self, block: Any, p: Any, dp: Any, ds: Any, delta: Any, thread: Any) -> None:
        """Answers with dS, in 16 bits, what the first warp group has passed on."""
        cute.arch.barrier(barrier_id=PASSED, number_of_threads=BOTH)
        self.taken(p, block.passed[0], thread)
        self.differences(p, dp, delta)
        ds.store(narrowed(dp, self.dtype).load())
        self.given(cute.recast_tensor(ds, Int32), block.passed[1], thread)
        cute.arch.barrier_arrive(barrier_id=RETURNED, number_of_threads=BOTH)

    def _gradients_taken(self, block: Any, ds: Any, thread: Any) -> None:
        cute.arch.barrier(barrier_id=RETURNED, number_of_threads=BOTH)
        self.taken(cute.recast_tensor(ds, Int32), block.passed[1], thread)
