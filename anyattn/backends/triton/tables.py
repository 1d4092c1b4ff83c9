"""Device tables that kernels read: block lists, the order of a varlen batch's row tiles, its sequences' entries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.documents.rewrite import DocumentTables
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.tile_order import longest_first, most_tiles
from anyattn.sequences.tile_order_device import can_order, sequences_ordered
from anyattn.sequences.unread_kvcache import StoredCache
from anyattn.sequences.varlen_tables import entries_table
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.derived import derived
from anyattn.sparsity.grid import TileGrid
from anyattn.sparsity.lists import kept_transposed

__all__ = ["WHOLE", "Tables", "cache_read", "in_key_order", "key_tables_of", "may_be_padded", "tables_of"]

_LIST_TILE = (128, 128)  # tile of lists made for a mask without lists


WHOLE = 1 << 30  # marks the full tiles of ``in_key_order``


class Tables(NamedTuple):
    """row_tiles: programs per head. entries: int32 (B, 9), ``Sequence``. order: int32 (row_tiles, 2), (sequence, row tile or -1).
    pages: integers (B, pages), rows contiguous. cache: a decoder's tables, which a kernel reads instead of entries and order.
    lists: counts and indices of partial, then of full tiles. list_tile: their rows and keys, (0, 0) without lists.
    strides: ``kernels.arguments.ListStrides``. guard: int32 (1,), ``addressing.is_off``, or None if the launch always has work."""

    row_tiles: int
    entries: Tensor | None
    order: Tensor | None
    pages: Tensor | None
    lists: tuple[Tensor | None, ...]
    list_tile: tuple[int, int]
    strides: tuple[int, int, int, int, int]
    cache: StoredCache | None = None
    guard: Tensor | None = None


def tables_of(problem: Problem, listed: Any, tile_m: int, documents: DocumentTables | None = None, tile_n: int = 1) -> Tables:
    """All tables of a call whose row tiles have ``tile_m`` positions. listed: ``CallProgram.lists``. documents: see ``documents.Form``.
    tile_n: a listed tile that holds all keys is enlarged to a multiple of it."""
    sequences = problem.sequences
    lists, tile = _lists_of(problem, listed, by_key=False)
    if tile[1] >= problem.k.shape[2]:
        tile = tile[0], ceil_div(tile[1], tile_n) * tile_n
    if problem.is_batch_invariant and lists is not None:
        lists = in_key_order(lists)
    tensors, strides = _of_lists(lists, sequences is not None, problem.heads_q)
    if sequences is None:
        row_tiles = ceil_div(problem.q.shape[2], tile_m) if tensors[0] is None else tensors[0].shape[2] * ceil_div(tile[0], tile_m)
        return Tables(row_tiles, None, None, None, tensors, tile, strides)
    pages = sequences.page_table
    if pages is not None and pages.shape[1] > 1 and pages.stride(1) != 1:
        pages = pages.contiguous()
    cache = cache_read(sequences, lists is not None)
    if cache is not None:
        return Tables(ceil_div(cache.bound_q, tile_m), None, None, pages, tensors, tile, strides, cache)
    if documents is not None:
        return Tables(*_of_documents(documents, tile_m, bool(problem.predicates)), pages, tensors, tile, strides)
    order, entries = _ordered(sequences, lists, problem.q.shape, (tile_m, tile[0]), False)
    return Tables(len(order), entries, order, pages, tensors, tile, strides)


class InOrder(NamedTuple):
    """Lists as ``block_sparse.tensors_of`` reads them, with the full tiles among the partial ones."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: None = None
    full_block_idx: None = None


def in_key_order(lists: Any) -> InOrder:
    """Lists of a dense call with one line of ascending tiles, in which ``WHOLE`` marks the full ones; kept with the lists."""
    kept = derived(lists)
    if "triton, in key order" not in kept:
        counts, indices = [lists.mask_block_cnt], [lists.mask_block_idx]
        if lists.full_block_cnt is not None:
            counts, indices = [*counts, lists.full_block_cnt], [*indices, lists.full_block_idx]
        parts = []
        for mark, (count, index) in enumerate(zip(counts, indices, strict=True)):
            is_listed = torch.arange(index.shape[-1], device=index.device) < count[..., None]
            parts.append(torch.where(is_listed, index.to(torch.int32) * 2 + mark, torch.iinfo(torch.int32).max))
        joined = torch.cat(parts, -1).sort(-1).values
        kept["triton, in key order"] = InOrder(sum(counts[1:], counts[0]).to(torch.int32), (joined >> 1) + (joined & 1) * WHOLE)
    found: InOrder = kept["triton, in key order"]
    return found


def cache_read(sequences: Sequences, has_lists: bool) -> StoredCache | None:
    """A decoder's tables if kernels read them directly, else None."""
    return sequences if isinstance(sequences, StoredCache) and sequences.uses_all_rows and not has_lists else None


def may_be_padded(sequences: Sequences | None, cache: StoredCache | None) -> bool:
    """Whether a KV cache's keys may begin after padding; for unread tables, whether there is a padding table. cache: see ``cache_read``."""
    if cache is not None:
        return cache.tables.leftpad is not None
    return sequences is not None and sequences.is_cache


def key_tables_of(problem: Problem, listed: Any, tile_n: int, documents: DocumentTables | None = None) -> Tables:
    """``tables_of`` for programs of ``tile_n`` keys: lists name the row tiles that visit a tile of keys, and the order is of key tiles."""
    sequences = problem.sequences
    lists, tile = _lists_of(problem, listed, by_key=True)
    tensors, strides = _of_lists(lists, sequences is not None, problem.heads_q)
    if sequences is None:
        tiles = ceil_div(problem.k.shape[2], tile_n) if tensors[0] is None else tensors[0].shape[2] * ceil_div(tile[1], tile_n)
        return Tables(tiles, None, None, None, tensors, tile, strides)
    if documents is not None:
        return Tables(*_of_documents(documents, tile_n, False), None, tensors, tile, strides)
    order, entries = _ordered(sequences, lists, problem.k.shape, (tile_n, tile[1]), True)
    return Tables(len(order), entries, order, None, tensors, tile, strides)


def _of_documents(documents: DocumentTables, tile: int, ends_with_row: bool) -> tuple[int, Tensor, Tensor]:
    """Programs per head, entries and order of documents, whose queries and keys are the same positions; cached with the documents.

    Once the number of documents is known, only as many tiles are ordered as they can have. ends_with_row: for row tiles under a mask, which
    most likely shows more keys to later rows.
    """
    key = "triton", tile, ends_with_row, documents.count
    tables: tuple[int, Tensor, Tensor] | None = documents.prepared.get(key)
    if tables is None:
        order, entries = documents.in_order(tile, ends_with_row)
        most, sizes = len(order) - 1, documents.sequences.sizes
        if documents.count:
            most = min(most, (sizes.rows * sizes.length + documents.count * (tile - 1)) // tile)
        tables = documents.prepared[key] = most, entries, torch.stack((order[:most, 2], order[:most, 0]), 1)
    return tables


_NO_STRIDES = (0, 0, 0, 0, 1)


def _of_lists(lists: Any, is_ragged: bool, heads_q: int) -> tuple[tuple[Tensor | None, ...], tuple[int, int, int, int, int]]:
    """The lists' tensors, and the strides by which a kernel finds a line; 0 for a broadcast dimension."""
    if lists is None:
        return (None, None, None, None), _NO_STRIDES
    tensors: Any = tuple([None if t is None else t.contiguous() for t in tensors_of(lists)])
    count, index = tensors[0], tensors[1]
    if is_ragged:
        per_head = count.shape[0] > 1
        group = heads_q // count.shape[0] if per_head else 1
        is_flat = index.ndim == 2
        return tensors, (0, count.shape[1] * per_head, 0 if is_flat else index.shape[2], index.shape[1] * per_head * is_flat, group)
    batch, heads, rows = count.shape
    return tensors, (heads * rows * (batch > 1), rows * (heads > 1), index.shape[3], 0, heads_q // heads if heads > 1 else 1)


def _lists_of(problem: Problem, listed: Any, by_key: bool) -> tuple[Any, tuple[int, int]]:
    """The lists of a call, and the rows and keys of their tiles; (None, (0, 0)) without lists.

    by_key: the row tiles that visit each tile of keys. Lists of a varlen batch are ``RaggedLists``.
    """
    if listed is None:
        return None, (0, 0)
    blocks: Any = problem.blocks if listed == "given" else None
    assert listed != "given" or blocks is not None
    tile = _LIST_TILE if blocks is None else blocks.tile
    if problem.sequences is not None:
        from anyattn.sparsity.varlen_lists import lists_of_call

        return lists_of_call(blocks, listed, problem.sequences, _LIST_TILE, problem.heads_q, by_key), tile
    if blocks is not None:
        return kept_transposed(blocks) if by_key else blocks, tile
    from anyattn.sparsity.compute import tile_lists

    grid = TileGrid((problem.q.shape[2], problem.k.shape[2]), tile, (problem.batch, problem.heads_q))
    lists = tile_lists(listed, grid, problem.q.device)
    return lists.transposed() if by_key else lists, tile


def _ordered(s: Sequences, lists: Any, shape: Sequence[int], tile: tuple[int, int], by_key: bool) -> tuple[Tensor, Tensor]:
    """The tiles of a varlen batch along one side, those with most tiles to visit first, and its sequences; reads nothing on the host.

    lists: ``RaggedLists`` or None. shape: of the storage along that side. tile: the programs' tile, and the lists' (0 without lists).
    """
    step, bound = tile[1] or tile[0], s.bound_k if by_key else s.bound_q
    most = most_tiles(s.batch, bound, shape[0] * shape[2], step) * ceil_div(step, tile[0])
    if lists is None and can_order(s):
        return sequences_ordered(s, tile[0], most, by_key)
    order = longest_first(s, tile[0], most, by_key=by_key, list_tile=tile[1])
    return order, entries_table(s) if lists is None else lists.entries(s, by_key)
