"""Backward MMA role (consumer warp groups): S^T, dP^T, then dV += P^T dO, dQ = dS K and dK += dS^T Q, row tile after row tile."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import warp, warpgroup

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.kernel.backward.adder import ADD_THREADS, END, FILLED, FREE
from anyattn.backends.hopper.kernel.backward.scheduler import KeyFacts, Visit
from anyattn.backends.hopper.kernel.backward.scores import Seen
from anyattn.backends.hopper.kernel.fragment import columns_of, narrowed, rows_and_columns
from anyattn.backends.hopper.kernel.mma import Multiplies
from anyattn.backends.hopper.kernel.operand import to_registers

__all__ = ["EXCHANGED", "MultipliesBack", "transposed"]

EXCHANGED = 4  # named barrier: all warp groups have written their keys' part of dS
_EMPTIED = 5  # named barrier if dS has one stage: all warp groups have read dS


class Exchange(NamedTuple):
    """Where a consumer thread puts dS, which all warp groups read, and its part of dQ.

    store: its copy to shared memory. ds: dS there. dq: the part of dQ there that an adding warp reads. dq_sums: the sums of dQ in global
    memory, or the gradient itself if no other key tile adds to it.
    """

    store: Any
    ds: Any
    dq: Any
    dq_sums: Any


class Consumer(NamedTuple):
    """What a consumer thread needs for every key tile.

    mmas: the tiled MMAs of S^T and dP^T, of dV, dK and dQ. operands: see ``MultipliesBack.operands``. shapes: a thread's parts of S^T and
    dQ. positions: of its scores in their tile. board: the key tile's facts, the visits', and the row tiles of the adding warps. statistics:
    lse and delta in shared memory.
    """

    mmas: tuple[Any, ...]
    operands: tuple[Any, ...]
    shapes: tuple[Any, ...]
    positions: Any
    pipes: tuple[Any, ...]
    board: tuple[Any, ...]
    group: Any
    thread: Any
    statistics: tuple[Any, ...]
    exchange: Exchange


class MultipliesBack:
    """The MMA role of ``HopperBackward``."""

    config: Any

    scores_from_registers: Any
    rows_stored: Any
    release_keys: Any

    _product = Multiplies._product

    @cute.jit
    def multiply(self, thread, mmas, in_smem, leaving, statistics, of_dq, pipes, board, keys, scales, captured):
        """Processes the key tiles that the producer posts on the board. in_smem: Q, dO, K, V and dS. leaving: dK and dV in shared memory.
        statistics: lse and delta in shared memory. of_dq: the part of dQ in shared memory; in global memory the sums of dQ, or dQ. keys:
        (copy atom, tensor) of dK and dV. scales: the softmax scale, and that times log2(e)."""
        tiles, d, dv = self.config.tiles, self.config.head_dim, self.config.head_dim_v
        to_scores, to_v, to_k, to_q = mmas
        group = cute.arch.make_warp_uniform(thread // 128)
        groups = cute.make_layout(tiles.warp_groups, stride=128)
        of_scores, of_v, of_k, of_q = (mma.get_slice(groups(group)) for mma in mmas)
        _, _, _, _, ds = in_smem
        operands = self.operands((of_scores, of_v, of_k, of_q), in_smem)
        mine, dq_shape = to_scores.get_slice(thread), (d, tiles.tile_m) if tiles.transposes_dq else (tiles.tile_m, d // tiles.dq_parts)
        positions = rows_and_columns(mine.partition_C(cute.make_identity_tensor((tiles.tile_n, tiles.tile_m))))
        shapes = (
            mine.partition_shape_C((tiles.tile_n, tiles.tile_m)),
            to_q.get_slice(thread).partition_shape_C(dq_shape),
        )
        dk = cute.make_rmem_tensor(to_k.get_slice(thread).partition_shape_C((tiles.tile_n, d)), Float32)
        dv_acc = cute.make_rmem_tensor(to_v.get_slice(thread).partition_shape_C((tiles.tile_n, dv)), Float32)
        store = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), to_scores).get_slice(thread)
        exchange = Exchange(store, ds, *of_dq)
        fixed = Consumer(mmas, operands, shapes, positions, pipes, board, group, thread, statistics, exchange)
        if const_expr(self.config.sums):
            self.begin_scratch(captured)
        self._key_tiles(fixed, (dk, dv_acc), in_smem, leaving, keys, scales, captured)

    def operands(self, slices: Any, in_smem: Any) -> tuple[Any, ...]:
        """The operands of S^T, dP^T, dV, dK and dQ that are in shared memory; K and V as (columns held in registers, all columns). slices:
        a warp group's slices of the tiled MMAs."""
        tiles, (of_scores, of_v, of_k, of_q) = self.config.tiles, slices
        q, dout, k, v, ds = in_smem
        ds_t, k_t = transposed(ds), transposed(k)
        if self.config.tiles.transposes_dq:
            of_dq = of_q.make_fragment_B(of_q.partition_B(ds_t)), of_q.make_fragment_A(of_q.partition_A(k_t))
        else:
            of_dq = of_q.make_fragment_A(of_q.partition_A(ds_t)), of_q.make_fragment_B(of_q.partition_B(k_t))
        return (
            (self._held(tiles.holds_k), of_scores.make_fragment_A(of_scores.partition_A(k))),
            of_scores.make_fragment_B(of_scores.partition_B(q)),
            (self._held(tiles.holds_v), of_scores.make_fragment_A(of_scores.partition_A(v))),
            of_scores.make_fragment_B(of_scores.partition_B(dout)),
            of_v.make_fragment_B(of_v.partition_B(transposed(dout))),
            of_k.make_fragment_B(of_k.partition_B(transposed(q))),
            *of_dq,
        )

    @cute.jit
    def _key_tiles(self, fixed, sums, in_smem, leaving, keys, scales, captured):
        """The loop over key tiles."""
        mmas, pipes, board, group, thread = fixed.mmas, fixed.pipes, fixed.board, fixed.group, fixed.thread
        consumer = pipeline.PipelineUserType.Consumer
        tiles = self.config.tiles
        q_state, do_state, key_state, work_state = (
            pipeline.make_pipeline_state(consumer, n) for n in (tiles.q_stages, tiles.do_stages, 1, 2)
        )
        more, stage = Int32(1), Int32(0)  # stage: of dS
        while more != 0:
            pipes[4].consumer_wait(work_state)
            facts = self._key_facts(board[0], work_state)
            more = facts.more
            if more != 0:
                sums[0].fill(0.0)
                sums[1].fill(0.0)
                pipes[2].consumer_wait(key_state)
                pipes[3].consumer_wait(key_state)
                if const_expr(self.config.has_entries):
                    self.keys_wiped(in_smem, facts, group, thread)
                self.await_dv_read()
                self.hold(fixed, in_smem)
                total, until = facts.total, Int32(0)  # until: the visits up to the next that may have rows past the last, itself included
                if const_expr(self.config.has_entries):
                    until = self.visits_to_wiping(board[0], work_state)
                    if const_expr(self.config.is_deterministic):  # begins with the last row tile
                        until = Int32(1)
                for i in cutlass.range(total, unroll=1):
                    if const_expr(self.config.has_entries):
                        until -= 1
                        if until == 0:
                            self.rows_wiped(in_smem, pipes, (q_state, do_state), (board, q_state, work_state), group, thread)
                            until = self.visits_to_wiping(board[0], work_state)
                            if const_expr(self.config.interleaves_heads):
                                if i + 1 >= self.visits_wiped(board[0], work_state):
                                    until = total  # more visits than are left
                    self._row_tile(fixed, sums, scales, captured, (q_state, do_state, work_state, key_state), stage, i + 1 == total)
                    q_state.advance()
                    do_state.advance()
                    stage = tiles.ds_stages - 1 - stage
                if const_expr(self.config.has_dropout):
                    sums[1].store(sums[1].load() * self.factor(captured))
                facts = self._key_facts(board[0], work_state)
                place = self.posted_place(board[0], work_state, facts)
                self.stored_keys(sums, mmas, leaving, keys, scales[0], (group, thread, board[2]), facts, place, (pipes, key_state))
                key_state.advance()
            pipes[4].consumer_release(work_state)
            work_state.advance()
        for after in cutlass.range_constexpr(self.config.adding_warps - 1, -1, -1):
            self._post_dq(fixed, None, after)

    def _held(self, columns: int) -> Any:
        """Registers for ``columns`` columns of K or V; None if columns is 0."""
        mma = self.scores_from_registers()
        return mma.make_fragment_A(mma.partition_shape_A((self.config.tiles.tile_n, columns))) if columns else None

    def hold(self, fixed: Any, in_smem: Any) -> None:
        """Reads the held columns of a new tile of K and V from shared memory to registers; dQ reads all of K from shared memory."""
        tiles, operands, thread = self.config.tiles, fixed.operands, fixed.thread
        for at, source, columns in ((0, in_smem[2], tiles.holds_k), (2, in_smem[3], tiles.holds_v)):
            if columns:
                part = cute.local_tile(source[None, None, 0], (tiles.tile_n, columns), (0, 0))
                to_registers(self.scores_from_registers(), operands[at][0], part, thread, self.dtype)

    def _scores(self, mma: Any, acc: Any, first: tuple[Any, Any], second: Any, columns: int, from_zero: bool) -> None:
        """Issues the product S^T or dP^T. first: its first operand as (held, in shared memory); ``columns`` columns are held."""
        held, whole = first
        self._product(mma, acc, whole[None, None, None, 0], second, from_zero, (self.scores_from_registers(), held, columns))

    @cute.jit
    def _both_begun(self, fixed, scores, dp, states):
        """Issues the products S^T and dP^T; ``BackwardTiles.delta`` says when delta is loaded."""
        q_state, do_state = states[0], states[1]
        mmas, operands, positions, pipes, statistics = fixed.mmas, fixed.operands, fixed.positions, fixed.pipes, fixed.statistics
        k, q, v, dout = operands[:4]
        tiles = self.config.tiles
        if const_expr(tiles.delta == "before"):
            pipes[1].consumer_wait(do_state)
            self.begin_dp(dp, self.of_rows(statistics[1][None, do_state.index], positions))
        pipes[0].consumer_wait(q_state)
        self._scores(mmas[0], scores, k, q[None, None, None, q_state.index], tiles.holds_k, True)
        if const_expr(tiles.delta != "before"):
            pipes[1].consumer_wait(do_state)
        if const_expr(tiles.delta == "between"):
            self.begin_dp(dp, self.of_rows(statistics[1][None, do_state.index], positions))
        self._scores(mmas[0], dp, v, dout[None, None, None, do_state.index], tiles.holds_v, tiles.delta == "behind")

    def _p_begun(self, fixed: Any, states: Any, slots: Any, scales: Any, captured: Any) -> tuple[Any, Any, tuple]:
        """Issues S^T and dP^T of a row tile. Returns (P, dP, ()) while dP may still be under way; with a score mod (P, dS, ``late_parts``).
        slots: see ``read_slots``."""
        q_state, do_state, _, _ = states
        positions, statistics, shape = fixed.positions, fixed.statistics, fixed.shapes[0]
        scores, dp = (cute.make_rmem_tensor(shape, Float32) for _ in range(2))
        self._both_begun(fixed, scores, dp, states)
        lse = self.of_rows(statistics[0][None, q_state.index], positions)
        if self.config.score is None:
            warpgroup.wait_group(1)
            self.probabilities(scores, lse, scales[1])
            self.hidden((scores,), positions, slots, captured)
            return scores, dp, ()
        delta = self.delta_behind(statistics, do_state, positions)
        warpgroup.wait_group(0)
        late = self.late_parts(shape)
        if self.config.sums_while_made:
            words = cute.make_rmem_tensor(ceil_div(cute.size(scores), 32), Int32)
            words.fill(-1)
            self.hidden((words,), positions, slots, captured)
            self.modified(scores, dp, lse, delta, positions, slots, scales[0], captured, self.late_views(late), Seen(words))
        else:
            self.modified(scores, dp, lse, delta, positions, slots, scales[0], captured, self.late_views(late))
            self.hidden((scores, dp, *late), positions, slots, captured)
        return scores, dp, late

    def _p_and_ds(self, fixed: Any, states: Any, slots: Any, scales: Any, captured: Any) -> tuple[Any, Any, tuple]:
        """(P, dS, ``late_parts``) of a row tile."""
        scores, dp, late = self._p_begun(fixed, states, slots, scales, captured)
        if self.config.score is None:
            delta = self.delta_behind(fixed.statistics, states[1], fixed.positions)
            warpgroup.wait_group(0)
            if self.config.has_dropout:
                self.drop_gradients(scores, dp, delta, fixed.positions, slots, captured)
            else:
                self.score_gradients(scores, dp, delta)
        return scores, dp, late

    def delta_behind(self, statistics: Any, do_state: Any, positions: Any) -> Any:
        """delta of a thread's rows if it is subtracted from the finished dP, else None."""
        if self.config.tiles.delta != "behind":
            return None
        return self.of_rows(statistics[1][None, do_state.index], positions)

    def read_slots(self, slots: Any) -> tuple[Visit, KeyFacts]:
        """The current visit and the current key tile, read from the board in shared memory. slots: (board, state of Q's pipeline, state of
        the work pipeline); the states select the board's current slots."""
        board, q_state, work_state = slots
        count = len(Visit._fields) - (not self.config.posts_turns)  # the last one is the turn
        return Visit(*(board[1][i, q_state.index] for i in range(count))), self._key_facts(board[0], work_state)

    def _place(self, slots: Any) -> tuple[Any, ...]:
        """(row tile, head, entry, turn) for an adding warp. If ``slots`` is a number, no work is left: (``END``, number of adding warps
        that are told later, 0, 0)."""
        if not isinstance(slots, tuple):
            return Int32(END), Int32(slots), Int32(0), Int32(0)
        visit, facts = self.read_slots(slots)
        turn = self.turn_of(facts.n_block, visit) if self.config.is_deterministic else Int32(0)
        entry, slot = self.tile_at(visit.m_block, self.posted_place(slots[0][0], slots[2], facts))
        return slot, visit.head, entry, turn

    def _key_facts(self, board: Any, state: Any) -> KeyFacts:
        return KeyFacts(*(board[i, state.index] for i in range(len(KeyFacts._fields))))

    @cute.jit
    def _row_tile(self, fixed, sums, scales, captured, states, stage, is_last):
        """Adds one row tile to dK and dV, and passes its part of dQ on. The visit and the key tile are read from the board
        where they are used instead of being kept in registers. is_last: no row tile of these keys follows."""
        q_state, do_state, work_state, key_state = states
        mmas, operands, shapes, positions, pipes, board, _, _, _, exchange = fixed
        _, _, _, _, dout_t, q_t, ds_in_smem, k_t = operands
        _, to_v, to_k, to_q = mmas
        dk, dv = sums
        tiles = self.config.tiles
        slots = (board, q_state, work_state)
        scores, dp, late = self._p_and_ds(fixed, states, slots, scales, captured)
        p, ds = narrowed(scores, self.dtype), narrowed(dp, self.dtype)
        if const_expr(tiles.ds_stages == 1):
            cute.arch.barrier(barrier_id=_EMPTIED, number_of_threads=128 * tiles.warp_groups)
        self._stored((exchange.store, exchange.ds[None, None, stage]), dp)
        self._product(to_v, dv, p, dout_t[None, None, None, do_state.index], False)
        if const_expr(self.config.sums):
            self.add_sums(dp, late, positions, slots, captured)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=128 * tiles.warp_groups)
        dq = cute.make_rmem_tensor(shapes[1], Float32)
        of_dq = ds_in_smem[None, None, None, stage], k_t[None, None, None, 0]
        self._product(to_q, dq, *(of_dq[::-1] if tiles.transposes_dq else of_dq), True)
        self._product(to_k, dk, ds, q_t[None, None, None, q_state.index], False)
        warpgroup.wait_group(1)
        pipes[1].consumer_release(do_state)
        if const_expr(self.config.frees_keys):  # dQ was the last product with K; the next keys are loaded while dK is finished and stored
            if is_last:
                self.release_keys(pipes, key_state)
        self._passed_on(fixed, dq, slots, scales[0])
        warpgroup.wait_group(0)
        pipes[0].consumer_release(q_state)

    @cute.jit
    def _passed_on(self, fixed, dq, slots, scale):
        """Hands a warp group's part of a row tile's dQ to an adding warp, or writes it to the gradient."""
        steps = self.config.tiles.dq_steps
        if const_expr(self.config.stores_dq):
            self._dq_stored(fixed, dq, slots, scale)
        else:
            for step in cutlass.range_constexpr(steps):
                self._post_dq(fixed, columns_of(dq, step, steps), slots)

    @cute.jit
    def _dq_stored(self, fixed, dq, slots, scale):
        """Writes a warp group's part of a row tile's dQ, to which no other key tile adds, to the gradient."""
        to_q, thread, target, tiles = fixed.mmas[3], fixed.thread, fixed.exchange.dq_sums, self.config.tiles
        visit, facts = self.read_slots(slots)
        dq.store(dq.load() * scale)
        own, columns = target[None, None, visit.head, facts.entry], cute.size(target, mode=[1])
        rows = (visit.m_block * tiles.tile_m, facts.seqlen_q)
        self.rows_stored(dq, to_q, (tiles.tile_m, self.config.head_dim), (own, columns), rows, thread)

    @cute.jit
    def _stored(self, place, ds):
        """Writes a warp group's keys of dS to shared memory, where all warp groups read them: dQ sums over all keys. place: (a thread's
        copy, the tile)."""
        store, target = place
        narrow = cute.make_rmem_tensor_like(ds, self.dtype)
        narrow.store(ds.load().to(self.dtype))
        cute.copy(store, store.retile(narrow), store.partition_D(target))

    @cute.jit
    def _post_dq(self, fixed, dq, slots):
        """Writes a warp group's part of dQ, or of dQ^T, to shared memory once the previous part has been read out, and posts its row tile;
        ``dq`` is None at the end, and ``slots`` the number of adding warps that are told later. A chunk is 4 numbers that are neighbours in
        registers: two columns of two rows, 8 apart (``backward.rows`` puts them in order)."""
        places, group, thread, in_smem = fixed.board[2], fixed.group, fixed.thread, fixed.exchange.dq
        cute.arch.barrier(barrier_id=FREE + group, number_of_threads=ADD_THREADS)
        if thread % 128 == 0:
            place = self._place(slots)
            for i in cutlass.range_constexpr(4):
                places[i, group] = place[i]
        if const_expr(dq is not None):
            chunk = cute.make_rmem_tensor(4, Float32)
            own = rows_and_columns(dq)
            for c in cutlass.range_constexpr(cute.size(own, mode=[1]) // 2):
                for i in cutlass.range_constexpr(4):
                    chunk[i] = own[i // 2, 2 * c + i % 2]
                cute.autovec_copy(chunk, in_smem[None, thread % 128, c, group])
            cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=FILLED + group, number_of_threads=ADD_THREADS)


def transposed(x: Any) -> Any:
    """A staged tile in shared memory with its columns first."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))
