"""Loading role for wide heads: two thread blocks of a cluster take the same row tiles, and each loads half of every key tile for both."""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int16

from anyattn.backends.hopper.kernel.producer import Loads

__all__ = ["LoadsWide"]

_BOTH_BLOCKS = 3  # a bit for each thread block of the cluster


class LoadsWide(Loads):
    """The loading role of ``HopperWideForward``. With ``config.pairs`` both thread blocks copy a tile and release it."""

    def place(self) -> tuple[Any, Any, Any]:
        if not self.config.pairs:
            return Loads.place(self)
        return cute.arch.block_idx()[0] // 2, cute.arch.grid_dim()[0] // 2, cute.arch.block_idx_in_cluster()

    def own_tile(self, m_block: Any, rank: Any) -> Any:
        return m_block * 2 + rank if self.config.pairs and not self.config.divides_heads else m_block

    def own_heads(self, heads: Any, head: Any, rank: Any) -> tuple[Any, Any]:
        if not self.config.divides_heads:
            return heads, head
        before = rank * self.config.own_heads
        return cutlass.min(heads - before, self.config.own_heads), head + before

    def receivers(self) -> dict[str, Any]:
        return {"mcast_mask": Int16(_BOTH_BLOCKS)} if self.config.pairs else {}
