"""KV caches described by device tables that the host has not read: places of new rows, and the keys after appending."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import UnreadSequences
from anyattn.tensors.strides import begins

__all__ = ["CacheSizes", "CacheStep", "CacheTables", "StoredCache", "alike", "room_for"]

_STEP, _SHORT = 256, 512  # rows


class CacheTables(NamedTuple):
    """Tables of 32- or 64-bit integers, None if the call has none. cached: (B,) rows of each entry's cache in use before the step, padding
    included. leftpad: (B,) padding rows at its beginning. rows: (B,) the cache row of each entry. cu_seqlens_q: (B + 1,) ends of packed
    queries, from 0. page_table: (B, pages)."""

    cached: Tensor
    leftpad: Tensor | None = None
    rows: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    page_table: Tensor | None = None


class CacheSizes(NamedTuple):
    """batch: number of entries. rows_q: queries of an entry, or all packed queries. bound_q: upper bound on an entry's queries. new: rows
    appended per entry, None if as many as its queries. capacity: rows that an entry has room for. storage: the first dimension of the
    cache, rows or pages. page_size: 0 without pages. most_q: bound_q if the call gives it, 0 if it is only the number of queries."""

    batch: int
    rows_q: int
    bound_q: int
    new: int | None
    capacity: int
    storage: int
    page_size: int = 0
    most_q: int = 0


def alike(rows: int) -> range:
    """The range of capacities, including ``rows``, that share one plan, which is made for the last of them.

    A cache that grows row by row seldom leaves the range.

    >>> alike(70), alike(4097)[-1]
    (range(65, 129), 4352)
    """
    room = room_for(rows)
    return range(room - _step(rows) + 1, room + 1)


def room_for(rows: int) -> int:
    """The capacity for which a cache of ``rows`` rows is planned."""
    step = _step(rows)
    return max(1, ceil_div(rows, step)) * step


def _step(rows: int) -> int:
    return _STEP if rows > _SHORT else _STEP // 4


@dataclass(frozen=True, eq=False)
class CacheStep:
    """The first part of a decoding step: append new rows to the caches, and apply rotary embedding to them and the queries.

    q: (B, Sq, Hq, D), or (total, Hq, D) packed. k_cache, v_cache: (B_cache, capacity, Hkv, D or Dv) or pages (pages, page_size, Hkv, D or
    Dv). k, v: the new rows, (B, new, Hkv, D or Dv) or packed as q; None if nothing is appended. cos, sin: (positions, rotary_dim / 2) or
    None. rotary_last: they rotate the last rotary_dim columns, not the first. follows: query i is rotated by the position of its entry's
    new row i; otherwise all queries by that of row 0. k_descale, v_descale, saturated: of 8-bit caches, as in ``kvcache.quantise.Scaling``.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor | None
    v: Tensor | None
    tables: CacheTables
    sizes: CacheSizes
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = True
    follows: bool = False
    k_descale: Tensor | float | None = None
    v_descale: Tensor | float | None = None
    saturated: Tensor | None = None
    rotary_last: bool = False

    @property
    def has_one_cache(self) -> bool:
        """Whether the values are the first columns of the keys in the cache, which are written once."""
        return begins(self.v_cache, self.k_cache)


class StoredCache(UnreadSequences):
    """``Sequences`` after a step, whose fields are computed from the tables when first read; a kernel may read the tables instead.

    For any table contents no entry has a key outside its storage: rows without room are left out, and so are all keys of an entry whose
    cache row does not exist.

    >>> sizes = CacheSizes(batch=2, rows_q=1, bound_q=1, new=1, capacity=8, storage=2)
    >>> s = StoredCache(CacheTables(torch.tensor([3, 8]), leftpad=torch.tensor([2, 0])), sizes, torch.device("cpu"))
    >>> s.seqlens_k.tolist(), s.k_start.tolist(), s.q_first.tolist()
    ([2, 8], [2, 0], [1, 7])
    """

    def __init__(self, tables: CacheTables, sizes: CacheSizes, device: torch.device):
        # the dataclass is frozen, and its fields are properties here
        own = {"tables": tables, "sizes": sizes, "device": device, "is_cache": True, "most_q": sizes.most_q}
        vars(self).update(own | {"page_table": tables.page_table, "page_size": sizes.page_size})

    tables: CacheTables
    sizes: CacheSizes

    @property
    def bound_k(self) -> int:
        return self.sizes.capacity

    @property
    def uses_all_rows(self) -> bool:
        return self.tables.cu_seqlens_q is None

    @property
    def position_bounds(self) -> tuple[int, int]:
        # in an entry with keys the last query is at the last key, and the new keys are among them
        new = self.sizes.bound_q if self.sizes.new is None else max(1, self.sizes.new)
        return min(0, new - self.sizes.bound_q), self.sizes.capacity

    def kept(self) -> Sequences:
        return self.read().kept()

    @cached_property
    def seqlens_q(self) -> Tensor:  # type: ignore[override]
        if self.tables.cu_seqlens_q is None:
            return torch.full((self.sizes.batch,), self.sizes.rows_q, device=self.device)
        return self._ends.diff().clamp(min=0)

    @cached_property
    def seqlens_k(self) -> Tensor:  # type: ignore[override]
        new = self.seqlens_q if self.sizes.new is None else self.sizes.new
        found = ((self.tables.cached.to(torch.int64) + new).clamp(max=self.sizes.capacity) - self.k_start).clamp(min=0)
        rows = self.tables.rows
        return found if rows is None else torch.where((rows >= 0) & (rows < self.sizes.storage), found, 0)

    @cached_property
    def q_row(self) -> Tensor:  # type: ignore[override]
        return self._number if self.tables.cu_seqlens_q is None else self._zero

    @cached_property
    def q_start(self) -> Tensor:  # type: ignore[override]
        return self._zero if self.tables.cu_seqlens_q is None else self._ends[:-1]

    @cached_property
    def k_row(self) -> Tensor:  # type: ignore[override]
        return self._number if self.tables.rows is None else self.tables.rows.to(torch.int64)

    @cached_property
    def k_start(self) -> Tensor:  # type: ignore[override]
        return self._zero if self.tables.leftpad is None else self.tables.leftpad.to(torch.int64).clamp(min=0)

    @cached_property
    def q_first(self) -> Tensor:  # type: ignore[override]
        return self.seqlens_k - self.seqlens_q

    @cached_property
    def _ends(self) -> Tensor:
        assert self.tables.cu_seqlens_q is not None
        return self.tables.cu_seqlens_q.to(torch.int64).clamp(0, self.sizes.rows_q)

    @cached_property
    def _zero(self) -> Tensor:
        return torch.zeros(self.sizes.batch, dtype=torch.int64, device=self.device)
