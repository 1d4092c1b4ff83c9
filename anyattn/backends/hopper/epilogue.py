"""The end of a tile: the sink joins, the output is divided by the row's sum and leaves through shared memory, the log-sum-exp directly."""

import math
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from anyattn.backends.hopper.fragment import rows_and_columns
from anyattn.backends.hopper.softmax import LOG2E

__all__ = ["Epilogue"]

_BARRIER = 6  # the named barrier at which the multiplying warp groups meet around the store


class Epilogue:
    """What ``HopperForward`` does with a finished row tile."""

    config: Any

    @cute.jit
    def finished(self, acc, row_max, row_sum, scale_log2, sink, head):
        """Divides ``acc`` by the rows' sums and leaves the natural log-sum-exp in ``row_sum``."""
        scale = Float32(LOG2E) if const_expr(self.config.score is not None) else scale_log2
        out = rows_and_columns(acc)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            total = row_sum[r]
            for offset in (2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
            top, rescale = row_max[r] * scale, Float32(1.0)
            if const_expr(self.config.has_sink):
                logit = Float32(sink[head]) * Float32(LOG2E)
                higher = cute.arch.fmax(top, logit)
                rescale = cute.math.exp2(top - higher, fastmath=True)
                total = total * rescale + cute.math.exp2(logit - higher, fastmath=True)
                top = higher
            inverse = rescale * cute.arch.rcp_approx(total) if total > 0.0 else Float32(0.0)
            out[r, None].store(out[r, None].load() * inverse)
            row_sum[r] = (top + cute.math.log2(total, fastmath=True)) * Float32(math.log(2.0))

    @cute.jit
    def stored(self, acc, lse_rows, mma, thread, out_copy, out_in_smem, lse, place, seqlen_q):
        """Writes the tile's output and log-sum-exp; the copy engine leaves out rows past the last one."""
        tile_m, head_dim = self.config.tiles.tile_m, self.config.head_dim
        m_block, head, _, entry = place
        atom, out = out_copy
        if const_expr(self.config.has_lse):
            positions = rows_and_columns(mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, head_dim))))
            if positions[0, 0][1] == 0:  # of the four threads that hold a row, the first
                for r in cutlass.range_constexpr(cute.size(lse_rows)):
                    row = positions[r, 0][0] + m_block * tile_m
                    if row < seqlen_q:
                        lse[row, head, entry] = lse_rows[r]
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        narrow.store(acc.load().to(self.dtype))
        threads = 128 * self.config.tiles.warp_groups
        cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=threads)  # the output takes Q's memory: nobody may still read Q
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        mine = copy.get_slice(thread)
        cute.copy(copy, mine.retile(narrow), mine.partition_D(out_in_smem[None, None, 0]))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=_BARRIER, number_of_threads=threads)
        target = cute.local_tile(out[None, None, head, entry], (tile_m, head_dim), (m_block, 0))
        source, target = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(out_in_smem, 0, 2), cute.group_modes(target, 0, 2)
        )
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.copy(atom, source[None, 0], target)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
