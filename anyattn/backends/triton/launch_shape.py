"""Launch shape: the division of a problem's rows and keys among programs: tiles, packed query heads, split-KV.

Pure functions of shapes: no tensor is read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.codegen.assumptions import reads_keys, shape_of
from anyattn.backends.triton.codegen.programs import masks_of, program_of
from anyattn.backends.triton.tile_config import Shape, Tiles
from anyattn.backends.triton.wide_tiles import is_wide
from anyattn.hardware import Hardware
from anyattn.mods.ir.extents import Box, Extent, extents
from anyattn.problem import Problem
from anyattn.sequences.sections import KEYS_IN_ORDER, SECTION
from anyattn.sequences.split_kv import MOST_SPLITS, num_splits

__all__ = [
    "MOST_BLOCKS",
    "EvenShares",
    "Layout",
    "Reading",
    "forward_shape",
    "grid_of",
    "has_few_rows",
    "head_rows",
    "joined_tiles",
    "layout_of",
    "limits_of_tiles",
    "listed_tile",
    "padded_group",
    "pieces_of",
    "positions_per_tile",
    "rows_of",
    "stages_of_gathered",
    "tiles_in_order",
    "tiles_per_group",
]

# Even shares, in key tiles: the fewest of a program, how many more make one more part worth adding, and the time of merging.
_LEAST_TILES, _MERGED_TILES, _SPARED_TILES = 2, 8, 4
_MANY_ROW_TILES = 1024
_SATURATING = 0.7  # programs per multiprocessor that together read at the memory's rate
# By the tiles of other calls: whether a tile of keys is skipped is known after its scores, so that the loop has no late product to overlap
# with; then more rows share a tile of keys. D 128, S 8,192, half of the tiles skipped, none: 1.74, 2.40 ms; before 2.13, 2.88 (H200).
_OF_SKIPS = {Tiles(64, 64, 4, 3): Tiles(128, 64, 4, 3)}
_MOST_ROWS = 16  # of a tile: with more, products take as long as reading keys, and a loop over row tiles spills registers
# Bytes of keys and values that there is room for: finding shares takes some 5 us more than a number of splits, a third of the time in
# which these are read (H200: 8 sequences of 1,024 keys, 8 heads of 128, 18 instead of 12.5 us; 32 of up to 16,384, log-normal, 104
# instead of 122).
_LEAST_SHARED = 64 << 20
_MOST_PACKED = 64
_FEW_LIST_ROWS = 16  # a tile of dq has no fewer rows
_LEAST_KEYS = 64  # of a tile: where lists have tiles of fewer keys, one tile gathers several
_ANY_NUMBER = 1024  # assumed queries per entry if a call gives no upper bound
_MOST_SPLITS, _MANY_SPLITS = 128, 32
MOST_BLOCKS = 65535  # on each axis of a CUDA grid except the first
# Model of the time to read keys, by number of splits, fitted to 80 H200 measurements in tests/backends/triton/test_split_kv.py. It uses
# shares of the bandwidth and bytes instead of seconds, so that it applies to other devices.
_ALONE = 0.9  # share of a multiprocessor's bandwidth that one program reaches with ``_UNDER_WAY`` bytes of loads in flight
_UNDER_WAY = 64 << 10
_MORE = 0.77  # exponent of the gain from more bytes in flight
_WAITED = 26 << 10  # bytes of a multiprocessor's share that pass while a program waits for its mods' loads at a tile's keys, about 0.7 us
_BEND = 3  # per tile loaded ahead: how sharply throughput saturates at the bandwidth as programs are added
_ONE_MORE_LAUNCH = 224 << 10  # bytes that a multiprocessor reads in the time of the combining launch's start and end, about 6 us
_MERGED = 6  # cost of writing, reading and starting the program of a partial output, in multiples of its bytes
_BEGUN = 16 << 10  # bytes that other programs read while a program starts, for each tile that it loads ahead but one
_UNEVEN = 0.25
_MANY_ROWS = 4096  # for which tiles are not made smaller
_MOST_PARTIAL = 1 << 30  # bytes of the sections' results
_CLOSE = 1.015  # within this factor of the best, fewer splits are preferred, since they take less memory


class EvenShares(NamedTuple):
    """programs: number of those that take even shares of all key tiles. The others: see ``kernels.arguments.Shares``."""

    programs: int
    most: int
    least: int
    merged: int
    spared: int
    saturating: int


class Layout(NamedTuple):
    """packed: most query heads of a K/V head whose rows share a tile. shares: None: a program for each row tile, or split of one. why: one
    line per decision, for people. section: keys of a section of the sums (``kernels.softmax.sections``), of which each split is one; 0
    without."""

    tiles: Tiles
    packed: int
    num_splits: int
    shares: EvenShares | None
    why: tuple[str, ...]
    section: int = 0


def layout_of(problem: Problem, hardware: Hardware, options: dict[str, int]) -> Layout:
    """options: ``kernel_options``, of which tile_m, tile_n and num_splits are requirements and pack_gqa is a preference."""
    if problem.is_batch_invariant:
        return _layout_in_order(problem, hardware, options)
    requested = {name: options[name] for name in ("tile_m", "tile_n") if name in options}
    why, shape = [], forward_shape(problem)
    splits, shares = options.get("num_splits", problem.num_splits), None
    # the parts of even shares have room for the planned tiles, not for those that are measured later
    is_shared = splits == 0 and not options.get("autotune") and _wants_shares(problem, hardware)
    for packed in _allowed_choices(problem, hardware.capability, options):
        is_short = has_few_rows(problem, hardware.capability)
        rows, queries = rows_of(problem, packed), _most_q(problem) if _is_cache(problem) else 1
        tiles = tile_config.forward_tiles(shape, hardware.capability, rows, is_short, is_shared, queries)
        tiles = tiles if problem.skip is None else _OF_SKIPS.get(tiles, tiles)
        if requested:
            tiles = tile_config.requested_tiles("forward", replace(tiles, **requested), shape, hardware.capability, hardware.name)
        if padded_group(packed) <= tiles.tile_m:
            break
    if packed > 1:
        where = " in a row of the block lists" if _list_rows(problem) else ""
        why.append(f"{packed} query heads share a row tile: there are at most {_most_q(problem)} queries{where}")
    elif options.get("pack_gqa", problem.packs) and problem.qhead_per_kvhead > 1:
        why.append("pack_gqa=True is not followed: few queries only are packed, and heads that share lists of tiles")
    if requested:
        why.append(f"tiles of {tiles.tile_m} x {tiles.tile_n}: kernel_options")
    if is_shared and tiles.tile_m <= _MOST_ROWS:
        splits, shares = 1, _even_shares(problem, tiles, packed, hardware)
        why.append(f"keys shared evenly by {shares.programs} programs, by the lengths on the device")
    elif splits == 0:
        splits = _splits(problem, tiles, packed, hardware)
        why.append(f"keys in {splits} piece{'s' * (splits != 1)}: for {max(1, hardware.sm_count)} multiprocessors")
    most = min(MOST_SPLITS, max(1, MOST_BLOCKS // max(1, problem.batch)))
    if splits > most:
        why.append(f"keys in {most} pieces, not {splits}: a grid has room for {MOST_BLOCKS} entries and pieces, {MOST_SPLITS} of an entry")
        splits = most
    return Layout(tiles, packed, splits, shares, tuple(why))


def _layout_in_order(problem: Problem, hardware: Hardware, options: dict[str, int]) -> Layout:
    """The layout of a call whose rows have the same bits in every batch. Heads share a tile, and sections of the keys have programs of
    their own, where that is faster: neither changes a bit."""
    tiles = tiles_in_order(forward_shape(problem), hardware.capability)
    choices = _allowed_choices(problem, hardware.capability, options)
    packed = next(n for n in (*choices, 1) if padded_group(n) <= tiles.tile_m)
    sections = ceil_div(problem.bound_k, SECTION)
    row_tiles = ceil_div(problem.bound_q, positions_per_tile(tiles.tile_m, packed)) * problem.heads_kv * tiles_per_group(problem, packed)
    programs = row_tiles * problem.batch
    partial = sections * problem.q.shape[:3].numel() * tile_config.padded(problem.v.shape[3]) * 4
    fits = problem.batch * sections <= MOST_BLOCKS and partial <= _MOST_PARTIAL
    is_divided = sections > 1 and fits and programs < 2 * max(1, hardware.sm_count)
    why = [f'sums by sections of {SECTION} keys, tiles of {tiles.tile_m} x {tiles.tile_n} in their order: deterministic="batch"']
    if packed > 1:
        why.append(f"{packed} query heads share a row tile: there are at most {_most_q(problem)} queries")
    if is_divided:
        why.append(f"a program for each of {sections} sections: for {max(1, hardware.sm_count)} multiprocessors")
    return Layout(tiles, packed, sections if is_divided else 1, None, tuple(why), SECTION)


def tiles_in_order(shape: Shape, capability: tuple[int, int] | None) -> Tiles:
    """The tiles of a forward pass whose rows have the same bits in every batch: functions of the head dimensions, the dtypes and the mods
    alone, for a single query as for many. Lists of 64 keys and multiples can be visited.

    D 256, bfloat16, an H200: with 64 keys, four warps and three stages prefill takes 2.60 ms and decoding 354 us (the default 314), with
    two stages 3.14 and 406, with 32 keys 2.73 and 331; for 64 keys Hopper has a kernel, whose prefill takes 1.86.
    """
    plain = replace(shape, asks=False, has_pairs=False, most_keys=0, wrap=0, is_narrow=False, listed=(0, 0), has_one_kv=False)
    tiles = tile_config.forward_tiles(plain, capability, _MANY_ROWS, False)
    if shape.dtype.itemsize == 2:
        most, warps, stages = (32, 8, 2) if is_wide(shape.d, shape.dv) else (KEYS_IN_ORDER, 4, 3)
        tiles = Tiles(min(tiles.tile_m, 64), min(tiles.tile_n, most), warps, stages)
        if tile_config.fitting("forward", tiles, plain, capability).num_stages == 1:
            tiles = replace(tiles, tile_n=min(tiles.tile_n, 32), num_stages=2)
    return tile_config.fitting("forward", tiles, plain, capability)


def forward_shape(problem: Problem) -> Shape:
    """The shape for which a forward pass's tiles are chosen."""
    return replace(shape_of(problem), asks=masks_of(problem).has_lists, listed=limits_of_tiles(problem))


def limits_of_tiles(problem: Problem) -> tuple[int, int]:
    """The most rows and keys of a tile of the forward pass or of dq, 0 for no limit: a tile of the call's own lists, unless a tile gathers
    several of their keys."""
    rows, keys = listed_tile(problem)
    return rows, 0 if keys < _LEAST_KEYS and joined_tiles(problem, keys, _LEAST_KEYS) else keys


def joined_tiles(problem: Problem, list_n: int, tile_n: int) -> int:
    """How many listed tiles of ``list_n`` keys a tile of ``tile_n`` gathers, 0 if it is a part of one. Dropout draws for adjacent keys, and
    numbers of pages and pairs of 8-bit values are loaded for such."""
    is_plain = problem.dropout is None and problem.k.dtype is problem.q.dtype
    is_paged = problem.sequences is not None and problem.sequences.page_table is not None
    return tile_n // list_n if 0 < list_n < tile_n and tile_n % list_n == 0 and is_plain and not is_paged else 0


def stages_of_gathered(num_stages: int) -> int:
    """The compiler's stages for a loop that loads its addresses too: as many tiles are under way as in another with ``num_stages``."""
    return 2 * num_stages - 1


def head_rows(problem: Problem) -> int:
    """Rows of a position in a tile that has the query heads of a K/V head, in dq and in gradients of gathered queries' keys; 0 if each head
    has tiles of its own. Gradients of captured tensors and dropout are computed head by head."""
    packs = 0 < _list_rows(problem) < _FEW_LIST_ROWS and problem.dropout is None and not problem.wanted_slots and _shares_lists(problem)
    return padded_group(problem.qhead_per_kvhead) if packs and problem.qhead_per_kvhead > 1 else 0


def listed_tile(problem: Problem) -> tuple[int, int]:
    """The tile of the call's own block lists, (0, 0) if no list selects the tiles to visit."""
    return problem.blocks.tile if problem.blocks is not None and masks_of(problem).uses_blocks else (0, 0)


def padded_group(packed: int) -> int:
    """The number of rows of a tile per position: a power of two."""
    return next_power_of_2(packed)


def tiles_per_group(problem: Problem, packed: int) -> int:
    """The number of tiles for the query heads of a K/V head, ``packed`` per tile and the rest in the last one."""
    return ceil_div(problem.qhead_per_kvhead, packed)


def grid_of(row_tiles: int, heads: int, entries: int) -> tuple[int, int, int]:
    """The launch grid of (row tiles, heads, entries); entries are the first axis if only that one is large enough for them."""
    return (row_tiles, heads, entries) if entries <= MOST_BLOCKS else (entries, heads, row_tiles)


def positions_per_tile(tile_m: int, packed: int) -> int:
    return tile_m // padded_group(packed)


def has_few_rows(problem: Problem, capability: tuple[int, int] | None) -> bool:
    """Whether the heads of a group may share a tile. All such calls with tiles of one size use one kernel, for any number of heads."""
    return _most_q(problem) <= tile_config.most_short(problem.q.dtype, capability, _is_cache(problem))


def _is_cache(problem: Problem) -> bool:
    return problem.sequences is not None and problem.sequences.is_cache


def rows_of(problem: Problem, packed: int) -> int:
    """The greatest number of rows of an entry, with ``packed`` heads per position."""
    return _most_q(problem) * padded_group(packed)


def _most_q(problem: Problem) -> int:
    """The greatest number of queries of an entry, or of a row of block lists with few queries, which have tiles of their own. For a cache
    only the call's own bound is used: a number read from the batch would let one entry change the bits of another."""
    sequences = problem.sequences
    if sequences is None or not sequences.is_cache:
        return min(problem.bound_q, _list_rows(problem) or problem.bound_q)
    return sequences.most_q or _ANY_NUMBER


def _list_rows(problem: Problem) -> int:
    """The queries of a row of the call's block lists if they are so few that a tile has room for them in all heads of a group; else 0."""
    rows = listed_tile(problem)[0]
    return rows if rows * padded_group(problem.qhead_per_kvhead) <= _MOST_PACKED else 0


def _choices(problem: Problem, capability: tuple[int, int] | None) -> list[int]:
    """Numbers of heads that may share a tile, greatest first, all of one group: one number for each number of
    tiles that divide a group evenly."""
    ratio = problem.qhead_per_kvhead
    if ratio == 1 or not has_few_rows(problem, capability) or not _shares_lists(problem):
        return [1]
    evenly = dict.fromkeys(ceil_div(ratio, tiles) for tiles in range(1, ratio + 1))
    return [n for n in evenly if n <= _MOST_PACKED]


def _allowed_choices(problem: Problem, capability: tuple[int, int] | None, options: dict[str, int]) -> list[int]:
    """``_choices``, restricted by the call's pack_gqa."""
    packs = options.get("pack_gqa", problem.packs)
    return [1] if packs is not None and not packs else _choices(problem, capability)


def _shares_lists(problem: Problem) -> bool:
    """Whether the heads of a group visit the same tiles."""
    plan = masks_of(problem)
    if not plan.uses_blocks:
        return not plan.has_lists  # lists made here have a line per head
    counts: torch.Tensor = problem.blocks.mask_block_cnt  # type: ignore[union-attr]
    return counts.shape[1 if counts.ndim == 3 else 0] in (1, problem.heads_kv)


def _wants_shares(problem: Problem, hardware: Hardware) -> bool:
    """Whether programs should take even shares of the call's key tiles."""
    if problem.wants_max or problem.skip is not None or not has_few_rows(problem, hardware.capability):
        return False
    rows = _list_rows(problem)
    if rows and ceil_div(problem.bound_q, rows) >= _MANY_ROW_TILES:  # as many programs, which visit about equally many tiles
        return False
    keys = problem.batch * problem.heads_kv * _most_seen(problem)
    return keys * (problem.q.shape[3] + problem.v.shape[3]) * problem.k.element_size() > _LEAST_SHARED


def _even_shares(problem: Problem, tiles: Tiles, packed: int, hardware: Hardware) -> EvenShares:
    saturating = max(1, int(_SATURATING * hardware.sm_count))
    most = _most_tiles(problem, tiles, packed)
    return EvenShares(_programs(problem, tiles, hardware), most, _LEAST_TILES, _MERGED_TILES, _SPARED_TILES, saturating)


def _programs(problem: Problem, tiles: Tiles, hardware: Hardware) -> int:
    """The programs that take even shares: as many as run at the same time, with the registers that a loop over row tiles takes."""
    return max(1, hardware.sm_count) * min(2, tile_config.resident(tiles, shape_of(problem), hardware.capability))


def _most_tiles(problem: Problem, tiles: Tiles, packed: int) -> int:
    """The most key tiles that a row tile visits."""
    return ceil_div(_most_seen(problem) + positions_per_tile(tiles.tile_m, packed), tiles.tile_n) + 1


def _splits(problem: Problem, tiles: Tiles, packed: int, hardware: Hardware) -> int:
    step, heads = positions_per_tile(tiles.tile_m, packed), problem.heads_kv * tiles_per_group(problem, packed)
    row_tiles, batch, sm_count = ceil_div(problem.bound_q, step), problem.batch, max(1, hardware.sm_count)
    rows, _, length, _ = problem.q.shape
    if rows != batch:  # packed one after another: their total rows bound the row tiles
        row_tiles, batch = min(batch * row_tiles, rows * length // step + batch), 1
    if tiles.tile_m > 64 or not has_few_rows(problem, hardware.capability):  # limited by matrix products, not by bytes
        return num_splits(row_tiles, ceil_div(problem.bound_k, tiles.tile_n), heads, batch, sm_count, _MOST_SPLITS)
    shape = shape_of(problem)
    return pieces_of(
        Reading(
            programs=row_tiles * heads * batch, key_tiles=ceil_div(_most_seen(problem), tiles.tile_n),
            tile_bytes=tiles.tile_n * (shape.d + shape.dv) * shape.kv_size, stages=max(1, tiles.num_stages - 1),
            resident=tile_config.resident(tiles, shape, hardware.capability), partial_bytes=problem.q.shape[:3].numel() * shape.dv * 4,
            waits=any(reads_keys(mod.expr) for mod in (problem.score, *problem.predicates) if mod is not None),
        ),
        sm_count,
    )  # fmt: skip


def _most_seen(problem: Problem) -> int:
    """The greatest number of keys that a row sees, if the mask's limits show it without reading tensors: a window's width."""
    call_program = program_of(problem)
    ranges = call_program.program.ranges
    if ranges is None:
        return problem.bound_k
    captured = call_program.mods[call_program.program.parts.index(ranges)].scalars
    numbers = tuple([Extent(n, n) for n in captured if type(n) is int])
    last = problem.bound_k - 1 if problem.sequences is not None else problem.bound_q - 1  # sees most keys, all before it
    one = Extent(max(0, last), max(0, last))
    most = Extent(0, max(0, problem.batch - 1)), Extent(0, max(0, problem.heads_q - 1))
    bounds = extents(ranges.expr, Box(*most, one, one, numbers if len(numbers) == len(captured) else None))
    limits = [bounds[at] for at in ranges.expr.outputs]
    total = 0
    for lo, hi in zip(limits[::2], limits[1::2], strict=True):
        if lo is None or hi is None:
            return problem.bound_k
        total += max(0, min(hi.hi, problem.bound_k) - max(lo.lo, 0))
    return min(total, problem.bound_k)


class Reading(NamedTuple):
    """A launch that takes as long as reading its keys and values.

    programs: without splits. key_tiles: most tiles that a program visits. tile_bytes: of a tile's keys and values. stages: tiles that a
    program has in flight. resident: programs per multiprocessor at a time. partial_bytes: of one split's outputs, all rows together.
    waits: mods load values at the keys, which are not loaded ahead.
    """

    programs: int
    key_tiles: int
    tile_bytes: int
    stages: int
    resident: int
    partial_bytes: int
    waits: bool = False


@lru_cache(maxsize=4096)
def pieces_of(reading: Reading, sm_count: int) -> int:
    """The number of splits (split-KV): the least one whose modelled time is as good as the best.

    The model weighs three effects: enough programs to keep the memory busy; a last wave with enough programs, which makes some numbers in
    between worse; and the cost of partial results.
    """
    if min(reading.programs, reading.key_tiles) == 0:
        return 1
    # with more than two programs per multiprocessor, many small splits were slower than modelled
    most = min(_MOST_SPLITS, reading.key_tiles, max(_MANY_SPLITS, ceil_div(2 * sm_count, reading.programs)))
    # other numbers give equally large splits and leave the last ones empty
    useful = [s for s in range(1, most + 1) if ceil_div(reading.key_tiles, ceil_div(reading.key_tiles, s)) == s]
    times = {s: _reading_time(reading, s, sm_count) for s in useful}
    best = min(times.values())
    return next(s for s in useful if times[s] <= _CLOSE * best)


def _reading_time(reading: Reading, splits: int, sm_count: int) -> float:
    """The modelled time, in bytes at the device's full bandwidth."""
    alone = _ALONE * (reading.stages * reading.tile_bytes / _UNDER_WAY) ** _MORE
    if reading.waits:
        alone = 1 / (1 / alone + _WAITED / reading.tile_bytes)
    bend = _BEND * reading.stages

    def progress(running: int) -> float:
        """The share of the bandwidth that ``running`` programs reach together."""
        demand = alone * running / sm_count
        return demand / (1 + demand**bend) ** (1 / bend)  # type: ignore[no-any-return]

    share = ceil_div(reading.key_tiles, splits)
    last = reading.key_tiles - share * (splits - 1)  # the last split is smaller
    programs = reading.programs * splits
    rest = programs % (sm_count * reading.resident)
    # before the last wave, every program that ends is replaced by another
    tiles = reading.programs * reading.key_tiles * (programs - rest) / programs / progress(sm_count * reading.resident)
    if rest:
        large = rest * (splits - 1) // splits
        # if some multiprocessors hold one program more, the others wait for them at the end, but not for the whole time
        uneven = 1 + _UNEVEN * (ceil_div(rest, sm_count) * sm_count / rest - 1) if rest > sm_count else 1
        tiles += uneven * rest * last / progress(rest)
        if share > last and large:
            tiles += uneven * large * (share - last) / progress(large)
    begun = _BEGUN * (reading.stages - 1) * programs
    merging = _ONE_MORE_LAUNCH * sm_count + _MERGED * splits * reading.partial_bytes if splits > 1 else 0
    return tiles * reading.tile_bytes + begun + merging
