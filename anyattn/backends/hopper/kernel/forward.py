"""``HopperForward``: the forward kernel: layouts, copies and MMA atoms on the host, warp-specialised roles on the device."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import SmemAllocator

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.score_analysis import Factored, bias, cases, factored, is_even, is_foreseen, is_tanh, reads_apart
from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.kernel.base import KernelOfConfig, rows_first
from anyattn.backends.hopper.kernel.dropout import Drops
from anyattn.backends.hopper.kernel.epilogue import Epilogue
from anyattn.backends.hopper.kernel.mma import Multiplies
from anyattn.backends.hopper.kernel.paged_gather import Gathers
from anyattn.backends.hopper.kernel.producer import Loads
from anyattn.backends.hopper.kernel.softmax import Softmax
from anyattn.backends.hopper.kernel.speculative_softmax import Guesses
from anyattn.backends.hopper.kernel.tile_scheduler import FACTS, Sizes, Tables, Visits

__all__ = ["HopperForward"]


class HopperForward(Visits, Loads, Gathers, Multiplies, Softmax, Guesses, Drops, Epilogue, KernelOfConfig):
    """Attention forward for one ``Config``: give an instance to ``cute.compile`` with CuTe tensors; the result takes other tensors too.

    Source: FlashAttention-3 (Shah et al., arXiv:2407.08608): warp specialisation, ping-pong between warp groups, overlap within one.
    """

    def __init__(self, config: Config):
        super().__init__(config)
        self.waits = config.has_entries and config.has_order  # for the kernel that makes the tables
        self.foresees = self.lifts = self.shortens = self.holds_thread = False
        if config.score is not None:
            self.score = factored(config.score) if config.is_factored else Factored(config.score, None, None, ())
            added = bias(config.score) if config.is_factored else None
            self.is_bias, self.whole = added is not None, self.score.core if added is None else added
            self.cases = cases(self.whole)
            self.foresees = self.is_bias and is_foreseen(config.score)
            # for these mods ptxas fills the registers that ``_again`` frees in the loop over key tiles with more values than it freed
            self.holds_thread = not self.is_bias or (reads_apart(config.score) and not self.foresees)
            self.shortens = config.is_bounded and is_tanh(self.score.core)
            self.lifts = self.is_bias and any(is_even(e) for e in (self.whole, *(case.expr for case in self.cases)))
        # a bias that is loaded while products are in flight, or an expensive mod, measured slower with speculation
        is_light = config.score is None or (self.lifts and not self.foresees)
        self.guesses = self.shortens or (is_light and not config.is_bounded)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        highest: cute.Tensor | None,
        sink: cute.Tensor | None,
        partial_count: cute.Tensor | None,
        partial_index: cute.Tensor | None,
        full_count: cute.Tensor | None,
        full_index: cute.Tensor | None,
        order: cute.Tensor | None,
        entries: cute.Tensor | None,
        pages: cute.Tensor | None,
        counter: cute.Tensor,
        scale_log2: Float32,
        rows: Int32,
        spread: Int32,
        section: Int32,
        workers: Int32,
        scalars: tuple,
        tensors: tuple,
        stream: cuda.CUstream,
    ):
        """q, out: (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D), strides multiples of 16 bytes, the last 1; lse, highest: (B, Hq, Sq) float32;
        sink: (Hq,). With ``config.is_split`` out is (splits * B, Hq, Sq, D) float32, contiguous at a multiple of 16 bytes, and lse
        (splits * B, Hq, Sq). With ``entries`` B is that of storage, with ``pages`` k and v are (pages, Hkv, page size, D),
        the page size a multiple of ``config.piece``.

        partial_count to pages: see ``tile_scheduler.Tables``. counter: two zeros, int32, left as zeros. scale_log2: the softmax scale times
        log2(e). rows, spread, section: see ``tile_scheduler.Sizes``. workers: thread blocks, or pairs of them, that take row tiles in turn.
        scalars, tensors: the captured values of ``config.exprs``, expression by expression, then of the dropout (``dropout.Drops``).
        """
        tiles, head_dim, head_dim_v = self.config.tiles, self.config.head_dim, self.config.head_dim_v
        tile_m, tile_n = tiles.tile_m, tiles.tile_n
        lengths, heads, k_heads = (q.shape[2], k.shape[2]), q.shape[1], k.shape[1]
        ratio = heads // k_heads
        if const_expr(self.config.is_split):
            out, lengths = self._of_splits(out), (*lengths, q.shape[0])
        k, plain_v, plain_out = (rows_first(t) for t in (k, v, out))
        q, whole_out = self._rows_first(q, ratio), self._rows_first(out, ratio)
        v = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[3, 2, 1, 0]))
        lse, highest = (
            None if const_expr(t is None) else cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 1, 0])) for t in (lse, highest)
        )
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        groups = (tiles.warp_groups, 1, 1)
        mma_qk = helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, groups, (64, tile_n))
        in_registers = warpgroup.OperandSource.RMEM
        columns = self.config.columns
        mma_pv = helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, across, Float32, groups, (64, columns), in_registers)
        layouts = (
            helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (tile_m, tile_n, head_dim), self.dtype, 1),
            helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (tile_m, tile_n, head_dim), self.dtype, tiles.stages),
            self._layout_of_values(),
            helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (tile_m, tile_n, head_dim_v), self.dtype, 1),
        )
        one = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        # each warp group stores its own rows of O
        part = cute.slice_(helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (64, tile_n, columns), self.dtype, 1), (None, None, 0))
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_atom, q = cpasync.make_tiled_tma_atom(read, q, *self._rows_of(one[0], tile_m, head_dim))
        at_once = self.config.piece if const_expr(self.config.is_paged) else tile_n  # keys per copy
        if const_expr(self.config.gathers):
            of_tile = (None, k), (None, plain_v)
        else:
            of_tile = self._copies_of_tile(k, v, one, at_once)
        if const_expr(self.config.is_split):
            out_atom, out = None, None
        else:
            out_atom, out = cpasync.make_tiled_tma_atom(write, whole_out, *self._rows_of(part, 64, columns))
        self.bytes = [cute.size_in_bytes(self.dtype, layout) for layout in one[:3]]
        self.q_size = max(cute.cosize(one[0]), cute.cosize(one[3]))
        self.storage_of_block = self._shared(layouts)
        tables = (partial_count, partial_index, full_count, full_index, order, entries, pages)
        if const_expr(self.config.heads_per_tile > 1):
            heads = k_heads * ceil_div(ratio, self.config.heads_per_tile)
        sizes = (rows, spread, section, heads, ratio, lengths[1] // at_once if const_expr(self.config.is_paged) else Int32(0))
        self.kernel(
            (q_atom, *(atom for atom, _ in of_tile)), (q, *(x for _, x in of_tile)), (out_atom, out, plain_out, lse, highest), sink,
            scale_log2, (*tables, counter), lengths, sizes, (scalars, tensors), layouts, (mma_qk, mma_pv),
        ).launch(
            grid=(workers * self.config.cluster, 1, 1),
            cluster=(self.config.cluster, 1, 1) if const_expr(self.config.pairs) else None,
            block=[128 * (self.config.consumers + 1), 1, 1],
            stream=stream,
            use_pdl=self.waits,
            min_blocks_per_mp=tiles.blocks,
            preferred_smem_carveout=100 if const_expr(tiles.blocks > 1) else None,  # percent; the compiler would ask the GPU otherwise
        )  # fmt: skip

    def _of_splits(self, out: Any) -> Any:
        """The splits' output with strides and an address by which a thread stores two entries at once."""
        layout = cute.make_layout(out.shape, stride=(*(cute.assume(s, divby=8) for s in out.stride[:3]), 1))
        return cute.make_tensor(cute.make_ptr(Float32, out.iterator.toint(), cute.AddressSpace.gmem, assumed_align=16), layout)

    def _layout_of_values(self) -> Any:
        tiles, shape = self.config.tiles, (self.config.tiles.tile_m, self.config.head_dim_v, self.config.tiles.tile_n)
        return helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, shape, self.dtype, tiles.stages)

    def _copies_of_tile(self, k: Any, v: Any, layouts: list[Any], keys: int) -> tuple[tuple[Any, Any], ...]:
        """(atom, tensor) of each part of a tile of K and V, in the order of ``Loads.parts_of_tile``. layouts: of Q, K and V in shared
        memory. keys: per copy."""
        read = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.config.pairs else cpasync.CopyBulkTensorTileG2SOp()
        tensors = (k, layouts[1]), (v, layouts[2])
        return tuple(self._copy_of(read, *tensors[int(part.are_values)], part.shape(keys)) for part in self.parts())

    def _copy_of(self, operation: Any, tensor: Any, tile: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
        """(atom, tensor) of copies of ``shape`` into a part of a tile, in the tile's layout: the swizzle depends on the bits of an entry's
        address, for TMA too, so a part may begin at any multiple of 128 bytes."""
        part = cute.composition(tile, tuple(cute.make_layout(n) for n in shape))
        return cpasync.make_tiled_tma_atom(operation, tensor, part, shape, num_multicast=self.config.cluster)

    def _rows_first(self, x: Any, ratio: Any) -> Any:
        """(B, H, S, D) as (S, D, H, B); if heads share row tiles, as ((query heads per K/V head, S), D, K/V heads, B)."""
        if self.config.heads_per_tile == 1:
            return rows_first(x)
        (batch, heads, length, dim), (to_entry, to_head, to_row, to_next) = x.shape, x.stride
        shape = ((ratio, length), dim, heads // ratio, batch)
        return cute.make_tensor(x.iterator, cute.make_layout(shape, stride=((to_head, to_row), to_next, to_head * ratio, to_entry)))

    def _rows_of(self, layout: Any, rows: int, dim: int) -> tuple[Any, tuple]:
        """The layout of ``rows`` rows in shared memory, and the tile of ``_rows_first`` that is loaded there or stored from there.

        Heads and positions past the last are read as zeros and not written.
        """
        if self.config.heads_per_tile == 1:
            return layout, (rows, dim)
        packed = (self.config.own_heads, rows // self.config.own_heads)
        return cute.composition(layout, (cute.make_layout(packed), cute.make_layout(dim))), (packed, dim)

    def _shared(self, layouts: tuple) -> Any:
        stages, q_stages, dtype = self.config.tiles.stages, self.config.q_stages, self.dtype
        sizes = [cute.cosize(layout) for layout in layouts]

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2 * q_stages]  # full and empty, for each stage
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            work_barriers: cute.struct.MemRange[cutlass.Int64, 4]
            work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 2 * FACTS], 16]
            visit: cute.struct.MemRange[cutlass.Int32, 8]
            q: cute.struct.Align[cute.struct.MemRange[dtype, q_stages * self.q_size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, sizes[2]], 1024]
            sums: cute.struct.Align[cute.struct.MemRange[Float32, self.config.sums.in_smem], 16]

        return Storage

    def _tables_awaited(self) -> None:
        """Waits for the kernel that makes the tables: thread blocks begin while it runs (programmatic dependent launch), with which
        decoding 32 entries took 76.9 instead of 78.4 us (H200, 16 heads of 512, one cache, with tables)."""
        if self.waits:
            cute.arch.griddepcontrol_wait()

    def _staged(self, layout: Any) -> Any:
        """The outer layout of Q's or O's tile with a mode for the stage; both use the same memory."""
        tile = cute.slice_(layout.outer, (None, None, 0))
        return cute.append(tile, cute.make_layout(self.config.q_stages, stride=self.q_size))

    def more_in_smem(self, storage: Any) -> tuple[Any, ...]:
        """Further tensors in shared memory, for the consumers."""
        return ()

    @cute.kernel
    def kernel(self, atoms, gmem, outputs, sink, scale_log2, tables, lengths, sizes, captured, layouts, mmas):
        tiles = self.config.tiles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in (*atoms, outputs[0]):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.storage_of_block)
        pipes = (
            self._pipe(storage.q_barriers.data_ptr(), self.config.q_stages, self.bytes[0]),
            self._pipe(storage.k_barriers.data_ptr(), tiles.stages, self.bytes[1], self.config.gathers),
            self._pipe(storage.v_barriers.data_ptr(), tiles.stages, self.bytes[2], self.config.gathers),
            self._work_pipe(storage.work_barriers.data_ptr()),
        )
        smem = (
            storage.q.get_tensor(self._staged(layouts[0]), swizzle=layouts[0].inner),
            storage.k.get_tensor(layouts[1].outer, swizzle=layouts[1].inner),
            storage.v.get_tensor(layouts[2].outer, swizzle=layouts[2].inner),
            storage.q.get_tensor(self._staged(layouts[3]), swizzle=layouts[3].inner),
            *self.more_in_smem(storage),
        )
        board = (storage.work.get_tensor(cute.make_layout((FACTS, 2))), storage.visit.get_tensor(cute.make_layout(8)))
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        self._tables_awaited()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.registers[1])
            if warp == 0:
                copies = tuple(zip(atoms, gmem))
                self.load(copies, smem, pipes, board, Tables(*tables[:-1]), tables[-1], lengths, Sizes(*sizes), captured)
        else:
            cute.arch.setmaxregister_increase(self.config.registers[0])
            self.multiply(thread - 128, mmas, smem, pipes, board, outputs, sink, scale_log2, captured)
