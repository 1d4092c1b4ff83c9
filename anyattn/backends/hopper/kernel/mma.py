"""MMA role (consumer warp groups): S = Q K^T, softmax, O += P V, with the next tile's first product overlapping the exponentials."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr, pipeline
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.backends.hopper.kernel.epilogue import MEETING
from anyattn.backends.hopper.kernel.fragment import again, narrowed, narrowed_to, rows_and_columns
from anyattn.backends.hopper.kernel.tile_scheduler import Facts

__all__ = ["VOTE", "Multiplies", "all_of_group"]

_TURN = 1  # first of the named barriers by which warp groups take turns
VOTE = 9  # first of the named barriers, one per warp group, at which its warps vote
_THREADS = 512  # a power of 2, at least the number of consumer threads
_AT_ONCE = 8  # entries of V cleared per instruction: 16 bytes, contiguous in the swizzled layout


@dsl_user_op
def all_of_group(x: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """Whether ``x`` holds in all threads of a warp group; they meet at ``barrier``."""
    found = nvvm.barrier_cta_red(
        Boolean(x).ir_value(loc=loc, ip=ip),
        Int32(barrier).ir_value(loc=loc, ip=ip),
        nvvm.BarrierReduxKind.AND,
        thread_count=Int32(128).ir_value(loc=loc, ip=ip),
        aligned=True,
        results=[T.i32()],
        loc=loc,
        ip=ip,
    )
    return Int32(found) != 0


class _Stage(NamedTuple):
    """One of two pipeline stages by its index, without a pipeline state."""

    index: Any


class Multiplies:
    """The MMA role of ``HopperForward``."""

    config: Any
    holds_thread: bool
    multiplies_values_first = False  # a step starts with the second product of the tile before; else with its own first

    @cute.jit
    def multiply(self, thread, mmas, in_smem, pipes, board, outputs, sink, scale_log2, captured):
        """Processes the row tiles that the board lists, one after the other. outputs: (copy of out, out, lse, highest scores)."""
        tiles = self.config.tiles
        mma_qk, mma_pv = mmas
        group = cute.arch.make_warp_uniform(thread // 128)
        groups = cute.make_layout(tiles.warp_groups, stride=128)
        qk, pv = mma_qk.get_slice(groups(group)), mma_pv.get_slice(groups(group))
        operands = (
            qk.make_fragment_A(qk.partition_A(in_smem[0])),
            qk.make_fragment_B(qk.partition_B(in_smem[1])),
            pv.make_fragment_B(pv.partition_B(self.values_of(in_smem[2], 0))),
        )
        shape_s = mma_qk.get_slice(thread).partition_shape_C((tiles.tile_m, tiles.tile_n))
        acc = cute.make_rmem_tensor(mma_pv.get_slice(thread).partition_shape_C((tiles.tile_m, self.config.columns)), Float32)
        per_row = [cute.make_rmem_tensor(cute.size(rows_and_columns(acc), mode=[0]), Float32) for _ in range(3)]
        sums = (acc, *per_row, self.tops_of(acc))
        of_thread = (mmas, operands, shape_s, pipes, board, group, thread, in_smem)
        given = (scale_log2, self.rate(scale_log2, captured), captured)
        self._first_turn(group)
        self._row_tiles(of_thread, sums, given, outputs, sink)

    @cute.jit
    def _row_tiles(self, of_thread, sums, given, outputs, sink):
        """Row tile after row tile. If shared memory has two stages of Q, a row tile's stage is released while the next one is processed:
        its output may still be leaving from there."""
        mmas, operands, shape_s, pipes, board, group, thread, in_smem = of_thread
        q_state, k_state, v_state, work_state = self._states()
        p = narrowed(cute.make_rmem_tensor(shape_s, Float32), self.dtype)
        more, due = Int32(1), Int32(0)  # due: the previous row tile's stage of Q is still to be released
        while more != 0:
            pipes[3].consumer_wait(work_state)
            facts = self._facts(board[0], work_state)
            more = facts.more
            if facts.total > 0:
                pipes[0].consumer_wait(q_state)
                # with predicates in ``always`` ``_here`` recomputes positions; prefetches need them earlier
                is_held = self.foresees or len(self.config.always) > 0
                positions = self._positions(mmas[0], thread if const_expr(is_held) else self._again(thread))
                fixed = (mmas, operands, shape_s, positions, pipes, board, group, thread, in_smem)
                captured = given[2]
                if const_expr(self.config.has_dropout):
                    captured = (*captured, self.words_of_rows(positions, facts, captured))
                of_tile = (facts, *given[:2], captured, self.row_limits(positions, facts, captured))
                self._first(fixed, sums, p, of_tile, q_state, k_state, v_state)
                k_state.advance()
                if const_expr(self.config.q_stages > 1):
                    if due != 0:
                        self._give_back(pipes[0], _Stage(1 - q_state.index), thread)
                    due = Int32(1)
                k_state, v_state = self._steps(fixed, sums, p, of_tile, q_state, k_state, v_state)
                self._ended(fixed, sums, given, outputs, sink, q_state, work_state)
                if const_expr(self.config.q_stages == 1):
                    self._give_back(pipes[0], q_state, thread)
                q_state.advance()
            elif more != 0:
                self.blank(mmas[1], self._again(thread), outputs, sink, facts)
            pipes[3].consumer_release(work_state)
            work_state.advance()
        if const_expr(self.config.q_stages > 1):
            if due != 0:
                self._give_back(pipes[0], _Stage(1 - q_state.index), thread)

    def tops_of(self, acc: Any) -> Any:
        """Registers for the rows' highest scores; None if the call does not want them."""
        return cute.make_rmem_tensor(cute.size(rows_and_columns(acc), mode=[0]), Float32) if self.config.has_max else None

    def start_tops(self, tops: Any, positions: Any, facts: Any, captured: Any) -> None:
        """What ``tops`` holds before a row tile's first key tile."""
        tops.fill(-Float32.inf)

    def values_of(self, v: Any, group: int) -> Any:
        """The part of a tile of V, in shared memory, that a warp group multiplies: all columns."""
        return v

    def _states(self) -> tuple[Any, ...]:
        """The consumer's states in the pipelines of Q, K, V and row tiles."""
        stages = self.config.tiles.stages
        consumer = pipeline.PipelineUserType.Consumer
        return tuple(pipeline.make_pipeline_state(consumer, n) for n in (self.config.q_stages, stages, stages, 2))

    def _again(self, thread: Any) -> Any:
        """A consumer thread's number as a new value for the compiler, so that values derived from it, such as addresses of the epilogue,
        are computed where they are used and take no registers in the loop over key tiles. With ``holds_thread`` the number itself, because
        ptxas would then hoist other values out of the loop and spill them."""
        return thread if self.holds_thread else again(thread) & (_THREADS - 1)

    def _positions(self, mma: Any, thread: Any) -> Any:
        """The rows and columns of a thread's scores in their tile."""
        tile = cute.make_identity_tensor((self.config.tiles.tile_m, self.config.tiles.tile_n))
        return rows_and_columns(mma.get_slice(thread).partition_C(tile))

    def _here(self, fixed: tuple, given: tuple) -> tuple[Any, Any]:
        """(positions, row limits) for a key tile. With predicates in ``always``, perhaps evaluated beside a partial one, both are
        recomputed: these predicates need the registers that would hold them between tiles."""
        (mma_qk, _), _, _, held, _, _, _, thread, _ = fixed
        facts, _, _, captured, limits = given
        if not self.config.always:
            return held, limits
        positions = self._positions(mma_qk, self._again(thread))
        return positions, self.limits_again(limits, positions, facts, captured)

    def _facts(self, board: Any, state: Any) -> Facts:
        return Facts(*(board[i, state.index] for i in range(len(Facts._fields))))

    @cute.jit
    def _give_back(self, pipe, state, thread):
        """Releases Q's stage to the loader once O, which reuses its memory, has been read out of it."""
        if cute.arch.make_warp_uniform(self._again(thread) // 32) % 4 == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        pipe.consumer_release(state)

    @cute.jit
    def _first(self, fixed, sums, p, given, q_state, k_state, v_state):
        """The first product and softmax of a row tile; stores its probabilities in ``p``."""
        _, _, shape_s, positions, pipes, board, group, thread, in_smem = fixed
        acc, row_max, row_sum, row_scale, tops = sums
        facts, scale_log2, rate, captured, limits = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        acc.fill(0.0)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        if const_expr(tops is not None):
            self.start_tops(tops, positions, facts, captured)
        self._keys_awaited(pipes, k_state)
        visit = board[1][k_state.index]
        self._my_turn(group)
        self._scores(fixed, scores, q_state, k_state)
        self._next_turn(group)
        warpgroup.wait_group(0)
        self._keys_read(pipes, k_state)
        n = visit // 2
        lifts = self.modified(scores, None, positions, n, facts, scale_log2, captured, True)
        self.masked(scores, positions, n, facts, captured, limits, visit % 2, True)
        if const_expr(tops is not None):
            self.raise_tops(tops, scores, lifts)
        if const_expr(self.config.is_bounded):
            row_scale.fill(0.0)
            self.unshifted(scores, sums, rate, True)
        else:
            self.exponentials(scores, lifts, row_max, row_sum, row_scale, rate, True, True)
        self._store(p, scores, (captured[2], n, None) if self.config.has_dropout else None)
        if const_expr(self.config.has_entries):  # only the first tile may reach past a sequence's last key
            self._wiped(in_smem[2], pipes, v_state, facts.seqlen_k - n * self.config.tiles.tile_n, thread, group)
        self._stored(fixed, p, row_scale, None)

    @cute.jit
    def _steps(self, fixed, sums, p, given, q_state, k_state, v_state):
        """The key tiles of a row tile after its first: masked, bare and again masked ones."""
        pipes, facts = fixed[4], given[0]
        for _ in cutlass.range(facts.masked, unroll=1):
            self._step(fixed, sums, p, given, q_state, k_state, v_state, True)
            k_state.advance()
            v_state.advance()
        for _ in cutlass.range(facts.bare, unroll=1):
            self._step(fixed, sums, p, given, q_state, k_state, v_state, False)
            k_state.advance()
            v_state.advance()
        if const_expr(self.config.has_left):
            for _ in cutlass.range(facts.behind, unroll=1):
                self._step(fixed, sums, p, given, q_state, k_state, v_state, True)
                k_state.advance()
                v_state.advance()
        self._last(fixed, sums, p, v_state)
        pipes[2].consumer_release(v_state)
        v_state.advance()
        return k_state, v_state

    def _last(self, fixed: tuple, sums: tuple, p: Any, v_state: Any) -> None:
        """The second product of a row tile's last key tile."""
        self._second(fixed, sums[0], p, v_state)
        warpgroup.wait_group(0)

    def _second(self, fixed: tuple, acc: Any, p: Any, v_state: Any) -> None:
        """Starts the second product of the tile before, of which ``p`` holds the probabilities."""
        (_, mma_pv), (_, _, v), _, _, pipes, _, _, _, _ = fixed
        pipes[2].consumer_wait(v_state)
        self._product(mma_pv, acc, p, v[None, None, None, v_state.index], False)

    def _stored(self, fixed: tuple, p: Any, row_scale: Any, rescales: Any) -> None:
        """What follows once a tile's probabilities are in ``p``. rescales: whether ``acc`` was multiplied by ``row_scale``; None in a row
        tile's first tile."""

    def _scored(self, pipes: Any, k_state: Any, v_state: Any) -> None:
        """Waits for the scores."""
        warpgroup.wait_group(1)
        self._keys_read(pipes, k_state)

    def _keys_awaited(self, pipes: Any, state: Any) -> None:
        """Waits for a tile of K, or for what the product that follows reads of it first."""
        pipes[1].consumer_wait(state)

    def _keys_read(self, pipes: Any, state: Any) -> None:
        """Releases a tile of K, but for what is read as V too."""
        pipes[1].consumer_release(state)

    def _values_awaited(self, pipes: Any, state: Any) -> None:
        """Waits for all columns of a tile of V."""
        pipes[2].consumer_wait(state)

    def _scores(self, fixed: tuple, scores: Any, q_state: Any, k_state: Any, held: Any = None, rest: Any = None) -> None:
        """Starts the product of Q and a tile of K. held, rest: see ``_product``."""
        (mma_qk, _), (q, k, _), _, _, _, _, _, _, _ = fixed
        self._product(mma_qk, scores, q[None, None, None, q_state.index], k[None, None, None, k_state.index], True, held, rest)

    @cute.jit
    def _ended(self, fixed, sums, given, outputs, sink, q_state, work_state):
        """Stores a row tile's output and statistics. Its facts are read from the board again rather than kept in registers."""
        (_, mma_pv), _, _, positions, _, board, group, thread, in_smem = fixed
        acc, row_max, row_sum, row_scale, tops = sums
        facts, thread = self._facts(board[0], work_state), self._again(thread)
        factor = self.factor(given[2]) if const_expr(self.config.has_dropout) else None
        excess = row_scale if const_expr(self.config.is_bounded) else None
        self.finished(acc, row_max, row_sum, excess, given[1], sink, self.heads(positions, facts), factor, self._inverses(row_scale))
        self._divided(fixed, row_scale)
        tops = self.highest(tops, given[1])
        self.stored(acc, tops, row_sum, mma_pv, thread, group, outputs, in_smem[3][None, None, q_state.index], facts)

    def _inverses(self, row_scale: Any) -> Any:
        """Where ``finished`` stores what rows are multiplied by; None: nowhere."""
        return None

    def _divided(self, fixed: tuple, inverses: Any) -> None:
        """What follows a row tile's division by the row sums."""

    @cute.jit
    def _step(self, fixed, sums, p, given, q_state, k_state, v_state, is_masked: cutlass.Constexpr):
        """The first product of a tile and the second of the tile before it, then the softmax of the tile."""
        _, _, shape_s, positions, pipes, board, group, _, _ = fixed
        acc, (facts, _, _, captured, _) = sums[0], given
        asks = is_masked or len(self.config.always) > 0
        scores = cute.make_rmem_tensor(shape_s, Float32)
        if const_expr(self.multiplies_values_first):
            self._second(fixed, acc, p, v_state)
        self._keys_awaited(pipes, k_state)
        n = Int32(0)
        if const_expr(asks or self.config.score is not None or self.config.has_dropout):
            n = board[1][k_state.index] // 2
        self._my_turn(group)
        self._scores(fixed, scores, q_state, k_state)
        if const_expr(not self.multiplies_values_first):
            self._second(fixed, acc, p, v_state)
        self._next_turn(group)
        ahead = None
        if const_expr(self.foresees):
            ahead = self.foreseen(positions, n, facts, captured)
        dropping = None
        if const_expr(self.config.has_dropout):
            dropping = (captured[2], n, self.words_ahead(captured[2], n))
        self._scored(pipes, k_state, v_state)
        self._weighed(fixed, sums, p, given, (scores, ahead, n, v_state, dropping), is_masked, asks)

    @cute.jit
    def _weighed(self, fixed, sums, p, given, of_tile, is_masked: cutlass.Constexpr, asks: cutlass.Constexpr):
        """The softmax of a tile, whose probabilities it stores in ``p``, while the second product of the tile before is in flight."""
        acc, _, _, row_scale, tops = sums
        if const_expr(self.guesses and not asks):
            rescales = self._guessed(fixed, sums, p, given, of_tile)
        else:
            lifts = self._modified(fixed, given, of_tile, is_masked, asks)
            if const_expr(tops is not None):
                self.raise_tops(tops, of_tile[0], lifts)
            rescales = self._taken(fixed, sums, p, given, of_tile, lifts, asks)
        self._rescaled(acc, row_scale, rescales)
        self._stored(fixed, p, row_scale, rescales)

    @cute.jit
    def _rescaled(self, acc, row_scale, rescales):
        if const_expr(not self.config.is_bounded):
            if rescales:
                out = rows_and_columns(acc)
                for r in cutlass.range_constexpr(cute.size(row_scale)):
                    out[r, None].store(out[r, None].load() * row_scale[r])

    @cute.jit
    def _modified(self, fixed, given, of_tile, is_masked: cutlass.Constexpr, asks: cutlass.Constexpr):
        """Applies the score mod and the masks to a tile's scores. Returns the result of ``modified``."""
        facts, scale_log2, _, captured, _ = given
        scores, ahead, n, _, _ = of_tile
        positions, limits = self._here(fixed, given)
        lifts = self.modified(scores, ahead, positions, n, facts, scale_log2, captured, False)
        if const_expr(asks):
            self.masked(scores, positions, n, facts, captured, limits, Int32(1) if is_masked else Int32(0), False)
        return lifts

    @cute.jit
    def _taken(self, fixed, sums, p, given, of_tile, lifts, asks: cutlass.Constexpr, highest=None):
        """The complete softmax of a tile's modified scores; stores its probabilities in ``p`` and returns whether ``acc`` needs rescaling.
        highest: the rows' highest scores in this tile if they are known."""
        _, row_max, row_sum, row_scale, _ = sums
        _, _, rate, _, _ = given
        scores, _, _, v_state, dropping = of_tile
        pipes, rescales = fixed[4], cutlass.Boolean(False)
        if const_expr(self.config.is_bounded):
            self.unshifted(scores, sums, rate, asks)
        else:
            rescales = self.exponentials(scores, lifts, row_max, row_sum, row_scale, rate, False, asks, highest)
        apart = None if dropping is None else self.narrowed_apart(scores, dropping)
        self._values_read(pipes[2], v_state)
        if const_expr(apart is None):
            self._narrow_to(p, scores)
        else:
            self.keep(p, apart)
        return rescales

    def _narrow_to(self, p: Any, powers: Any) -> None:
        p.store(narrowed(powers, self.dtype).load())

    @cute.jit
    def _guessed(self, fixed, sums, p, given, of_tile):
        """The speculative softmax of a bare tile, as ``_taken``; repeated without speculation if that failed."""
        _, _, shape_s, positions, pipes, _, _, _, _ = fixed
        _, row_max, row_sum, row_scale, tops = sums
        facts, scale_log2, rate, captured, _ = given
        scores, ahead, n, v_state, dropping = of_tile
        powers = cute.make_rmem_tensor(shape_s, Float32)
        added = cute.make_rmem_tensor(cute.size(row_sum), Float32)
        lifts, rescales = None, cutlass.Boolean(False)
        if const_expr(not self.shortens):
            lifts = self.modified(scores, ahead, positions, n, facts, scale_log2, captured, False)
        if const_expr(tops is not None):
            if const_expr(self.shortens):
                self.raise_tops_under_cap(tops, scores, positions, facts, scale_log2, captured)
            else:
                self.raise_tops(tops, scores, lifts)
        is_right = self.guessed(scores, lifts, powers, added, row_max, positions, facts, scale_log2, rate, captured)
        apart = None if dropping is None else self.narrowed_apart(powers, dropping)
        self._values_read(pipes[2], v_state)
        if const_expr(apart is None):
            narrowed_to(p, powers, self.dtype)
        else:
            self.keep(p, apart)
        if is_right:
            row_sum.store(row_sum.load() + added.load())
        elif const_expr(self.shortens):
            self.modified(scores, ahead, positions, n, facts, scale_log2, captured, False)
            self.unshifted(scores, sums, rate, False)
            self._store(p, scores, dropping)
        else:
            rescales = self.exponentials(scores, lifts, row_max, row_sum, row_scale, rate, False, True)
            self._store(p, scores, dropping)
        return rescales

    def _values_read(self, pipe: Any, state: Any) -> None:
        """Waits for the product with V of the tile before, which reads ``p`` too, and releases V's stage."""
        warpgroup.wait_group(0)
        pipe.consumer_release(state)

    def _store(self, p: Any, powers: Any, dropping: Any) -> None:
        """Stores probabilities in ``p``, without those that dropout drops. dropping: see ``Drops.narrowed_apart``; None without dropout."""
        if const_expr(dropping is None):
            p.store(narrowed(powers, self.dtype).load())
        else:
            self.keep(p, self.narrowed_apart(powers, dropping))

    @cute.jit
    def _product(self, mma, acc, a, b, from_zero: cutlass.Constexpr, held=None, rest=None):
        """Issues the product of ``a`` and ``b``. held: (tiled MMA, registers, number of columns) if registers hold the first columns of
        ``a``, all of which is in shared memory. rest: (number of columns, pipeline, state) if ``b``'s columns after the first ones have a
        pipeline of their own, for which this waits."""
        if const_expr(self.config.gathers):  # no barrier orders the threads' own copies before a product's reads
            cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
            if const_expr(rest is not None and 16 * i == rest[0]):
                rest[1].consumer_wait(rest[2])
            is_held = held is not None and 16 * i < held[2]
            atom = cute.make_mma_atom((held[0] if is_held else mma).op)
            atom.set(warpgroup.Field.ACCUMULATE, i > 0 or not from_zero)
            cute.gemm(atom, acc, (held[1] if is_held else a)[None, None, i], b[None, None, i], acc)
        warpgroup.commit_group()

    @cute.jit
    def _wiped(self, v, pipes, state, room, thread, group):
        """Clears V's rows from ``room`` on: rows past the last key may hold NaN, and 0 x NaN is NaN.

        Each warp group clears all of them, so that none has to wait for another.
        """
        tile_n, head_dim = self.config.tiles.tile_n, self.config.head_dim_v
        if room < tile_n:
            self._values_awaited(pipes, state)
            tile = v[None, None, state.index]
            nothing = cute.make_rmem_tensor(_AT_ONCE, self.dtype)
            nothing.fill(0.0)
            pieces = head_dim // _AT_ONCE  # per key
            lanes = 1 << (pieces - 1).bit_length()
            piece = self._again(thread) % lanes
            if piece < pieces:
                for key in cutlass.range(room + self._again(thread) % 128 // lanes, tile_n, 128 // lanes, unroll=1):
                    cute.autovec_copy(nothing, cute.local_tile(tile, (_AT_ONCE, 1), (piece, key))[None, 0])
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=MEETING + group, number_of_threads=128)

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
            after = 1 - group if const_expr(self.config.tiles.warp_groups == 2) else (group + 1) % self.config.tiles.warp_groups
            cute.arch.barrier_arrive(barrier_id=_TURN + after, number_of_threads=256)
