"""How a problem's rows and keys are dealt out to programs: the tiles, the query heads that share a tile, the pieces that keys are cut into.

Pure functions of shapes: nothing asks what tensors hold.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from anyattn.backends.triton import config
from anyattn.backends.triton.config import Tiles
from anyattn.backends.triton.programs import program_of
from anyattn.backends.triton.styles import shape_of
from anyattn.geometry.integers import ceil_div
from anyattn.geometry.splits import num_splits
from anyattn.hardware import Hardware
from anyattn.problem import Problem

__all__ = ["Layout", "has_few_rows", "layout_of", "padded_group", "positions_per_tile", "rows_of"]

SHORT = 64  # queries, up to which the heads of a group share a tile: beyond, a head fills one by itself
_MOST_PACKED = 64
_ANY_NUMBER = 1024  # of queries, where a call does not say how many an entry has at most
_MOST_SPLITS = 128
_MOST_BLOCKS = 65535  # along the last axis of a CUDA grid


class Layout(NamedTuple):
    """packed: query heads of one K/V head whose rows lie side by side in a tile. why: a line per decision, for people."""

    tiles: Tiles
    packed: int
    num_splits: int
    why: tuple[str, ...]


def layout_of(problem: Problem, hardware: Hardware, options: dict[str, int]) -> Layout:
    """options: ``kernel_options``, of which tile_m, tile_n and num_splits are taken as they come."""
    asked = {name: options[name] for name in ("tile_m", "tile_n") if name in options}
    why, shape = [], shape_of(problem)
    for packed in _choices(problem):
        tiles = config.forward_tiles(shape, hardware.capability, rows_of(problem, packed), has_few_rows(problem))
        if asked:
            tiles = config.asked("forward", replace(tiles, **asked), shape, hardware.capability, hardware.name)
        if padded_group(packed) <= tiles.tile_m:
            break
    if packed > 1:
        why.append(f"{packed} query heads share a row tile: there are at most {_most_q(problem)} queries")
    if asked:
        why.append(f"tiles of {tiles.tile_m} x {tiles.tile_n}: kernel_options")
    splits = options.get("num_splits", problem.num_splits)
    if splits == 0:
        splits = _splits(problem, tiles, packed, hardware.sm_count)
        why.append(f"keys in {splits} piece{'s' * (splits != 1)}: for {max(1, hardware.sm_count)} multiprocessors")
    most = max(1, _MOST_BLOCKS // max(1, problem.batch))
    if splits > most:
        splits = most
        why.append(f"keys in {most} pieces: a grid has room for {_MOST_BLOCKS} entries and pieces")
    return Layout(tiles, packed, splits, tuple(why))


def padded_group(packed: int) -> int:
    """The rows of a tile that one position has: a power of two."""
    return 1 << (packed - 1).bit_length()


def positions_per_tile(tile_m: int, packed: int) -> int:
    return tile_m // padded_group(packed)


def has_few_rows(problem: Problem) -> bool:
    """Whether the heads of a group may share a tile. One kernel serves all such calls, however many heads it then is."""
    return _most_q(problem) <= SHORT


def rows_of(problem: Problem, packed: int) -> int:
    """The most rows that an entry's queries make with so many heads side by side."""
    return _most_q(problem) * padded_group(packed)


def _most_q(problem: Problem) -> int:
    """The most queries of an entry. Of a cache only what the call says: a number from what is in the batch would let one entry change
    the bits of another."""
    sequences = problem.sequences
    if sequences is None or not sequences.is_cache:
        return problem.bound_q
    return sequences.most_q or _ANY_NUMBER


def _choices(problem: Problem) -> list[int]:
    """How many heads may share a tile, the most first: a divisor of the group, so that none has heads of two groups."""
    ratio = problem.qhead_per_kvhead
    if ratio == 1 or not has_few_rows(problem) or not _shares_lists(problem):
        return [1]
    return [n for n in range(min(ratio, _MOST_PACKED), 0, -1) if ratio % n == 0]


def _shares_lists(problem: Problem) -> bool:
    """Whether the heads of a group visit the same tiles."""
    lists = program_of(problem).lists
    if not isinstance(lists, str) or problem.blocks is None:
        return lists is None  # lists that are made are made for every head
    counts: torch.Tensor = problem.blocks.mask_block_cnt
    return counts.shape[1 if counts.ndim == 3 else 0] == 1


def _splits(problem: Problem, tiles: Tiles, packed: int, sm_count: int) -> int:
    step, heads = positions_per_tile(tiles.tile_m, packed), problem.heads_q // packed
    row_tiles, batch = ceil_div(problem.bound_q, step), problem.batch
    rows, _, length, _ = problem.q.shape
    if rows != batch:  # packed one after another: no more tiles than their rows make
        row_tiles, batch = min(batch * row_tiles, rows * length // step + batch), 1
    return num_splits(row_tiles, ceil_div(problem.bound_k, tiles.tile_n), heads, batch, max(1, sm_count), _MOST_SPLITS)
