"""Device tables that the Hopper forward kernel reads: lists of tiles, the order of row tiles, a varlen batch's entries."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.compile.launch import launch
from anyattn.backends.hopper.config import TILE_M, Config
from anyattn.backends.hopper.make_config import ForwardSpec, tile_of
from anyattn.backends.hopper.pack_gqa import groups_of
from anyattn.backends.hopper.tables_config import MOST_ENTRIES, THREADS, TablesConfig
from anyattn.documents.rewrite import DocumentTables
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.tile_order import counted, longest_first, most_tiles, most_visits_first, of_all_heads
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.sequences.varlen_tables import entries_table
from anyattn.sparsity.block_sparse import LISTS, tensors_of
from anyattn.sparsity.derived import derived
from anyattn.sparsity.grid import TileGrid

__all__ = ["CACHE_FOR_KEYS", "TablesOnHost", "made_lists", "visits_beside_documents", "visits_of", "visits_of_documents", "wiping_blocks"]

CACHE_FOR_KEYS = 32 * 2**20  # bytes of the 50 MB L2 cache for K and V of heads computed side by side


class TablesOnHost(NamedTuple):
    """``tile_scheduler.Tables`` as torch tensors."""

    partial_count: Tensor | None = None
    partial_index: Tensor | None = None
    full_count: Tensor | None = None
    full_index: Tensor | None = None
    order: Tensor | None = None
    entries: Tensor | None = None
    pages: Tensor | None = None


# tables of a batch, for as long as it lives; it is frozen
_of_sequences: WeakKeyDictionary[Sequences, dict[Any, Any]] = WeakKeyDictionary()


# out, lse, highest scores, None if the call does not want them
Results = tuple[Tensor, Tensor | None, Tensor | None]


def visits_of(problem: Problem, spec: ForwardSpec, results: Results | None = None) -> TablesOnHost:
    """All tables of a call. For a mask without lists they are made in every call.

    For ``StoredSequences`` the same launch clears those rows of ``results`` that belong to no sequence to 0 and -inf, if they are given.
    """
    sequences, blocks, config = problem.sequences, problem.blocks, spec.config
    if spec.listed is None:
        return TablesOnHost() if sequences is None else _ragged(problem, spec, None, results)
    if sequences is not None:
        return _ragged(problem, spec, _ragged_lists(problem, problem.predicates[spec.listed], config.per_head), results)
    if blocks is None:
        (made,) = made_lists(problem, problem.predicates[spec.listed], config.per_entry, config.per_head)
        return _dense(problem, spec, made)
    known = derived(blocks)
    assert spec.list_tile is not None
    config, sizes = spec.config, (problem.q.shape[:3], problem.k.shape, problem.v.shape[3])
    key = ("hopper", spec.list_tile, config.spread, config.tile_q, config.heads_per_tile, *sizes)
    if key not in known:
        fits = spec.list_tile == tile_of(blocks)
        known[key] = _dense(problem, spec, blocks if fits else blocks.retile(*spec.list_tile))
    return known[key]


def visits_of_documents(documents: DocumentTables, config: Config) -> TablesOnHost:
    """Tables of documents as sequences, cached with them; without row tiles if the ids are not documents."""
    order, entries = documents.in_order(config.tile_q, config.has_right)
    return TablesOnHost(order=order, entries=entries)


def visits_beside_documents(problem: Problem, spec: ForwardSpec, documents: DocumentTables) -> TablesOnHost:
    """Tables of the call's lists, cached with the documents; without row tiles if the documents are run as sequences."""
    visits = visits_of(problem, spec)
    key = ("hopper", spec.list_tile, spec.config.spread, problem.q.shape[:3])
    known = documents.prepared.get(key)
    if known is None or known[0] is not visits:
        assert visits.order is not None
        tiles = len(visits.order) * (1 - documents.holds)
        known = documents.prepared[key] = visits, visits._replace(order=counted(visits.order, tiles))
    found: TablesOnHost = known[1]
    return found


def _dense(problem: Problem, spec: ForwardSpec, lists: Any) -> TablesOnHost:
    tensors = tensors_of(lists)
    visited = tensors[0] if tensors[2] is None else tensors[0] + tensors[2]
    if spec.config.spread == "none":  # every head, or group of heads, of every entry has its own row tiles
        if spec.config.by_kv_head:
            visited = visited.repeat_interleave(groups_of(problem.qhead_per_kvhead, spec.config.heads_per_tile), 1)
        visited = visited.expand(problem.batch, -1 if spec.config.by_kv_head else problem.heads_q, -1)
    k, v = problem.k, problem.v
    exceeds_cache = (k.numel() + v.numel()) * k.element_size() > CACHE_FOR_KEYS
    by_head = exceeds_cache and spec.config.spread == "none"  # else heads take turns in the kernel
    order = most_visits_first(visited, spec.config.list_cut[0], ceil_div(problem.q.shape[2], spec.config.tile_q), by_head)
    return TablesOnHost(*tensors, order)


def made_lists(problem: Problem, mask: TracedMod, per_entry: bool, per_head: bool, both_ways: bool = False) -> tuple[Any, ...]:
    """Lists for a mask that has none: of the key tiles of each row tile and, if ``both_ways``, of the row tiles of each key tile."""
    from anyattn.sparsity.compute import tile_lists, tile_lists_both_ways

    grid = TileGrid((problem.q.shape[2], problem.k.shape[2]), (TILE_M, TILE_M), (problem.batch, problem.heads_q))
    device, shape = problem.q.device, (problem.batch if per_entry else 1, problem.heads_q if per_head else 1)
    found = tile_lists_both_ways(mask, grid, device) if both_ways else (tile_lists(mask, grid, device),)
    if found[0].mask_block_cnt.shape[:2] == shape:
        return found

    def of_all(lists: Any) -> Any:
        return replace(lists, **{name: t.expand(*shape, *t.shape[2:]) for name in LISTS if (t := getattr(lists, name)) is not None})

    return tuple([of_all(lists) for lists in found])


def _ragged_lists(problem: Problem, mask: TracedMod, per_head: bool) -> Any:
    """The call's ragged lists, or else lists of ``mask``."""
    from anyattn.sparsity.varlen_lists import RaggedLists, lists_of_call

    blocks: Any = problem.blocks
    assert problem.sequences is not None
    found = lists_of_call(blocks, mask, problem.sequences, (TILE_M, TILE_M), problem.heads_q)
    if blocks is None and per_head and found.mask_block_cnt.shape[0] == 1:  # another predicate depends on h
        found = RaggedLists(*(t if t is None or t.ndim == 1 else t.expand(problem.heads_q, -1) for t in found))  # type: ignore[arg-type]
    return found


def _ragged(problem: Problem, spec: ForwardSpec, lists: Any, results: Results | None) -> TablesOnHost:
    sequences, config = problem.sequences, spec.config
    assert sequences is not None
    pages = None if sequences.page_table is None else sequences.page_table.to(torch.int32)
    if not config.has_order:
        assert isinstance(sequences, StoredSequences)
        return TablesOnHost(entries=sequences.tables.seqused_k, pages=pages)
    tile_m = config.tile_q
    entries, length = problem.q.shape[0], problem.q.shape[2]
    most = most_tiles(problem.batch, length, entries * length, tile_m)
    if isinstance(sequences, StoredSequences):
        order, places = _prepared(sequences, config, most, results, problem.q.device)
    else:
        known = _of_sequences.setdefault(sequences, {})
        key = (tile_m, most, config.has_right)
        if key not in known:
            known[key] = _in_order(sequences, config, most)
        order, places = known[key]
    if lists is None:
        return TablesOnHost(order=order, entries=places, pages=pages)
    return TablesOnHost(*tensors_of(lists), order, lists.entries(sequences), pages)


def _prepared(
    s: StoredSequences, config: Config, most: int, results: Results | None, device: torch.device
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(order, entries) by one launch, which also clears the results' rows that belong to no sequence.

    Made in every call: the tables' contents may change without a new torch version counter, and clearing needs a launch anyway.
    """
    is_large = s.batch > MOST_ENTRIES[-1]
    order = entries = None
    if not is_large:
        order = torch.empty((most, 3), dtype=torch.int32, device=device)
        entries = torch.empty((s.batch, 9), dtype=torch.int32, device=device)
    blocks, heads, wiped = 0 if is_large else 1, 1, (None, None, None)
    if results is not None and not s.uses_all_rows:
        wiping, heads = wiping_blocks(results[0])
        blocks, wiped = blocks + wiping, results  # type: ignore[assignment]
    if blocks:
        bin_keys = ceil_div(s.bound_k + 1, THREADS)
        launch(
            _tables_config(config, s.batch > MOST_ENTRIES[0]),
            (*s.tables, entries, order, *wiped, None, s.batch, s.sizes.rows_q, s.sizes.rows_k, bin_keys, blocks, heads),
        )
    if order is None or entries is None:
        return _in_order(s, config, most)
    return order, entries


def wiping_blocks(*tensors: Tensor) -> tuple[int, int]:
    """(thread blocks that clear rows of (rows of storage, heads, positions, D) tensors, number of heads over which they are
    distributed)."""
    heads, rows = max(x.shape[1] for x in tensors), max(x.shape[0] * x.shape[2] for x in tensors)
    return min(ceil_div(rows, _ROWS_AT_ONCE), max(1, _MOST_BLOCKS // heads)), heads


def _in_order(s: Sequences, config: Config, most: int) -> tuple[Tensor, Tensor]:
    """(order, entries) by torch operations."""
    return of_all_heads(longest_first(s, config.tile_q, most, ends_with_row=config.has_right)), entries_table(s)


_ROWS_AT_ONCE = THREADS  # of storage that a block checks, one per thread
_MOST_BLOCKS = 528  # four per multiprocessor of an H200; two fit at once


@lru_cache(maxsize=256)
def _tables_config(config: Config, is_large: bool) -> TablesConfig:
    return TablesConfig(config.tile_q, config.has_right, MOST_ENTRIES[is_large])
