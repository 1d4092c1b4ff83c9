"""Backward producer role: one warp that schedules key tiles and loads, by TMA, each tile of K and V and the row tiles of Q and dO."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.backward.scheduler import VISIT_FACTS, KeyFacts
from anyattn.backends.hopper.kernel.bulk_copy import load_bytes
from anyattn.backends.hopper.kernel.producer import Loads

__all__ = ["LoadsRows"]


class LoadsRows:
    """The producer role of ``HopperBackward``."""

    config: Any

    _drawn, _left, _post, _partition = Loads._drawn, Loads._left, Loads._post, Loads._partition

    @cute.jit
    def load(self, copies, in_smem, statistics, statistics_in_smem, pipes, board, tables, counter, lengths, sizes, captured):
        """copies: (atom, tensor) of q, dout, k, v. statistics: lse and delta. board: (key tiles, visits, places) in shared memory."""
        producer = pipeline.PipelineUserType.Producer
        tiles = self.config.tiles
        q_state, do_state, key_state, work_state = (
            pipeline.make_pipeline_state(producer, n) for n in (tiles.q_stages, tiles.do_stages, 1, 2)
        )
        workers, _, _ = cute.arch.grid_dim()
        sizes = self.counted_keys(tables, sizes)
        total = sizes.rows * sizes.spread
        work = self._first_drawn(counter)
        while work < total:
            n_block, kv_head, entry = self.key_tile(work, tables, sizes)
            seqlens, keys_place, rows_place = self.placed(entry, lengths, tables)
            if const_expr(self.config.folds_keys):
                key_tiles = self.key_tiles(seqlens[1])
                n_block = self.folded(n_block, key_tiles, key_tiles, sizes)
            visits, of_each = Int32(0), Int32(0)  # of_each: of each head, 0 if heads differ
            for which in cutlass.range(sizes.ratio, unroll=1):
                of_head, _ = self.plan_of(n_block, kv_head * sizes.ratio + which, entry, seqlens, tables, captured, sizes)
                of_each = select((which == 0) | (of_each == of_head), of_head, Int32(0), "int")
                visits += of_head
            facts = KeyFacts(Int32(1), n_block, kv_head, entry, visits, *seqlens)
            begins_last = self.begins_last(work, sizes, workers) if const_expr(self.config.interleaves_heads) else Int32(0)
            posted = self.posted(keys_place, facts, of_each, (sizes.ratio, begins_last))
            self._post(board[0], pipes[4], work_state, (*facts, *posted))
            work_state.advance()
            own_head = kv_head // sizes.parts if const_expr(self.config.stores_float32) else kv_head
            place, waits_for_keys = (n_block, own_head, keys_place), Int32(1)
            # interleaved heads have the same plan, and one loop over all visits
            for which in cutlass.range(1 if const_expr(self.config.interleaves_heads) else sizes.ratio, unroll=1):
                head = kv_head * sizes.ratio + which
                of_head, plan = self.plan_of(n_block, head, entry, seqlens, tables, captured, sizes)
                for i in cutlass.range(visits if const_expr(self.config.interleaves_heads) else of_head, unroll=1):
                    at = i
                    if const_expr(self.config.interleaves_heads):
                        of_group, at = self.interleaved(i, of_head, sizes.ratio, begins_last)
                        head = kv_head * sizes.ratio + of_group
                    visit = self.visit_of(at, n_block, head, seqlens, plan)
                    where = (rows_place, self.tile_at(visit.m_block, keys_place))
                    of_q, of_do = (where, visit, q_state), (where, visit, do_state)
                    words: tuple[Any, ...] = ()
                    if const_expr(self.config.has_dropout):
                        words = self.words_of_visit(visit, entry, captured)
                    posting = (board[1], words)
                    self._rows(copies[0], in_smem[0], statistics[0], statistics_in_smem[0], self.config.head_dim, pipes[0], of_q, posting)
                    self._rows(copies[1], in_smem[1], statistics[1], statistics_in_smem[1], self.config.head_dim_v, pipes[1], of_do, None)
                    q_state.advance()
                    do_state.advance()
                    if waits_for_keys != 0:  # the first row tile is loaded before K and V: its stages are free earlier than theirs
                        self._k_and_v(copies, in_smem, pipes, key_state, place)
                        waits_for_keys = Int32(0)
            if waits_for_keys != 0:  # no row tile sees the keys
                self._k_and_v(copies, in_smem, pipes, key_state, place)
            key_state.advance()
            # drawn as late as possible: a key tile that is drawn early waits for this one while other blocks run out of work
            work = self._next_drawn(counter, total, workers)
        self._post(board[0], pipes[4], work_state, KeyFacts(*(Int32(0) for _ in KeyFacts._fields)))
        work_state.advance()
        self._left(counter, workers + 1 if const_expr(self.config.is_deterministic) else total, workers)
        # if the block ended while its copies are still read, their shared memory would go to another block
        for pipe, state in zip(pipes, (q_state, do_state, key_state, key_state, work_state), strict=True):
            pipe.producer_tail(state.clone())

    @cute.jit
    def _first_drawn(self, counter):
        """A block's first key tile. With deterministic sums key tiles wait for earlier ones, so the first tiles are drawn from the counter
        too: no tile then belongs to a block that has not started because other blocks occupy its multiprocessor."""
        if const_expr(self.config.is_deterministic):
            return self._next_drawn(counter, Int32(1), Int32(0))
        return cute.arch.block_idx()[0]

    @cute.jit
    def _next_drawn(self, counter, total, workers):
        """A block's next key tile."""
        return self._drawn(counter, total, Int32(0) if const_expr(self.config.is_deterministic) else workers)

    @cute.jit
    def _k_and_v(self, copies, in_smem, pipes, state, place):
        self._keys(copies[2], in_smem[2], self.config.head_dim, pipes[2], state, place)
        self._keys(copies[3], in_smem[3], self.config.head_dim_v, pipes[3], state, place)

    @cute.jit
    def _keys(self, copy, in_smem, head_dim: cutlass.Constexpr, pipe, state, place):
        """Loads a tile of K or V; keys past the tensor's last one are zeros."""
        atom, tensor = copy
        n_block, head, where = place
        source = cute.local_tile(self.rows_at(tensor, head, where), (self.config.tiles.tile_n, head_dim), (n_block, 0))
        source, target = self._partition(atom, in_smem, source)
        pipe.producer_acquire(state)
        cute.copy(atom, source, target[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))

    @cute.jit
    def _rows(self, copy, in_smem, statistic, statistic_in_smem, head_dim: cutlass.Constexpr, pipe, place, posting):
        """Loads a row tile of Q or dO with its statistic. posting: None, or (board, words): the visit and the words are posted on the board
        before the stage's full barrier is signalled."""
        atom, tensor = copy
        (where, (entry, slot)), visit, state = place
        head = visit.head
        tile_m = self.config.tiles.tile_m
        source = cute.local_tile(self.rows_at(tensor, head, where), (tile_m, head_dim), (visit.m_block, 0))
        source, target = self._partition(atom, in_smem, source)
        pipe.sync_object_empty.wait(state.index, state.phase)
        if const_expr(posting is not None):
            board, words = posting
            for i in cutlass.range_constexpr(len(visit)):
                if const_expr(visit[i] is not None):
                    board[i, state.index] = visit[i]
            for i in cutlass.range_constexpr(len(words)):
                board[VISIT_FACTS + i, state.index] = words[i]
        pipe.sync_object_full.arrive(state.index, None)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(atom, source, target[None, state.index], tma_bar_ptr=barrier)
        with cute.arch.elect_one():
            load_bytes(statistic_in_smem[None, state.index].iterator, statistic[entry, head, slot, None].iterator, 4 * tile_m, barrier)
