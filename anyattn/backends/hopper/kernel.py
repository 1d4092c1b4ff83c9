"""The kernel put together: layouts, copies and products on the host, roles on the device."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import BFloat16, Float16, Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import SmemAllocator

from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.epilogue import Epilogue
from anyattn.backends.hopper.load import Loads
from anyattn.backends.hopper.multiply import Multiplies
from anyattn.backends.hopper.softmax import Softmax
from anyattn.geometry.block_info import BlockInfo
from anyattn.geometry.seqlen_info import SeqlenInfoQK

__all__ = ["HopperForward"]


class HopperForward(Loads, Multiplies, Softmax, Epilogue):
    """Attention forward for one ``Config``: give an instance to ``cute.compile`` with CuTe tensors; the result takes other tensors too.

    Source: FlashAttention-3 (Shah et al., arXiv:2407.08608): warp specialisation, ping-pong between warp groups, overlap within one.
    """

    def __init__(self, config: Config):
        self.config = config
        self.dtype = BFloat16 if config.is_bf16 else Float16
        tiles = config.tiles
        self.bands = BlockInfo(tiles.tile_m, tiles.tile_n, is_causal=False, is_local=config.has_left or config.has_right)

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        k: cute.Tensor,
        v: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor | None,
        sink: cute.Tensor | None,
        scale_log2: Float32,
        left: Int32,
        right: Int32,
        scalars: tuple,
        tensors: tuple,
        stream: cuda.CUstream,
    ):
        """q, out: (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D), strides multiples of 16 bytes, the last 1; lse: (B, Hq, Sq) float32; sink: (Hq,).

        scale_log2: the softmax scale times log2(e). Row i sees keys ``i + left <= j < i + right``, as far as the config has these bounds.
        scalars, tensors: the score mod's captured values.
        """
        tiles, head_dim = self.config.tiles, self.config.head_dim
        tile_m, tile_n = tiles.tile_m, tiles.tile_n
        q, k, out = (cute.make_tensor(t.iterator, cute.select(t.layout, mode=[2, 3, 1, 0])) for t in (q, k, out))
        v = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[3, 2, 1, 0]))
        if const_expr(lse is not None):
            lse = cute.make_tensor(lse.iterator, cute.select(lse.layout, mode=[2, 1, 0]))
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        groups = (tiles.warp_groups, 1, 1)
        mma_qk = helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, groups, (64, tile_n))
        in_registers = warpgroup.OperandSource.RMEM
        mma_pv = helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, across, Float32, groups, (64, head_dim), in_registers)
        layouts = (
            helpers.make_smem_layout_a(LayoutEnum.ROW_MAJOR, (tile_m, tile_n, head_dim), self.dtype, 1),
            helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (tile_m, tile_n, head_dim), self.dtype, tiles.stages),
            helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, (tile_m, head_dim, tile_n), self.dtype, tiles.stages),
        )
        one = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        read, write = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        q_atom, q = cpasync.make_tiled_tma_atom(read, q, one[0], (tile_m, head_dim))
        k_atom, k = cpasync.make_tiled_tma_atom(read, k, one[1], (tile_n, head_dim))
        v_atom, v = cpasync.make_tiled_tma_atom(read, v, one[2], (head_dim, tile_n))
        out_atom, out = cpasync.make_tiled_tma_atom(write, out, one[0], (tile_m, head_dim))
        self.bytes = [cute.size_in_bytes(self.dtype, layout) for layout in one]
        self.storage = self._storage(layouts)
        self.kernel(
            (q_atom, k_atom, v_atom, out_atom), (q, k, v, out), lse, sink, scale_log2, (left, right), (scalars, tensors), layouts,
            (mma_qk, mma_pv), (q.shape[0], k.shape[0]), q.shape[2] // k.shape[2],
        ).launch(
            grid=(cute.ceil_div(q.shape[0], tile_m), q.shape[2], q.shape[3]),
            block=[128 * (tiles.warp_groups + 1), 1, 1],
            stream=stream,
            min_blocks_per_mp=1,
        )  # fmt: skip

    def _storage(self, layouts: tuple) -> Any:
        stages = self.config.tiles.stages
        sizes = [cute.cosize(layout) for layout in layouts]
        dtype = self.dtype

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]  # full and empty, for each stage
            k_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            v_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages]
            q: cute.struct.Align[cute.struct.MemRange[dtype, sizes[0]], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, sizes[2]], 1024]

        return Storage

    @cute.kernel
    def kernel(self, atoms, gmem, lse, sink, scale_log2, band, mods, layouts, mmas, lengths, ratio):
        tiles = self.config.tiles
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.storage)
        pipes = (
            self._pipe(storage.q_barriers.data_ptr(), 1, self.bytes[0]),
            self._pipe(storage.k_barriers.data_ptr(), tiles.stages, self.bytes[1]),
            self._pipe(storage.v_barriers.data_ptr(), tiles.stages, self.bytes[2]),
        )
        smem = tuple(
            part.get_tensor(layout.outer, swizzle=layout.inner)
            for part, layout in ((storage.q, layouts[0]), (storage.k, layouts[1]), (storage.v, layouts[2]), (storage.q, layouts[0]))
        )
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        block, head, entry = cute.arch.block_idx()
        blocks_m, _, _ = cute.arch.grid_dim()
        # where keys end with the row, the last rows see most: they go first
        m_block = blocks_m - 1 - block if const_expr(self.config.has_right) else block
        place = (m_block, head, head // ratio, entry)
        blocks = self._blocks(m_block, lengths, band)
        if warp < 4:
            cute.arch.setmaxregister_decrease(tiles.registers[1])
            if warp == 0:
                copies = tuple(zip(atoms[:3], gmem[:3]))
                self.load(copies, smem, pipes, place, blocks[0], blocks[3])
        else:
            cute.arch.setmaxregister_increase(tiles.registers[0])
            out_copy = (atoms[3], gmem[3])
            self.multiply(thread - 128, mmas, smem, pipes, out_copy, lse, sink, place, lengths, scale_log2, mods, band, blocks)

    @cute.jit
    def _blocks(self, m_block, lengths, band):
        """(n_min, n_left, n_right, n_max) of a row tile: which key tiles it needs, and which of them without a mask."""
        config = self.config
        info = SeqlenInfoQK.create(0, lengths[0], lengths[1], tile_m=config.tiles.tile_m, tile_n=config.tiles.tile_n)
        if const_expr(not (config.has_left or config.has_right)):
            end = cute.ceil_div(lengths[1], config.tiles.tile_n)
            return Int32(0), Int32(0), end, end
        # BlockInfo counts from the row's place among the keys, i + seqlen_k - seqlen_q
        offset = lengths[1] - lengths[0]
        window_left = offset - band[0] if const_expr(config.has_left) else None
        window_right = band[1] - 1 - offset if const_expr(config.has_right) else None
        blocks = BlockInfo(config.tiles.tile_m, config.tiles.tile_n, False, True, False, window_left, window_right)
        n_min, n_max = blocks.get_n_block_min_max(info, m_block)
        n_left = blocks.get_n_block_min_before_local_mask(info, m_block, n_min)
        n_right = blocks.get_n_block_min_causal_local_mask(info, m_block, n_min)
        return n_min, n_left, n_right, n_max

    def _pipe(self, barriers: Any, stages: int, transaction_bytes: int) -> Any:
        """One thread fills a stage, one of each multiplying warp gives it back."""
        agent = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(agent, 1),
            consumer_group=pipeline.CooperativeGroup(agent, 4 * self.config.tiles.warp_groups),
            tx_count=transaction_bytes,
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
        )
