"""Paged gather: K and V rows from pages too small for TMA, copied asynchronously by the producer's lanes, 16 bytes at a time."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import cpasync

__all__ = ["ARRIVALS", "LANES", "Gathers"]

LANES = 32
ARRIVALS = LANES + 1  # per stage: one of each lane when its copies are done, one of the warp when it has written the board
_AT_ONCE = 8  # entries per copy: 16 bytes, contiguous in the swizzled layout


class Gathers:
    """The part of ``HopperForward``'s loading role that copies without TMA, for ``config.gathers``."""

    config: Any
    dtype: Any

    @cute.jit
    def gather(self, source, target, pages, places, barrier):
        """Starts the copies of a tile's rows, each of which is a piece; ``barrier`` counts their completion.

        source: (row of a page, entry, page). target: (key, entry). pages, places: page and row of each lane's key, ``LANES`` apart. Keys
        on no page of the pool, such as those past the last one, get some row of it: the consumers mask or clear them.
        """
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(cpasync.LoadCacheMode.GLOBAL), self.dtype, num_bits_per_copy=16 * _AT_ONCE)
        tile_n, width = (cute.size(target, mode=[i]) for i in (0, 1))
        segment = 64 if const_expr(width % 64 == 0) else 32  # contiguous entries of a row
        lanes = segment // _AT_ONCE
        rows = LANES // lanes
        mine, chunk = cute.arch.lane_idx() // lanes, cute.arch.lane_idx() % lanes
        # the whole pool, indexed in steps of 16 bytes
        entries = cute.make_layout((_AT_ONCE, width // segment, 2**31 - 1), stride=(1, segment, _AT_ONCE))
        entries = cute.make_tensor(source.iterator, entries)
        for group in cutlass.range_constexpr(len(pages)):
            offset = self._offset(source, places[group], pages[group])  # once per row, for the lanes that share it
            for i in cutlass.range(min(tile_n - group * LANES, LANES) // rows, unroll=4 if const_expr(segment == 64) else 1):
                lane = i * rows + mine
                first = cute.arch.shuffle_sync(offset, lane) + chunk
                for part in cutlass.range_constexpr(width // segment):
                    to = cute.local_tile(target[group * LANES + lane, None], (_AT_ONCE,), (part * lanes + chunk,))
                    cute.copy(atom, entries[None, part, first], to)
        cute.arch.cp_async_mbarrier_arrive_noinc(barrier)

    @cute.jit
    def _offset(self, source, row, page):
        """The offset of a row of the pool, in steps of one copy."""
        offset = Int64(0)
        if (page >= 0) & (page < source.shape[2]):
            offset = Int64(cute.crd2idx((row, 0, page), source.layout)) // _AT_ONCE
        return offset
