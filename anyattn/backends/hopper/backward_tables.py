"""Device tables of the Hopper backward kernel: the order of key tiles, and a varlen batch's entries, made without synchronising."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward_config import TILE_N, BackwardConfig
from anyattn.backends.hopper.compile.launch import launch
from anyattn.backends.hopper.config import TILE_M
from anyattn.backends.hopper.tables import wiping_blocks
from anyattn.backends.hopper.tables_config import MOST_ENTRIES, THREADS, TablesConfig
from anyattn.documents.rewrite import DocumentTables
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.tile_order import counted, longest_first, most_tiles, most_visits_first, of_all_heads
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.sequences.varlen_tables import entries_table
from anyattn.sparsity.block_sparse import tensors_of

__all__ = ["KeyOrder", "key_order", "key_order_of_documents", "order_of_lists", "order_where", "ragged_lists_by_key", "row_tiles"]


class KeyOrder(NamedTuple):
    """``backward.scheduler.KeyTables.order`` and ``entries``; None if they follow from dense storage. Dense lists may have an order."""

    order: Tensor | None = None
    entries: Tensor | None = None

    def tiles(self, keys: int, tile_n: int) -> int:
        """The number of key tiles that there is room for. keys: of one row of storage."""
        return ceil_div(keys, tile_n) if self.entries is None else len(self.order) - 1  # type: ignore[arg-type]


_CLASSES = 8  # of key tiles by the number of row tiles that see them
_of_sequences: WeakKeyDictionary[Sequences, dict[int, KeyOrder]] = WeakKeyDictionary()


def row_tiles(problem: Problem, tile_m: int) -> int:
    """The capacity for the row tiles of all entries of a varlen batch (``backward.packed.first_tile``)."""
    return problem.q.shape[0] * ceil_div(problem.q.shape[2], tile_m) + problem.batch


def key_order(problem: Problem, config: BackwardConfig, dq: Tensor, dk: Tensor, dv: Tensor) -> KeyOrder:
    """The tables of a call's sequences; also clears rows of the gradients that belong to none of them."""
    s, k, tile = problem.sequences, problem.k, config.tiles.tile_n
    assert s is not None
    most = most_tiles(problem.batch, s.bound_k, k.shape[0] * k.shape[2], tile)
    if isinstance(s, StoredSequences):
        return _prepared(s, config, most, dq, dk, dv)
    for gradient in (dq, dk, dv):
        gradient.zero_()
    known = _of_sequences.setdefault(s, {})
    if tile not in known:
        known[tile] = _in_order(s, config, most)
    return known[tile]


def key_order_of_documents(documents: DocumentTables, config: BackwardConfig) -> KeyOrder:
    """The tables of documents as sequences, cached with them; without tiles if the ids are not documents."""
    return KeyOrder(*documents.in_order(config.tiles.tile_n, False))


def ragged_lists_by_key(problem: Problem, listed: int) -> tuple[tuple[Tensor | None, ...], Tensor]:
    """(counts and indices of the row tiles that visit each key tile, ``KeyOrder.entries`` with the place of each sequence's lists), for the
    call's lists, or else for lists of predicate ``listed``."""
    from anyattn.sparsity.varlen_lists import lists_of_call

    s, blocks = problem.sequences, problem.blocks
    mask: Any = problem.predicates[listed] if blocks is None else None
    assert s is not None
    found = lists_of_call(blocks, mask, s, (TILE_M, TILE_N), problem.heads_q, by_key=True)  # type: ignore[arg-type]
    return tuple(None if t is None else t.contiguous() for t in tensors_of(found)), found.entries(s.turned())


def order_of_lists(lists: tuple[Tensor | None, ...], cut: int, tiles: int) -> KeyOrder:
    """The order of a dense call with lists: key tiles that most row tiles see first. Tiles seen by about as many row tiles keep their
    order, so that neighbours read the same rows from the L2 cache together.

    lists: ``backward.scheduler.KeyTables.partial_count`` to ``full_index``. cut: how many of the kernel's key tiles make one of theirs.
    tiles: the number of the kernel's.
    """
    visits = sum(count.sum((0, 1)) for count in lists[:3:2] if count is not None)
    assert isinstance(visits, Tensor)
    return KeyOrder(counted(most_visits_first((visits // (visits.max() // _CLASSES + 1))[None, None], cut, tiles), tiles))


def order_where(order: KeyOrder, tiles: int, guard: Tensor) -> KeyOrder:
    """The order for a dense call with lists: all ``tiles`` key tiles if ``guard`` is 0, none if it is 1. order: ``order_of_lists``; without
    tables for ascending order."""
    if order.order is None:
        rows = torch.zeros((tiles, 3), dtype=torch.int32, device=guard.device)
        rows[:, 0] = torch.arange(tiles, dtype=torch.int32, device=guard.device)
    else:
        rows = order.order[:-1]
    return KeyOrder(counted(rows, tiles * (1 - guard)))


def _prepared(s: StoredSequences, config: BackwardConfig, most: int, dq: Tensor, dk: Tensor, dv: Tensor) -> KeyOrder:
    """The tables by one launch, which also clears rows of the gradients."""
    t, n = s.tables, s.sizes
    by_key = (t.cu_seqlens_k, t.cu_seqlens_q, t.seqused_k, t.seqused_q)
    is_large = s.batch > MOST_ENTRIES[-1]
    order = entries = None
    if not is_large:
        order = torch.empty((most + 1, 3), dtype=torch.int32, device=dk.device)
        entries = torch.empty((s.batch, 9), dtype=torch.int32, device=dk.device)
    of_keys = None if t.cu_seqlens_k is None and t.seqused_k is None else (dk, dv)  # without these tables there are no gaps
    of_queries = None if t.cu_seqlens_q is None and t.seqused_q is None else dq
    cleared = [x for x in (*(of_keys or ()), of_queries) if x is not None]
    blocks, heads = wiping_blocks(*cleared) if cleared else (0, 1)
    if blocks := blocks + (not is_large):
        wiped = (*(of_keys or (None, None)), None, of_queries)
        config_of_tables = _tables_config(config, s.batch > MOST_ENTRIES[0])
        launch(
            config_of_tables,
            (*by_key, entries, order, *wiped, s.batch, n.rows_k, n.rows_q, ceil_div(s.bound_q + 1, THREADS), blocks, heads),
        )
    if order is None or entries is None:
        return _in_order(s, config, most)
    return KeyOrder(order, entries)


def _in_order(s: Sequences, config: BackwardConfig, most: int) -> KeyOrder:
    """The tables by torch operations. A sequence's tiles are in ascending order, as a deterministic sum requires."""
    by_key, tile = s.turned(), config.tiles.tile_n
    order = longest_first(by_key, tile, most)
    tiles = ceil_div(by_key.seqlens_q, tile).sum().clamp(max=most)
    return KeyOrder(counted(of_all_heads(order), tiles), entries_table(by_key))


@lru_cache(maxsize=256)
def _tables_config(config: BackwardConfig, is_large: bool) -> TablesConfig:
    return TablesConfig(config.tiles.tile_n, False, MOST_ENTRIES[is_large], by_key=True)
