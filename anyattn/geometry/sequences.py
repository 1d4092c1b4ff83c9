"""A batch whose entries differ: where each one's queries and keys are stored, how many there are, and what their positions are called."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["OnHost", "Sequences"]


class OnHost(NamedTuple):
    """The same numbers as lists, one entry per sequence."""

    seqlens_q: list[int]
    seqlens_k: list[int]
    q_row: list[int]
    q_start: list[int]
    k_row: list[int]
    k_start: list[int]
    q_first: list[int]
    row_base: list[int]
    key_base: list[int]


@dataclass(frozen=True, eq=False)
class Sequences:
    """Every field is an int64 vector with one entry per sequence, on the queries' device.

    seqlens_q, seqlens_k: rows in use. q_row, q_start: the sequence's queries are ``q[q_row, :, q_start : q_start + seqlens_q]`` of a
    (rows, heads, positions, D) tensor; packed tensors are one such row. k_row, k_start: the same for keys and values.
    q_first: the position, as a mod sees it, of the first query; keys count from 0.
    page_table: (B, pages) integers, or None. With it storage row t of sequence b is row ``t % page_size`` of page
    ``page_table[b, t // page_size]`` of a pool (pages, heads, page_size, D), the sequence begins at storage row k_start, and k_row is
    not read.
    is_cache: the keys are a cache that grows; then a result must not depend on what else is in the batch.
    """

    seqlens_q: Tensor
    seqlens_k: Tensor
    q_row: Tensor
    q_start: Tensor
    k_row: Tensor
    k_start: Tensor
    q_first: Tensor
    page_table: Tensor | None = None
    page_size: int = 0
    is_cache: bool = False

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @cached_property
    def row_base(self) -> Tensor:
        """(B,): the first row of each sequence when all queries are laid end to end."""
        return self.seqlens_q.cumsum(0) - self.seqlens_q

    @cached_property
    def key_base(self) -> Tensor:
        """(B,): the first key of each sequence when all keys are laid end to end."""
        return self.seqlens_k.cumsum(0) - self.seqlens_k

    @cached_property
    def on_host(self) -> OnHost:
        fields = torch.stack([getattr(self, name) for name in OnHost._fields])  # one transfer
        return OnHost(*fields.tolist())

    @cached_property
    def max_seqlen_q(self) -> int:
        return max(self.on_host.seqlens_q, default=0)

    @cached_property
    def max_seqlen_k(self) -> int:
        return max(self.on_host.seqlens_k, default=0)

    @cached_property
    def end_position(self) -> int:
        """One more than the last query position of any sequence."""
        host = self.on_host
        return max((f + n for f, n in zip(host.q_first, host.seqlens_q, strict=True) if n), default=0)

    @cached_property
    def least_difference(self) -> int:
        """The least ``q_idx - kv_idx`` of any sequence."""
        host = self.on_host
        found = (f - n + 1 for f, n, m in zip(host.q_first, host.seqlens_k, host.seqlens_q, strict=True) if n and m)
        return min(found, default=0)

    @cached_property
    def row_entry(self) -> Tensor:
        """(total queries,): the sequence of each row."""
        return torch.repeat_interleave(self.seqlens_q)

    @cached_property
    def row_position(self) -> Tensor:
        """(total queries,): q_idx of each row."""
        start = self.q_first - self.row_base
        return torch.arange(len(self.row_entry), device=start.device) + start[self.row_entry]

    @cached_property
    def key_entry(self) -> Tensor:
        """(total keys,): the sequence of each key."""
        return torch.repeat_interleave(self.seqlens_k)

    @cached_property
    def key_position(self) -> Tensor:
        """(total keys,): kv_idx of each key."""
        return torch.arange(len(self.key_entry), device=self.key_base.device) - self.key_base[self.key_entry]

    def storage_rows(self, entry: int) -> Tensor:
        """(seqlen_k,): with a page table, where each key of a sequence is in the pool seen as one run of rows."""
        assert self.page_table is not None
        host = self.on_host
        rows = torch.arange(host.k_start[entry], host.k_start[entry] + host.seqlens_k[entry], device=self.page_table.device)
        return self.page_table[entry].to(torch.int64)[rows // self.page_size] * self.page_size + rows % self.page_size
