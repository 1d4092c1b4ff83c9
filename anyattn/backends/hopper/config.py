"""What one compiled kernel is specialised for; a config that cannot run is refused where it is made."""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr

__all__ = ["HEAD_DIMS", "Config", "Tiles", "tiles_for"]

HEAD_DIMS = (64, 128, 256)
_SHARED_MEMORY = 227 * 1024
_REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a consumer and of a producer thread, by warp groups that multiply: 65,536 an SM


@dataclass(frozen=True)
class Tiles:
    """tile_m: query rows, 64 for each warp group that multiplies. tile_n: keys. stages: tiles of K and of V in flight.

    ping_pong: the warp groups take turns, one multiplies while another exponentiates.
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = True

    def __post_init__(self) -> None:
        if self.tile_m not in (128, 192):
            raise ValueError(f"tile_m={self.tile_m}; wanted 128 or 192: two or three warp groups of 64 rows (wgmma M)")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}; wanted a multiple of 16 up to 256 (wgmma K and N)")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages}; wanted at least 1")

    @property
    def warp_groups(self) -> int:
        """Warp groups that multiply; one more loads."""
        return self.tile_m // 64

    @property
    def registers(self) -> tuple[int, int]:
        return _REGISTERS[self.warp_groups]

    def shared_memory(self, head_dim: int) -> int:
        """Bytes of 16-bit tiles: Q (which O reuses), and ``stages`` of K and V; barriers and alignment beside them."""
        return 2 * head_dim * (self.tile_m + 2 * self.stages * self.tile_n) + 2048


@dataclass(frozen=True)
class Config:
    """One kernel. Run-time numbers (lengths, strides, scales, window bounds, captured values) are no part of it.

    is_bf16: else float16. score: the score mod's expression or None. has_left, has_right: whether row i of the queries sees keys from
    ``i + left`` on, and up to ``i + right``. has_sink, has_lse: as the call asks.
    """

    head_dim: int
    is_bf16: bool
    tiles: Tiles
    score: Expr | None = None
    has_left: bool = False
    has_right: bool = False
    has_sink: bool = False
    has_lse: bool = False

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim={self.head_dim}; wanted one of {', '.join(map(str, HEAD_DIMS))}")
        needed = self.tiles.shared_memory(self.head_dim)
        if needed > _SHARED_MEMORY:
            raise ValueError(f"{self.tiles} at head_dim {self.head_dim} takes {needed} bytes of shared memory; an SM has {_SHARED_MEMORY}")


def tiles_for(head_dim: int, score: Expr | None, has_band: bool) -> Tiles:
    """The tiles for a head dimension: as large as registers allow without spilling, which ``tests/backends/test_hopper.py`` watches.

    A score mod needs registers that three warp groups do not have, and one that reads a table for every score needs more.
    """
    reads_each = score is not None and any(n.op == "load" and d.q and d.kv for n, d in zip(score.nodes, dependence(score), strict=True))
    if head_dim == 64 and score is None and not has_band:
        return Tiles(192, 128, 3)
    tile_n = {64: 64, 128: 64, 256: 48}[head_dim] if reads_each else {64: 128, 128: 128, 256: 80}[head_dim]
    return Tiles(128, tile_n, 3 if head_dim == 64 else 2)
