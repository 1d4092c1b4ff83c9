"""A varlen batch described by device tables that the host has not read; their contents may change before they are used."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences

__all__ = ["MANY_QUERIES", "LengthTables", "StoredSequences", "StoredSizes", "UnreadSequences", "queries_each"]

MANY_QUERIES = 272  # per entry; larger numbers do not decide on packing


class LengthTables(NamedTuple):
    """Tables of 32- or 64-bit integers, None if the call has none: ends (B + 1,) of packed sequences, from 0, and rows in use (B,)."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None


class StoredSizes(NamedTuple):
    """batch: number of sequences. rows_q, rows_k: rows that one row of storage has room for: all packed rows, a padded length, or the rows
    of all pages of an entry. bound_q, bound_k: upper bounds on a sequence's queries and keys. page_size: 0 without pages."""

    batch: int
    rows_q: int
    rows_k: int
    bound_q: int
    bound_k: int
    page_size: int = 0


def queries_each(rows: int, batch: int, bound_q: int) -> int:
    """A rough number of queries per entry: a multiple of 16, at most ``MANY_QUERIES``, so that plans and cache keys have few variants.

    rows: of storage, for all entries together. bound_q: an upper bound on each entry's queries.

    >>> queries_each(100, 50, 100), queries_each(9000, 2, 9000) == MANY_QUERIES
    (16, True)
    """
    return min(ceil_div(max(1, min(bound_q, ceil_div(rows, max(1, batch)))), 16) * 16, MANY_QUERIES)


class UnreadSequences(Sequences):
    """``Sequences`` described by tables that the host has not read. sizes:
    what is known without them, including ``batch`` and ``bound_q``."""

    sizes: Any
    device: torch.device | None

    @property
    def batch(self) -> int:
        return self.sizes.batch

    @property
    def bound_q(self) -> int:
        return self.sizes.bound_q

    @property
    def is_unread(self) -> bool:
        return True

    def read(self) -> Sequences:
        """The same sequences with all vectors computed, in memory of their own."""
        vectors = (self.seqlens_q, self.seqlens_k, self.q_row, self.q_start, self.k_row, self.k_start, self.q_first)
        page_table, page_size = self.page_table, self.page_size
        return Sequences(*[t.clone() for t in vectors], page_table, page_size, self.is_cache, self.most_q)  # type: ignore[arg-type, call-arg]

    @cached_property
    def _number(self) -> Tensor:
        return torch.arange(self.batch, device=self.device)


class StoredSequences(UnreadSequences):
    """``Sequences`` whose fields are computed from the tables when first read; a kernel may read the tables instead.

    tables: lengths and offsets of the sequences.

    >>> s = StoredSequences(LengthTables(torch.tensor([0, 3, 5]), None, None, torch.tensor([2, 7])), StoredSizes(2, 5, 9, 3, 7))
    >>> s.seqlens_q.tolist(), s.q_start.tolist(), s.seqlens_k.tolist(), s.k_row.tolist()
    ([3, 2], [0, 3], [2, 7], [0, 1])
    """

    def __init__(self, tables: LengthTables, sizes: StoredSizes, page_table: Tensor | None = None, device: torch.device | None = None):
        # the dataclass is frozen, and its fields are properties here
        own = {"tables": tables, "sizes": sizes, "page_table": page_table, "page_size": sizes.page_size, "device": device}
        vars(self).update(own)

    tables: LengthTables
    sizes: StoredSizes

    @property
    def bound_k(self) -> int:
        return self.sizes.bound_k

    @property
    def uses_all_rows(self) -> bool:
        return self.tables.cu_seqlens_q is None and self.tables.seqused_q is None

    @property
    def position_bounds(self) -> tuple[int, int]:
        return 0, self.sizes.bound_q

    def kept(self) -> Sequences:
        """A copy for later use, with copies of the tables."""
        own = LengthTables(*(None if t is None else t.clone() for t in self.tables))
        if self.tables.cu_seqlens_q is self.tables.cu_seqlens_k:
            own = own._replace(cu_seqlens_k=own.cu_seqlens_q)
        pages = None if self.page_table is None else self.page_table.clone()
        return StoredSequences(own, self.sizes, pages, self.device)

    def turned(self) -> Sequences:
        t, n = self.tables, self.sizes
        tables = LengthTables(t.cu_seqlens_k, t.cu_seqlens_q, t.seqused_k, t.seqused_q)
        return StoredSequences(tables, StoredSizes(n.batch, n.rows_k, n.rows_q, n.bound_k, n.bound_q), None, self.device)

    @cached_property
    def seqlens_q(self) -> Tensor:  # type: ignore[override]
        return self._lengths(self.tables.cu_seqlens_q, self.tables.seqused_q, self.sizes.rows_q)

    @cached_property
    def seqlens_k(self) -> Tensor:  # type: ignore[override]
        return self._lengths(self.tables.cu_seqlens_k, self.tables.seqused_k, self.sizes.rows_k)

    @cached_property
    def q_row(self) -> Tensor:  # type: ignore[override]
        return self.q_first if self.tables.cu_seqlens_q is not None else self._number

    @cached_property
    def q_start(self) -> Tensor:  # type: ignore[override]
        ends = self.tables.cu_seqlens_q
        return self.q_first if ends is None else ends.narrow(0, 0, self.sizes.batch).to(torch.int64)

    @cached_property
    def k_row(self) -> Tensor:  # type: ignore[override]
        return self.q_first if self.tables.cu_seqlens_k is not None else self._number

    @cached_property
    def k_start(self) -> Tensor:  # type: ignore[override]
        ends = self.tables.cu_seqlens_k
        return self.q_first if ends is None else ends.narrow(0, 0, self.sizes.batch).to(torch.int64)

    @cached_property
    def q_first(self) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(self._number)

    def _lengths(self, ends: Tensor | None, used: Tensor | None, rows: int) -> Tensor:
        if used is not None:
            return used.to(torch.int64)
        if ends is not None:
            return ends.diff().to(torch.int64)
        return torch.full((self.sizes.batch,), rows, device=self.device)
