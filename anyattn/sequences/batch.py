"""``Sequences``: a varlen batch, with the storage, lengths and positions of each sequence's queries and keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["OnHost", "Sequences", "end_to_end"]


def end_to_end(start: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """The ranges ``start[b]`` to ``start[b] + count[b]``, concatenated, int64: each element's b, and the element.

    >>> end_to_end(torch.tensor([5, 0]), torch.tensor([2, 3]))
    (tensor([0, 0, 1, 1, 1]), tensor([5, 6, 0, 1, 2]))
    """
    entry = torch.repeat_interleave(count)
    # start minus the elements before the range, so that one lookup is enough
    shift = start - (count.cumsum(0) - count)
    return entry, torch.arange(len(entry), device=entry.device) + shift[entry]


class OnHost(NamedTuple):
    """The fields of ``Sequences`` as lists, one entry per sequence."""

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
    is_cache: the keys are a KV cache, which grows; a result must then not depend on the rest of the batch. most_q: the call's own upper
    bound on an entry's queries in such a batch (not read from its tables); 0 if it has none.
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
    most_q: int = 0

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    def kept(self) -> Sequences:
        """A copy for later use, with a copy of the page table, which a decoder changes in place."""
        return self if self.page_table is None else replace(self, page_table=self.page_table.clone())

    def turned(self) -> Sequences:
        """The same batch with queries and keys exchanged; not for caches or pages."""
        lengths, rows, starts = (self.seqlens_k, self.seqlens_q), (self.k_row, self.q_row), (self.k_start, self.q_start)
        q_row, k_row, q_start, k_start = *rows, *starts
        return Sequences(*lengths, q_row, q_start, k_row, k_start, torch.zeros_like(self.q_first))

    @cached_property
    def row_base(self) -> Tensor:
        """(B,): the first row of each sequence when all queries are concatenated."""
        return self.seqlens_q.cumsum(0) - self.seqlens_q

    @cached_property
    def key_base(self) -> Tensor:
        """(B,): the first key of each sequence when all keys are concatenated."""
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

    @property
    def bound_q(self) -> int:
        """An upper bound on every sequence's number of queries."""
        return self.max_seqlen_q

    @property
    def bound_k(self) -> int:
        """An upper bound on every sequence's number of keys."""
        return self.max_seqlen_k

    @property
    def is_unread(self) -> bool:
        """Whether the host has not read the tables; then fields are computed from tensors that may be on a GPU."""
        return False

    @property
    def uses_all_rows(self) -> bool:
        """Whether, without reading tables, every row of the queries' storage is known to belong to a sequence."""
        return False

    @property
    def position_bounds(self) -> tuple[int, int]:
        """(lowest, end) of the query positions that mods see in sequences with keys: lowest <= position < end, lowest <= 0."""
        host = self.on_host
        first = min((f for f, asked in zip(host.q_first, self._with_pairs, strict=True) if asked), default=0)
        return min(0, first), self.end_position

    @cached_property
    def end_position(self) -> int:
        """One more than the last query position of any sequence with pairs."""
        host = self.on_host
        return max((f + n for f, n, asked in zip(host.q_first, host.seqlens_q, self._with_pairs, strict=True) if asked), default=0)

    @cached_property
    def least_difference(self) -> int:
        """The least ``q_idx - kv_idx`` of any pair of a sequence."""
        host = self.on_host
        return min((f - n + 1 for f, n, asked in zip(host.q_first, host.seqlens_k, self._with_pairs, strict=True) if asked), default=0)

    @cached_property
    def row_entry(self) -> Tensor:
        """(total queries,): the sequence of each row."""
        return torch.repeat_interleave(self.seqlens_q)

    @cached_property
    def _with_pairs(self) -> list[bool]:
        """For each sequence whether it has both queries and keys."""
        host = self.on_host
        return [n > 0 and m > 0 for n, m in zip(host.seqlens_q, host.seqlens_k, strict=True)]

    @cached_property
    def has_pairs(self) -> bool:
        """Whether any sequence has both queries and keys; if none has, there is no pair at which a mod could be evaluated."""
        return any(self._with_pairs)

    @cached_property
    def asked_entry(self) -> Tensor:
        """(B,): the b at which mods are evaluated for each sequence; needs ``has_pairs``.

        It is the sequence itself, except for one without queries or keys: it has no pairs and a captured table may be too short for it, so
        mods are evaluated at the first sequence with pairs and the value is not used.
        """
        spare = self._with_pairs.index(True)
        return torch.tensor([b if asked else spare for b, asked in enumerate(self._with_pairs)], device=self.seqlens_q.device)

    @cached_property
    def asked_rows(self) -> tuple[Tensor, Tensor]:
        """(total queries,) each: the b and q_idx at which mods are evaluated for each row; see ``asked_entry``."""
        return self._asked(self.q_first, self.seqlens_q)

    @cached_property
    def asked_keys(self) -> tuple[Tensor, Tensor]:
        """(total keys,) each: the b and kv_idx at which mods are evaluated for each key; see ``asked_entry``."""
        return self._asked(torch.zeros_like(self.seqlens_k), self.seqlens_k)

    def _asked(self, first: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        entry, position = end_to_end(first, count)
        if all(self._with_pairs):
            return entry, position
        asked = self.asked_entry[entry]
        return asked, torch.where(asked == entry, position, first[asked])

    @cached_property
    def longest_asked_k(self) -> int:
        """The greatest number of keys of a sequence with queries."""
        return max((n for n, asked in zip(self.on_host.seqlens_k, self._with_pairs, strict=True) if asked), default=0)

    @cached_property
    def alike(self) -> list[int]:
        """For each sequence the first of its run of neighbours that are stored with one stride.

        Such neighbours have equal lengths and positions and the same place in their rows of storage, and these rows are consecutive.
        """
        host = self.on_host
        facts = list(zip(host.seqlens_q, host.seqlens_k, host.q_start, host.k_start, host.q_first, strict=True))
        first = list(range(len(facts)))
        for b in range(1, len(facts)):
            k_follows = self.page_table is not None or host.k_row[b] == host.k_row[b - 1] + 1
            if facts[b] == facts[b - 1] and k_follows and host.q_row[b] == host.q_row[b - 1] + 1:
                first[b] = first[b - 1]
        return first

    def storage_rows(self, lo: int, hi: int) -> Tensor:
        """(hi - lo, seqlen_k): the row of each key in the page pool, with pages flattened to rows; for ``alike`` sequences with pages."""
        assert self.page_table is not None
        start, count, size = self.on_host.k_start[lo], self.on_host.seqlens_k[lo], self.page_size
        first = start // size
        pages = self.page_table[lo:hi, first : ceil_div(start + count, size)]
        rows = torch.add(torch.arange(size, device=pages.device), pages[..., None], alpha=size).flatten(1)  # int64, as arange
        return rows[:, start - first * size : start - first * size + count]
