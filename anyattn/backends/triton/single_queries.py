"""Gradients of keys that single queries have chosen: for each tile of keys the queries that list it, in memory of the lists' own size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.triton.launch_shape import listed_tile, padded_group
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import Shape, Tiles, fitting, padded
from anyattn.backends.triton.wide_tiles import is_wide
from anyattn.problem import Problem
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.derived import derived

__all__ = ["gathers_queries", "queries_of_keys", "tables_of_queries", "tiles_of_queries", "with_whole_queries"]

_MOST_HEADS = 32  # rows of a query in a tile
# Rows and keys of a tile, warps and stages, for head dimensions up to 128 and above. By the compiler's output for Hopper: with 128 rows the
# first spills 15 % of its loop's operations.
_TILES = (64, 64, 8, 3), (32, 64, 8, 2)


def gathers_queries(problem: Problem) -> bool:
    """Whether the gradients of keys are computed for gathered queries: under lists of single queries that heads of a K/V head share."""
    blocks: Any = problem.blocks
    if listed_tile(problem)[0] != 1 or problem.sequences is not None or problem.dropout is not None:
        return False
    if is_wide(problem.q.shape[3], problem.v.shape[3]):  # dk and dv have launches of their own, and columns beyond 512 a block
        return False
    return blocks.mask_block_cnt.shape[1] in (1, problem.heads_kv) and padded_group(problem.qhead_per_kvhead) <= _MOST_HEADS


def tiles_of_queries(problem: Problem, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> Tiles:
    """The tiles of ``dkdv_of_queries``. tiles: of lists by key, which float32 keeps but for the rows."""
    if shape.dtype.itemsize == 2:
        wanted = Tiles(*_TILES[max(shape.d, shape.dv) > 128])
        tiles = fitting("dkdv", replace(wanted, tile_n=min(wanted.tile_n, padded(listed_tile(problem)[1]))), shape, capability)
    return with_whole_queries(problem, tiles)


def with_whole_queries(problem: Problem, tiles: Tiles) -> Tiles:
    """Tiles of ``dkdv_of_queries`` with no fewer rows than a query has."""
    return replace(tiles, tile_m=max(tiles.tile_m, padded_group(problem.qhead_per_kvhead)))


def tables_of_queries(problem: Problem, listed: Any, tile_n: int, documents: Any = None) -> Tables:
    """``tables.key_tables_of`` for ``dkdv_of_queries``. The lists are where each tile's queries begin, and the queries."""
    blocks: Any = problem.blocks
    known, key = derived(blocks), "queries of keys"
    if key not in known:
        known[key] = queries_of_keys(blocks)
    batch, heads = blocks.mask_block_cnt.shape[:2]
    columns, group = blocks.grid[1], problem.heads_q // heads if heads > 1 else 1
    strides = (heads * columns * (batch > 1), columns * (heads > 1), 0, 0, group)
    return Tables(columns * ceil_div(blocks.tile[1], tile_n), None, None, None, (*known[key], None, None), blocks.tile, strides)


def queries_of_keys(blocks: Any) -> tuple[Tensor, Tensor]:
    """Lists of single queries by key tile: int64 (B * H * N + 1,), where the queries of each tile begin, and int32, for each listed tile of
    each query twice the query, and 1 if the tile is full; ascending for a key tile, and arbitrary behind the last. Does not wait for a GPU.

    >>> from anyattn import BlockMask
    >>> mask = BlockMask.from_topk(torch.tensor([[[[0], [1], [0]]]]), BLOCK_SIZE=(1, 2), seq_lengths=(3, 4))
    >>> begins, queries = queries_of_keys(mask.block_sparse())
    >>> begins.tolist(), queries[:3].tolist()
    ([0, 2, 3], [1, 5, 3])
    """
    counts, tiles, full_counts, full_tiles = tensors_of(blocks)
    (batch, heads, rows, width), columns, device = tiles.shape, blocks.grid[1], tiles.device
    lines = batch * heads * columns
    dtype = torch.int32 if lines < 2**31 - 1 else torch.int64
    first = torch.arange(batch * heads, dtype=dtype, device=device).view(batch, heads, 1, 1) * columns
    parts = [
        torch.where(torch.arange(index.shape[3], device=device) < count[..., None], first + index, lines)
        for count, index in ((counts, tiles), (full_counts, full_tiles))
        if count is not None and index is not None
    ]
    together = torch.cat(parts, -1)
    # stable: the queries of a tile are in ascending order
    line, order = together.flatten().sort(stable=True)
    begins = torch.searchsorted(line, torch.arange(lines + 1, dtype=dtype, device=device))
    each = max(together.shape[3], 1)
    queries = order // each % max(rows, 1) * 2 + (order % each >= width)
    return begins, queries.to(torch.int32)
