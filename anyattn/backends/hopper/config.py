"""``Config``: what one compiled Hopper kernel is specialised for; a config that cannot run raises where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from anyattn.backends.hopper.codegen.score_analysis import (
    cases,
    is_foreseen,
    is_special,
    parts_of,
    reads_apart,
    reads_straight,
    work_by_pair,
)
from anyattn.mods.analysis.row_ranges import NO_LIMIT
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr

__all__ = ["HEAD_DIMS", "LEAST_PIECE", "MOST", "PACKED", "TILE_M", "Ask", "Config", "Tiles", "padded", "sides", "slots", "tiles_for"]

HEAD_DIMS = (64, 96, 128, 192, 256)  # what a row is padded to, in shared memory only
MOST = 52.0  # a score's size where exponentials are taken as they are: 2^75 leaves a sum of 2^30 keys, times values, room in float32
# Heads that may share a row tile. A thread's rows lie 8 apart: with at most 8 heads they are one head's, as in a kernel that packs none.
PACKED = (4, 8)
TILE_M = 128  # query rows of every kernel that goes by lists
LEAST_PIECE = 2  # rows of a piece of a page, below which threads copy faster than the copy engine
_SHARED_MEMORY = 227 * 1024
_REGISTERS_FOR_PIECES = (232, 40)  # where each piece of a page is a copy, which takes the loader more than 24 without spilling
_NARROW = 96  # head dimension up to which there is a third stage
_MUCH_WORK = 7  # operations for every pair of a row and a key
_SMALL = 16  # rows of a piece of a page, below which copies are so many that a smaller tile is worth it
_REGISTERS = {2: (240, 24), 3: (160, 32)}  # of a consumer and of a producer thread, by warp groups that multiply: 65,536 an SM


def padded(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dimensions of the kernel that computes these: the copy engine pads with zeros.

    Raises ``ValueError`` where one is larger than any kernel's.
    """
    if max(head_dim, head_dim_v) > HEAD_DIMS[-1]:
        raise ValueError(f"head_dim={head_dim}, head_dim_v={head_dim_v}; wanted at most {HEAD_DIMS[-1]}")
    d, dv = (next(n for n in HEAD_DIMS if given <= n) for given in (head_dim, head_dim_v))
    return (d, dv) if d == dv else (max(d, 128) if d == 96 else d, max(dv, 128) if dv == 96 else dv)


@dataclass(frozen=True)
class Tiles:
    """tile_m: query rows, 64 for each warp group that multiplies. tile_n: keys. stages: tiles of K and of V in flight.

    ping_pong: the warp groups take turns, one multiplies while another exponentiates. emulated: of 8 exponentials so many are computed by
    multiplications and additions, where special functions are what a tile waits for.
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = True
    emulated: int = 0

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


@dataclass(frozen=True)
class Ask:
    """How a predicate is evaluated in the kernel. by_row: ``expr``'s outputs are lo, hi, lo, hi, ..., the ranges of keys that a row sees
    (``row_ranges.RowRanges``), and a key's column is compared with them; else ``expr`` is the mask itself."""

    expr: Expr
    by_row: bool


class ModsOfConfig:
    """What a config's mods, bands and predicates say of it; the configs of both passes have these fields."""

    score: Expr | None
    bands: tuple[Expr, ...]
    partial: Ask | None
    always: tuple[Ask, ...]

    @cached_property
    def has_left(self) -> bool:
        return any(found[0] for band in self.bands if (found := sides(band)))

    @cached_property
    def has_right(self) -> bool:
        return any(found[1] for band in self.bands if (found := sides(band)))

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """All expressions, in the order in which their captured numbers and tensors are given: score, bands, partial, always."""
        asked = ((self.partial,) if self.partial else ()) + self.always
        return ((self.score,) if self.score else ()) + self.bands + tuple(ask.expr for ask in asked)


@dataclass(frozen=True)
class Config(ModsOfConfig):
    """One kernel. Run-time numbers (lengths, strides, scales, window bounds, captured values) are no part of it.

    head_dim, head_dim_v: as padded. is_bf16: else float16. score: the score mod's expression or None.
    is_factored: constant factors may be taken off the score mod's end, for they and the scale are above 0 (``score_analysis.factored``,
    ``bias``). is_bounded: no score exceeds ``MOST``, so exponentials are taken of the scores themselves, without a row maximum.
    heads_per_tile: query heads that share K and V and a row tile (packed GQA), 1, 4 or 8: row r is head ``r % heads_per_tile`` of them at
    position ``r // heads_per_tile`` of the tile's. A group of another number of heads leaves rows of its last tiles empty.
    bands: row ranges ``lo, hi`` of predicates that are bands around a row's position (``sides``); the kernel derives its tiles from them.
    lists: None, or the layout of the lists of tiles to visit: "dense" (B, H, M, N), "ragged" (H, total_m, max_n) or "flat" (H, total_n).
    per_entry, per_head: the lists differ from batch entry to entry, from head to head. list_cut: (rows, keys) of a list's tile in units
    of the kernel's. partial: what decides inside listed partial tiles (None: nothing). always: predicates that hold in every tile.
    has_order: the row tiles come in a given order. has_count: the order's last row holds the number of its valid rows, which may be known
    on the device alone. spread: the heads that share one place in the order: "all"
    (of the batch), "heads" (of an entry) or "none".
    has_entries: a table says where each batch entry's rows are. piece: 0, or K and V are a pool of pages, and one copy brings so many rows
    of a page: a tile of keys takes ``tile_n / piece`` copies, and a page holds whole pieces. gathers: pieces are rows, and the loader's
    lanes copy them themselves; no row of K or V is padded.
    has_sink, has_lse, has_max: as the call requests.
    """

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    tiles: Tiles
    score: Expr | None = None
    is_factored: bool = True
    is_bounded: bool = False
    heads_per_tile: int = 1
    bands: tuple[Expr, ...] = ()
    lists: str | None = None
    per_entry: bool = False
    per_head: bool = False
    list_cut: tuple[int, int] = (1, 1)
    partial: Ask | None = None
    always: tuple[Ask, ...] = ()
    has_order: bool = False
    has_count: bool = False
    spread: str = "all"
    has_entries: bool = False
    piece: int = 0
    gathers: bool = False
    has_sink: bool = False
    has_lse: bool = False
    has_max: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) not in HEAD_DIMS:
                raise ValueError(f"{name}={getattr(self, name)}; wanted one of {', '.join(map(str, HEAD_DIMS))}")
        if self.lists not in (None, "dense", "ragged", "flat") or self.spread not in ("all", "heads", "none"):
            raise ValueError(f"lists={self.lists!r}, spread={self.spread!r}; wanted names that the kernel knows")
        if self.head_dim != self.head_dim_v and 96 in (self.head_dim, self.head_dim_v):
            raise ValueError(f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}; wanted 128 instead of 96, for O takes Q's place")
        if any(sides(band) is None for band in self.bands):
            raise ValueError("bands has row ranges that are no band around a row's place; wanted them as partial or always")
        if self.lists is not None and self.bands:
            raise ValueError("bands and lists are both given; with lists a band is one of the predicates that hold always")
        if self.has_count and not self.has_order:
            raise ValueError("has_count without has_order: the number of row tiles stands behind their order")
        if self.is_bounded and (self.score is None or not self.is_factored or not self.is_bf16):
            raise ValueError("is_bounded without a factored score mod or in float16; wanted bfloat16, in which no exponential overflows")
        is_odd = self.piece % 2 == 1 and not self.gathers and 96 in (self.head_dim, self.head_dim_v)
        if self.piece and (self.tiles.tile_n % self.piece or is_odd):
            raise ValueError(f"piece={self.piece}; wanted a divisor of tile_n={self.tiles.tile_n}, even at head_dim 96 (TMA's 128 bytes)")
        if self.gathers and self.piece != 1:
            raise ValueError(f"gathers with piece={self.piece}; wanted piece=1, any page's")
        if self.heads_per_tile not in (1, *PACKED):
            raise ValueError(f"heads_per_tile={self.heads_per_tile}; wanted 1 or one of {', '.join(map(str, PACKED))}")
        if self.heads_per_tile > 1 and (self.per_head or self.spread == "none" or any(d.h for b in self.bands for d in dependence(b))):
            raise ValueError(
                f"heads_per_tile={self.heads_per_tile}, and lists or bands of each head; wanted such that a tile's heads share"
            )
        needed = self.shared_memory(1)
        if needed > _SHARED_MEMORY:
            raise ValueError(f"{self.tiles} at head_dim {self.head_dim} takes {needed} bytes of shared memory; an SM has {_SHARED_MEMORY}")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))

    def shared_memory(self, q_stages: int) -> int:
        """Bytes: 16-bit tiles of Q, whose place O takes, and ``stages`` of K and V; barriers, the board and alignment beside them."""
        tiles, (d, dv) = self.tiles, (self.head_dim, self.head_dim_v)
        return 2 * (q_stages * tiles.tile_m * max(d, dv) + tiles.stages * tiles.tile_n * (d + dv)) + 3072

    @property
    def q_stages(self) -> int:
        """Tiles of Q in flight: with two the next row tile's Q is there before this one's output has left."""
        return 2 if self.shared_memory(2) <= _SHARED_MEMORY else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread that multiplies and of one that loads."""
        is_cut = 0 < self.piece < self.tiles.tile_n and self.tiles.warp_groups == 2
        return _REGISTERS_FOR_PIECES if is_cut else _REGISTERS[self.tiles.warp_groups]

    @property
    def is_paged(self) -> bool:
        return self.piece > 0

    @property
    def tile_q(self) -> int:
        """Query positions of a row tile."""
        return self.tiles.tile_m // self.heads_per_tile


@lru_cache(maxsize=1024)
def slots(expr: Expr) -> tuple[int, int]:
    """How many captured numbers and tensors an expression may read: one more than its highest slots."""
    numbers = max((int(n.attr) for n in expr.nodes if n.op == "scalar"), default=-1)  # type: ignore[call-overload]
    return numbers + 1, max(expr.tensor_slots, default=-1) + 1


@lru_cache(maxsize=1024)
def sides(ranges: Expr) -> tuple[bool, bool] | None:
    """Whether one range of keys per row is bounded to the left and to the right by lines parallel to the diagonal; None if otherwise."""
    if len(ranges.outputs) != 2:
        return None
    found = []
    for output, is_open in zip(ranges.outputs, (lambda x: x <= 0, lambda x: x >= NO_LIMIT), strict=True):
        node, slope = ranges.nodes[output], dependence(ranges)[output].slope
        if node.op == "const" and is_open(node.attr):  # type: ignore[no-untyped-call]
            found.append(False)
        elif slope == (1, 0):
            found.append(True)
        else:
            return None
    return found[0], found[1]


def _with_pages(tiles: list[int], page: int) -> int:
    """Of tiles of so many keys, the largest first, the one for pages of ``page`` rows: the largest whose pieces are not small, or, where
    all are, the one with the largest pieces. Tiles much smaller than the largest are none."""
    large = [n for n in tiles if n * 8 >= tiles[0] * 5]
    return max(large, key=lambda n: (min(math.gcd(n, page), _SMALL), n))


def _reads_pairs(ask: Ask, has_whole_tiles: bool) -> bool:
    """Whether a predicate reads a tensor for every pair. has_whole_tiles: a tile has 128 keys, and a read may be one for all of them."""
    rest = parts_of(ask.expr, ask.by_row, "kv_idx", TILE_M)[1] if has_whole_tiles else ask.expr
    return not ask.by_row and rest is not None and reads_apart(rest)


def _asks_much(ask: Ask) -> bool:
    """Whether so much of a predicate is computed for every pair that registers for 128 keys do not suffice beside a third stage."""
    rest = None if ask.by_row else parts_of(ask.expr, False, "kv_idx", TILE_M)[1]
    return rest is not None and work_by_pair(rest) >= _MUCH_WORK


def tiles_for(
    head_dim: int,
    head_dim_v: int,
    score: Expr | None,
    tile_n: int | None = None,
    asked: tuple[Ask, ...] = (),
    page: int = 0,
    is_packed: bool = False,
) -> Tiles:
    """The tiles for padded head dimensions: as large as registers allow without spilling.

    ``tests/backends/hopper/test_plan_and_compile.py`` compiles them all and counts what spills.

    A score mod, or predicates besides bands, need registers that three warp groups do not have, and what reads a table for every score
    needs more. tile_n: what a tile's keys must divide, a list's tile. asked: all predicates but bands. page: rows of a page, 0 without.
    is_packed: heads share row tiles, and a thread's scores lie on more diagonals.
    """
    if head_dim == head_dim_v == 64 and score is None and tile_n is None and not asked and page % _SMALL == 0:
        return Tiles(192, 128, 3)
    widest = max(head_dim, head_dim_v)
    ahead = score is not None and is_foreseen(score)
    apart = score is not None and reads_apart(score) and not cases(score)
    has_whole_tiles = widest <= 128 and not page and (tile_n is None or tile_n % TILE_M == 0)
    if any(_reads_pairs(ask, has_whole_tiles) for ask in asked) or (apart and not ahead):
        keys = 64 if widest <= 128 else 48
    elif score is not None and (apart or reads_straight(score)):
        keys = {192: 64 if apart else 96, 256: 64}.get(widest, 128)
    else:
        keys = {192: 96 if ahead else 112, 256: 64 if ahead and is_packed else 80}.get(widest, 128)
        keys = 128 if head_dim == 192 and head_dim_v <= 128 else keys
    if widest <= _NARROW and any(_asks_much(ask) for ask in asked):
        keys = min(keys, 64)
    may_be = [n for n in range(keys // 16 * 16, 0, -16) if tile_n is None or tile_n % n == 0]
    keys = _with_pages(may_be, page) if page else may_be[0]
    emulated = 2 if score is not None and reads_straight(score) else 1 if score is not None and is_special(score) else 0
    return Tiles(128, keys, 3 if widest <= _NARROW else 2, emulated=emulated)
