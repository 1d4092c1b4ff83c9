"""Producer role: one warp that schedules row tiles and loads Q, then the tiles of K and V, by TMA."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync

from anyattn.backends.hopper.kernel.paged_gather import LANES
from anyattn.backends.hopper.kernel.tile_scheduler import Facts

__all__ = ["Loads", "Part"]

_AT_ONCE = 8  # unrolled copies of pieces


class Part(NamedTuple):
    """Columns ``first`` to ``end`` of a tile of K, or of V."""

    are_values: bool
    first: int
    end: int

    def shape(self, keys: Any) -> tuple[Any, Any]:
        """(keys, columns), of V (columns, keys)."""
        size = self.end - self.first
        return (size, keys) if self.are_values else (keys, size)


class Loads:
    """The loading role of ``HopperForward``."""

    config: Any

    @cute.jit
    def load(self, copies, tiles_in_smem, pipes, board, tables, counter, lengths, sizes, captured):
        """copies: (atom, tensor) of q and of each part of a tile of K and V. pipes: of q, K, V and row tiles. board: (row tiles, key tiles)
        in shared memory. Key tiles go from the last to the first."""
        producer = pipeline.PipelineUserType.Producer
        stages = self.config.tiles.stages
        q_state, kv_state, work_state = (pipeline.make_pipeline_state(producer, n) for n in (self.config.q_stages, stages, 2))
        work, workers, rank = self.place()
        sizes = self.counted(tables, sizes)
        total = sizes.rows * sizes.spread
        while work < total:
            m_block, head, entry = self.row_tile(work, tables, sizes)
            split, heads = Int32(0), Int32(1)
            if const_expr(self.config.is_split):
                split, head = head // sizes.heads, head % sizes.heads
            if const_expr(self.config.heads_per_tile > 1):
                heads, head = self.packed(head, sizes)
            if m_block >= 0:
                q_row, q_start, seqlen_q, k_row, k_start, seqlen_k, q_first = self.storage(entry, tables, lengths)
                left, right = Int32(0), Int32(0)
                if const_expr(self.config.lists is None):
                    left, right = self.band(entry, head, q_first, captured)
                    visits, masked, bare, behind, last = self.band_visits(m_block, seqlen_q, seqlen_k, left, right)
                    if const_expr(self.config.is_split):
                        visits, masked, bare, behind, last = self.share(
                            split, sizes.spread // sizes.heads, (visits, masked, bare, behind, last)
                        )
                    plan = last
                else:
                    of_lists = self.head_of_lists(head, sizes)
                    (visits, masked, bare, behind), plan = self.list_visits(m_block, entry, of_lists, seqlen_k, tables)
                plan = self.planned(plan, visits, masked, bare)
                m_block = self.own_tile(m_block, rank)
                heads, head = self.own_heads(heads, head, rank)
                # splits follow one another, each with all rows of storage
                out_row = q_row + split * lengths[2] if const_expr(self.config.is_split) else q_row
                facts = Facts(
                    heads, m_block, head, entry, visits, masked, bare, behind, seqlen_q, seqlen_k, out_row, q_start, q_first, left, right
                )  # fmt: skip
                place = (m_block, head, q_row, q_start, k_row, k_start)
                (q_atom, q_from, q_to), of_tile = self._sources(copies, place, tiles_in_smem, sizes, rank)
                if visits > 0:
                    pipes[0].producer_acquire(q_state)
                    cute.copy(q_atom, q_from, q_to[None, q_state.index], tma_bar_ptr=pipes[0].producer_get_barrier(q_state))
                    q_state.advance()
                self._post(board[0], pipes[3], work_state, facts)
                work_state.advance()
                if visits > 0:
                    n, asked = self._visit(Int32(0), plan)
                    pages = self._pages(n, entry, seqlen_k, tables, sizes)
                    for i in cutlass.range(visits, unroll=1):
                        after, asks = self._visit(cutlass.min(i + 1, visits - 1), plan)  # loaded long before it is needed
                        pages_after = self._pages(after, entry, seqlen_k, tables, sizes)
                        self._fetch_all(pipes, kv_state, of_tile, n, pages, sizes, board[1], asked)
                        kv_state.advance()
                        n, asked, pages = after, asks, pages_after
            work = self.next_in_turn(work, workers) if const_expr(self.config.pairs) else self._drawn(counter, total, workers)
        self._post(board[0], pipes[3], work_state, Facts(*(Int32(0) for _ in Facts._fields)))
        work_state.advance()
        if const_expr(not self.config.pairs):
            self._left(counter, total, workers)
        # if the thread block ended earlier, another one could reuse memory that copies are still reading
        of_tile = tuple((pipe, kv_state.clone()) for pipe in self.pipes_of_tile(pipes))
        for pipe, state in ((pipes[0], q_state), *of_tile, (pipes[3], work_state)):
            pipe.producer_tail(state)

    def place(self) -> tuple[Any, Any, int]:
        """(first work item, workers, number within the worker) of a thread block."""
        return cute.arch.block_idx()[0], cute.arch.grid_dim()[0], 0

    def planned(self, plan: Any, visits: Any, masked: Any, bare: Any) -> Any:
        """The plan of a row tile's visits, of which ``_visit`` finds each."""
        return plan

    def own_tile(self, m_block: Any, rank: Any) -> Any:
        """A thread block's row tile, of a scheduled one."""
        return m_block

    def own_heads(self, heads: Any, head: Any, rank: Any) -> tuple[Any, Any]:
        """(number, first) of the heads of a thread block's row tile, of a scheduled one's."""
        return heads, head

    @cute.jit
    def _drawn(self, counter, total, workers):
        """The next work item, from an atomic counter in the first lane: dynamic scheduling balances uneven items.

        It is drawn once all of the item before is on its way: what is drawn earlier waits for that item while other thread blocks run out
        of work. Causal prefill of 4,096 rows took 134 us with the next item drawn first and takes 98 (D 256, 8 heads), 192 and 153 (D 512,
        4 heads), 104 and 101 (D 128, 16 heads); of 8,192 rows, 1,047 and 905 (D 512, 8 heads; H200).
        """
        found = total
        if total > workers:
            if cute.arch.lane_idx() == 0:
                found = workers + cute.arch.atomic_add(counter.iterator, Int32(1))
        return cute.arch.shuffle_sync(found, 0)

    @cute.jit
    def _left(self, counter, total, workers):
        """Counts finished thread blocks; the last one resets the counter for the next kernel."""
        if total > workers:
            if cute.arch.lane_idx() == 0:
                before = cute.arch.atomic_add(counter.iterator + 1, Int32(1), sem="acq_rel", scope="gpu")
                if before == workers - 1:
                    counter[0] = Int32(0)
                    counter[1] = Int32(0)

    @cute.jit
    def _visit(self, i, plan):
        if const_expr(self.config.lists is None):
            return plan - i, Int32(1)
        return self.listed(i, plan)

    @cute.jit
    def _post(self, board, pipe, state, facts):
        pipe.producer_acquire(state)
        for i in cutlass.range_constexpr(len(facts)):
            board[i, state.index] = facts[i]
        pipe.producer_commit(state)

    @cute.jit
    def _pages(self, n, entry, seqlen_k, tables, sizes):
        """The pages of key tile ``n``: each lane has the page of its piece, or of each of its pieces if
        there are more pieces than lanes."""
        if const_expr(not self.config.is_paged):
            return ()
        return tuple(self._page(at, entry, seqlen_k, tables, sizes) for at in self._pieces(n))

    @cute.jit
    def _page(self, at, entry, seqlen_k, tables, sizes):
        """The page of a piece. The table is undefined for pieces past the last key: they are on page -1, for which TMA writes zeros."""
        page = Int32(-1)
        if at * self.config.piece < seqlen_k:
            page = tables.pages[entry, Int32(Uint32(at) // Uint32(sizes.pieces_in_page))]
        return page

    def _pieces(self, n: Any) -> list[Any]:
        """The numbers, counted in the entry's keys, of a lane's pieces of key tile ``n``."""
        pieces = self.config.tiles.tile_n // self.config.piece
        return [n * pieces + i + cute.arch.lane_idx() for i in range(0, pieces, LANES)]

    def parts(self) -> tuple[Part, ...]:
        """The parts that a tile of K and V is loaded in."""
        return Part(False, 0, self.config.head_dim), Part(True, 0, self.config.head_dim_v)

    def pipes_of_tile(self, pipes: Any) -> tuple[Any, ...]:
        """The pipelines of a tile's parts."""
        return pipes[1:3]

    def _fetch_all(self, pipes: Any, state: Any, of_tile: Any, n: Any, pages: Any, sizes: Any, board: Any, asked: Any) -> None:
        """Loads the parts of key tile ``n``. The first is waited for first, and the tile's number is on the board with it."""
        for i, (pipe, copy) in enumerate(zip(self.pipes_of_tile(pipes), of_tile, strict=True)):
            self._fetch(pipe, state, copy, n, pages, sizes, board if i == 0 else None, asked)

    @cute.jit
    def _fetch(self, pipe, state, copy, n, pages, sizes, board, asked):
        """Loads a part of key tile ``n`` into the next free stage; the tile's number is on the board, if given, before the stage is full.

        Thread blocks of a pair have the part brought to the L2 cache before they wait for the stage: both wait for the slower one's, and
        decoding 128 heads of 576/512 then took 129 instead of 142 us (H200; single thread blocks 1.00 to 1.15 of their time).
        """
        if const_expr(self.config.pairs):
            self._start_copies(copy, state.index, n, pages, sizes, None)
        pipe.sync_object_empty.wait(state.index, state.phase)
        if const_expr(board is not None):
            board[state.index] = n * 2 + asked
        pipe.sync_object_full.arrive(state.index, None)
        self._start_copies(copy, state.index, n, pages, sizes, pipe.producer_get_barrier(state))

    @cute.jit
    def _start_copies(self, copy, stage, n, pages, sizes, barrier):
        """Starts the copies of a part of key tile ``n`` into a stage; without a barrier, into the L2 cache alone."""
        atom, source, target = copy
        if const_expr(self.config.is_paged):
            places = tuple(Int32(Uint32(at) % Uint32(sizes.pieces_in_page)) for at in self._pieces(n))
            if const_expr(self.config.gathers):
                self.gather(source, target[None, None, stage], pages, places, barrier)
                return
            pieces = self.config.tiles.tile_n // self.config.piece
            for group in cutlass.range_constexpr(len(pages)):
                for i in cutlass.range(min(pieces - group * LANES, LANES), unroll=_AT_ONCE):
                    at = source[None, cute.arch.shuffle_sync(places[group], i), cute.arch.shuffle_sync(pages[group], i)]
                    self._start_copy(atom, at, target[None, group * LANES + i, stage], barrier)
        else:
            self._start_copy(atom, source[None, n], target[None, stage], barrier)

    def _start_copy(self, atom: Any, source: Any, target: Any, barrier: Any) -> None:
        """Starts one copy, or without a barrier one into the L2 cache."""
        if barrier is None:
            cute.prefetch(atom, source)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier, **self.receivers())

    def receivers(self) -> dict[str, Any]:
        """The thread blocks of the cluster that a copy of keys is for, for ``cute.copy``."""
        return {}

    @cute.jit
    def _sources(self, copies, place, in_smem, sizes, rank):
        """(atom, source, target) of q, and of each part of a tile of K and V: these have a mode for the tile. With pages their sources have
        modes for a page's pieces and for the page, their targets one for a tile's pieces."""
        d, (q_atom, q) = self.config.head_dim, copies[0]
        m_block, head, q_row, q_start, k_row, k_start = place
        kv_head = head // sizes.ratio
        if const_expr(self.config.heads_per_tile > 1):
            shape = ((self.config.own_heads, self.config.own_q), d)
            q_rows = cute.domain_offset(((head % sizes.ratio, q_start), 0), q[None, None, kv_head, q_row])
            q_source = cute.local_tile(q_rows, shape, ((0, m_block), 0))
        else:
            q_rows = cute.domain_offset((q_start, 0), q[None, None, head, q_row])
            q_source = cute.local_tile(q_rows, (self.config.tiles.tile_m, d), (m_block, 0))
        of_tile = self.parts_of_tile(copies[1:], in_smem[1:3], (kv_head, k_row, k_start), rank)
        return (q_atom, *self._partition(q_atom, in_smem[0], q_source)), of_tile

    def parts_of_tile(self, copies: Any, in_smem: Any, place: Any, rank: Any) -> tuple[Any, ...]:
        """(atom, source, target) of each part of a tile of K and V. place: (K/V head, row of storage, first key in it)."""
        if self.config.gathers:
            k, v = in_smem
            v = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 0, 2]))
            return tuple((None, x[None, None, place[0], None], to) for (_, x), to in zip(copies, (k, v), strict=True))
        of_parts = zip(copies, in_smem, self.parts(), strict=True)
        return tuple(self.part_of_tile(copy, x, part, place, rank) for copy, x, part in of_parts)

    def part_of_tile(self, copy: Any, in_smem: Any, part: Part, place: Any, rank: Any) -> tuple[Any, Any, Any]:
        """(atom, source, target) of a part. copy: its source begins at the part's first column."""
        (atom, x), (head, row, start) = copy, place
        shape = part.shape(self.config.piece or self.config.tiles.tile_n)
        at, first = ((0, None), (0, start)) if part.are_values else ((None, 0), (start, 0))
        if self.config.is_paged:
            source = cute.local_tile(x[None, None, head, None], shape, (*at, None))
            in_smem = cute.flat_divide(in_smem, shape)[(None, None, *at, None)]
        else:
            source = cute.local_tile(cute.domain_offset(first, x[None, None, head, row]), shape, at)
        return atom, *self._partition(atom, in_smem, source, rank, self.config.cluster)

    def _partition(self, atom: Any, in_smem: Any, in_gmem: Any, part: Any = 0, parts: int = 1) -> tuple[Any, Any]:
        """(source, target) of the copies of a part of a tile; the target's last mode is the stage."""
        target, source = cpasync.tma_partition(
            atom, part, cute.make_layout(parts), cute.group_modes(in_smem, 0, 2), cute.group_modes(in_gmem, 0, 2)
        )
        return source, target
