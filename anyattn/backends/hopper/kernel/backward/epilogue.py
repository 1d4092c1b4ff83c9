"""Backward epilogue of a tile of keys: dK, scaled, and dV through shared memory to global memory."""

from typing import Any

import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync, warp

__all__ = ["READ", "STORED", "StoresKeys"]

READ = 10  # the named barrier at which all warp groups have read K for the last time
STORED = 11  # the first of those at which each warp group meets before its copies leave


class StoresKeys:
    """What ``HopperBackward`` does with a finished tile of keys."""

    config: Any

    @cute.jit
    def stored_keys(self, sums, mmas, in_smem, keys, scale, group, thread, facts, place):
        """keys: (copy atom, tensor) of dK and dV, and with entries dK and dV as they are. place: see ``Packed.place_told``."""
        _, to_v, to_k, _ = mmas
        dk, dv = sums
        dk.store(dk.load() * scale)
        # dQ of the last row tile may still be multiplied from another group's keys of K
        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)
        if const_expr(self.config.has_entries):
            if self.is_cut(group, facts):  # the next keys belong to another sequence
                self.keys_stored(dk, to_k, self.config.head_dim, keys[2], facts, place, thread)
                self.keys_stored(dv, to_v, self.config.head_dim_v, keys[3], facts, place, thread)
            else:
                self._tile_stored(sums, mmas, in_smem, keys, group, thread, facts, place)
        else:
            self._tile_stored(sums, mmas, in_smem, keys, group, thread, facts, place)

    @cute.jit
    def _tile_stored(self, sums, mmas, in_smem, keys, group, thread, facts, place):
        """Each warp group sends its 64 keys; the copy engine leaves out those past the tensor's last one."""
        _, _, k, v, _ = in_smem
        _, to_v, to_k, _ = mmas
        dk, dv = sums
        self._into(dk, to_k, k[None, None, 0], thread)
        self._into(dv, to_v, v[None, None, 0], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STORED + group, number_of_threads=128)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            self._sent(keys[0], k[None, None, 0], self.config.head_dim, group, facts, place)
            self._sent(keys[1], v[None, None, 0], self.config.head_dim_v, group, facts, place)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _into(self, acc: Any, mma: Any, target: Any, thread: Any) -> None:
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        narrow.store(acc.load().to(self.dtype))
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.retile(narrow), mine.partition_D(target))

    def _sent(self, copy: Any, source: Any, head_dim: int, group: Any, facts: Any, place: Any) -> None:
        """The ``group``-th 64 keys of the tile."""
        atom, tensor = copy
        groups = self.config.tiles.tile_n // 64
        goal = cute.local_tile(self.rows_at(tensor, facts.kv_head, place), (64, head_dim), (facts.n_block * groups + group, 0))
        part = cute.local_tile(source, (64, head_dim), (group, 0))
        part, goal = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(part, 0, 2), cute.group_modes(goal, 0, 2))
        cute.copy(atom, part, goal)
