"""Adding role: one warp that sends each warp group's part of dQ to the sums in global memory, in turns where results are deterministic."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.backends.hopper.kernel.bulk_copy import add_floats

__all__ = ["ADD_THREADS", "FILLED", "FREE", "Adds"]

FILLED = 6  # the first of the named barriers at which a warp group's part of dQ is complete in shared memory
FREE = 8  # and of those at which it has been read out of it
ADD_THREADS = 160  # a warp group and the adding warp


class Adds:
    """The adding role of ``HopperBackward``."""

    config: Any

    @cute.jit
    def add(self, dq, board, sums, turns):
        """board: for each warp group (row tile or -1 at the end, head, entry, turn), which its first thread writes beside its part."""
        groups, steps = self.config.tiles.warp_groups, self.config.tiles.dq_steps
        size = self.config.tiles.tile_m * self.config.head_dim // groups
        more, step = Int32(1), Int32(0)
        for group in cutlass.range_constexpr(groups):
            cute.arch.barrier_arrive(barrier_id=FREE + group, number_of_threads=ADD_THREADS)
        while more != 0:
            for group in cutlass.range_constexpr(groups):
                cute.arch.barrier(barrier_id=FILLED + group, number_of_threads=ADD_THREADS)
                m, head, entry, turn = (board[i, group] for i in range(4))
                if m < 0:
                    more = Int32(0)
                else:
                    if cute.arch.lane_idx() == 0:
                        if const_expr(turns is not None):
                            self._await(turns[entry, head, None].iterator + m, (turn * steps + step) * groups + group)
                        target = sums[entry, head, m, None].iterator + group * size + step * (size // steps)
                        add_floats(target, dq[None, None, None, group].iterator, 4 * size // steps)
                        cute.arch.cp_async_bulk_commit_group()
                        if const_expr(turns is not None):
                            self._pass_on(turns[entry, head, None].iterator + m)
                        else:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(barrier_id=FREE + group, number_of_threads=ADD_THREADS)
            step = steps - 1 - step
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    @cute.jit
    def _await(self, turn_of_tile, turn):
        """Until the tiles of keys before this one have added. Each warp group's part takes a turn of its own, the first group's first."""
        while cute.arch.load(turn_of_tile, Int32, sem="acquire", scope="gpu") < turn:
            pass

    @cute.jit
    def _pass_on(self, turn_of_tile):
        """Once the sums are written, not only read out of shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.fence_proxy("async.global")
        cute.arch.fence_acq_rel_gpu()
        cute.arch.atomic_add(turn_of_tile, Int32(1), sem="release", scope="gpu")
