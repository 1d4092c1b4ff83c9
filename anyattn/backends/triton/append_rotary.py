"""Appending and rotary embedding of a decoding step: one launch of ``kernels.append_rotary``, without synchronising."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.sequences.unread_kvcache import CacheStep
from anyattn.triton_tools.launch import run_plain

__all__ = ["append"]

_ELEMENTS = 1024  # elements of a block of lines: eight for each of 128 threads, one 16-bit load instruction each
_ALIGNMENT = 8  # elements: 16 bytes of the smallest dtype
_MOST_LINES = 2**31


def append(step: CacheStep) -> Tensor:
    """Writes the new rows into the caches, keys rotated; returns the queries, rotated too, in their own layout.

    Without rotary tables the queries are returned unchanged. No table is read on the host: rows beyond an entry's capacity, on a page
    outside the pool or in a cache row that does not exist are not written, and a row at a position beyond the rotary tables becomes NaN. If
    two entries write to one place, either may win.
    """
    turned = step.q if step.cos is None else torch.empty_like(step.q, memory_format=torch.contiguous_format)
    lines = _lines(step)
    if max(lines) >= _MOST_LINES:
        raise ValueError(f"q and k have {max(lines)} rows and heads; wanted fewer than {_MOST_LINES}: append in parts")
    if not any(lines):
        return turned
    width = step.q.shape[-1], step.v_cache.shape[-1]
    blocks = tuple(_power_of_2(n) for n in width)
    per_program = max(1, _ELEMENTS // max(blocks))
    programs = [ceil_div(n, per_program) for n in lines]
    tensors, numbers, last_strides = _tensors(step, turned), _numbers(step, programs), _last_strides(step)
    from anyattn.backends.triton.kernels.append_rotary import cache_step

    # a fused multiply-add rounds only once, so its bits would differ from those of the torch operations
    sizes = {"LINES": per_program, "BLOCK_D": blocks[0], "BLOCK_DV": blocks[1], "enable_fp_fusion": False}
    options = {**_options(step, numbers, width), **sizes}
    run_plain(cache_step, sum(programs), (*tensors, *numbers), last_strides, step.q.device, options)
    return turned


def _lines(step: CacheStep) -> tuple[int, int, int]:
    """Rows times heads of the new keys, of the new values and of the queries; 0 where there is nothing to do."""
    new = 0 if step.k is None else step.k.shape[:-1].numel()
    return new, new, 0 if step.cos is None else step.q.shape[:-1].numel()


def _tensors(step: CacheStep, turned: Tensor) -> tuple[Tensor, ...]:
    """The arguments ``kernels.append_rotary.TENSORS``; an absent one is replaced by any tensor."""
    tables = step.tables
    cached = _side_by_side(tables.cached)
    k, v = (step.k, step.v) if step.k is not None and step.v is not None else (step.q, step.q)
    rows, ends, pages = (cached if t is None else t for t in (tables.rows, tables.cu_seqlens_q, tables.page_table))
    cos, sin = (step.q, step.q) if step.cos is None or step.sin is None else (step.cos, step.sin)
    pages = pages if pages.ndim == 1 or pages.stride(1) == 1 else pages.contiguous()
    tensors = (k, v, step.q, step.k_cache, step.v_cache, turned, cos, sin, cached, _side_by_side(rows), _side_by_side(ends), pages)
    return tuple(t.detach() if t.requires_grad else t for t in tensors)


def _side_by_side(table: Tensor) -> Tensor:
    return table.contiguous() if table.ndim == 1 else table


def _numbers(step: CacheStep, programs: list[int]) -> tuple[int, ...]:
    """The arguments ``kernels.append_rotary.NUMBERS``."""
    sizes, (heads_kv, width), table = step.sizes, step.k_cache.shape[2:], step.tables.page_table
    new = (0, 0, 0) if step.k is None else _strides(step.k)
    new_v = (0, 0, 0) if step.v is None else _strides(step.v)
    positions, half = (0, 0) if step.cos is None else step.cos.shape
    rows_new = 0 if step.k is None else step.k.shape[:-2].numel()
    return (
        *new, *new_v, *_strides(step.q), *_strides(step.k_cache), *_strides(step.v_cache),
        0 if step.cos is None else step.cos.stride(0), 0 if step.sin is None else step.sin.stride(0),
        0 if table is None else table.stride(0) if table.stride(1) == 1 else table.shape[1], sizes.batch, max(1, sizes.new or 0),
        max(1, sizes.rows_q), rows_new, step.q.shape[:-2].numel(), heads_kv, step.q.shape[-2], width, step.v_cache.shape[3], half,
        positions, sizes.capacity, sizes.storage, max(1, sizes.page_size), programs[0], programs[1],
    )  # fmt: skip


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of entries, rows and heads; packed rows belong to one entry."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])  # type: ignore[return-value]


def _last_strides(step: CacheStep) -> tuple[int, ...]:
    tensors = (step.k, step.v, step.q, step.k_cache, step.v_cache, step.cos, step.sin)
    return tuple(1 if t is None else t.stride(-1) for t in tensors)


def _options(step: CacheStep, numbers: tuple[int, ...], width: tuple[int, int]) -> dict[str, Any]:
    """The constants and options that the kernel is compiled for."""
    packed_new, packed_q = step.k is not None and step.k.ndim == 3, step.q.ndim == 3
    steps = ceil_div(step.sizes.batch.bit_length(), 4) * 4 if packed_new or packed_q else 0  # few values, since each one is compiled
    strides = numbers[:15]
    return {
        "NEW_IS_PACKED": packed_new,
        "Q_IS_PACKED": packed_q,
        "HAS_ROWS": step.tables.rows is not None,
        "HAS_PAGES": step.tables.page_table is not None,
        "TURNS": step.cos is not None,
        "INTERLEAVED": step.interleaved,
        "FOLLOWS": step.follows,
        "IS_ALIGNED": all(n % _ALIGNMENT == 0 for n in (*strides, *width)),
        "SEARCH_STEPS": steps,
    }


def _power_of_2(size: int) -> int:
    return max(16, next_power_of_2(size))
