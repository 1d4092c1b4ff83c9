"""Gradients of paged keys and values: gathers each sequence's keys for the backward pass, and adds their gradients back to the pages.

A page that several sequences hold gets the sum of their contributions, in the order of the page table. Nothing is read on the host. The
additional memory is a copy of keys, values and their gradients, with as many rows for each sequence as the longest may have: its bound or,
if the call gives none, the capacity of a line of the page table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.triton.gathered_keys import gathered
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.tensors.strides import in_order
from anyattn.triton_tools.launch import run_plain

__all__ = ["add_to_pages", "brought_together"]

_BLOCK = 1024


def brought_together(problem: Problem) -> Problem:
    """The call with gathered keys and values, (B, Hkv, rows, D): one row of storage per sequence, stored token by token as in pages."""
    found = gathered(problem)
    for t, pool in ((found.k, problem.k), (found.v, problem.v)):
        t.requires_grad_(pool.requires_grad)
    return found


def add_to_pages(rows: Tensor, pool: Tensor, sequences: Sequences) -> Tensor:
    """The gradient of ``pool`` (pages, Hkv, page_size, D) from ``rows`` (B, Hkv, rows, D), which is 0 beyond each sequence. sequences: with
    the pool's page table."""
    from anyattn.backends.triton.kernels.gathered_keys import sum_pages

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
