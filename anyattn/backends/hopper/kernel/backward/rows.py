"""Row kernels around the backward kernel: before it, row statistics and zeros in the sums of dQ; after it, dQ from its sums, and dK and dV
from their parts.

A call whose dQ has no sums (``BackwardConfig.stores_dq``) has neither the zeros nor the kernel after.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, const_expr

from anyattn.arithmetic import LOG2E, ceil_div, next_power_of_2
from anyattn.backends.hopper.backward_config import RowsConfig
from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.backward.packed import first_tile

__all__ = ["RowsAfter", "RowsBefore"]

_THREADS = 256
_WIDE = 8  # 16-bit numbers of one load
_LANES = 32  # threads that exchange registers


class _Rows:
    def __init__(self, config: RowsConfig):
        self.config = config
        self.dtype = BFloat16 if config.is_bf16 else Float16

    def tile(self, heads: Any, tiles: Any) -> tuple[Any, Any, Any]:
        """(row tile, head, entry) of this block, in descending order: after the backward kernel the L2 cache holds the sums that it added
        to last, and before it the cache should hold the sums that it adds to first. Deterministic sums go through rows in the opposite
        direction, and interleaved heads in both, so for them this holds of heads and entries only."""
        blocks, _, _ = cute.arch.grid_dim()
        block, _, _ = cute.arch.block_idx()
        block = blocks - 1 - block
        return block % tiles, block // tiles % heads, block // tiles // heads

    @cute.jit
    def located(self, slot, entries, length):
        """(row of storage, the tile's first position in it, rows of the sequence from there on) of row tile ``slot`` of all entries; the
        last is 0 or less if no sequence has this tile. entries: see ``backward.scheduler.KeyTables``. length: positions in a row of
        storage."""
        tile_m = self.config.tile_m
        tiles = ceil_div(length, tile_m)
        low, high = Int32(0), entries.shape[0] - 1  # bounds of the last entry whose tiles begin at ``slot`` or before
        while low < high:
            middle = (low + high + 1) // 2
            if first_tile(entries[middle, 3], entries[middle, 4], middle, tile_m, tiles) <= slot:
                low = middle
            else:
                high = middle - 1
        row, start, seqlen_q = (entries[low, i] for i in range(3, 6))
        before = (slot - first_tile(row, start, low, tile_m, tiles)) * tile_m
        rest = seqlen_q - before if before >= 0 else Int32(0)
        return row, start + before, rest

    def sums_of(self, sums: Any, entry: Any, head: Any, m: Any) -> Any:
        """A row tile's sums, which begin at a multiple of 16 bytes: the library allocates them."""
        start = sums[entry, head, m, None].iterator.align(16)
        return cute.make_tensor(start, cute.make_layout(self.config.tile_m * self.config.head_dim))


class RowsBefore(_Rows):
    """The kernel for one ``RowsConfig`` that runs before the backward kernel: a block for each row tile."""

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        natural_lse: cute.Tensor,
        dlse: cute.Tensor | None,
        natural_delta: cute.Tensor | None,
        entries: cute.Tensor | None,
        lse: cute.Tensor,
        delta: cute.Tensor,
        sums: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """out, dout: (B, Hq, Sq, Dv). natural_lse, dlse: (B, Hq, Sq) float32. natural_delta: the same shape; if given, delta is also stored
        here, for the gradient of a sink. entries, lse, delta, sums: see ``HopperBackward``; sums is None if there are none."""
        blocks = lse.shape[0] * lse.shape[1] * lse.shape[2]
        self.kernel((out, dout, natural_lse, dlse), entries, natural_delta, (lse, delta, sums)).launch(
            grid=(blocks, 1, 1), block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, given, entries, natural_delta, found):
        m, head, entry = self.tile(found[0].shape[1], found[0].shape[2])
        length = given[0].shape[2]
        if const_expr(self.config.has_entries):
            row, first, rest = self.located(m, entries, length)
            if rest > 0:
                self.of_tile(given, natural_delta, found, (m, head, entry), (row, first, rest))
        else:
            first = m * self.config.tile_m
            self.of_tile(given, natural_delta, found, (m, head, entry), (entry, first, length - first))

    @cute.jit
    def of_tile(self, given, natural_delta, found_of_rows, slot, where):
        """slot: (row tile, head, entry) in the results. where: see ``located``."""
        (out, dout, natural_lse, dlse), (lse, delta, sums) = given, found_of_rows
        (m, head, entry), (storage, first, rest) = slot, where
        thread, _, _ = cute.arch.thread_idx()
        tile_m, lanes = self.config.tile_m, min(next_power_of_2(self.config.head_dim_v // _WIDE), _LANES)
        at_once, pieces = _THREADS // lanes, ceil_div(self.config.head_dim_v, _WIDE * lanes)
        if const_expr(sums is not None):
            own = self.sums_of(sums, entry, head, m)
            nothing = cute.make_rmem_tensor(4, Float32)
            nothing.fill(0.0)
            for i in cutlass.range_constexpr(tile_m * self.config.head_dim // (4 * _THREADS)):
                cute.autovec_copy(nothing, cute.local_tile(own, (4,), (i * _THREADS + thread,)))
        column = thread % lanes * _WIDE
        loads = tile_m // at_once
        of_out, of_dout = (cute.make_rmem_tensor((_WIDE, loads * pieces), self.dtype) for _ in range(2))
        for i in cutlass.range_constexpr(loads * pieces):  # all are loaded before the first is used
            row, at = first + i // pieces * at_once + thread // lanes, column + i % pieces * (_WIDE * lanes)
            if (row - first < rest) & (at < out.shape[3]):
                for source, target in ((out, of_out), (dout, of_dout)):
                    cute.autovec_copy(cute.local_tile(source[storage, head, row, None], (_WIDE,), (at // _WIDE,)), target[None, i])
        for i in cutlass.range_constexpr(loads):
            place = i * at_once + thread // lanes
            row = first + place
            total = Float32(0.0)
            for piece in cutlass.range_constexpr(pieces):
                if (place < rest) & (column + piece * (_WIDE * lanes) < out.shape[3]):
                    for j in cutlass.range_constexpr(_WIDE):
                        x = Float32(of_out[j, i * pieces + piece])
                        # a row that sees no key has an output of zeros, and its dO may contain inf or NaN
                        total += select(x == 0.0, Float32(0.0), x * Float32(of_dout[j, i * pieces + piece]), "float")
            for j in cutlass.range_constexpr(lanes.bit_length() - 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=1 << j)
            if thread % lanes == 0:
                found = Float32.inf
                if place < rest:
                    natural = natural_lse[storage, head, row]
                    found = select(natural == -Float32.inf, Float32.inf, natural * Float32(LOG2E), "float")
                    if const_expr(dlse is not None):
                        total -= Float32(dlse[storage, head, row])
                    if const_expr(natural_delta is not None):
                        natural_delta[storage, head, row] = total
                lse[entry, head, m, place] = found
                delta[entry, head, m, place] = total


class RowsAfter(_Rows):
    """The kernel for one ``RowsConfig`` that runs after the backward kernel: a block for each row tile, and before these, if the config
    ``divides_heads``, the blocks that add parts of dK and dV."""

    @cute.jit
    def __call__(
        self,
        sums: cute.Tensor | None,
        dq: cute.Tensor | None,
        entries: cute.Tensor | None,
        guard: cute.Tensor | None,
        scale: Float32,
        of_dk: cute.Tensor | None,
        of_dv: cute.Tensor | None,
        dk: cute.Tensor | None,
        dv: cute.Tensor | None,
        stream: cuda.CUstream,
    ):
        """sums, entries: see ``HopperBackward``. dq: (B, Hq, Sq, D), the sums times ``scale``; both may be None. guard: int32 (1,); if it
        is 1, nothing is written. dk, dv: (B, Hkv, Sk, D), in 16 bits or float32, the sums of of_dk and of_dv, (B, Hkv * parts, Sk, D)
        float32, contiguous; None unless the config ``divides_heads``."""
        blocks, keys = Int32(0), (Int32(0), Int32(0))
        if const_expr(sums is not None):
            blocks = sums.shape[0] * sums.shape[1] * sums.shape[2]
        if const_expr(self.config.divides_heads):
            keys = tuple(ceil_div(t.shape[0] * t.shape[1] * t.shape[2] * (t.shape[3] // _WIDE), _THREADS) for t in (dk, dv))
            blocks += keys[0] + keys[1]
        self.kernel(sums, dq, entries, guard, scale, (of_dk, of_dv), (dk, dv), keys).launch(
            grid=(blocks, 1, 1), block=[_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, sums, dq, entries, guard, scale, parts, of_keys, blocks_of_keys):
        if const_expr(self.config.divides_heads):
            block, _, _ = cute.arch.block_idx()
            runs = Int32(1)
            if const_expr(guard is not None):
                runs = 1 - guard[0]
            if (block < blocks_of_keys[0]) & (runs != 0):
                self.parts_added(parts[0], of_keys[0], block)
            block -= blocks_of_keys[0]
            if (block >= 0) & (block < blocks_of_keys[1]) & (runs != 0):
                self.parts_added(parts[1], of_keys[1], block)
            if const_expr(sums is not None):
                if block >= blocks_of_keys[1]:
                    self.of_block(sums, dq, entries, guard, scale)
        else:
            self.of_block(sums, dq, entries, guard, scale)

    @cute.jit
    def parts_added(self, parts, target, block):
        """Writes 8 columns of a key for each thread: the sum of their parts, in order."""
        thread, _, _ = cute.arch.thread_idx()
        entries, heads, keys, columns = target.shape
        wide, piece = columns // _WIDE, block * _THREADS + thread
        row, column = piece // wide, piece % wide
        if row < entries * heads * keys:
            key, head, entry = row % keys, row // keys % heads, row // keys // heads
            count, eight = parts.shape[1] // heads, cute.make_layout(_WIDE)
            total, part = (cute.make_rmem_tensor(_WIDE, Float32) for _ in range(2))
            total.fill(0.0)
            for p in cutlass.range(count, unroll=4):
                at = cute.local_tile(parts[entry, head * count + p, key, None], (_WIDE,), (column,)).iterator
                cute.autovec_copy(cute.make_tensor(at.align(16), eight), part)
                total.store(total.load() + part.load())
            own = cute.local_tile(target[entry, head, key, None], (_WIDE,), (column,)).iterator
            found = cute.make_rmem_tensor(_WIDE, target.element_type)
            found.store(total.load().to(target.element_type))
            cute.autovec_copy(found, cute.make_tensor(own.align(16), eight))

    @cute.jit
    def of_block(self, sums, dq, entries, guard, scale):
        """Writes the row tile of this block."""
        m, head, entry = self.tile(sums.shape[1], sums.shape[2])
        length = dq.shape[2]
        if const_expr(self.config.has_entries):
            row, first, rest = self.located(m, entries, length)
            if rest > 0:
                self.of_tile(sums, dq, scale, (m, head, entry), (row, first, rest))
        else:
            first = m * self.config.tile_m
            if const_expr(guard is not None):
                if guard[0] == 0:
                    self.of_tile(sums, dq, scale, (m, head, entry), (entry, first, length - first))
            else:
                self.of_tile(sums, dq, scale, (m, head, entry), (entry, first, length - first))

    @cute.jit
    def of_tile(self, sums, dq, scale, slot, where):
        """slot: (row tile, head, entry) of the sums. where: see ``located``."""
        if const_expr(self.config.is_transposed):
            self._by_columns(sums, dq, scale, slot, where)
        else:
            self._by_rows(sums, dq, scale, slot, where)

    @cute.jit
    def _by_rows(self, sums, dq, scale, slot, where):
        (m, head, entry), (storage, before, rest) = slot, where
        thread, _, _ = cute.arch.thread_idx()
        tile_m, head_dim = self.config.tile_m, self.config.head_dim
        own = self.sums_of(sums, entry, head, m)
        pieces = tile_m * head_dim // 16  # a piece: 16 numbers that are contiguous in the sums, 8 columns of two rows
        loads = cute.ceil_div(pieces, _THREADS)
        found = cute.make_rmem_tensor((16, loads), Float32)
        for i in cutlass.range_constexpr(loads):  # all are loaded before the first is used
            row, column, first = self.place_of(i * _THREADS + thread)
            if (row < rest) & (column < dq.shape[3]):
                cute.autovec_copy(cute.local_tile(own, (16,), (first // 16,)), found[None, i])
        for i in cutlass.range_constexpr(loads):
            row, column, _ = self.place_of(i * _THREADS + thread)
            if (row < rest) & (column < dq.shape[3]):
                for half in cutlass.range_constexpr(2):
                    if row + 8 * half < rest:
                        narrow = cute.make_rmem_tensor(_WIDE, self.dtype)
                        for j in cutlass.range_constexpr(_WIDE):
                            narrow[j] = self.dtype(found[j // 2 * 4 + 2 * half + j % 2, i] * scale)
                        cute.autovec_copy(
                            narrow, cute.local_tile(dq[storage, head, before + row + 8 * half, None], (_WIDE,), (column // 8,))
                        )

    def place_of(self, piece: Any) -> tuple[Any, Any, Any]:
        """(row of the tile, column, first number in the sums) of a piece: the chunks of 4 threads, 8 columns of this row and of the row 8
        below (``MultipliesBack._post_dq``)."""
        tile_m, head_dim = self.config.tile_m, self.config.head_dim
        chunks = tile_m * head_dim // 1024  # chunks per thread: 2 warp groups, 128 threads, 4 numbers in a chunk
        # neighbouring threads write to one row
        chunk, quad, group = piece % chunks, piece // chunks % 32, piece // chunks // 32
        row = quad // 8 * 16 + quad % 8
        column = chunk * 8
        if tile_m == 64:
            column = column + group * (head_dim // 2)
        else:
            row = row + group * 64
        return row, column, ((group * chunks + chunk) * 128 + quad * 4) * 4

    @cute.jit
    def _by_columns(self, sums, dq, scale, slot, where):
        """``_by_rows`` for sums of dQ^T."""
        (m, head, entry), (storage, before, rest) = slot, where
        thread, _, _ = cute.arch.thread_idx()
        tile_m, head_dim = self.config.tile_m, self.config.head_dim
        own, rest = self.sums_of(sums, entry, head, m), cutlass.min(rest, tile_m)
        loads = cute.ceil_div(tile_m * head_dim // 32, _THREADS)
        found = cute.make_rmem_tensor((4, 8, loads), Float32)
        for i in cutlass.range_constexpr(loads):  # all are loaded before the first is used
            row, column, first = self.place_of_pair(i * _THREADS + thread)
            if (row < rest) & (column < dq.shape[3]):
                for j in cutlass.range_constexpr(8):
                    cute.autovec_copy(cute.local_tile(own, (4,), (first // 4 + 4 * j,)), found[None, j, i])
        for i in cutlass.range_constexpr(loads):
            row, column, _ = self.place_of_pair(i * _THREADS + thread)
            for of_pair in cutlass.range_constexpr(2):
                for half in cutlass.range_constexpr(2):
                    if (row + of_pair < rest) & (column + 8 * half < dq.shape[3]):
                        narrow = cute.make_rmem_tensor(_WIDE, self.dtype)
                        for j in cutlass.range_constexpr(_WIDE):
                            narrow[j] = self.dtype(found[2 * half + of_pair, j, i] * scale)
                        own_row = dq[storage, head, before + row + of_pair, None]
                        cute.autovec_copy(narrow, cute.local_tile(own_row, (_WIDE,), (column // 8 + half,)))

    def place_of_pair(self, pair: Any) -> tuple[Any, Any, Any]:
        """(row of the tile, column, first number in the sums) of 16 columns of this row and of the next: chunks of every fourth thread."""
        tile_m, head_dim = self.config.tile_m, self.config.head_dim
        chunks, warps = tile_m // 8, head_dim // 16  # chunks per thread; warps of both warp groups, 16 columns each
        # neighbouring threads read neighbouring chunks
        lane, warp, chunk = pair % 4, pair // 4 % warps, pair // 4 // warps
        return 8 * chunk + 2 * lane, 16 * warp, (((warp // 4) * chunks + chunk) * 128 + warp % 4 * 32 + lane) * 4
