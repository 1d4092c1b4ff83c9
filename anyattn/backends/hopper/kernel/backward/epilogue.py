"""Backward epilogue of a key tile: stores of dK, scaled, and of dV through shared memory to global memory."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from anyattn.backends.hopper.kernel.backward.adder import ADD_THREADS, FILLED, FREE, KEYS, KEYS_LEFT, LEFT_THREADS

__all__ = ["READ", "STORED", "StoresKeys"]

READ = 10  # named barrier: all warp groups have read K and dS for the last time
STORED = 11  # first of the named barriers, one per warp group (wide heads: one for both): dK and dV are complete in shared memory


class StoresKeys:
    """The epilogue of ``HopperBackward`` for a finished key tile."""

    config: Any

    def await_dv_read(self) -> None:
        """Waits until dV of the previous key tile has been read out of the buffer of dS."""
        if self.config.posts_keys:
            cute.arch.barrier(barrier_id=KEYS_LEFT, number_of_threads=LEFT_THREADS)

    def release_keys(self, pipes: Any, key_state: Any) -> None:
        """Releases the stages of K and V to the producer."""
        pipes[2].consumer_release(key_state)
        pipes[3].consumer_release(key_state)

    @cute.jit
    def stored_keys(self, sums, mmas, leaving, keys, scale, about, facts, place, held):
        """Stores dK and dV. keys: (copy atom, tensor) of dK and dV, and with entries or parts the plain tensors dK and dV. about: the
        warp group, the thread, and the board of the adding warps (``Adds.add``). place: see ``Packed.posted_place``. held: the pipelines,
        and the state of the stage of K and V to release.
        """
        pipes, key_state = held
        sums[0].store(sums[0].load() * scale)
        if const_expr(self.config.frees_keys):
            if facts.total == 0:  # otherwise the last row tile has released them
                self.release_keys(pipes, key_state)
        if const_expr(self.config.posts_keys):
            self._post_keys(sums, mmas, leaving, keys, about, facts, place)
        elif const_expr(self.config.stores_float32):
            if const_expr(not self.config.frees_keys):
                self.release_keys(pipes, key_state)
            self._plainly_stored(sums, mmas, keys, about, facts, place)
        else:
            self._tile_stored(sums, mmas, leaving, keys, about, facts, place)
            self.release_keys(pipes, key_state)

    @cute.jit
    def _tile_stored(self, sums, mmas, leaving, keys, about, facts, place):
        """Each warp group stores its 64 keys; TMA leaves out keys past the tensor's last one."""
        group, _, _ = about
        # another warp group's product dQ of the last row tile may still read these keys of K
        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)
        if const_expr(self.config.has_entries):
            if self.is_cut(group, facts):
                self._plainly_stored(sums, mmas, keys, about, facts, place)
            else:
                self._part_stored(sums, mmas, leaving, keys, about, facts, place)
        else:
            self._part_stored(sums, mmas, leaving, keys, about, facts, place)

    @cute.jit
    def _plainly_stored(self, sums, mmas, keys, about, facts, place):
        """Stores a warp group's keys row by row: the next keys belong to another sequence, or dK and dV are float32."""
        _, to_v, to_k, _ = mmas
        self.keys_stored(sums[0], to_k, self.config.head_dim, keys[-2], facts, place, about[1])
        self.keys_stored(sums[1], to_v, self.config.head_dim_v, keys[-1], facts, place, about[1])

    @cute.jit
    def _part_stored(self, sums, mmas, leaving, keys, about, facts, place):
        """Stores a warp group's keys by TMA."""
        _, to_v, to_k, _ = mmas
        group, thread, _ = about
        self._into(sums[0], to_k, leaving[0], thread)
        self._into(sums[1], to_v, leaving[1], thread)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=STORED + group, number_of_threads=128)
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            self._store_part(keys[0], leaving[0], self.config.head_dim, group, facts.kv_head, facts.n_block, place)
            self._store_part(keys[1], leaving[1], self.config.head_dim_v, group, facts.kv_head, facts.n_block, place)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _post_keys(self, sums, mmas, leaving, keys, about, facts, place):
        """Writes dK and dV to the buffers of dQ and dS, from which an adding warp stores them."""
        _, to_v, to_k, _ = mmas
        dk, dv = sums
        group, thread, board = about
        cute.arch.barrier(barrier_id=FREE + group, number_of_threads=ADD_THREADS)
        # then all of dQ has been read out of its buffer, and no product dQ reads dS any more
        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)
        is_whole = Int32(1)
        if const_expr(self.config.has_entries):
            if self.is_cut(group, facts):
                is_whole = Int32(0)
                self._plainly_stored(sums, mmas, keys, about, facts, place)
            else:
                self._into(dk, to_k, leaving[0], thread)
                self._into(dv, to_v, leaving[1], thread)
        else:
            self._into(dk, to_k, leaving[0], thread)
            self._into(dv, to_v, leaving[1], thread)
        if thread % 128 == 0:
            where = (place.row, place.start) if const_expr(self.config.has_entries) else (place, Int32(0))
            note = (Int32(KEYS), facts.kv_head, where[0], is_whole, facts.n_block, where[1])
            for i in cutlass.range_constexpr(len(note)):
                board[i, group] = note[i]
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier_arrive(barrier_id=FILLED + group, number_of_threads=ADD_THREADS)

    @cute.jit
    def store_whole_parts(self, board, copy, source, head_dim: cutlass.Constexpr):
        """Stores each warp group's 64 keys of dK or dV, unless the group has stored them itself."""
        for group in cutlass.range_constexpr(self.config.tiles.warp_groups):
            _, kv_head, row, is_whole, n_block, start = (board[i, group] for i in range(6))
            if is_whole != 0:
                self._store_part(
                    copy, source, head_dim, group, kv_head, n_block, (row, start) if const_expr(self.config.has_entries) else row
                )

    def _into(self, acc: Any, mma: Any, target: Any, thread: Any) -> None:
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        narrow.store(acc.load().to(self.dtype))
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.retile(narrow), mine.partition_D(target))

    def _store_part(self, copy: Any, source: Any, head_dim: int, group: Any, kv_head: Any, n_block: Any, place: Any) -> None:
        """Stores the ``group``-th 64 keys of the tile."""
        atom, tensor = copy
        groups = self.config.tiles.tile_n // 64
        goal = cute.local_tile(self.rows_at(tensor, kv_head, place), (64, head_dim), (n_block * groups + group, 0))
        part = cute.local_tile(source, (64, head_dim), (group, 0))
        part, goal = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(part, 0, 2), cute.group_modes(goal, 0, 2))
        cute.copy(atom, part, goal)
