"""Tile-order kernel: makes a varlen batch's tables from cu_seqlens and seqused, and clears result rows that belong to no sequence."""

from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.utils import SmemAllocator

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.tables_config import THREADS, TablesConfig
from anyattn.sequences.tile_order import keys_up_to

__all__ = ["SequenceTables"]


@dataclass(frozen=True)
class Given:
    """The call's tables: tensors or None. rows_q, rows_k: the capacity of one row of storage."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    batch: Any
    rows_q: Any
    rows_k: Any


class SequenceTables:
    """The kernel for one ``TablesConfig``: its first block makes the tables, the others clear rows.

    Row tiles are ordered by a counting sort of their costs (``sequences.tile_order``): there are as many bins as threads; the bins are
    concatenated, most expensive first, and each tile takes the next place of its bin. For key tiles, sequences are sorted instead, in the
    same way: a sequence's tiles follow one another in ascending order, so that they find its rows in the L2 cache, and deterministic sums
    never wait for a tile that comes later. Nothing outside storage is written, even if the tables are wrong.
    """

    def __init__(self, config: TablesConfig):
        self.config = config

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor | None,
        cu_seqlens_k: cute.Tensor | None,
        seqused_q: cute.Tensor | None,
        seqused_k: cute.Tensor | None,
        entries: cute.Tensor | None,
        order: cute.Tensor | None,
        out: cute.Tensor | None,
        lse: cute.Tensor | None,
        highest: cute.Tensor | None,
        other: cute.Tensor | None,
        batch: Int32,
        rows_q: Int32,
        rows_k: Int32,
        bin_keys: Int32,
        blocks: Int32,
        heads: Int32,
        stream: cuda.CUstream,
    ):
        """cu_seqlens: (B + 1,), seqused: (B,), int32 or int64, or None. entries: (B, 9) and order: (rows, 3) int32, see
        ``tile_scheduler.Tables``, or both None. out: (rows of storage, Hq, rows_q, Dv), lse, highest: the same without Dv, or with a last
        dimension of their own, which is cleared to zeros too, or all None. With ``TablesConfig.by_key`` queries and keys are exchanged,
        and order has one row more. other: (rows of storage, heads, rows_k, D) or None, cleared by the tables of the other side.

        bin_keys: the width of a cost bin in keys. blocks: thread blocks. heads: the heads over which the clearing blocks are distributed.
        """
        given = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, batch, rows_q, rows_k)
        self.kernel(given, entries, order, (out, lse, highest), other, bin_keys).launch(
            grid=(blocks, heads, 1), block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, given, entries, order, outputs, other, bin_keys):
        given = Given(*given)
        cute.arch.griddepcontrol_launch_dependents()  # an attention kernel prepares itself meanwhile (``forward._tables_awaited``)
        block, head, _ = cute.arch.block_idx()
        blocks, heads, _ = cute.arch.grid_dim()
        if const_expr(order is not None):
            if block == 0:
                if head == 0:
                    self.tables(given, entries, order, bin_keys)
            else:
                self.wipe_all(given, outputs, other, (block - 1, blocks - 1, head, heads))
        else:
            self.wipe_all(given, outputs, other, (block, blocks, head, heads))

    # ---- tables

    def shared(self) -> Any:
        most = self.config.most_entries

        @cute.struct
        class Storage:
            ends: cute.struct.MemRange[Int32, most]  # type: ignore[valid-type]
            chosen: cute.struct.MemRange[Int32, most if self.config.by_key else 1]  # type: ignore[valid-type]
            counts: cute.struct.MemRange[Int32, THREADS]
            sums: cute.struct.MemRange[Int32, 32]

        return Storage

    @cute.jit
    def tables(self, given, entries, order, bin_keys):
        storage = SmemAllocator().allocate(self.shared())
        ends = storage.ends.get_tensor(cute.make_layout(self.config.most_entries))
        counts, sums = storage.counts.get_tensor(cute.make_layout(THREADS)), storage.sums.get_tensor(cute.make_layout(32))
        chosen = None
        if const_expr(self.config.by_key):
            chosen = storage.chosen.get_tensor(cute.make_layout(self.config.most_entries))
        thread, _, _ = cute.arch.thread_idx()
        counts[thread] = Int32(0)
        each = ceil_div(given.batch, THREADS)
        first, mine = thread * each, Int32(0)
        for i in cutlass.range(each, unroll=1):
            if first + i < given.batch:
                ends[first + i] = self.entered(first + i, given, entries)
        if const_expr(chosen is not None):
            cute.arch.sync_threads()
            self.choose(given, entries, (ends, chosen, counts, sums), bin_keys, thread)
        # ends[i]: the row tiles of entries 0 to i, or of entries chosen[0] to chosen[i]
        for i in cutlass.range(each, unroll=1):
            if first + i < given.batch:
                mine += ends[first + i]
                ends[first + i] = mine
        before = self.scanned(mine, sums, thread) - mine
        for i in cutlass.range(each, unroll=1):
            if first + i < given.batch:
                ends[first + i] += before
        cute.arch.sync_threads()
        room = order.shape[0] - 1 if const_expr(self.config.by_key) else order.shape[0]
        total = cutlass.min(ends[given.batch - 1], room)
        rounds = ceil_div(total, THREADS)
        if const_expr(chosen is None):
            for i in cutlass.range(rounds, unroll=1):
                if i * THREADS + thread < total:
                    _, _, place = self.located(i * THREADS + thread, given, ends, entries, bin_keys, chosen)
                    cute.arch.atomic_add(counts.iterator + place, Int32(1))
            self.started(counts, sums, thread)
        for i in cutlass.range(rounds, unroll=1):
            if i * THREADS + thread < total:
                entry, m_block, place = self.located(i * THREADS + thread, given, ends, entries, bin_keys, chosen)
                row = i * THREADS + thread
                if const_expr(chosen is None):
                    row = cute.arch.atomic_add(counts.iterator + place, Int32(1))
                self.put(order, row, m_block, entry)
        for i in cutlass.range(ceil_div(room - total, THREADS), unroll=1):
            row = total + i * THREADS + thread
            if row < room:
                self.put(order, row, Int32(-1), Int32(0))
        if const_expr(self.config.by_key):
            if thread == 0:
                self.put(order, room, total, Int32(0))

    @cute.jit
    def choose(self, given, entries, storage, bin_keys, thread):
        """Sorts entries by the length of their other side, in bins: ``chosen`` holds them, longest first, and ``ends`` their tiles in this
        order."""
        ends, chosen, counts, sums = storage
        rounds = ceil_div(given.batch, THREADS)
        for i in cutlass.range(rounds, unroll=1):
            if i * THREADS + thread < given.batch:
                place = self.bin_of(entries[i * THREADS + thread, 5], bin_keys)
                cute.arch.atomic_add(counts.iterator + place, Int32(1))
        self.started(counts, sums, thread)
        for i in cutlass.range(rounds, unroll=1):
            if i * THREADS + thread < given.batch:
                place = self.bin_of(entries[i * THREADS + thread, 5], bin_keys)
                chosen[cute.arch.atomic_add(counts.iterator + place, Int32(1))] = i * THREADS + thread
        cute.arch.sync_threads()
        for i in cutlass.range(rounds, unroll=1):
            if i * THREADS + thread < given.batch:
                ends[i * THREADS + thread] = ceil_div(entries[chosen[i * THREADS + thread], 2], self.config.tile_m)
        cute.arch.sync_threads()

    @cute.jit
    def started(self, counts, sums, thread):
        """Replaces the size of each bin by its first place, and from there on by the next one that is free."""
        cute.arch.sync_threads()
        count = counts[thread]
        start = self.scanned(count, sums, thread) - count
        counts[thread] = start
        cute.arch.sync_threads()

    def bin_of(self, cost: Any, bin_keys: Any) -> Any:
        return THREADS - 1 - cutlass.min(cutlass.max(cost, 0) // bin_keys, THREADS - 1)

    @cute.jit
    def put(self, order, row, m_block, entry):
        order[row, 0] = m_block
        order[row, 1] = Int32(0)
        order[row, 2] = entry

    @cute.jit
    def entered(self, entry, given, entries):
        """Writes an entry's row of ``entries``; returns its number of row tiles."""
        q_row, q_start, seqlen_q = self.place(entry, given.cu_seqlens_q, given.seqused_q, given.rows_q)
        k_row, k_start, seqlen_k = self.place(entry, given.cu_seqlens_k, given.seqused_k, given.rows_k)
        found = (q_row, q_start, seqlen_q, k_row, k_start, seqlen_k, Int32(0), Int32(0), Int32(0))
        for i in cutlass.range_constexpr(9):
            entries[entry, i] = found[i]
        return ceil_div(seqlen_q, self.config.tile_m)

    @cute.jit
    def place(self, entry, ends, used, rows):
        """(row of storage, first row in it, rows in use) of an entry, clamped to storage even if the tables are wrong."""
        row, start, length = entry, Int32(0), rows
        if const_expr(ends is not None):
            row, start = Int32(0), cutlass.min(cutlass.max(Int32(ends[entry]), 0), rows)
            length = Int32(ends[entry + 1]) - start
        if const_expr(used is not None):
            length = Int32(used[entry])
        return row, start, cutlass.max(cutlass.min(length, rows - start), 0)

    @cute.jit
    def scanned(self, mine, sums, thread):
        """The sum of ``mine`` over this thread and those before it."""
        lane, warp = thread % 32, thread // 32
        within = self.scanned_by_warp(mine, lane)
        if lane == 31:
            sums[warp] = within
        cute.arch.sync_threads()
        of_warps = Int32(0)
        if lane < THREADS // 32:
            of_warps = sums[lane]
        of_warps = cute.arch.shuffle_sync(self.scanned_by_warp(of_warps, lane), cutlass.max(warp - 1, 0))
        cute.arch.sync_threads()  # ``sums`` is reused
        if warp > 0:
            within += of_warps
        return within

    @cute.jit
    def scanned_by_warp(self, value, lane):
        for i in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_up(value, 2**i)
            if lane >= 2**i:
                value += other
        return value

    @cute.jit
    def located(self, number, given, ends, entries, bin_keys, chosen):
        """(entry, m_block, bin) of row tile ``number``, counted entry after entry in the order of ``chosen``, if that is given."""
        low, high = Int32(0), given.batch - 1  # finds the first entry that ends after it
        while low < high:
            middle = (low + high) // 2
            if ends[middle] > number:
                high = middle
            else:
                low = middle + 1
        before = Int32(0)
        if low > 0:
            before = ends[low - 1]
        m_block = number - before
        if const_expr(chosen is not None):
            low = chosen[low]
        cost = entries[low, 5]
        if const_expr(self.config.ends_with_row):
            cost = keys_up_to(m_block, self.config.tile_m, entries[low, 2], cost)
        return low, m_block, self.bin_of(cost, bin_keys)

    # ---- rows of no sequence

    @cute.jit
    def wipe_all(self, given, outputs, other, share):
        """share: this block, the blocks that clear rows, this block's first head, the heads over which they are distributed."""
        if const_expr(outputs[0] is not None):
            self.wipe(given, outputs, *share)
        if const_expr(other is not None):
            turned = (given.cu_seqlens_k, given.cu_seqlens_q, given.seqused_k, given.seqused_q, given.batch, given.rows_k, given.rows_q)
            self.wipe(Given(*turned), (other, None, None), *share)

    @cute.jit
    def wipe(self, given, outputs, block, blocks, head, heads):
        """Writes zeros in out and -inf in the statistics; each warp checks 32 rows of storage at once and
        clears every ``heads``-th head."""
        out, lse, highest = outputs
        thread, _, _ = cute.arch.thread_idx()
        lane, warp, warps = thread % 32, block * (THREADS // 32) + thread // 32, blocks * (THREADS // 32)
        total = out.shape[0] * given.rows_q
        first, last = Int32(0), Int32(0)
        if const_expr(given.cu_seqlens_q is not None):
            first, last = Int32(given.cu_seqlens_q[0]), Int32(given.cu_seqlens_q[given.batch])
        for i in cutlass.range(ceil_div(cutlass.max(total - warp * 32, 0), warps * 32), unroll=1):
            start = (warp + i * warps) * 32
            is_gap = Int32(0)
            if start + lane < total:
                is_gap = self.is_gap(start + lane, given, first, last)
            for j in cutlass.range(32, unroll=1):
                if cute.arch.shuffle_sync(is_gap, j) != 0:
                    row = start + j
                    for h in cutlass.range(ceil_div(out.shape[1] - head, heads), unroll=1):
                        self.clear(out, lse, highest, row // given.rows_q, head + h * heads, row % given.rows_q, lane)

    @cute.jit
    def is_gap(self, row, given, first, last):
        """1 if a row of storage is in no sequence, or after the rows that its sequence uses."""
        found = Int32(0)
        if const_expr(given.cu_seqlens_q is None):
            if row % given.rows_q >= Int32(given.seqused_q[row // given.rows_q]):
                found = Int32(1)
        else:
            if (row < first) | (row >= last):
                found = Int32(1)
            elif const_expr(given.seqused_q is not None):
                low, high = Int32(0), given.batch - 1  # finds the first entry that ends after the row
                while low < high:
                    middle = (low + high) // 2
                    if Int32(given.cu_seqlens_q[middle + 1]) > row:
                        high = middle
                    else:
                        low = middle + 1
                if row - Int32(given.cu_seqlens_q[low]) >= Int32(given.seqused_q[low]):
                    found = Int32(1)
        return found

    @cute.jit
    def clear(self, out, lse, highest, entry, head, row, lane):
        for i in cutlass.range(ceil_div(out.shape[3] - lane, 32), unroll=1):
            out[entry, head, row, lane + 32 * i] = out.element_type(0.0)
        for other in (lse, highest):
            if const_expr(other is not None and len(other.shape) == 4):
                for i in cutlass.range(ceil_div(other.shape[3] - lane, 32), unroll=1):
                    other[entry, head, row, lane + 32 * i] = other.element_type(0.0)
            elif const_expr(other is not None):
                if lane == 0:
                    other[entry, head, row] = -Float32.inf
