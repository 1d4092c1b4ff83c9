"""Launch of the Triton kernel ``tile_order_kernel``: tile order and sequence table of a varlen batch.

``sequences.tile_order`` and ``varlen_tables`` compute the same with two dozen torch operations, each of which takes the host longer than
the kernel takes the GPU.
"""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_kvcache import StoredCache
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.triton_tools import interpreter
from anyattn.triton_tools.launch import run_plain

__all__ = ["can_order", "sequences_ordered"]

_TILES, _ENTRIES = 64, 64  # tiles per program, and sequences per iteration
_MOST = 1024  # sequences: each program iterates over all of them


def can_order(s: Sequences) -> TypeGuard[StoredSequences | StoredCache]:
    """Whether the kernel can order this batch: sequences, or a cache with packed queries."""
    is_known = isinstance(s, StoredSequences) or (isinstance(s, StoredCache) and s.tables.cu_seqlens_q is not None)
    return is_known and 0 < s.batch <= _MOST and _runs_kernels(s.device)  # type: ignore[attr-defined]


def _runs_kernels(device: torch.device | None) -> bool:
    return device is not None and (device.type == "cuda" or interpreter.is_interpreting())


def sequences_ordered(s: StoredSequences | StoredCache, tile: int, most: int, by_key: bool) -> tuple[Tensor, Tensor]:
    """(order, entries), int32 (most, 2) and (B, 9), as in ``tile_order.longest_first`` and ``varlen_tables.entries_table``. Does not
    synchronise."""
    order = torch.empty((most, 2), dtype=torch.int32, device=s.device)
    entries = torch.empty((s.batch, 9), dtype=torch.int32, device=s.device)
    tables: list[Tensor | None]
    if isinstance(s, StoredCache):
        assert not by_key
        tables = [s.tables.cu_seqlens_q, None, None, s.tables.cached, s.tables.leftpad, s.tables.rows]
        new, storage, rows_k = -1 if s.sizes.new is None else s.sizes.new, s.sizes.storage, s.sizes.capacity
    else:
        tables = [s.tables.cu_seqlens_q, s.tables.cu_seqlens_k, s.tables.seqused_q, s.tables.seqused_k, None, None]
        new, storage, rows_k = 0, 0, s.sizes.rows_k
    flags = [t is not None for t in tables]
    # for an absent tensor any pointer is passed
    given = [order if t is None else t if t.is_contiguous() else t.contiguous() for t in tables]
    names = ("HAS_ENDS_Q", "HAS_ENDS_K", "HAS_USED_Q", "HAS_USED_K", "HAS_LEFTPAD", "HAS_ROWS")
    options = {
        **dict(zip(names, flags, strict=True)), "BY_KEY": by_key, "IS_CACHE": isinstance(s, StoredCache),
        "TILES": _TILES, "ENTRIES": _ENTRIES,
    }  # fmt: skip
    numbers = (s.batch, s.sizes.rows_q, rows_k, most, tile, new, storage)
    from anyattn.sequences.tile_order_kernel import order_sequences

    run_plain(order_sequences, ceil_div(max(most, s.batch), _TILES), (order, entries, *given, *numbers), (), order.device, options)
    return order, entries
