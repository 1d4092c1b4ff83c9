"""Gradients of paged keys and values: gathers each sequence's keys for the backward pass, and adds their gradients back to the pages.

A page that several sequences hold gets the sum of their contributions, in the order of the page table. Nothing is read on the host. The
additional memory is a copy of keys, values and their gradients, with as many rows for each sequence as the longest may have: its bound or,
if the call gives none, the capacity of a line of the page table.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences
from anyattn.tensors.strides import in_order
from anyattn.triton_tools.launch import run_plain

__all__ = ["add_to_pages", "brought_together"]

_BLOCK = 1024


def brought_together(problem: Problem) -> Problem:
    """The call with gathered keys and values, (B, Hkv, rows, D): one row of storage per sequence, stored token by token as in pages."""
    sequences = problem.sequences
    assert sequences is not None and sequences.page_table is not None
    pages = _pages_in_use(sequences)
    numbers = sequences.page_table[:, :pages].clamp(0, problem.k.shape[0] - 1).flatten()

    def gathered(pool: Tensor) -> Tensor:
        tokens = pool.detach().transpose(1, 2).index_select(0, numbers)  # (batch x pages, page_size, heads, D)
        return tokens.view(sequences.batch, -1, *tokens.shape[2:]).transpose(1, 2).requires_grad_(pool.requires_grad)

    return problem.like(k=gathered(problem.k), v=gathered(problem.v), sequences=_in_rows(sequences, pages * sequences.page_size))


def _pages_in_use(sequences: Sequences) -> int:
    """The number of pages from the beginning of a line of the page table that may hold keys of a sequence."""
    assert sequences.page_table is not None
    room = sequences.page_table.shape[1]
    if not isinstance(sequences, StoredSequences):  # a sequence may begin anywhere in its line
        return room
    return min(room, max(1, ceil_div(sequences.bound_k, sequences.page_size)))


def _in_rows(sequences: Sequences, rows: int) -> Sequences:
    """The sequences after the keys of each have been moved to ``rows`` storage rows of its own."""
    if isinstance(sequences, StoredSequences):
        cu_seqlens_q, _, seqused_q, seqused_k = sequences.tables
        assert seqused_k is not None
        # for any table contents, no key lies outside
        tables = LengthTables(cu_seqlens_q, None, seqused_q, seqused_k.clamp(0, rows))
        sizes = sequences.sizes._replace(rows_k=rows, bound_k=min(sequences.bound_k, rows), page_size=0)
        return StoredSequences(tables, sizes, None, sequences.device)
    own = torch.arange(sequences.batch, device=sequences.k_start.device)
    return replace(sequences, page_table=None, page_size=0, k_row=own)


def add_to_pages(rows: Tensor, pool: Tensor, sequences: Sequences) -> Tensor:
    """The gradient of ``pool`` (pages, Hkv, page_size, D) from ``rows`` (B, Hkv, rows, D), which is 0 beyond each sequence. sequences: with
    the pool's page table."""
    from anyattn.backends.triton.kernels.paged_gradients import sum_pages

    assert sequences.page_table is not None
    # (pages, page_size, heads, D)
    sums = torch.empty_like(pool.transpose(1, 2), dtype=rows.dtype, memory_format=torch.contiguous_format)
    pages, size, device = pool.shape[0], math.prod(pool.shape[1:]), pool.device
    held, starts = _holders(sequences, rows.shape[2] // sequences.page_size, pages)
    chunks = ceil_div(size, _BLOCK)
    arguments = (rows.transpose(1, 2).contiguous(), sums, held, starts, size, chunks)
    run_plain(sum_pages, pages * chunks, arguments, (), device, {"BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1})
    # the kernel writes the tokens of a page next to one another, as in a contiguous pool; for other strides the result is copied
    return in_order(sums.transpose(1, 2), pool)


def _holders(sequences: Sequences, pages: int, of_pool: int) -> tuple[Tensor, Tensor]:
    """The places in the page table's first ``pages`` columns, sorted by pool page, and the begin of each pool page's places."""
    s, table = sequences, sequences.page_table
    assert table is not None
    first = torch.arange(pages, device=table.device) * s.page_size
    is_held = (first < (s.k_start + s.seqlens_k)[:, None]) & (first + s.page_size > s.k_start[:, None])
    page = torch.where(is_held, table[:, :pages].clamp(0, of_pool - 1), of_pool).flatten()
    page, held = page.sort(stable=True)
    return held, torch.searchsorted(page, torch.arange(of_pool + 1, device=page.device, dtype=page.dtype))
