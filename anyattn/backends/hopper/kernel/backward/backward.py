"""``HopperBackward``: the backward kernel; layouts, copies and MMA atoms on the host, warp-specialised roles on the device."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import SmemAllocator

from anyattn.backends.hopper.backward_config import REGISTERS
from anyattn.backends.hopper.kernel.backward.adder import NOTED, Adds
from anyattn.backends.hopper.kernel.backward.epilogue import StoresKeys
from anyattn.backends.hopper.kernel.backward.mma import MultipliesBack
from anyattn.backends.hopper.kernel.backward.packed import PLACE_FACTS, Packed
from anyattn.backends.hopper.kernel.backward.producer import LoadsRows
from anyattn.backends.hopper.kernel.backward.scheduler import KEY_FACTS, KeySizes, KeyTables, VisitsRows
from anyattn.backends.hopper.kernel.backward.scores import Scores
from anyattn.backends.hopper.kernel.base import KernelOfConfig, rows_first
from anyattn.backends.hopper.kernel.captured.sums import SumsCaptured
from anyattn.backends.hopper.kernel.dropout import Drops

__all__ = ["HopperBackward"]


class HopperBackward(VisitsRows, LoadsRows, MultipliesBack, Scores, SumsCaptured, Drops, Adds, StoresKeys, Packed, KernelOfConfig):
    """Attention backward for one ``BackwardConfig``: dK, dV and the sums of dQ in float32, or dQ.

    A thread block processes one key tile after another, each with all row tiles that see it. Source: FlashAttention-3 (Shah et al.,
    arXiv:2407.08608): S and dP are computed transposed, so that P and dS are operands from registers; dQ is added to global memory,
    or stored there if the keys fit one tile.
    """

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        dout: cute.Tensor,
        dk: cute.Tensor,
        dv: cute.Tensor,
        lse: cute.Tensor,
        delta: cute.Tensor,
        dq_sums: cute.Tensor,
        turns: cute.Tensor | None,
        partial_count: cute.Tensor | None,
        partial_index: cute.Tensor | None,
        full_count: cute.Tensor | None,
        full_index: cute.Tensor | None,
        ranks: cute.Tensor | None,
        order: cute.Tensor | None,
        entries: cute.Tensor | None,
        counter: cute.Tensor,
        scale: Float32,
        scale_log2: Float32,
        rows: Int32,
        spread: Int32,
        section: Int32,
        workers: Int32,
        scalars: tuple,
        tensors: tuple,
        totals: tuple,
        stream: cuda.CUstream,
    ):
        """q, dout: (B, Hq, Sq, D), k, v, dk, dv: (B, Hkv, Sk, D), strides multiples of 16 bytes, the last 1. If the config
        ``stores_float32``, dk and dv are (B, Hkv * parts, Sk, D) float32, strides even: each head's parts, one after another.

        lse: (B, Hq, M, tile_m) float32, in base 2, infinite for rows that see no key and rows that do not exist. delta: the same shape,
        subtracted from each row's dP. dq_sums: (B, Hq, M, tile_m * head_dim) float32, zeros, in the order of
        ``backward.rows``; if the config ``stores_dq``, dq itself, (B, Hq, Sq, D), zeros where no key tile sees a row. turns: (B, Hq, M)
        int32 zeros, if the config is deterministic.
        With ``entries`` B is the number of rows of storage, and lse, delta, dq_sums and turns are (1, Hq, row tiles of all entries, ...),
        each entry's from ``backward.packed.first_tile`` on. partial_count to entries: see ``backward.scheduler.KeyTables``. counter: two
        zeros, int32, reset to zeros. scale: the softmax scale; scale_log2: times log2(e). rows, spread, section: see
        ``backward.scheduler.KeySizes``. workers: the number of thread blocks. scalars, tensors: captured values, expression by expression
        of ``config.exprs``. totals: zeros, to which the gradients of captured tensors are added, contiguous, with a last dimension for
        copies if they have some (``CapturedSum``).
        """
        tiles, d, dv_ = self.config.tiles, self.config.head_dim, self.config.head_dim_v
        tile_m, tile_n = tiles.tile_m, tiles.tile_n
        lengths, heads, k_heads, parts = (q.shape[2], k.shape[2]), q.shape[1], k.shape[1], None
        if const_expr(self.config.stores_float32):
            k_heads, parts = dk.shape[1], dk.shape[1] // k.shape[1]
        q, k, v, dout, dk, dv = (rows_first(t) for t in (q, k, v, dout, dk, dv))
        if const_expr(self.config.stores_dq):
            dq_sums = rows_first(dq_sums)
        layouts = self._layouts()
        one = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_atom, q = cpasync.make_tiled_tma_atom(read, q, one[0], (tile_m, d))
        do_atom, dout = cpasync.make_tiled_tma_atom(read, dout, one[1], (tile_m, dv_))
        k_atom, k = cpasync.make_tiled_tma_atom(read, k, one[2], (tile_n, d))
        v_atom, v = cpasync.make_tiled_tma_atom(read, v, one[3], (tile_n, dv_))
        # dK and dV are stored in parts of 64 keys, those of one warp group
        plain = (dk, dv) if const_expr(self.config.has_entries or self.config.stores_float32) else ()
        key_copies = ()
        if const_expr(not self.config.stores_float32):
            part_k, part_v = (cute.slice_(self._tile(64, n, 1, is_k), (None, None, 0)) for n, is_k in ((d, True), (dv_, False)))
            of_dk = cpasync.make_tiled_tma_atom(write, dk, part_k, (64, d))
            of_dv = cpasync.make_tiled_tma_atom(write, dv, part_v, (64, dv_))
            key_copies = (of_dk, of_dv)
        self.bytes = [cute.size_in_bytes(self.dtype, layout) for layout in one[:4]]
        self.storage_of_block = self._shared(layouts)
        sizes = (rows, spread, section, k_heads, heads // k_heads, parts)
        self.kernel(
            (q_atom, do_atom, k_atom, v_atom), (q, dout, k, v), key_copies, plain, (lse, delta, dq_sums, turns),
            (scale, scale_log2), (partial_count, partial_index, full_count, full_index, ranks, order, entries, counter), lengths, sizes,
            (scalars, tensors, totals), layouts, self._products(),
        ).launch(
            grid=(workers, 1, 1),
            block=[128 * (tiles.warp_groups + 1), 1, 1],
            stream=stream,
            min_blocks_per_mp=tiles.blocks,
            preferred_smem_carveout=100 if const_expr(tiles.blocks > 1) else None,  # percent; the compiler would ask the GPU otherwise
        )  # fmt: skip

    def _layouts(self) -> tuple[Any, ...]:
        """The layouts in shared memory of Q, dO, K, V and of dS, whose rows are keys: all row-major, with a last mode for the stage."""
        tiles, d, dv = self.config.tiles, self.config.head_dim, self.config.head_dim_v
        tile_m, tile_n = tiles.tile_m, tiles.tile_n
        shapes = ((tile_m, d, tiles.q_stages), (tile_m, dv, tiles.do_stages))
        of_keys = (self._tile(tile_n, d, 1, is_halved=True), self._tile(tile_n, dv, 1))
        return *(self._tile(*shape) for shape in shapes), *of_keys, self._tile(tile_n, tile_m, tiles.exchanged)

    def _tile(self, rows: int, columns: int, stages: int, is_halved: bool = False) -> Any:
        """The layout of a tile in shared memory. All its columns are an MN-major operand, or half of them if warp groups share keys or the
        tile ``is_halved``: an operand begins where a swizzle pattern begins, or inside a pattern that contains all of the operand."""
        widths = {64: 64, 80: 16, 128: 64, 256: 64, 192: 32, 96: 16 if is_halved else 32}
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[widths[columns]]
        return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, self.dtype), (rows, columns, stages), order=(0, 1, 2))

    def leaving(self, storage: Any, smem: Any) -> tuple[Any, Any]:
        """The shared memory from which finished dK and dV are stored: the buffers of K and V, or those of dQ and dS (``frees_keys``)."""
        if not self.config.frees_keys:
            return smem[2][None, None, 0], smem[3][None, None, 0]
        n, d, dv = self.config.tiles.tile_n, self.config.head_dim, self.config.head_dim_v
        of_k, of_v = (cute.slice_(self._tile(n, columns, 1, is_k), (None, None, 0)) for columns, is_k in ((d, True), (dv, False)))
        return (
            storage.dq.get_tensor(of_k.outer, swizzle=of_k.inner, dtype=self.dtype),
            storage.ds.get_tensor(of_v.outer, swizzle=of_v.inner),
        )

    def _products(self) -> tuple[Any, ...]:
        """The tiled MMAs: S^T = K Q^T (and dP^T = V dO^T), dV += P^T dO, dK += dS^T Q, dQ = dS K or dQ^T = K^T dS^T. If a row tile has 128
        rows, each warp group computes 64 rows of dQ, else half the columns of dQ."""
        tiles, d, dv, dtype = self.config.tiles, self.config.head_dim, self.config.head_dim_v, self.dtype
        along, across, groups = OperandMajorMode.K, OperandMajorMode.MN, tiles.warp_groups
        in_registers = warpgroup.OperandSource.RMEM
        make = helpers.make_trivial_tiled_mma
        scores = make(dtype, dtype, along, along, Float32, (groups, 1, 1), (64, tiles.tile_m))
        to_v = make(dtype, dtype, along, across, Float32, (groups, 1, 1), (64, dv), in_registers)
        to_k = make(dtype, dtype, along, across, Float32, (groups, 1, 1), (64, d), in_registers)
        if tiles.transposes_dq:
            return scores, to_v, to_k, make(dtype, dtype, across, across, Float32, (groups, 1, 1), (64, tiles.tile_m))
        by_rows = tiles.tile_m // 64
        to_q = make(dtype, dtype, across, across, Float32, (by_rows, groups // by_rows, 1), (64, d // tiles.dq_parts * by_rows // groups))
        return scores, to_v, to_k, to_q

    def scores_from_registers(self) -> Any:
        """The tiled MMA of S^T and dP^T for the columns of K and V that are held in registers."""
        along, groups, source = OperandMajorMode.K, self.config.tiles.warp_groups, warpgroup.OperandSource.RMEM
        shape = (64, self.config.tiles.tile_m)
        return helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, (groups, 1, 1), shape, source)

    def _shared(self, layouts: tuple) -> Any:
        tiles, dtype = self.config.tiles, self.dtype
        sizes, facts = [cute.cosize(layout) for layout in layouts], self._facts()

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * tiles.q_stages]  # a full and an empty barrier for each stage
            do_barriers: cute.struct.MemRange[cutlass.Int64, 2 * tiles.do_stages]
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2]
            work_barriers: cute.struct.MemRange[cutlass.Int64, 4]
            work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 2 * facts], 16]
            visit: cute.struct.MemRange[cutlass.Int32, self.visit_facts * tiles.q_stages]
            place: cute.struct.MemRange[cutlass.Int32, NOTED * tiles.warp_groups]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, tiles.q_stages * tiles.tile_m], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, tiles.do_stages * tiles.tile_m], 128]
            q: cute.struct.Align[cute.struct.MemRange[dtype, sizes[0]], 1024]
            dout: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes[2]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, sizes[3]], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[dtype, sizes[4]], 1024]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, self.config.dq_numbers], 1024]
            diagonals: cute.struct.MemRange[Float32, self.config.scratch // 4]

        return Storage

    @cute.kernel
    def kernel(self, atoms, gmem, key_copies, plain, sums, scales, tables, lengths, sizes, captured, layouts, mmas):
        tiles = self.config.tiles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (*atoms, *(copy[0] for copy in key_copies)):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.storage_of_block)
        statistics = 4 * tiles.tile_m  # bytes of lse or delta, which arrive at the barrier of Q or of dO
        pipes = (
            self._pipe(storage.q_barriers.data_ptr(), tiles.q_stages, self.bytes[0] + statistics),
            self._pipe(storage.do_barriers.data_ptr(), tiles.do_stages, self.bytes[1] + statistics),
            self._pipe(storage.k_barriers.data_ptr(), 1, self.bytes[2]),
            self._pipe(storage.v_barriers.data_ptr(), 1, self.bytes[3]),
            self._work_pipe(storage.work_barriers.data_ptr()),
        )
        ranges = (storage.q, storage.dout, storage.k, storage.v, storage.ds)
        smem = tuple(part.get_tensor(layout.outer, swizzle=layout.inner) for part, layout in zip(ranges, layouts, strict=True))
        statistics_in_smem = (
            storage.lse.get_tensor(cute.make_layout((tiles.tile_m, tiles.q_stages))),
            storage.delta.get_tensor(cute.make_layout((tiles.tile_m, tiles.do_stages))),
        )
        board = (
            storage.work.get_tensor(cute.make_layout((self._facts(), 2))),
            storage.visit.get_tensor(cute.make_layout((self.visit_facts, tiles.q_stages))),
            storage.place.get_tensor(cute.make_layout((NOTED, tiles.warp_groups))),
        )
        # in chunks of 4 numbers per thread of a warp group: free of bank conflicts, and contiguous in global memory for each group
        dq = storage.dq.get_tensor(cute.make_layout((4, 128, self.config.dq_chunks, tiles.warp_groups)))
        diagonals = storage.diagonals.get_tensor(cute.make_layout(self.config.scratch // 4)) if const_expr(self.config.scratch) else None
        leaving = self.leaving(storage, smem)
        captured = (*captured, diagonals)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if warp < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[tiles.blocks][1])
            if warp == 0:
                copies = tuple(zip(atoms, gmem))
                self.load(
                    copies, smem, (sums[0], sums[1]), statistics_in_smem, pipes, board, KeyTables(*tables[:-1]), tables[-1], lengths,
                    KeySizes(*sizes), captured,
                )  # fmt: skip
            if (warp > 0) & (warp <= self.config.adding_warps):
                self.add(warp - 1, dq, board[2], sums[2], sums[3], key_copies, leaving, KeySizes(*sizes).ratio)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[tiles.blocks][0])
            keys = (*key_copies, *plain)
            self.multiply(thread - 128, mmas, smem, leaving, statistics_in_smem, (dq, sums[2]), pipes, board, keys, scales, captured)

    def _facts(self) -> int:
        """The count of numbers that the producer posts on the board for a key tile."""
        return KEY_FACTS + PLACE_FACTS * self.config.has_entries
