"""``Config``: the properties that one compiled Hopper forward kernel is specialised for; an impossible config raises when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from anyattn.backends.hopper.codegen.score_analysis import (
    cases,
    is_foreseen,
    is_special,
    pair_part,
    reads_apart,
    reads_straight,
    work_by_pair,
)
from anyattn.backends.hopper.in_order import NO_SUMS, Sums, sums_of
from anyattn.mods.analysis.row_ranges import NO_LIMIT
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.sequences.sections import KEYS_IN_ORDER

__all__ = [
    "HEAD_DIMS", "LEAST_PIECE", "LEAST_ROWS", "LEAST_SHARED_PIECE", "MOST", "PACKED", "PACKED_WIDE", "SHARED_MEMORY",
    "TILE_M", "WIDE", "Ask", "Config", "ModsOfConfig", "Tiles", "bytes_of", "padded", "room_of", "sides", "slots", "tiles_for",
]  # fmt: skip

HEAD_DIMS = (64, 96, 128, 192, 256)  # padded head dimensions, in shared memory only
WIDE = ((512, 512), (576, 512))  # the same of q with k and of v, of the forward kernel for wider heads
MOST = 52.0  # bound of scores for exponentials without a maximum: a sum of 2^30 keys, each up to 2^75, times values still fits float32
# Heads that may share a row tile. A thread's rows lie 8 apart: with at most 8 heads they belong to one head, as without packing.
PACKED = (4, 8)
# The same for wide heads only, where no mod depends on the head: rows of one thread then belong to different heads.
PACKED_WIDE = (16, 32, 64)
TILE_M = 128  # query rows per tile of lists that the backend makes, and of every kernel that reads lists of such tiles
LEAST_ROWS = 64  # query rows per tile of lists that a kernel can read: those of one warp group
LEAST_SHARED_PIECE = 16  # rows of a page piece that two thread blocks load: whole swizzled rows of 8
LEAST_PIECE = 2  # rows of a page piece; for smaller ones threads copy faster than TMA
SHARED_MEMORY = 227 * 1024
_NARROW = 96  # largest head dimension with a third stage
_MUCH_WORK = 7  # operations per (row, key) pair
_SHORT_KEYS = 64  # of a tile with one warp group: two thread blocks with more have no room for two stages
_MOST_STAGES = 4
_SMALL = 16  # rows of a page piece; below it, fewer copies are worth a smaller tile
# of a consumer and a producer thread, by consumer warp groups and thread blocks per multiprocessor, which has 65,536
_REGISTERS = {(4, 1): (112, 24), (2, 1): (240, 24), (3, 1): (160, 32), (1, 1): (240, 40), (1, 2): (232, 24), (1, 3): (136, 24)}
# the same where K and V are gathered by pieces of pages; with 24 the loading warp spills
_REGISTERS_FOR_PIECES = {(2, 1): (232, 40), (1, 1): (240, 72), (1, 2): (208, 48)}
_REGISTERS_OF_WIDE = (232, 40)  # with two consumer warp groups for 64 rows; with 24 the loading warp spills
_PER_MULTIPROCESSOR = 228 * 1024  # shared memory, of which each thread block takes 1 KiB more than it asks for


def padded(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The head dimensions of the kernel that computes the given ones: TMA pads with zeros.

    Raises ``ValueError`` if one is larger than any kernel's.
    """
    if max(head_dim, head_dim_v) > HEAD_DIMS[-1]:
        found = next((dims for dims in WIDE if head_dim <= dims[0] and head_dim_v <= dims[1]), None)
        if found is None:
            raise ValueError(f"head_dim={head_dim}, head_dim_v={head_dim_v}; wanted at most {WIDE[-1][0]}, and {WIDE[-1][1]} for v")
        return found
    d, dv = (next(n for n in HEAD_DIMS if given <= n) for given in (head_dim, head_dim_v))
    return (d, dv) if d == dv else (max(d, 128) if d == 96 else d, max(dv, 128) if dv == 96 else dv)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes. tile_m: query rows, 64 per consumer warp group. tile_n: keys. stages: tiles of K and of V in flight.

    ping_pong: the warp groups take turns: one multiplies while another exponentiates. emulated: how many of 8 exponentials are computed
    by multiplications and additions, if special functions are the bottleneck of a tile. blocks: thread blocks per multiprocessor; with one
    warp group each, one multiplies while another exponentiates, and no barrier orders them.
    """

    tile_m: int
    tile_n: int
    stages: int
    ping_pong: bool = True
    emulated: int = 0
    blocks: int = 1

    def __post_init__(self) -> None:
        if self.tile_m not in (64, 128, 192, 256):
            raise ValueError(f"tile_m={self.tile_m}; wanted 64, 128, 192 or 256: one to four warp groups of 64 rows (wgmma M)")
        if (self.warp_groups, self.blocks) not in _REGISTERS:
            raise ValueError(f"blocks={self.blocks} with tile_m={self.tile_m}; wanted 1, or up to 3 with tile_m=64 (registers)")
        if self.ping_pong and self.warp_groups == 1:
            raise ValueError("ping_pong with tile_m=64; wanted False: a thread block has one warp group, which would wait for ever")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n}; wanted a multiple of 16 up to 256 (wgmma K and N)")
        if self.stages < 1:
            raise ValueError(f"stages={self.stages}; wanted at least 1")

    @property
    def warp_groups(self) -> int:
        """Consumer warp groups, which multiply; one more loads."""
        return self.tile_m // 64


@dataclass(frozen=True)
class Ask:
    """How the kernel evaluates a predicate. by_row: the outputs of ``expr`` are lo, hi, lo, hi, ..., the ranges of keys that a row sees
    (``row_ranges.RowRanges``), and a key's column is compared with them; else ``expr`` is the mask itself."""

    expr: Expr
    by_row: bool


class ModsOfConfig:
    """Properties of a config's mods, bands and predicates; the configs of both passes have these fields."""

    head_dim: int
    head_dim_v: int
    is_bf16: bool
    lists: str | None
    score: Expr | None
    bands: tuple[Expr, ...]
    partial: Ask | None
    always: tuple[Ask, ...]
    gathers: bool = False  # threads copy keys out of pages: never in a backward pass
    is_wide: bool = False  # head dimensions of ``WIDE``: never in a backward pass
    tiles: Any

    @property
    def consumers(self) -> int:
        """Consumer warp groups."""
        groups: int = self.tiles.warp_groups
        return groups

    def check_mods(self) -> None:
        """Raises ``ValueError`` for head dimensions or bands that no kernel has."""
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) not in HEAD_DIMS and not self.is_wide:
                raise ValueError(f"{name}={getattr(self, name)}; wanted one of {', '.join(map(str, HEAD_DIMS))}")
        if any(sides(band) is None for band in self.bands):
            raise ValueError("bands has row ranges that are no band around a row's place; wanted them as partial or always")
        if self.lists is not None and self.bands:
            raise ValueError("bands and lists are both given; with lists a band is one of the predicates that hold always")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, name) for name in self.__dataclass_fields__))  # type: ignore[attr-defined]

    @cached_property
    def has_left(self) -> bool:
        return any(found[0] for band in self.bands if (found := sides(band)))

    @cached_property
    def has_right(self) -> bool:
        return any(found[1] for band in self.bands if (found := sides(band)))

    @cached_property
    def bands_by_head(self) -> bool:
        """Whether some band differs between heads."""
        return any(d.h for band in self.bands for d in dependence(band))

    @property
    def asks(self) -> tuple[Ask, ...]:
        """The predicates besides bands."""
        return ((self.partial,) if self.partial else ()) + self.always

    @property
    def exprs(self) -> tuple[Expr, ...]:
        """All expressions, in the order in which their captured numbers and tensors are passed: score, bands, partial, always."""
        return ((self.score,) if self.score else ()) + self.bands + tuple(ask.expr for ask in self.asks)


@dataclass(frozen=True)
class Config(ModsOfConfig):
    """The config of one kernel. Run-time values (lengths, strides, scales, window bounds, captured values) are no part of it.

    head_dim, head_dim_v: as padded. is_bf16: else float16. score: the score mod's expression or None.
    is_factored: constant factors may be split off the end of the score mod, because they and the scale are above 0
    (``score_analysis.factored``, ``bias``). is_bounded: no score exceeds ``MOST``, so exponentials are taken without a row maximum.
    heads_per_tile: query heads that share K, V and a scheduled row tile (packed GQA), 1, 4 or 8, of wide heads up to 64, and 128 with
    ``pairs``: row r of a tile is head ``r % heads_per_tile`` of them at the tile's position ``r // heads_per_tile``. Groups of another size
    leave rows of their last tiles empty.
    bands: row ranges ``lo, hi`` of predicates that are bands around a row's position (``sides``); the kernel derives its tiles from them.
    lists: None, or the layout of the lists of tiles to visit: "dense" (B, H, M, N), "ragged" (H, total_m, max_n) or "flat" (H, total_n).
    per_entry, per_head: the lists differ between batch entries, between heads. by_kv_head: they are of K/V heads, whose query heads share
    them. list_cut: (rows, keys) of a list's tile in units of the kernel's tiles. partial: the predicate inside listed partial tiles, None
    for none. always: predicates that apply in every tile.
    has_order: a table gives the order of the row tiles. has_count: the order's last row holds its number of valid rows, which may be known
    only on the device. spread: the heads that share one row of the order: "all" (of the batch), "heads" (of an entry) or "none".
    has_entries: a table gives the storage of each batch entry, or without an order its number of keys. piece: 0, or K and V are a pool of
    pages, and one copy loads so many rows of one: a key tile takes ``tile_n / piece`` copies, and a page holds whole pieces. gathers:
    pieces are single rows, which the loader's lanes copy themselves; K and V have no padded head dimension.
    has_sink, has_lse, has_max, has_dropout: as the call requests. has_one_kv: V is the first columns of K, which are loaded once; only with
    head dimensions of ``WIDE``. pairs: two thread blocks of a cluster, of wide heads, have successive tiles of 64 rows and visit the same
    keys: each loads half of every tile of K and V for both. A scheduled row tile, which lists and tables count, is that of both.
    is_split: each row tile's visits are shared by several work items, which write float32 results of their own (split-KV); of wide heads.
    has_skip: tiles are left out below a threshold (``problem.Skip``). counts_skips: such tiles are counted. in_order: keys are visited from
    the first to the last, in sections, for results that are the same in every batch (``kernel.in_order``).
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
    by_kv_head: bool = False
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
    has_dropout: bool = False
    has_one_kv: bool = False
    pairs: bool = False
    is_split: bool = False
    has_skip: bool = False
    counts_skips: bool = False
    in_order: bool = False

    __hash__ = ModsOfConfig.__hash__  # a dataclass would write its own

    def __post_init__(self) -> None:
        self.check_mods()
        if self.lists not in (None, "dense", "ragged", "flat") or self.spread not in ("all", "heads", "none"):
            raise ValueError(f"lists={self.lists!r}, spread={self.spread!r}; wanted names that the kernel knows")
        if self.is_wide and (self.tiles.tile_m != LEAST_ROWS or self.tiles.blocks > 1 or self.gathers):
            raise ValueError(
                f"{self.tiles}, gathers={self.gathers} at head_dim {self.head_dim}; wanted tile_m={LEAST_ROWS}, one block, pieces"
            )
        if self.pairs and (not self.is_wide or 0 < self.piece < LEAST_SHARED_PIECE):
            raise ValueError(
                f"pairs at head_dim {self.head_dim}, piece={self.piece}; wanted wide heads, and pieces of {LEAST_SHARED_PIECE} rows"
            )
        if self.has_one_kv and not self.is_wide:
            raise ValueError(f"has_one_kv at head_dim {self.head_dim}; wanted head dimensions above {HEAD_DIMS[-1]}")
        if self.has_one_kv and self.tiles.stages < 2:
            raise ValueError("stages=1 with has_one_kv; wanted 2 or more: a tile is V while the next one is K")
        if self.head_dim != self.head_dim_v and 96 in (self.head_dim, self.head_dim_v):
            raise ValueError(f"head_dim={self.head_dim}, head_dim_v={self.head_dim_v}; wanted 128 instead of 96, for O takes Q's place")
        if self.has_skip and (self.is_wide or self.has_entries or self.is_bounded):
            raise ValueError(
                f"has_skip at head_dim {self.head_dim}; wanted at most {HEAD_DIMS[-1]}, one entry per batch row, and row maxima"
            )
        if self.in_order and (self.score or self.lists or self.asks or self.piece or self.has_dropout or self.has_skip or self.is_wide):
            raise ValueError("in_order with a score mod, lists, predicates besides bands, pages, dropout, skips or wide heads; wanted none")
        if self.in_order and self.tiles.tile_n != KEYS_IN_ORDER:
            raise ValueError(f"{self.tiles} with in_order; wanted tile_n={KEYS_IN_ORDER}")
        if self.tiles.warp_groups == 4 and (not self.in_order or self.head_dim_v > 64 or self.has_max):
            raise ValueError(
                f"{self.tiles} at head_dim_v {self.head_dim_v}, in_order={self.in_order}, has_max={self.has_max}; wanted at most three "
                "warp groups, or in_order to 64 without has_max (registers)"
            )
        if self.counts_skips and not self.has_skip:
            raise ValueError("counts_skips without has_skip; wanted a threshold: nothing else is counted")
        if self.has_count and not self.has_order:
            raise ValueError("has_count without has_order: the number of row tiles stands behind their order")
        if self.is_bounded and (self.score is None or not self.is_factored or not self.is_bf16):
            raise ValueError("is_bounded without a factored score mod or in float16; wanted bfloat16, in which no exponential overflows")
        is_odd = self.piece % 2 == 1 and not self.gathers and 96 in (self.head_dim, self.head_dim_v)
        if self.piece and (self.tiles.tile_n % self.piece or is_odd):
            raise ValueError(f"piece={self.piece}; wanted a divisor of tile_n={self.tiles.tile_n}, even at head_dim 96 (TMA's 128 bytes)")
        if self.gathers and self.piece != 1:
            raise ValueError(f"gathers with piece={self.piece}; wanted piece=1, any page's")
        packed = (1, *PACKED, *(PACKED_WIDE if self.is_wide else ()), *((2 * LEAST_ROWS,) if self.pairs else ()))
        if self.heads_per_tile not in packed:
            raise ValueError(f"heads_per_tile={self.heads_per_tile}; wanted one of {', '.join(map(str, packed))}")
        if self.heads_per_tile > PACKED[-1] and any(d.h for expr in self.exprs for d in dependence(expr)):
            raise ValueError(f"heads_per_tile={self.heads_per_tile} with mods that depend on the head; wanted up to {PACKED[-1]}")
        if self.has_entries and not self.has_order and (self.lists is not None or self.spread != "heads"):
            raise ValueError(f"has_entries without has_order, spread={self.spread!r}; wanted spread='heads' and no lists")
        can_split = self.is_wide and self.has_entries and self.lists is None and self.has_lse
        if self.is_split and (not can_split or self.has_sink or self.has_max or self.has_dropout):
            raise ValueError("is_split; wanted wide heads of sequences, without lists, sink, highest scores and dropout, with has_lse")
        if self.heads_per_tile > 1 and (self.lists_by_head or self.bands_by_head):
            raise ValueError(
                f"heads_per_tile={self.heads_per_tile}, and lists or bands of each head; wanted such that a tile's heads share"
            )
        needed, room = self.shared_memory(1), room_of(self.tiles.blocks)
        if needed > room:
            raise ValueError(
                f"{self.tiles} at head_dim {self.head_dim} takes {needed} bytes of shared memory; each thread block has {room}"
            )

    @property
    def lists_by_head(self) -> bool:
        """Whether query heads that share K and V have lists or an order of row tiles of their own."""
        return (self.per_head or self.spread == "none") and not self.by_kv_head

    def shared_memory(self, q_stages: int) -> int:
        """Bytes: 16-bit tiles of Q, whose memory O reuses, and ``stages`` tiles of K and V; plus barriers, the board and alignment."""
        return bytes_of(self.tiles, self.head_dim, self.head_dim_v, q_stages, self.has_one_kv) + 4 * self.sums.in_smem

    @property
    def sums(self) -> Sums:
        """Where a row tile's output of earlier sections is, with ``in_order``."""
        return sums_of(self.tiles.tile_m, self.head_dim, self.head_dim_v) if self.in_order else NO_SUMS

    @property
    def recomputes(self) -> bool:
        """With ``in_order``, whether weights are guessed in the place of scores, which are computed again if the guess was wrong: registers
        of four warp groups do not hold both."""
        return self.tiles.warp_groups == 4

    @property
    def q_stages(self) -> int:
        """Tiles of Q in flight: with two, the next row tile's Q is loaded before this one's output has left shared memory."""
        return 2 if not self.is_wide and self.shared_memory(2) <= room_of(self.tiles.blocks) else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a consumer thread and of a producer thread."""
        each, is_cut = (self.tiles.warp_groups, self.tiles.blocks), 0 < self.piece < self.tiles.tile_n
        if self.is_wide:
            return _REGISTERS_OF_WIDE
        return _REGISTERS_FOR_PIECES.get(each, _REGISTERS[each]) if is_cut else _REGISTERS[each]

    @property
    def is_wide(self) -> bool:  # type: ignore[override]
        """Whether two warp groups share the rows of a tile, each with half of the output's columns."""
        return (self.head_dim, self.head_dim_v) in WIDE

    @property
    def consumers(self) -> int:
        return 2 if self.is_wide else self.tiles.warp_groups

    @property
    def columns(self) -> int:
        """Columns of the output that a warp group has."""
        return self.head_dim_v // 2 if self.is_wide else self.head_dim_v

    @property
    def is_paged(self) -> bool:
        return self.piece > 0

    @property
    def cluster(self) -> int:
        """Thread blocks that work together."""
        return 2 if self.pairs else 1

    @property
    def tile_q(self) -> int:
        """Query positions of a scheduled row tile."""
        return self.tiles.tile_m * self.cluster // self.heads_per_tile

    @property
    def own_q(self) -> int:
        """Query positions of a thread block's row tile."""
        return self.tiles.tile_m // self.own_heads

    @property
    def own_heads(self) -> int:
        """Query heads of a thread block's row tile: with as many as a pair has rows, each of its blocks has half of them."""
        return min(self.heads_per_tile, self.tiles.tile_m)

    @property
    def divides_heads(self) -> bool:
        """Whether the blocks of a pair have the same positions, each for its heads."""
        return self.heads_per_tile > self.own_heads


@lru_cache(maxsize=1024)
def slots(expr: Expr) -> tuple[int, int]:
    """How many captured numbers and tensors an expression may read: one more than its highest slot of each kind."""
    numbers = max((int(n.attr) for n in expr.nodes if n.op == "scalar"), default=-1)  # type: ignore[call-overload]
    return numbers + 1, max(expr.tensor_slots, default=-1) + 1


@lru_cache(maxsize=1024)
def sides(ranges: Expr) -> tuple[bool, bool] | None:
    """Whether a single range of keys per row is bounded on the left and on the right by lines parallel to the diagonal, else None."""
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


def bytes_of(tiles: Tiles, head_dim: int, head_dim_v: int, q_stages: int, has_one_kv: bool = False) -> int:
    """The shared memory of a forward kernel's thread block; barriers and the board take less than the 1,024 bytes to which Q is aligned.
    Wide heads: and P with factors of its rows, which one warp group passes to the other."""
    rest = 3072 if tiles.blocks == 1 else 1024
    if (head_dim, head_dim_v) in WIDE:
        rest = 1024 + 2 * tiles.tile_m * tiles.tile_n + 8 * 128
    of_key = head_dim if has_one_kv else head_dim + head_dim_v
    return 2 * (q_stages * tiles.tile_m * max(head_dim, head_dim_v) + tiles.stages * tiles.tile_n * of_key) + rest


def room_of(blocks: int) -> int:
    """The shared memory that a thread block may have, of so many on a multiprocessor."""
    return _PER_MULTIPROCESSOR // blocks - 1024


def _with_pages(tiles: list[int], page: int) -> int:
    """The tile width for pages of ``page`` rows, of candidates with the largest first: the largest whose page pieces are not small, or, if
    all are small, the one with the largest pieces. Widths below 5/8 of the largest are not considered."""
    large = [n for n in tiles if n * 8 >= tiles[0] * 5]
    return max(large, key=lambda n: (min(math.gcd(n, page), _SMALL), n))


def _reads_pairs(ask: Ask, has_whole_tiles: bool) -> bool:
    """Whether a predicate loads from a tensor per pair. has_whole_tiles: a tile has 128 keys, so that one load may serve all of them."""
    rest = ask.expr if ask.by_row or not has_whole_tiles else pair_part(ask.expr, "kv_idx", TILE_M)
    return not ask.by_row and rest is not None and reads_apart(rest)


def _asks_much(ask: Ask) -> bool:
    """Whether a predicate computes so much per pair that registers for 128 keys do not suffice beside a third stage."""
    rest = None if ask.by_row else pair_part(ask.expr, "kv_idx", TILE_M)
    return rest is not None and work_by_pair(rest) >= _MUCH_WORK


def tiles_for(
    head_dim: int,
    head_dim_v: int,
    score: Expr | None,
    tile_n: int | None = None,
    asked: tuple[Ask, ...] = (),
    page: int = 0,
    is_packed: bool = False,
    has_dropout: bool = False,
    rows: int = TILE_M,
    has_one_kv: bool = False,
) -> Tiles:
    """The tiles for padded head dimensions: as large as registers allow without spills.

    ``tests/backends/hopper/test_plan_and_compile.py`` compiles them all and counts spills.

    A score mod, or predicates besides bands, need more registers than three warp groups leave, and a table load per score needs even
    more. With three warp groups a key is read once for 192 rows instead of 128. This counts most at head dimensions such as 72 and 88: a
    row of 144 or 176 bytes begins inside a sector of 32 bytes, and TMA reads more sectors.

    tile_n: keys, such as those of a list's tile, that a tile's must divide. asked: all predicates but bands. page: rows of a page,
    0 without. is_packed: heads share row tiles, so a thread's scores lie on more diagonals. has_dropout: its words take registers too.
    rows: the query rows of a list's tile, all heads counted that share it; a multiple of 64. has_one_kv: V is the first columns of K.
    """
    is_bare = score is None and tile_n is None and not asked
    if head_dim == head_dim_v == 64 and is_bare and page % _SMALL == 0:
        return Tiles(192, 96 if has_dropout else 128, 3)
    if head_dim == head_dim_v == 96 and is_bare and not page and not has_dropout:
        return Tiles(192, 112, 3)
    is_wide = (head_dim, head_dim_v) in WIDE
    widest = HEAD_DIMS[-1] if is_wide else max(head_dim, head_dim_v)  # a warp group has 256 columns of wide heads
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
    is_short = rows % TILE_M != 0 or is_wide
    if is_short:
        keys = min(keys, _SHORT_KEYS)
    may_be = [n for n in range(keys // 16 * 16, 0, -16) if tile_n is None or tile_n % n == 0]
    keys = _with_pages(may_be, page) if page else may_be[0]
    emulated = 2 if score is not None and reads_straight(score) else 1 if score is not None and is_special(score) else 0
    if is_short:
        return _short_tiles(head_dim, head_dim_v, keys, emulated, has_one_kv)
    stages = 3 if widest <= _NARROW else 2
    if tile_n == keys == _SHORT_KEYS and not page and _NARROW < widest <= 128:
        stages = _MOST_STAGES  # as many keys in flight as in tiles of 128
    return Tiles(128, keys, stages, emulated=emulated)


def _short_tiles(head_dim: int, head_dim_v: int, keys: int, emulated: int, has_one_kv: bool) -> Tiles:
    """Tiles of one warp group, or of two that share the rows of wide heads. Up to head dimension 128 exponentials take longer than the
    product beside them, and a second thread block's products fill the time; above, one thread block keeps the tensor cores busy, and shared
    memory has no room for two with two stages."""
    blocks = 2 if max(head_dim, head_dim_v) <= 128 else 1
    deep = [Tiles(LEAST_ROWS, keys, n, False, emulated, blocks) for n in range(_MOST_STAGES, 0, -1)]
    return next(tiles for tiles in deep if bytes_of(tiles, head_dim, head_dim_v, 1, has_one_kv) <= room_of(tiles.blocks))
