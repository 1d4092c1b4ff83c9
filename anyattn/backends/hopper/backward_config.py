"""``BackwardConfig``: the properties that one compiled Hopper backward kernel is specialised for, and its tiles for each head dimension."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.captured_sums import CapturedSum, scratch_of_warp
from anyattn.backends.hopper.config import HEAD_DIMS, SHARED_MEMORY, Ask, ModsOfConfig, room_of
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr

__all__ = [
    "TALL",
    "BackwardConfig",
    "BackwardTiles",
    "RowsConfig",
    "backward_tiles_for",
    "bytes_of",
    "fits_halved",
    "padded_for_backward",
    "short_tiles_for",
    "tall_tiles_for",
]

TILE_N = 128  # keys per tile, 64 for each consumer warp group
TALL = 80  # query rows of a tall tile, not a multiple of 64
SHARED_TILE_N = 64  # keys per tile that both warp groups share: each computes half the columns of dK, dV and dQ; or of one warp group
ACCUMULATORS = {1: 128, 2: 160}  # registers per thread for dK and dV together, by the steps of dP
# of a thread of a consumer warp group, and of the warp group that loads and adds, by thread blocks per multiprocessor
REGISTERS = {1: (240, 24), 2: (232, 24)}
_BARRIERS_AND_BOARDS, _ALIGNED = 512, 1024  # bytes of shared memory before the row statistics; alignment of the tiles after them
# registers of a consumer thread for matrices; the numbers that mods and predicates take of them, if warp groups share keys and if not
_HOLDING, _MODS_BESIDE_SHARED, _MODS_BESIDE_OWN = 208, 8, 40
_PLACES = 8  # registers that the places of packed sequences take in a kernel without mods and predicates
_DQ_CHUNK = 512  # numbers of dQ that a warp group's threads write at once, 4 each
_DELTA = ("before", "between", "behind")
_HALVED: dict[str, Any] = {"tile_m": 64, "tile_n": TILE_N, "ds_stages": 2, "dq_steps": 2, "holds_k": 0, "holds_v": 0, "delta": "before"}


@dataclass(frozen=True)
class BackwardTiles:
    """Tile sizes. tile_m: query rows. tile_n: keys, 64 for each warp group or 64 that they share. q_stages, do_stages: tiles of Q and dO in
    flight.

    ds_stages: tiles of dS; if keys are shared, of P. dq_steps: the number of parts in which a warp group's dQ passes through shared memory.
    dp_steps: the number of parts of its rows, one after the other, in which dP is computed: 2 leave room for wider dK and dV.
    holds_k, holds_v: the number of first columns of K and of V that a warp group keeps in registers as first operand of the products S and
    dP; each product reads the other columns from shared memory.
    delta: when a row's delta is subtracted from dP. "behind": from the finished product. "before": the accumulators of dP begin at -delta,
    which is loaded before S is multiplied; this takes the fewest registers. "between": loaded between the two products, which then do not
    overlap, but no register holds -delta while S is multiplied.
    blocks: thread blocks per multiprocessor; two have one warp group each, with 64 keys.
    """

    tile_m: int
    tile_n: int
    q_stages: int = 2
    do_stages: int = 2
    ds_stages: int = 2
    dq_steps: int = 1
    dp_steps: int = 1
    holds_k: int = 0
    holds_v: int = 0
    delta: str = "behind"
    blocks: int = 1

    def __post_init__(self) -> None:
        alone = (64, SHARED_TILE_N, 1, 1)
        if self.blocks not in REGISTERS or (self.blocks > 1 and (self.tile_m, self.tile_n, self.ds_stages, self.dp_steps) != alone):
            raise ValueError(f"blocks={self.blocks} in {self}; wanted 1, or 2 with 64 rows, 64 keys, ds_stages=1 and dp_steps=1")
        if self.tile_m not in (64, TALL, 128):
            raise ValueError(
                f"tile_m={self.tile_m}; wanted 64 or 128, once or twice the rows of a product (wgmma M), or {TALL}: columns of dQ^T"
            )
        if self.tile_n not in (TILE_N, SHARED_TILE_N):
            raise ValueError(f"tile_n={self.tile_n}; wanted {TILE_N}, 64 keys (wgmma M) for each of two warp groups, or 64 that they share")
        for name in ("q_stages", "do_stages", "ds_stages", "dq_steps", "dp_steps"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(f"{name}={getattr(self, name)}; wanted 1 or 2")
        if self.shares_keys and (self.tile_m, self.ds_stages) != (64, 2):
            raise ValueError(f"tile_m={self.tile_m}, ds_stages={self.ds_stages} where warp groups share keys; wanted 64 and 2")
        for name, wanted in _HALVED.items():
            if self.halves_dp and (given := getattr(self, name)) != wanted:
                raise ValueError(f"{name}={given!r} with dp_steps=2; wanted {wanted!r}: its kernel supports nothing else")
        if self.delta not in (_DELTA[:1] if self.shares_keys else _DELTA):
            wanted = "'before'" if self.shares_keys else f"one of {', '.join(map(repr, _DELTA))}"
            raise ValueError(f"delta={self.delta!r} with tile_n={self.tile_n}; wanted {wanted}")

    @property
    def warp_groups(self) -> int:
        """The number of consumer warp groups, which multiply; one more warp group loads and adds."""
        return 2 if self.blocks == 1 else 1

    @property
    def shares_keys(self) -> bool:
        """Whether each warp group works on all keys of a tile: on half the rows of the scores, and half the columns of the gradients."""
        return self.tile_n == SHARED_TILE_N and self.warp_groups > 1

    @property
    def halves_dp(self) -> bool:
        """Whether dP is computed for half the rows of a tile at a time: where dK and dV take 160 registers, there is room for no more."""
        return self.dp_steps == 2

    @property
    def transposes_dq(self) -> bool:
        """Whether the product computes dQ^T, of which a warp group has 64 rows, rather than dQ."""
        return self.tile_m == TALL

    @property
    def dq_parts(self) -> int:
        """The number of parts of its columns in which dQ is computed, one after the other."""
        return self.dq_steps if self.warp_groups == 1 else 1

    @property
    def exchanged(self) -> int:
        """Tiles of keys x rows in shared memory: the stages of dS, or those of P followed by one of dS."""
        return self.ds_stages + (1 if self.shares_keys else 0)


def bytes_of(tiles: BackwardTiles, head_dim: int, head_dim_v: int) -> int:
    """Shared memory in bytes: 16-bit tiles of K, V, Q, dO, P and dS, part of dQ in float32; before them barriers, boards and the row
    statistics, and padding for alignment."""
    t, (d, dv) = tiles, (head_dim, head_dim_v)
    rows = t.q_stages * t.tile_m * d + t.do_stages * t.tile_m * dv
    before = ceil_div(_BARRIERS_AND_BOARDS + 4 * (t.q_stages + t.do_stages) * t.tile_m, _ALIGNED) * _ALIGNED
    return 2 * (t.tile_n * (d + dv) + rows + t.exchanged * t.tile_m * t.tile_n) + 4 * t.tile_m * d // t.dq_steps + before


@dataclass(frozen=True)
class BackwardConfig(ModsOfConfig):
    """The config of one kernel for dK, dV and the sums of dQ, or dQ, without run-time values (lengths, strides, scales, captured values).

    head_dim, head_dim_v: as padded (``config.padded``). score: the score mod's value and derivative, two outputs, or None.
    bands: row ranges ``lo, hi`` that are bands around a row's position; the kernel derives its tiles from them. always: predicates that are
    evaluated in every tile. lists: None, or the layout of the lists of row tiles of each key tile, "dense" (B, H, N, M), "ragged" (H,
    total_n, max_m) or "flat" (H, total_m). per_entry, per_head: the lists differ between batch entries, between heads. by_kv_head: they are
    of K/V heads, whose query heads share them. list_cut: (rows, keys) of a list's tile in units of the kernel's. partial: the predicate
    inside listed partial tiles. is_deterministic: key tiles add to a row tile's dQ in a fixed order. sums: those of the gradients of
    captured tensors; ``score`` then has another output for each sum whose factor reads the score. has_entries: one table gives the storage
    of each batch entry, another table the order of the key tiles. stores_dq: the keys fit one tile, so that dQ is written at once and has
    no sums in float32. has_dropout: as the call requests. stores_float32: dK and dV are float32: parts, where the query heads of each K/V
    head are divided over thread blocks (``backward_parts``), or not rounded (``Problem.wide_kv_grads``).
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
    by_kv_head: bool = False
    list_cut: tuple[int, int] = (1, 1)
    partial: Ask | None = None
    is_deterministic: bool = False
    sums: tuple[CapturedSum, ...] = ()
    has_entries: bool = False
    stores_dq: bool = False
    has_dropout: bool = False
    stores_float32: bool = False

    __hash__ = ModsOfConfig.__hash__  # a dataclass would write its own

    def __post_init__(self) -> None:
        self.check_mods()
        count = 2 + sum(s.late is not None for s in self.sums)
        if self.score is not None and len(self.score.outputs) != count:
            given = len(self.score.outputs)
            raise ValueError(f"score has {given} outputs; wanted {count}: the value, the derivative by the score and what sums ask for")
        if self.has_dropout and (self.score is not None or self.tiles.delta != "behind" or self.tiles.halves_dp):
            raise ValueError("has_dropout with a score mod, or where delta is not subtracted from the finished dP; wanted neither")
        if self.sums and self.score is None:
            raise ValueError("sums without score; wanted the score mod that reads the captured tensors")
        if self.lists not in (None, "dense") and not (self.has_entries and self.lists in ("ragged", "flat")):
            raise ValueError(f"lists={self.lists!r}; wanted None or 'dense', or with entries 'ragged' or 'flat'")
        if self.frees_keys and self.head_dim_v > (room := self.tiles.exchanged * self.tiles.tile_m):
            raise ValueError(f"head_dim_v={self.head_dim_v}: dV leaves from the place of dS, with room for {room}; wanted 2 stages of dS")
        if self.tiles.halves_dp and self.score is not None:
            raise ValueError("dp_steps=2 with a score mod; wanted 1: its kernel has no registers for one")
        if self.tiles.tile_n == SHARED_TILE_N and self.has_entries:
            raise ValueError(f"{self.tiles} with entries, whose cut tiles this kernel does not store; wanted tiles of {TILE_N} keys")
        if self.partial is not None and self.lists is None:
            raise ValueError("partial without lists; wanted the predicate as always")
        if self.tiles.transposes_dq and self.head_dim != 64 * self.tiles.warp_groups:
            raise ValueError(f"tile_m={TALL} at head_dim {self.head_dim}; wanted {64 * self.tiles.warp_groups}: the rows of dQ^T")
        if self.tiles.transposes_dq and self.lists is not None:
            raise ValueError(f"tile_m={TALL} with lists, whose tiles have 64 or 128 rows; wanted one of these")
        if self.tiles.shares_keys and 96 in (self.head_dim, self.head_dim_v):
            raise ValueError("head dimension 96 where warp groups share keys; wanted 128: half of 96 columns is no multiple of 32")
        for name, columns in (("holds_k", self.head_dim), ("holds_v", self.head_dim_v)):
            if (held := getattr(self.tiles, name)) not in (0, 32, columns) and not (0 <= held < columns and held % 64 == 0):
                raise ValueError(f"{name}={held}; wanted 0, 32, a multiple of 64, or the head dimension, {columns}")
        if self.tiles.blocks > 1 and (self.sums or self.has_dropout or self.stores_dq or self.tiles.delta != "before"):
            raise ValueError(
                f"sums, has_dropout, stores_dq or delta={self.tiles.delta!r} with blocks=2, whose kernel has none; wanted delta='before'"
            )
        if self.stores_dq and (self.is_deterministic or self.has_entries or self.tiles.transposes_dq):
            raise ValueError(
                f"stores_dq with {self.tiles}, is_deterministic={self.is_deterministic}, has_entries={self.has_entries}; "
                "wanted a dense call without turns, and tiles of dQ, not of dQ^T"
            )
        most = ACCUMULATORS[self.tiles.dp_steps]
        if (taken := self.tiles.tile_n * (self.head_dim + self.head_dim_v) // (128 * self.tiles.warp_groups)) > most:
            raise ValueError(f"{self.tiles}: dK and dV take {taken} registers of a thread; wanted at most {most}")
        if self.shared_memory > (room := room_of(self.tiles.blocks)):
            raise ValueError(
                f"{self.tiles} at head_dim {self.head_dim} takes {self.shared_memory} bytes of shared memory; each thread block has {room}"
            )

    @property
    def shared_memory(self) -> int:
        return bytes_of(self.tiles, self.head_dim, self.head_dim_v) + self.scratch

    @property
    def dq_numbers(self) -> int:
        """float32 numbers of dQ in shared memory at a time."""
        return self.tiles.tile_m * self.head_dim // self.tiles.dq_steps

    @property
    def dq_chunks(self) -> int:
        """Chunks of one step of a warp group's part of dQ: ``_DQ_CHUNK`` numbers, 4 of each thread."""
        return self.dq_numbers // (_DQ_CHUNK * self.tiles.warp_groups)

    @property
    def frees_keys(self) -> bool:
        """Whether a finished key tile frees the stages of K and V at once: dK and dV then leave through the buffers of dQ and dS, which are
        large enough unless a tile has 64 keys or dP is computed by halves, while the next keys are loaded.

        If all rows see all keys, this takes 3 % longer: thread blocks in step read the same rows of Q and dO from the L2 cache together,
        and freeing early puts them out of step.
        """
        if self.tiles.tile_n == SHARED_TILE_N or self.tiles.halves_dp:
            return False
        return bool(self.bands) or self.lists is not None or self.has_entries

    @property
    def posts_keys(self) -> bool:
        """Whether an adding warp stores dK and dV. In float32, for which shared memory has no room, they leave from registers."""
        return self.frees_keys and not self.stores_float32

    @cached_property
    def looks_up_pairs(self) -> bool:
        """Whether a predicate of listed tiles loads a number at a place that depends on the row and on the key: a table of pairs, or of
        blocks, of which nothing says that neighbouring key tiles are seen by the same rows."""
        if self.lists is None or self.partial is None:
            return False
        expr = self.partial.expr
        return any(node.op == "load" and d.q and d.kv for node, d in zip(expr.nodes, dependence(expr), strict=True))

    @cached_property
    def interleaves_heads(self) -> bool:
        """Whether query heads that share keys, if there are several, are interleaved (``backward.scheduler``): under a causal mask that is
        the same for all heads. Not beside sums for captured tensors. Deterministic sums gain most: head after head, a key tile waits for
        the one before it at the last rows of each, and interleaved only once."""
        is_causal = self.has_right and not self.has_left and self.lists is None
        if not is_causal or self.sums:
            return False
        return not self.bands_by_head

    @property
    def adding_warps(self) -> int:
        """The number of warps that add dQ to its sums, in turns."""
        return 2 if self.is_deterministic else 1

    @property
    def sums_while_made(self) -> bool:
        """Whether gradients of captured tensors are summed while the scores' gradients are computed: then masks are applied first."""
        return any(s.is_running for s in self.sums)

    @property
    def has_ranks(self) -> bool:
        """Whether a table gives the order in which key tiles add to a row tile's dQ; else it follows from the bands and ``folds_keys``."""
        return self.is_deterministic and self.lists is not None

    @property
    def folds_keys(self) -> bool:
        """Whether a head's key tiles are drawn in folds (``backward.scheduler``): those of deterministic sums under a causal mask. Not
        where warp groups share keys: folds spread the thread blocks over more rows, of which the L2 cache holds the fewest there."""
        return self.is_deterministic and self.interleaves_heads and not self.tiles.shares_keys

    @property
    def posts_turns(self) -> bool:
        """Whether the producer posts the turn of each visit."""
        return self.has_ranks or self.folds_keys

    @property
    def scratch(self) -> int:
        """Bytes of shared memory in which the warps sum diagonals; 0 without a captured sum of kind "diagonal"."""
        has_diagonals = any(s.kind == "diagonal" for s in self.sums)
        return 4 * 4 * self.tiles.warp_groups * scratch_of_warp(self.tiles.tile_m) * has_diagonals


@dataclass(frozen=True)
class RowsConfig:
    """The config of one of the two kernels over all rows: before the backward kernel (row statistics, and zeros in the sums of dQ if it has
    some) or, if is_after, after it (dQ from its sums, dK and dV from parts). has_dlse: the log-sum-exp has a gradient. has_entries:
    see ``BackwardConfig``. divides_heads: there are parts of dK and dV."""

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tile_m: int
    is_after: bool
    has_dlse: bool = False
    has_entries: bool = False
    divides_heads: bool = False

    @property
    def is_transposed(self) -> bool:
        """Whether the sums are those of dQ^T."""
        return self.tile_m == TALL


def padded_for_backward(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The padded head dimensions.

    >>> padded_for_backward(80, 80), padded_for_backward(192, 96)
    ((96, 96), (192, 128))
    """
    widest = max(head_dim, head_dim_v)
    allowed = [n for n in HEAD_DIMS if n != 96 or widest <= 128]
    d, dv = (next(n for n in allowed if given <= n) for given in (head_dim, head_dim_v))
    return d, dv


def fits_halved(head_dim: int, head_dim_v: int) -> bool:
    """Whether the kernel that computes dP by halves is used at padded head dimensions above 128: dK and dV fit 160 registers of a thread,
    and a warp group's half of dQ fits the others. At (64, 256) it would fit too, but takes 3 % longer than the one that shares keys.

    >>> fits_halved(192, 128), fits_halved(192, 192), fits_halved(64, 256)
    (True, False, False)
    """
    return 128 <= head_dim <= 192 and head_dim + head_dim_v <= 320


def tall_tiles_for(head_dim: int, head_dim_v: int, is_packed: bool = False) -> BackwardTiles | None:
    """Tiles of more rows, for calls in which no score mod, list or predicate needs registers: fewer visits, and fewer products read K and
    V. None if there are none for these head dimensions. is_packed: a table says where sequences are, which takes registers too."""
    return BackwardTiles(TALL, TILE_N, delta="between" if is_packed else "before") if head_dim == head_dim_v == 128 else None


def backward_tiles_for(
    head_dim: int,
    head_dim_v: int,
    is_plain: bool = False,
    is_bare: bool = False,
    is_packed: bool = False,
) -> BackwardTiles:
    """The tiles for padded head dimensions, with as many keys as fit the registers that the accumulators of dK and dV leave.

    is_plain: no score mod is evaluated, and no predicate except words of bits: others need the registers that rows 64 to 127 would take.
    is_bare: no predicate at all is evaluated either, so that more columns of K and V are held in registers, or dP is computed by halves.
    is_packed: as in ``tall_tiles_for``.
    ``tests/backends/hopper/test_backward_compile.py`` compiles them all and counts spills; docs/history has the trials.
    """
    if max(head_dim, head_dim_v) > 128:
        if is_bare and fits_halved(head_dim, head_dim_v):
            return BackwardTiles(**_HALVED, dp_steps=2)
        return _shared_tiles(head_dim, head_dim_v, is_bare)
    if is_plain and head_dim == head_dim_v == 64:
        return BackwardTiles(128, TILE_N, holds_v=64, delta="between")
    if head_dim == head_dim_v == 128:
        return BackwardTiles(64, TILE_N, holds_v=32 if is_bare else 0, delta="before")
    # registers of a thread: dK and dV, S and dP, then V and K
    beside = _PLACES * is_packed if is_bare and head_dim == head_dim_v else _MODS_BESIDE_OWN
    room = _HOLDING - (head_dim + head_dim_v) // 2 - 64 - beside
    return _holding(BackwardTiles(64, TILE_N), head_dim, head_dim_v, room)


def short_tiles_for(head_dim: int, head_dim_v: int) -> BackwardTiles | None:
    """Tiles of 64 keys for block lists in such tiles, up to head dimension 128; None above, where all tiles have 64 keys."""
    if max(head_dim, head_dim_v) > 128:
        return None
    steps = 2 if head_dim == 128 else 1
    deep = [BackwardTiles(64, SHARED_TILE_N, 2, n, 1, steps, delta="before", blocks=2) for n in (2, 1)]
    return next(tiles for tiles in deep if bytes_of(tiles, head_dim, head_dim_v) <= room_of(2))


def _shared_tiles(head_dim: int, head_dim_v: int, is_bare: bool) -> BackwardTiles:
    """The tiles for heads so wide that the warp groups share keys."""
    steps = [{"do_stages": stages, "dq_steps": steps} for stages, steps in ((2, 1), (2, 2), (1, 2))]
    wide = [BackwardTiles(64, SHARED_TILE_N, delta="before", **fields) for fields in steps]
    tiles = next(tiles for tiles in wide if bytes_of(tiles, head_dim, head_dim_v) <= SHARED_MEMORY)
    # registers of a thread: dK and dV; S, dP and a mod's intermediate values, or dQ; then V and K
    room = _HOLDING - (head_dim + head_dim_v) // 4 - max(48, head_dim // 4) - (0 if is_bare else _MODS_BESIDE_SHARED)
    return _holding(tiles, head_dim, head_dim_v, room)


def _holding(tiles: BackwardTiles, head_dim: int, head_dim_v: int, room: int) -> BackwardTiles:
    """``tiles`` with as many held columns of V, then of K, as fit ``room`` registers of a thread: four columns take one register."""

    def columns(width: int, registers: int) -> int:
        most = max(registers, 0) * 4
        return width if width <= most else most // 64 * 64 or most // 32 * 32

    of_v = columns(head_dim_v, room)
    return replace(tiles, holds_v=of_v, holds_k=columns(head_dim, room - of_v // 4))
