"""``WideBackwardConfig``: the properties of one compiled backward kernel for heads above 256, which computes one of dq, dk and dv."""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.backends.hopper.config import SHARED_MEMORY, WIDE, Ask, ModsOfConfig
from anyattn.mods.ir.expr import Expr

__all__ = ["HALF", "HELD", "REGISTERS", "WideBackwardConfig", "WideTiles", "bytes_of", "wide_tiles_for"]

HELD = 64  # rows of the tiles that a thread block keeps: queries for dq, keys for dk and dv
HALF = 256  # columns of a gradient that a warp group accumulates, and of the first part of a streamed tile
REGISTERS = (232, 40)  # of a thread of the two warp groups that multiply, and of the warp group that loads
_HOLDS = {"dq": 128, "dk": 128, "dv": 64}  # columns in registers, beside 128 registers of a thread for the gradient's
_REST = 2048  # bytes of shared memory for barriers, boards, statistics and alignment


@dataclass(frozen=True)
class WideTiles:
    """Tile sizes. tile_m: query rows. tile_n: keys. stages: the stages of each part of the two streams of tiles: of the first columns and
    the other columns of the stream that is multiplied to scores first, then of the other stream. holds: first columns of a kept tile
    that a warp group keeps in registers: products do not read them from shared memory, whose bandwidth limits narrow tiles."""

    tile_m: int
    tile_n: int
    stages: tuple[int, int, int, int]
    holds: int = 0

    def __post_init__(self) -> None:
        if HELD not in (self.tile_m, self.tile_n):
            raise ValueError(f"tile_m={self.tile_m}, tile_n={self.tile_n}; wanted {HELD} of the rows that a thread block keeps")
        if (other := min(self.tile_m, self.tile_n)) not in (16, 32, HELD):
            raise ValueError(f"{other} rows of a streamed tile; wanted 16, 32 or {HELD} (wgmma K and N)")
        if self.holds % 64 or not 0 <= self.holds <= HALF:
            raise ValueError(f"holds={self.holds}; wanted a multiple of 64 up to {HALF}")
        if not all(1 <= n <= 2 for n in self.stages):
            raise ValueError(f"stages={self.stages}; wanted 1 or 2 of each part")

    @property
    def streamed(self) -> int:
        """Rows of the tiles that pass by."""
        return min(self.tile_m, self.tile_n)

    @property
    def warp_groups(self) -> int:
        return 2

    @property
    def delta(self) -> str:
        """As in ``BackwardTiles``."""
        return "behind"


def bytes_of(of: str, tiles: WideTiles, head_dim: int, head_dim_v: int, has_one_kv: bool) -> int:
    """Shared memory in bytes. dq keeps tiles of Q and dO and streams K and V, dk keeps K and V and streams Q and dO, dv keeps K alone. A V
    that lies in K is not loaded."""
    keeps_one = of == "dv" or (of == "dk" and has_one_kv)
    kept = HELD * (head_dim if keeps_one else head_dim + head_dim_v)
    of_second = (0, 0) if of == "dq" and has_one_kv else (HALF, head_dim_v - HALF)
    widths = (HALF, head_dim - HALF, *of_second)
    streamed = tiles.streamed * sum(n * width for n, width in zip(tiles.stages, widths, strict=True))
    passed = 2 * HELD * tiles.streamed * (1 if of == "dv" else 2)
    return 2 * (kept + streamed) + passed + _REST


@dataclass(frozen=True)
class WideBackwardConfig(ModsOfConfig):
    """The config of one kernel for one gradient. Fields are those of ``BackwardConfig`` (dk, dv) and ``Config`` (dq) unless listed.

    of: "dq", "dk" or "dv". score: the score mod's value, and for dq and dk its derivative as a second output. has_one_kv: V is the first
    columns of K; dk then keeps one tile for both, and dq streams one. has_order, spread: of dq's row tiles.
    """

    of: str
    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tiles: WideTiles
    score: Expr | None = None
    bands: tuple[Expr, ...] = ()
    always: tuple[Ask, ...] = ()
    lists: str | None = None
    per_entry: bool = False
    per_head: bool = False
    by_kv_head: bool = False
    list_cut: tuple[int, int] = (1, 1)
    partial: Ask | None = None
    has_order: bool = False
    spread: str = "all"
    has_one_kv: bool = False
    stores_float32: bool = False

    __hash__ = ModsOfConfig.__hash__  # a dataclass would write its own

    # what the roles of other kernels, which this one shares, may ask: dense calls, one head for each row tile, nothing added to memory
    is_deterministic = looks_up_pairs = has_entries = has_dropout = has_ranks = folds_keys = False
    has_count = is_paged = pairs = is_split = False
    sums = ()
    heads_per_tile = own_heads = cluster = 1

    def __post_init__(self) -> None:
        self.check_mods()
        if self.of not in ("dq", "dk", "dv"):
            raise ValueError(f"of={self.of!r}; wanted 'dq', 'dk' or 'dv'")
        if (self.head_dim, self.head_dim_v) not in WIDE:
            raise ValueError(f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}; wanted one of {WIDE}")
        if (self.tiles.tile_m if self.of == "dq" else self.tiles.tile_n) != HELD:
            raise ValueError(f"{self.tiles} of {self.of}; wanted {HELD} rows of what its thread block keeps")
        if self.of != "dv" and self.tiles.stages[0] < 2:
            raise ValueError(f"stages={self.tiles.stages} of {self.of}; wanted 2 first: a tile is multiplied while the next one is scored")
        if self.streams_one and self.tiles.stages[:2] != (2, 2):
            raise ValueError(
                f"stages={self.tiles.stages} with has_one_kv; wanted 2: dP of a tile is multiplied before dS of the one before"
            )
        if self.lists not in (None, "dense"):
            raise ValueError(f"lists={self.lists!r}; wanted None or 'dense'")
        if self.score is not None and len(self.score.outputs) != (wanted := 1 if self.of == "dv" else 2):
            raise ValueError(f"score has {len(self.score.outputs)} outputs; wanted {wanted} for {self.of}")
        if self.partial is not None and self.lists is None:
            raise ValueError("partial without lists; wanted the predicate as always")
        if self.stores_float32 and self.of == "dq":
            raise ValueError("stores_float32 of dq; wanted dk or dv")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(
                f"{self.tiles} at head_dim {self.head_dim} takes {self.shared_memory} bytes; a thread block has {SHARED_MEMORY}"
            )

    @property
    def shared_memory(self) -> int:
        return bytes_of(self.of, self.tiles, self.head_dim, self.head_dim_v, self.has_one_kv)

    @property
    def is_wide(self) -> bool:  # type: ignore[override]
        return True

    @property
    def keeps_one(self) -> bool:
        """Whether a thread block keeps one tile: of K alone, or of K whose first columns are V."""
        return self.of == "dv" or (self.of == "dk" and self.has_one_kv)

    @property
    def streams_one(self) -> bool:
        """Whether the tiles of K that pass by are those of V too."""
        return self.of == "dq" and self.has_one_kv

    @property
    def tile_q(self) -> int:
        return self.tiles.tile_m

    @property
    def own_q(self) -> int:
        return self.tiles.tile_m

    @property
    def interleaves_heads(self) -> bool:
        """As in ``BackwardConfig``."""
        return self.has_right and not self.has_left and self.lists is None and not self.bands_by_head


def wide_tiles_for(of: str, head_dim: int, head_dim_v: int, has_one_kv: bool) -> WideTiles:
    """The tiles of a kernel: as many streamed rows, then as many stages, as shared memory has room for.

    >>> wide_tiles_for("dk", 512, 512, False), wide_tiles_for("dv", 512, 512, False).streamed
    (WideTiles(tile_m=32, tile_n=64, stages=(2, 1, 1, 1), holds=128), 64)
    """
    deep = [(2, 2, 2, 2)]
    if of != "dq" or not has_one_kv:
        deep += [(2, 1, 2, 2), (2, 2, 1, 1), (2, 1, 1, 1)]
    if of == "dv":
        deep.append((1, 1, 1, 1))
    for rows in (HELD, 32, 16):
        for stages in deep:
            holds = _HOLDS[of] if head_dim == 2 * HALF else 64
            tiles = WideTiles(HELD, rows, stages, holds) if of == "dq" else WideTiles(rows, HELD, stages, holds)
            if bytes_of(of, tiles, head_dim, head_dim_v, has_one_kv) <= SHARED_MEMORY:
                return tiles
    raise ValueError(f"no tiles for {of} at head_dim {head_dim}, {head_dim_v}; wanted one of {WIDE}")
