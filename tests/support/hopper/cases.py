"""Random work for one thread block of the Hopper kernel: row tiles, key tiles per row tile, stages, warp groups, kinds of lists."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.support.hopper.protocol import RowTile
from tests.support.hopper.schedule import Broken

__all__ = ["Case", "random_case"]

TILE_N = 16
_MOST_READS = 100_000  # of a table in one schedule; the longest make some thousands
_STORED = 10_000  # rows of storage of the queries, above all that entries have
_VISITS = (0, 1, 1, 1, 2, 2, 3, 5)
_VISITS_IN_ORDER = (*_VISITS, 5, 7, 9)


class Table:
    """A tensor of a call's metadata; indexing outside it is an error, and so is reading it without end: a loop that waits for nothing."""

    def __init__(self, values: list):
        self.values, self.reads = values, 0

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.values), max(map(len, self.values), default=0)

    def __getitem__(self, key: tuple | int) -> Any:
        self.reads += 1
        if self.reads > _MOST_READS:
            raise Broken(f"a table is read {self.reads} times, now for {key}")
        found: Any = self.values
        for i in key if isinstance(key, tuple) else (key,):
            if i is not None:
                if not 0 <= i < len(found):
                    raise Broken(f"a table is asked for {key}; it has {len(found)} entries there")
                found = found[i]
        return found


class Sizes(NamedTuple):
    rows: int
    spread: int
    section: int
    heads: int
    ratio: int
    pieces_in_page: int


@dataclass
class Case:
    """tiles: what this block should compute, in order; others: what the other block of its cluster should. worker: the block's number, or
    the cluster's. jumps, left: see ``roles.Counter``. bands: (left, right) of each entry.
    foresees, guesses, shortens: what the kernel found of its config."""

    config: Any
    tiles: list[RowTile]
    tables: dict[str, Any]
    lengths: tuple[int, ...]
    sizes: Sizes
    bands: list[tuple[int, int]]
    workers: int
    jumps: list[int]
    left: int
    foresees: bool
    guesses: bool
    shortens: bool
    others: list[RowTile]
    worker: int

    @property
    def rows(self) -> int:
        """How many row tiles there are: as many as there is room for, or as the order says."""
        order = self.tables["order"]
        return order[self.sizes.rows, 0] if self.config.has_count else self.sizes.rows

    @property
    def draws(self) -> bool:
        return self.rows * self.sizes.spread > self.workers

    def __str__(self) -> str:
        tiles = self.config.tiles
        return (
            f"visits {[len(t.visits) for t in self.tiles]}, {tiles.stages} stages, Q {self.config.q_stages}, "
            f"{tiles.warp_groups} warp groups, turns {tiles.ping_pong}, lists {self.config.lists}, "
            f"left {self.config.has_left}, score {self.config.score}, heads of a tile {self.config.heads_per_tile}"
        )


def _config(draw: random.Random) -> Any:
    groups, q_stages = draw.choice((1, 2, 3)), draw.choice((1, 2, 2))
    takes_turns = groups > 1 and draw.random() < 0.8
    tiles = SimpleNamespace(tile_m=64 * groups, tile_n=TILE_N, stages=draw.choice((1, 2, 3)), ping_pong=takes_turns, warp_groups=groups)
    lists = draw.choice((None, None, "dense"))
    piece = draw.choice((0, 0, 0, 0, TILE_N, 8, 4, 2, 1)) if lists is None else 0
    return SimpleNamespace(
        tiles=tiles,
        tile_q=tiles.tile_m,
        heads_per_tile=1,
        q_stages=q_stages,
        score=draw.choice((None, "score")),
        is_bounded=draw.random() < 0.3,
        always=draw.choice(((), ("always",))),
        lists=lists,
        partial=draw.choice((None, "partial", "partial")) if lists else None,
        piece=piece,
        is_paged=piece > 0,
        gathers=piece == 1,
        list_cut=draw.choice(((1, 1), (2, 1), (1, 2))),
        per_entry=False,
        per_head=False,
        by_kv_head=False,
        has_order=lists is None,
        has_count=False,
        has_entries=lists is None,
        has_left=lists is None and draw.random() < 0.5,
        has_right=lists is None and draw.random() < 0.5,
        spread="none" if lists else draw.choice(("none", "heads")),
        head_dim=64,
        head_dim_v=64,
        columns=64,
        consumers=groups,
        is_wide=False,
        has_one_kv=False,
        pairs=False,
        cluster=1,
        is_split=False,
        has_skip=False,
        in_order=False,
        recomputes=False,
        has_sink=False,
    )


def _put_in_order(config: Any, seed: int) -> None:
    """Makes the config one of the kernel in the order of keys: no mods, no lists, no pages. section_tiles: key tiles of a section."""
    draw = random.Random(-(10**9) - seed)
    config.in_order, config.has_sink, config.section_tiles = True, draw.random() < 0.5, draw.choice((1, 2, 2, 3, 16))
    config.tiles.stages, config.score, config.always, config.is_bounded = draw.choice((1, 2, 3, 4)), None, (), False
    config.lists, config.partial, config.piece, config.is_paged, config.gathers = None, None, 0, False, False
    config.has_order = config.has_entries = True
    config.has_left, config.has_right, config.spread = draw.random() < 0.5, draw.random() < 0.5, draw.choice(("none", "heads"))
    # with values of more than 128 columns weights take the place of scores, and registers hold a part of Q
    config.head_dim = config.head_dim_v = draw.choice((64, 128, 256))
    config.sums = SimpleNamespace(in_q=int(config.head_dim > 128))
    if config.head_dim == 64 and draw.random() < 0.5:
        config.recomputes, config.consumers = True, 4
        config.tiles.warp_groups, config.tiles.tile_m, config.tiles.ping_pong = 4, 256, draw.random() < 0.8
        config.tile_q = config.tiles.tile_m


def _widen(config: Any, seed: int) -> None:
    """Makes the config one of wide heads: two warp groups have the same 64 rows."""
    draw = random.Random(-(10**5) - seed)
    config.is_wide, config.consumers, config.has_one_kv = True, 2, draw.random() < 0.5
    config.tiles.warp_groups, config.tiles.tile_m, config.tiles.ping_pong = 1, 64, False
    config.q_stages, config.pairs = 1, draw.random() < 0.5
    config.columns, config.head_dim, config.head_dim_v = 16, 32, 32  # each of a product's two instructions reads a part
    config.cluster = 1 + config.pairs
    config.tiles.stages = max(config.tiles.stages, 1 + config.has_one_kv)
    if config.gathers:
        config.gathers, config.piece = False, 2


def _ratio_of_wide(config: Any, seed: int, ratio: int) -> int:
    """Query heads per K/V head. Of some wide configs with entries heads fill a row tile, those of a pair too, or keys are split."""
    draw = random.Random(-(10**8) - seed)
    if config.lists is not None or config.spread != "heads":
        return ratio
    config.is_split = draw.random() < 0.5
    if draw.random() < 0.5:
        config.heads_per_tile = draw.choice((16, 64, 128) if config.pairs else (16, 64))
        ratio = draw.choice({16: (16, 20, 5), 64: (64, 40, 100), 128: (128, 65, 200)}[config.heads_per_tile])
    return ratio


def _turned(worker: int, workers: int, total: int) -> list[int]:
    """The pieces of work of a cluster: every other round goes from the last worker to the first."""
    rounds = -(-total // workers)
    taken = [workers * i + (workers - 1 - worker if i % 2 else worker) for i in range(rounds)]
    return [i for i in taken if i < total]


def _taken(draw: random.Random, total: int, workers: int) -> tuple[list[int], list[int]]:
    """The pieces of work that the first block gets, and how many others take after each of its draws."""
    jumps = [draw.choice((0, 0, 1, 2)) if workers > 1 else 0 for _ in range(total)]
    taken, at = [0] if total else [], workers
    for jump in jumps:
        if total <= workers or at >= total:
            break
        taken.append(at)
        at += 1 + jump
    return taken, jumps


def random_case(seed: int, rows: int | None = None, is_wide: bool = False, skips: bool = False, in_order: bool = False) -> Case:
    """rows: row tiles for all blocks together, from none to 12. is_wide: the kernel is that of wide heads. skips: it is one that skips.
    in_order: it is the one in the order of keys."""
    draw = random.Random(seed)
    config = _config(draw)
    if skips:
        config.has_skip, config.is_bounded, config.piece, config.is_paged, config.gathers = True, False, 0, False, False
    if is_wide:
        _widen(config, seed)
    if in_order:
        _put_in_order(config, seed)
    config.has_dropout = not in_order and random.Random(-(10**6) - seed).random() < 0.3
    config.has_order = config.has_order and random.Random(-(10**11) - seed).random() < 0.7
    rows = draw.choice((0, 1, 2, 3, 5, 8, 12)) if rows is None else rows
    workers = draw.choice((1, 1, 2))
    heads = draw.choice((2, 3, 4)) if config.spread == "heads" else 1
    section = draw.randint(1, heads)
    ratio = 2 if heads % 2 == 0 else 1
    if config.spread == "heads" and random.Random(-1 - seed).random() < 0.6:  # heads are then groups of heads that share row tiles
        config.heads_per_tile, config.tile_q = 4, config.tiles.tile_m // 4
        ratio = 4 * ratio - seed % 4
    if config.lists and random.Random(-(10**7) - seed).random() < 0.5:  # lists of K/V heads, whose query heads have row tiles of their own
        config.by_kv_head = config.per_head = config.has_order = True
        ratio = 3 if seed % 2 else 5
        if seed % 4 > 1:
            config.heads_per_tile, config.tile_q = 4, config.tiles.tile_m // 4
    ratio = _ratio_of_wide(config, seed, ratio) if is_wide else ratio
    config.own_heads = min(config.heads_per_tile, config.tiles.tile_m)
    config.divides_heads = config.heads_per_tile > config.own_heads
    config.own_q = config.tiles.tile_m // config.own_heads
    config.tile_q = config.tiles.tile_m * config.cluster // config.heads_per_tile
    spread = heads * (1 + seed % 3 if config.is_split else 1)
    sizes = Sizes(rows, spread, section, heads, ratio, draw.choice((1, 1, 2, 3)))
    # heads whose K and V fit the cache together go side by side
    work = [(r, h) for first in range(0, spread, section) for r in range(rows) for h in range(first, min(first + section, spread))]
    taken, jumps = _taken(draw, len(work), workers)
    worker = seed % workers if config.pairs else 0
    if config.pairs:
        taken = _turned(worker, workers, len(work))
    made = _listed if config.lists else _entries
    config.has_max = seed % 3 == 0
    tables, lengths, bands, tile = made(draw, config, sizes)
    tiles, others = ([found for i in taken if (found := tile(*work[i], rank)) is not None] for rank in range(2))
    names = ("partial_count", "partial_index", "full_count", "full_index", "order", "entries", "pages")
    left, foresees = draw.randrange(workers), bool(config.score) and draw.random() < 0.5
    guesses = draw.random() < 0.7
    shortens = guesses and config.is_bounded and not foresees
    case = Case(
        config, tiles, {n: tables.get(n) for n in names}, lengths, sizes, bands, workers, jumps, left, foresees,
        guesses and (shortens or not config.is_bounded), shortens, others, worker,
    )  # fmt: skip
    return _counted(case, random.Random(-seed))


def _counted(case: Case, draw: random.Random) -> Case:
    """Every other order says itself how many row tiles there are; behind them stand others, that are not to be computed."""
    if not case.config.has_order or draw.random() < 0.5:
        return case
    room, rows = draw.choice((0, 1, 4)), case.sizes.rows
    case.config.has_count = True
    case.tables["order"] = Table([*case.tables["order"].values, *[(0, 0, 0)] * room, (rows, 0, 0)])
    case.sizes = case.sizes._replace(rows=rows + room)
    return case


def _entries(draw: random.Random, config: Any, sizes: Sizes) -> tuple[dict[str, Any], tuple, list, Any]:
    """Each row tile is of an entry of its own, whose length is what it takes to have the visits wished for."""
    tile_m, count, in_page = config.tile_q, sizes.rows, sizes.pieces_in_page
    entries, order, bands, pages = [], [], [], []
    for b in range(count):
        m_block = draw.choice((0, 0, 1, -1 if draw.random() < 0.3 else 0))
        seqlen_q = max(m_block, 0) * tile_m + draw.choice((1, tile_m // 2 + 3, tile_m, tile_m, tile_m + 5))
        seqlen_k = max(0, draw.choice(_VISITS_IN_ORDER if config.in_order else _VISITS) * TILE_N - draw.choice((0, 0, 1, 9, 15)))
        entries.append((7 * b, 1000 * b, seqlen_q, 5 * b, 300 * b, seqlen_k, 40 * b, 0, 0))
        order.append((m_block, 0, b))
        left, right = draw.randint(-seqlen_q - 10, seqlen_k), draw.randint(-seqlen_q, seqlen_k + 10)
        bands.append((left if config.has_left else -(2**30), max(right, left) if config.has_right else 2**30))
        # no more than a sequence needs: who asks for another page fails
        used = -(-seqlen_k // (config.piece * in_page)) if config.is_paged else 0
        pages.append([1000 * b + i for i in draw.sample(range(99), used)])
    draw.shuffle(order)
    lengths, given = (999, 999), entries
    if not config.has_order:
        lengths, given = _of_lengths_alone(config, entries, order, pages, draw.randint(1, tile_m), in_page)

    def tile(row: int, inner: int, rank: int) -> RowTile | None:
        m_block, _, b = order[row]
        split, head = divmod(inner, sizes.heads)
        if m_block < 0:
            return None
        q_row, q_start, seqlen_q, k_row, k_start, seqlen_k, q_first, _, _ = entries[b]
        left, right = bands[b]
        visits = [(n, 1, cut) for n, cut in _of_band(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q), seqlen_k, left, right)]
        visits = _turned_bare(visits) if config.has_skip else visits
        visits = visits[::-1] if config.in_order else visits
        share = -(-len(visits) // (sizes.spread // sizes.heads))
        visits = visits[split * share : (split + 1) * share]
        m_block = m_block if config.divides_heads else m_block * config.cluster + rank
        place, skipped = (q_row, q_start, m_block), config.own_heads * rank if config.divides_heads else 0
        heads, head, q_place = _of_heads(head, config.heads_per_tile, sizes.ratio, place, skipped)
        heads, q_row = min(heads, config.own_heads), q_row + split * _STORED
        kv_head = head // sizes.ratio
        keys: list[tuple] = [(kv_head, k_row, k_start, 0, n) for n, _, _ in visits]
        if config.is_paged:
            place = lambda at: (kv_head, 0, *_on_page(at, seqlen_k, pages[b], config.piece, in_page))
            keys = [tuple(place(at) for at in _pieces(n, config.piece)) for n, _, _ in visits]
        seen = {"left": left if config.has_left else -(2**30), "right": right if config.has_right else 2**30}
        facts = {"more": heads, "m_block": m_block, "head": head, "entry": b, "total": len(visits), "seqlen_q": seqlen_q,
                 "seqlen_k": seqlen_k, "q_row": q_row, "q_start": q_start, "q_first": q_first, **seen}  # fmt: skip
        room = seqlen_k - max(n for n, _, _ in visits) * TILE_N if visits else TILE_N
        return RowTile(facts, visits, (q_place, keys, keys), room if room < TILE_N else None)

    tables = {"order": Table(order) if config.has_order else None, "entries": Table(given), "pages": Table(pages)}
    return tables, (*lengths, *((_STORED,) if config.is_split else ())), bands, tile


def _of_lengths_alone(
    config: Any, entries: list[tuple], order: list[tuple], pages: list[list[int]], seqlen_q: int, in_page: int
) -> tuple[tuple, list]:  # fmt: skip
    """Makes each entry a row of storage with one row tile. Returns the capacities and the numbers of keys, which are wrong where no other
    number means as many."""
    entries[:] = [(b, 0, seqlen_q, b, 0, e[5], 0, 0, 0) for b, e in enumerate(entries)]
    order[:] = [(0, 0, b) for b in range(len(entries))]
    rows = config.piece * in_page if config.is_paged else max((e[5] for e in entries), default=0)
    room = rows * max(map(len, pages), default=0) if config.is_paged else rows
    given = [e[5] + 7 if e[5] == room else e[5] or -7 for e in entries]
    return (seqlen_q, rows), given


def _pieces(n: int, piece: int) -> range:
    """The pieces of key tile ``n``, counted from an entry's first key."""
    count = TILE_N // piece
    return range(n * count, (n + 1) * count)


def _on_page(at: int, seqlen_k: int, pages: list[int], piece: int, in_page: int) -> tuple[int, int]:
    """(piece of a page, page) of piece ``at``; past the last key no page at all."""
    return at % in_page, pages[at // in_page] if at * piece < seqlen_k else -1


def _of_heads(number: int, packed: int, ratio: int, at: tuple[int, int, int], skipped: int = 0) -> tuple[int, int, tuple]:
    """(heads of a row tile, the first, what is chosen of Q). number: the tile's head, or the number of the group that shares it. skipped:
    heads of the group that another thread block has."""
    q_row, q_start, m_block = at
    if packed == 1:
        return 1, number, (number, q_row, q_start, m_block, 0)
    groups = [(h, min(packed, ratio - h)) for h in range(0, ratio, packed)]
    kv_head, (before, heads) = number // len(groups), groups[number % len(groups)]
    before, heads = before + skipped, heads - skipped
    return heads, kv_head * ratio + before, (kv_head, q_row, ((before, q_start), 0), (0, m_block), 0)


def _of_band(first: int, end: int, seqlen_k: int, left: int, right: int) -> list[tuple[int, bool]]:
    """(key tile, whether the band cuts it), from the last to the first, of rows that see keys ``i + left <= j < i + right``."""
    low, high = max(0, first + left), min(seqlen_k, end - 1 + right)
    if high <= low or right <= left:
        return []
    tiles = range((high - 1) // TILE_N, low // TILE_N - 1, -1)
    return [(n, end - 1 + left > n * TILE_N or first + right < min((n + 1) * TILE_N, seqlen_k)) for n in tiles]


def _turned_bare(visits: list) -> list:
    """The order of a kernel that skips: bare tiles, between masked ones, from the first to the last."""
    ahead = [*visits[:1], *itertools.takewhile(lambda visit: visit[2], visits[1:])]
    bare = list(itertools.takewhile(lambda visit: not visit[2], visits[len(ahead) :]))
    return [*ahead, *reversed(bare), *visits[len(ahead) + len(bare) :]]


def _listed(draw: random.Random, config: Any, sizes: Sizes) -> tuple[dict[str, Any], tuple, list, Any]:
    """Every row tile has a list of partial tiles and one of full ones; with ``by_kv_head`` two K/V heads have lists of their own."""
    cut_m, cut_n = config.list_cut
    seqlen_k = 8 * TILE_N - draw.choice((0, 0, 1, 9, 15, 20, 31))
    lists: list[list] = []
    for _ in range(1 + config.by_kv_head):
        lists.append(rows := [])
        for _ in range(sizes.rows):
            _add_lists(draw, rows, -(-seqlen_k // (TILE_N * cut_n)))
    groups = -(-sizes.ratio // config.heads_per_tile)
    order = [(m, head, 0) for head in range(len(lists) * groups) for m in range(sizes.rows)]
    order = draw.sample(order, sizes.rows) if config.by_kv_head else order
    has_full = draw.random() < 0.8

    def tile(row: int, head: int, rank: int) -> RowTile:
        m_block, head, _ = order[row]
        own = m_block * config.cluster + rank
        heads, head, q_place = _of_heads(head, config.heads_per_tile, sizes.ratio, (0, 0, own))
        kv_head = head // sizes.ratio
        of_row = lists[kv_head][m_block // cut_m]
        partial, full = ([n for e in reversed(x) for n in range(e * cut_n + cut_n - 1, e * cut_n - 1, -1)] for x in of_row)
        partial, full = ([n for n in x if n * TILE_N < seqlen_k] for x in (partial, full if has_full else []))
        # the tile that the last key cuts goes first
        ahead = full[:1] if full and (full[0] + 1) * TILE_N > seqlen_k else []
        visited = [(n, 0) for n in ahead] + [(n, 1) for n in partial] + [(n, 0) for n in full[len(ahead) :]]
        visits = [(n, asked, bool(asked and config.partial)) for n, asked in visited]
        visits = _turned_bare(visits) if config.has_skip else visits
        keys = [(kv_head, 0, 0, 0, n) for n, _, _ in visits]
        facts = {"more": heads, "m_block": own, "head": head, "entry": 0, "total": len(visits), "seqlen_q": sizes.rows * config.tile_q,
                 "seqlen_k": seqlen_k, "q_row": 0, "q_start": 0, "q_first": 0, "left": 0, "right": 0}  # fmt: skip
        return RowTile(facts, visits, (q_place, keys, keys), None)

    tables = {"order": Table(order)} if config.by_kv_head else {}
    for name, which in (("partial", 0), ("full", 1)):
        if which == 0 or has_full:
            tables[f"{name}_count"] = Table([[[len(r[which]) for r in rows] for rows in lists]])
            tables[f"{name}_index"] = Table([[[r[which] or [0] for r in rows] for rows in lists]])
    return tables, (sizes.rows * config.tile_q, seqlen_k), [], tile


def _add_lists(draw: random.Random, rows: list, exist: int) -> None:
    listed = draw.sample(range(exist), min(draw.choice(_VISITS), exist))
    cut = draw.randint(0, len(listed))
    rows.append((sorted(listed[:cut]), sorted(listed[cut:])))
