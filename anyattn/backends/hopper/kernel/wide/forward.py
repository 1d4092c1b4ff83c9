"""``HopperWideForward``: the forward kernel for heads so wide that a warp group has registers for half of the output's columns only."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.utils import SmemAllocator

from anyattn.backends.hopper.kernel.forward import HopperForward
from anyattn.backends.hopper.kernel.tile_scheduler import FACTS, Sizes, Tables
from anyattn.backends.hopper.kernel.wide.factors import Factors
from anyattn.backends.hopper.kernel.wide.mma import MultipliesWide
from anyattn.backends.hopper.kernel.wide.producer import LoadsWide

__all__ = ["HopperWideForward"]


class HopperWideForward(LoadsWide, MultipliesWide, Factors, HopperForward):
    """Attention forward for one ``Config`` that ``is_wide``: row tiles of 64 rows, and both consumer warp groups have all of them."""

    def _pipes_of_parts(self, barriers: Any) -> tuple[Any, ...]:
        pipes, stages, keys = [], self.config.tiles.stages, self.config.tiles.tile_n
        for i, (part, groups) in enumerate(zip(self.parts(), self.readers(), strict=True)):
            size = keys * (part.end - part.first) * self.dtype.width // 8
            pipes.append(self._pipe(barriers + 2 * stages * i, stages, size, groups=len(groups), cluster=self.config.cluster))
        return tuple(pipes)

    def _part(self, group: Any) -> tuple[Any, Any]:
        return 0, group

    def _shared(self, layouts: tuple) -> Any:
        stages, dtype, tiles = self.config.tiles.stages, self.dtype, self.config.tiles
        sizes = [cute.cosize(layout) for layout in layouts]

        @cute.struct
        class Storage:
            q_barriers: cute.struct.MemRange[cutlass.Int64, 2]  # full and empty
            part_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages * len(self.parts())]
            work_barriers: cute.struct.MemRange[cutlass.Int64, 4]
            work: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 2 * FACTS], 16]
            visit: cute.struct.MemRange[cutlass.Int32, 8]
            q: cute.struct.Align[cute.struct.MemRange[dtype, self.q_size], 1024]
            k: cute.struct.Align[cute.struct.MemRange[dtype, sizes[1]], 1024]
            v: cute.struct.Align[cute.struct.MemRange[dtype, 0 if self.config.has_one_kv else sizes[2]], 1024]
            p: cute.struct.Align[cute.struct.MemRange[cutlass.Int32, 128 * (tiles.tile_n // 4)], 1024]
            factors: cute.struct.Align[cute.struct.MemRange[cutlass.Float32, 2 * 128], 16]

        return Storage

    def _values_in_smem(self, storage: Any, layouts: tuple) -> Any:
        """The tiles of V. The first columns of a tile of K lie as V's tile would: in both, 64 columns of all keys follow one another."""
        if self.config.has_one_kv:
            stride = cute.cosize(cute.slice_(layouts[1], (None, None, 0)))
            tile = cute.slice_(layouts[2].outer, (None, None, 0))
            staged = cute.append(tile, cute.make_layout(self.config.tiles.stages, stride=stride))
            return storage.k.get_tensor(staged, swizzle=layouts[2].inner)
        return storage.v.get_tensor(layouts[2].outer, swizzle=layouts[2].inner)

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
        q_pipe, work_pipe = self._pipe(storage.q_barriers.data_ptr(), 1, self.bytes[0]), self._work_pipe(storage.work_barriers.data_ptr())
        pipes = self.pipes_of_roles(q_pipe, self._pipes_of_parts(storage.part_barriers.data_ptr()), work_pipe)
        exchange = (
            storage.p.get_tensor(cute.make_layout((4, 128, tiles.tile_n // 16))),
            storage.factors.get_tensor(cute.make_layout((2, 128))),
        )
        smem = (
            storage.q.get_tensor(self._staged(layouts[0]), swizzle=layouts[0].inner),
            storage.k.get_tensor(layouts[1].outer, swizzle=layouts[1].inner),
            self._values_in_smem(storage, layouts),
            storage.q.get_tensor(self._staged(layouts[3]), swizzle=layouts[3].inner),
            exchange,
        )
        board = (storage.work.get_tensor(cute.make_layout((FACTS, 2))), storage.visit.get_tensor(cute.make_layout(8)))
        cute.arch.mbarrier_init_fence()
        if const_expr(self.config.pairs):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        self._tables_awaited()
        if warp < 4:
            cute.arch.setmaxregister_decrease(self.config.registers[1])
            if warp == 0:
                copies = tuple(zip(atoms, gmem))
                self.load(copies, smem, pipes[0], board, Tables(*tables[:-1]), tables[-1], lengths, Sizes(*sizes), captured)
        elif warp < 8:
            cute.arch.setmaxregister_increase(self.config.registers[0])
            self.multiply(thread - 128, mmas, smem, pipes[1], board, outputs, sink, scale_log2, captured)
        else:
            cute.arch.setmaxregister_increase(self.config.registers[0])
            self.multiply_rest(thread - 256, mmas, smem, pipes[2], board, outputs)
