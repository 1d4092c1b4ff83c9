"""``BackwardConfig``: what one compiled Hopper backward kernel is specialised for, and the tiles for each head dimension."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from anyattn.backends.hopper.config import Ask, ModsOfConfig, sides
from anyattn.mods.ir.expr import Expr

__all__ = ["BackwardConfig", "BackwardTiles", "RowsConfig", "backward_tiles_for"]

SHARED_MEMORY = 227 * 1024
HEAD_DIMS = (64, 128)  # what a row is padded to, in shared memory only
TILE_N = 128  # keys of a tile, 64 for each warp group that multiplies
REGISTERS = (240, 24)  # of a thread that multiplies and of one that loads or adds


@dataclass(frozen=True)
class BackwardTiles:
    """tile_m: query rows. tile_n: keys, 64 for each warp group. q_stages, do_stages: tiles of Q and dO in flight. ds_stages: of dS."""

    tile_m: int
    tile_n: int
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128):
            raise ValueError(f"tile_m={self.tile_m}; wanted 64 or 128: dQ's rows are one or two times 64 (wgmma M)")
        if self.tile_n != TILE_N:
            raise ValueError(f"tile_n={self.tile_n}; wanted {TILE_N}: two warp groups of 64 keys (wgmma M)")
        for name in ("q_stages", "do_stages", "ds_stages"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(f"{name}={getattr(self, name)}; wanted 1 or 2")

    @property
    def warp_groups(self) -> int:
        """Warp groups that multiply; one more loads and adds."""
        return self.tile_n // 64


@dataclass(frozen=True)
class BackwardConfig(ModsOfConfig):
    """One kernel for dK, dV and the sums of dQ. Run-time numbers (lengths, strides, scales, captured values) are no part of it.

    head_dim, head_dim_v: as padded (``config.padded``). score: the score mod's value and derivative, two outputs, or None.
    bands: row ranges ``lo, hi`` that are bands around a row's position; the kernel derives its tiles from them. always: predicates that
    are evaluated in every tile. lists: None, or the layout of the lists of row tiles of each key tile, "dense" (B, H, N, M), "ragged"
    (H, total_n, max_m) or "flat" (H, total_m). per_entry, per_head: the lists differ
    from batch entry to entry, from query head to head. list_cut: (rows, keys) of a list's tile in units of the kernel's. partial: what
    decides inside listed partial tiles. is_deterministic: key tiles add to a row tile's dQ in their order.
    has_entries: a table says where each batch entry's rows are, and another one which tiles of keys there are.
    """

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tiles: BackwardTiles
    score: Expr | None = None
    bands: tuple[Expr, ...] = ()
    always: tuple[Ask, ...] = ()
    lists: str | None = None
    per_entry: bool = False
    per_head: bool = False
    list_cut: tuple[int, int] = (1, 1)
    partial: Ask | None = None
    is_deterministic: bool = False
    has_entries: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) not in HEAD_DIMS:
                raise ValueError(f"{name}={getattr(self, name)}; wanted one of {', '.join(map(str, HEAD_DIMS))}")
        if self.score is not None and len(self.score.outputs) != 2:
            raise ValueError(f"score has {len(self.score.outputs)} outputs; wanted 2, the value and the derivative by the score")
        if self.lists not in (None, "dense") and not (self.has_entries and self.lists in ("ragged", "flat")):
            raise ValueError(f"lists={self.lists!r}; wanted None or 'dense', or with entries 'ragged' or 'flat'")
        if any(sides(band) is None for band in self.bands):
            raise ValueError("bands has row ranges that are no band around a row's place; wanted them as partial or always")
        if self.lists is not None and self.bands:
            raise ValueError("bands and lists are both given; with lists a band is one of the predicates that hold always")
        if self.partial is not None and self.lists is None:
            raise ValueError("partial without lists; wanted the predicate as always")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(
                f"{self.tiles} at head_dim {self.head_dim} takes {self.shared_memory} bytes of shared memory; an SM has {SHARED_MEMORY}"
            )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    @property
    def shared_memory(self) -> int:
        """Bytes: 16-bit tiles of K, V, Q, dO and dS, one float32 tile of dQ, the rows' statistics; barriers and alignment beside them."""
        t, (d, dv) = self.tiles, (self.head_dim, self.head_dim_v)
        rows = t.q_stages * t.tile_m * d + t.do_stages * t.tile_m * dv
        statistics = 4 * (t.q_stages + t.do_stages) * t.tile_m
        return 2 * (t.tile_n * (d + dv) + rows + t.ds_stages * t.tile_m * t.tile_n) + 4 * t.tile_m * d + statistics + 2048


@dataclass(frozen=True)
class RowsConfig:
    """One of the two kernels that go over all rows: before the backward kernel (their statistics, and zeros in the sums of dQ) or,
    is_after, behind it (dQ from its sums). has_dlse: the log-sum-exp has a gradient. has_entries: see ``BackwardConfig``."""

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tile_m: int
    is_after: bool
    has_dlse: bool = False
    has_entries: bool = False


def backward_tiles_for(head_dim: int, head_dim_v: int, is_plain: bool = False) -> BackwardTiles | None:
    """The tiles for padded head dimensions, None where the accumulators of dK and dV are too large for the registers of two warp groups.

    is_plain: neither a score mod nor a predicate is evaluated, whose numbers need the registers that rows 64 to 127 would take.
    ``tests/backends/hopper/test_backward_compile.py`` compiles them all and counts what spills.
    """
    if max(head_dim, head_dim_v) > 128:
        return None
    return BackwardTiles(128 if is_plain and max(head_dim, head_dim_v) == 64 else 64, TILE_N)
