"""Sequences whose tables the host reads after all."""

from __future__ import annotations

import torch

from anyattn.sequences.unread_kvcache import CacheSizes, CacheTables, StoredCache
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes

FIELDS = ("seqlens_q", "seqlens_k", "q_row", "q_start", "k_row", "k_start", "q_first")


def test_read_sequences_do_not_change_with_their_tables() -> None:
    """A call's sequences are kept for its backward pass, and for later calls with equal tables; a decoder writes to its tables in place."""
    ends, used, cached, rows = (torch.tensor(x) for x in ([0, 3, 5], [2, 7], [3, 4], [1, 0]))  # int64, as the fields are
    packed = StoredSequences(LengthTables(ends, None, None, used), StoredSizes(2, 5, 9, 3, 7))
    cache = StoredCache(CacheTables(cached, used - used, rows, ends), CacheSizes(2, 5, 3, None, 8, 2), torch.device("cpu"))
    for stored in (packed, cache):
        tables = [t for t in stored.tables if t is not None]
        read, before = stored.read(), [t.clone() for t in tables]
        wanted = [getattr(read, name).tolist() for name in FIELDS]
        for t in tables:
            t.add_(1)
        assert [getattr(read, name).tolist() for name in FIELDS] == wanted and not read.is_unread
        for t, old in zip(tables, before, strict=True):
            t.copy_(old)
