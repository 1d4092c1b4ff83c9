"""Appending, quantisation and rotary embedding of a decoding step: one launch of ``kernels.append_rotary``, without synchronising."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.backends.triton.kernels.append_arguments import EightBits, ScaleForm
from anyattn.kvcache.quantise import is_written
from anyattn.sequences.unread_kvcache import CacheStep
from anyattn.triton_tools.launch import run_plain

__all__ = ["append"]

_ELEMENTS = 1024  # elements of a block of lines: eight for each of 128 threads, one load instruction of 16-bit numbers each
_MOST_UNIT = 8  # elements: 16 bytes of 16-bit dtypes, 8 of 8-bit ones
_MOST_LINES = 2**31
_FORMATS = {torch.float8_e4m3fn: int(EightBits.FLOAT8_E4M3), torch.float8_e5m2: int(EightBits.FLOAT8_E5M2), torch.int8: int(EightBits.INT8)}
_NUMBER, _BY_ENTRY, _BY_PLACE, _WRITTEN = map(int, ScaleForm)


def append(step: CacheStep) -> Tensor:
    """Writes the new rows into the caches, keys rotated; returns the queries, rotated too, in their own layout.

    Rows of 8-bit caches are quantised, as in ``kvcache.append``. Without rotary tables the queries are returned unchanged. No table is read
    on the host: rows beyond an entry's capacity, on a page outside the pool or in a cache row that does not exist are not written, and a
    row at a position beyond the rotary tables becomes NaN. If two entries write to one place, either may win.
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
    of_k = _UNSCALED if step.k_descale is None else _scales(step.k_descale, step.k_cache)
    of_v = _UNSCALED if step.v_descale is None else _scales(step.v_descale, step.v_cache)
    numbers, units = _numbers(step, programs)
    scaling = (*of_k.strides, *of_v.strides, of_k.number, of_v.number)
    from anyattn.backends.triton.kernels.append_rotary import cache_step

    # a fused multiply-add rounds only once, so its bits would differ from those of the torch operations
    sizes = {"LINES": per_program, "BLOCK_D": blocks[0], "BLOCK_DV": blocks[1], "enable_fp_fusion": False}
    options = {**_options(step, units, of_k.form, of_v.form), **sizes}
    given = (*_tensors(step, turned), *numbers, *scaling)
    run_plain(cache_step, sum(programs), given, _last_strides(step), step.q.device, options)
    return turned


def _lines(step: CacheStep) -> tuple[int, int, int]:
    """Rows times heads of the new keys, of the new values and of the queries; 0 where there is nothing to do."""
    new = 0 if step.k is None else step.k.shape[:-1].numel()
    return new, 0 if step.has_one_cache else new, 0 if step.cos is None else step.q.shape[:-1].numel()


class _Scales(NamedTuple):
    """The scales of one cache. form: a ``ScaleForm``. strides: ``DescaleStrides``."""

    form: int = _NUMBER
    strides: tuple[int, int, int] = (0, 0, 0)
    number: float = 1.0


_UNSCALED = _Scales()


def _scales(descale: Tensor | float | None, cache: Tensor) -> _Scales:
    if descale is None:
        return _UNSCALED
    if not isinstance(descale, Tensor):
        return _Scales(number=float(descale))
    is_own = is_written(descale, cache)
    if descale.numel() == 1 and not is_own:
        return _Scales(_BY_PLACE)
    strides: Any = tuple([0 if size == 1 else stride for size, stride in zip(descale.shape, descale.stride(), strict=True)])
    if descale.ndim == 2:
        return _Scales(_BY_ENTRY, (strides[0], 0, strides[1]))
    return _Scales(_WRITTEN if is_own else _BY_PLACE, strides)


def _tensors(step: CacheStep, turned: Tensor) -> tuple[Tensor, ...]:
    """The arguments ``kernels.append_rotary.TENSORS``; an absent one is replaced by any tensor."""
    tables = step.tables
    cached = _side_by_side(tables.cached)
    k, v = (step.k, step.v) if step.k is not None and step.v is not None else (step.q, step.q)
    rows, ends, pages = (cached if t is None else t for t in (tables.rows, tables.cu_seqlens_q, tables.page_table))
    cos, sin = (step.q, step.q) if step.cos is None or step.sin is None else (step.cos, step.sin)
    pages = pages if pages.ndim == 1 or pages.stride(1) == 1 else pages.contiguous()
    k_cache, v_cache, scales = step.k_cache, step.v_cache, [cached, cached, cached]
    if k_cache.dtype in _FORMATS:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
        scales = [t if isinstance(t, Tensor) else cached for t in (step.k_descale, step.v_descale, step.saturated)]
    tensors = (k, v, step.q, k_cache, v_cache, turned, cos, sin, cached, _side_by_side(rows), _side_by_side(ends), pages, *scales)
    return tuple(t.detach() if t.requires_grad else t for t in tensors)


def _side_by_side(table: Tensor) -> Tensor:
    return table.contiguous() if table.ndim == 1 else table


class _Units(NamedTuple):
    """The units, in elements, in which numbers are passed: strides of k, v and q, and head_dims; strides of the caches; strides and width
    of the rotary tables. Triton vectorises by factors that it knows: it knows those of a product with a constant, not those of an
    argument, whatever ``tl.multiple_of`` says of it."""

    inputs: int
    caches: int
    tables: int


def _numbers(step: CacheStep, programs: list[int]) -> tuple[tuple[int, ...], _Units]:
    """The arguments ``kernels.append_rotary.NUMBERS`` but those of scales."""
    sizes, (heads_kv, width), table, q = step.sizes, step.k_cache.shape[2:], step.tables.page_table, step.q
    rows_new, new, new_v, of_tables = 0, (0, 0, 0), (0, 0, 0), (0, 0, 0)
    if step.k is not None and step.v is not None:
        rows_new, new, new_v = step.k.shape[:-2].numel(), _strides(step.k), _strides(step.v)
    if step.cos is not None and step.sin is not None:
        of_tables = step.cos.stride(0), step.sin.stride(0), step.cos.shape[1]
    inputs, of_inputs = _in_units((*new, *new_v, *_strides(q), width, step.v_cache.shape[3]))
    caches, of_caches = _in_units((*_strides(step.k_cache), *_strides(step.v_cache)))
    tables, unit_of_tables = _in_units(of_tables)
    numbers = (
        *inputs, *caches, *tables,
        0 if table is None else table.stride(0) if table.stride(1) == 1 else table.shape[1], sizes.batch, max(1, sizes.new or 0),
        max(1, sizes.rows_q), rows_new, q.shape[:-2].numel(), heads_kv, q.shape[-2], 0 if step.cos is None else len(step.cos),
        sizes.capacity, sizes.storage, max(1, sizes.page_size), programs[0], programs[1],
    )  # fmt: skip
    return numbers, _Units(of_inputs, of_caches, unit_of_tables)


@lru_cache(maxsize=1024)  # the layers of a model pass equal strides
def _in_units(numbers: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    unit = math.gcd(_MOST_UNIT, *numbers)
    return tuple([n // unit for n in numbers]), unit


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of entries, rows and heads; packed rows belong to one entry."""
    return x.stride()[:3] if x.ndim == 4 else (0, *x.stride()[:2])  # type: ignore[return-value]


def _last_strides(step: CacheStep) -> tuple[int, ...]:
    tensors = (step.k, step.v, step.q, step.k_cache, step.v_cache, step.cos, step.sin)
    return tuple(1 if t is None else t.stride(-1) for t in tensors)


def _options(step: CacheStep, units: _Units, k_scales: int, v_scales: int) -> dict[str, Any]:
    """The constants and options that the kernel is compiled for."""
    format_of_caches = _FORMATS.get(step.k_cache.dtype, 0)
    packed_new, packed_q = step.k is not None and step.k.ndim == 3, step.q.ndim == 3
    steps = ceil_div(step.sizes.batch.bit_length(), 4) * 4 if packed_new or packed_q else 0  # few values, since each one is compiled
    return {
        "NEW_IS_PACKED": packed_new,
        "Q_IS_PACKED": packed_q,
        "HAS_ROWS": step.tables.rows is not None,
        "HAS_PAGES": step.tables.page_table is not None,
        "TURNS": step.cos is not None,
        "INTERLEAVED": step.interleaved,
        "IS_LAST": step.rotary_last,
        "FOLLOWS": step.follows,
        "UNIT": units.inputs,
        "CACHE_UNIT": units.caches,
        "TABLE_UNIT": units.tables,
        "FORMAT": format_of_caches,
        "K_SCALES": k_scales,
        "V_SCALES": v_scales,
        "COUNTS": format_of_caches != 0 and step.saturated is not None,
        "SEARCH_STEPS": steps,
    }


def _power_of_2(size: int) -> int:
    return max(16, next_power_of_2(size))
