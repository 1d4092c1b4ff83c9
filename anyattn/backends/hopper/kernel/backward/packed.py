"""Varlen sequences in the backward kernel: the places of their rows, and the treatment of rows past a sequence's end.

A sequence's last row is followed by rows of other sequences or of none. TMA loads them with the last tile, so they are overwritten with
zeros in shared memory; and a tile of dK or dV that reaches past a sequence's end is written row by row.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.backward.scheduler import KeyFacts
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.sequences.seqlen_info import aligned_offset

__all__ = ["PLACE_FACTS", "Packed", "Place", "first_tile"]

PLACE_FACTS = 5  # numbers of a key tile on the board after its ``KeyFacts``
_CLEANED = 13  # first of the named barriers, one per warp group: its threads have written all zeros
_AT_ONCE = 8  # entries of a row that one instruction wipes: 16 bytes, which the swizzled layout keeps together


class Place(NamedTuple):
    """The place of a batch entry's rows, as the producer posts it after ``KeyFacts``: Int32 each.

    row, start: its keys are ``k[row, :, start:]``. first: its first row tile among those of all entries (``first_tile``).
    """

    row: Any
    start: Any
    first: Any


def first_tile(row: Any, start: Any, entry: Any, tile_m: Any, tiles: Any) -> Any:
    """The first row tile of an entry in a buffer in which no two entries share a tile.

    row, start: the place of its queries. tiles: row tiles of one row of storage. The buffer needs ``batch`` more tiles than all storage.
    """
    return row * tiles + aligned_offset(start, entry, tile_m) // tile_m


class Packed:
    """The methods of ``HopperBackward`` for configs with entries; without entries they follow the storage's shape."""

    config: Any
    dtype: Any
    read_slots: Any

    @cute.jit
    def counted_keys(self, tables, sizes):
        """``sizes`` with the actual number of key tiles, which the last row of ``order`` contains."""
        if const_expr(tables.order is not None):
            return type(sizes)(tables.order[tables.order.shape[0] - 1, 0], *sizes[1:])
        return sizes

    @cute.jit
    def placed(self, entry, lengths, tables):
        """((queries, keys), ``Place``, (q_row, q_start)) of an entry, whose queries are ``q[q_row, :, q_start:]``; without entries, its
        number in place of the last two."""
        if const_expr(not self.config.has_entries):
            return lengths, entry, entry
        k_row, k_start, seqlen_k, q_row, q_start, seqlen_q = (tables.entries[entry, i] for i in range(6))
        tile_m = self.config.tiles.tile_m
        first = first_tile(q_row, q_start, entry, tile_m, ceil_div(lengths[0], tile_m))
        return (seqlen_q, seqlen_k), Place(k_row, k_start, first), (q_row, q_start)

    def posted(self, place: Any, facts: Any, of_each: Any, group: Any) -> tuple[Any, ...]:
        """The numbers that the producer posts after ``KeyFacts``: the ``Place``, and the period of the visits whose row tile may end past
        the sequence (``visits_to_wiping``), larger than the number of visits if there is none. of_each: the visits of each
        head, 0 if heads differ. group: (query heads for each kv head, ``begins_last``).

        Reading the visit and the lengths before each product takes 4 to 6 % of the pass. Without lists only one row tile of each head is
        cut, its last one; interleaved heads begin with it.
        """
        if not self.config.has_entries:
            return ()
        every = Int32(1) if self.config.lists is not None else cutlass.max(of_each, 1)
        if self.config.interleaves_heads:
            every = select(group[1] != 0, Int32(1), every, "int")
        is_cut = facts.seqlen_q % self.config.tiles.tile_m != 0
        return (*place, select(is_cut, every, facts.total + 1, "int"), *((group[0],) if self.config.interleaves_heads else ()))

    def visits_to_wiping(self, board: Any, state: Any) -> Any:
        """The number of visits up to the next one that may have rows past the last, itself included."""
        return board[len(KeyFacts._fields) + len(Place._fields), state.index]

    def visits_wiped(self, board: Any, state: Any) -> Any:
        """The number of visits, of interleaved heads, whose rows may be past the last: one for each query head of the group."""
        return board[len(KeyFacts._fields) + len(Place._fields) + 1, state.index]

    def posted_place(self, board: Any, state: Any, facts: Any) -> Any:
        """The ``Place`` that the producer has posted; without entries, the entry's number."""
        if not self.config.has_entries:
            return facts.entry
        return Place(*(board[len(facts) + i, state.index] for i in range(len(Place._fields))))

    def rows_at(self, tensor: Any, head: Any, place: Any) -> Any:
        """An entry's rows of a tensor, (positions, head dimension). place: (row of storage, first row in it, ...)."""
        if not self.config.has_entries:
            return tensor[None, None, head, place]
        return cute.domain_offset((place[1], 0), tensor[None, None, head, place[0]])

    def tile_at(self, m_block: Any, place: Any) -> tuple[Any, Any]:
        """(entry, row tile) of a row tile in the statistics and in the sums of dQ."""
        return (Int32(0), place.first + m_block) if self.config.has_entries else (place, m_block)

    @cute.jit
    def keys_wiped(self, in_smem, facts, group, thread):
        """Writes zeros to K and V past the last key. The tile was loaded with rows that may contain NaN, and 0 x NaN is NaN."""
        room = facts.seqlen_k - facts.n_block * self.config.tiles.tile_n
        if room < self.config.tiles.tile_n:
            self._wiped(in_smem[2][None, None, 0], room, self.config.tiles.tile_n, self.config.head_dim, thread)
            self._wiped(in_smem[3][None, None, 0], room, self.config.tiles.tile_n, self.config.head_dim_v, thread)
            self._cleaned(group)

    @cute.jit
    def rows_wiped(self, in_smem, pipes, states, slots, group, thread):
        """Writes zeros to Q and dO past the last row. slots: see ``MultipliesBack.read_slots``."""
        q_state, do_state = states
        tile_m = self.config.tiles.tile_m
        pipes[0].consumer_wait(q_state)
        visit, facts = self.read_slots(slots)
        room = facts.seqlen_q - visit.m_block * tile_m
        if room < tile_m:
            pipes[1].consumer_wait(do_state)
            self._wiped(in_smem[0][None, None, q_state.index], room, tile_m, self.config.head_dim, thread)
            self._wiped(in_smem[1][None, None, do_state.index], room, tile_m, self.config.head_dim_v, thread)
            self._cleaned(group)

    @cute.jit
    def _wiped(self, tile, room, rows: cutlass.Constexpr, head_dim: cutlass.Constexpr, thread):
        """Writes zeros to the rows from ``room`` on. Each warp group writes all of them, so that none has to wait for another."""
        nothing = cute.make_rmem_tensor(_AT_ONCE, self.dtype)
        nothing.fill(0.0)
        lanes = head_dim // _AT_ONCE  # pieces of a row
        for row in cutlass.range(room + thread % 128 // lanes, rows, 128 // lanes, unroll=1):
            cute.autovec_copy(nothing, cute.local_tile(tile, (1, _AT_ONCE), (row, thread % lanes))[0, None])

    def _cleaned(self, group: Any) -> None:
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_CLEANED + group, number_of_threads=128)

    @cute.jit
    def is_cut(self, group, facts):
        """Whether the last key lies before the end of a warp group's part of the tile."""
        return facts.n_block * self.config.tiles.tile_n + (group + 1) * 64 > facts.seqlen_k

    @cute.jit
    def keys_stored(self, acc, mma, head_dim: cutlass.Constexpr, target, facts, place, thread):
        """Stores the rows of dK or dV up to the last key. head_dim: padded."""
        own, columns = self.rows_at(target, facts.kv_head, place), cute.size(target, mode=[1])
        first = facts.n_block * self.config.tiles.tile_n
        self.rows_stored(acc, mma, (self.config.tiles.tile_n, head_dim), (own, columns), (first, facts.seqlen_k), thread)

    @cute.jit
    def rows_stored(self, acc, mma, shape: cutlass.Constexpr, target, rows, thread):
        """Stores a thread's part of an accumulator, row by row. shape: of the tile. target: (rows and columns in global memory, columns).
        rows: (the tile's first row there, the end of those that are stored)."""
        (own, columns), (first, end) = target, rows
        values = rows_and_columns(acc)
        positions = rows_and_columns(mma.get_slice(thread).partition_C(cute.make_identity_tensor(shape)))
        kind = own.element_type  # float32 for parts of dK and dV
        pair, pairs = cute.make_rmem_tensor(2, kind), cute.make_layout(2)
        for r in cutlass.range_constexpr(cute.size(values, mode=[0])):
            row = first + positions[r, 0][0]
            if row < end:
                line = own[row, None]
                for c in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
                    column = positions[0, c][1]  # and the next one: the head dimension is even
                    if column < columns:
                        for i in cutlass.range_constexpr(2):
                            pair[i] = kind(values[r, c + i])
                        at = cute.local_tile(line, (2,), (column // 2,)).iterator
                        cute.autovec_copy(pair, cute.make_tensor(at.align(kind.width // 4), pairs))
