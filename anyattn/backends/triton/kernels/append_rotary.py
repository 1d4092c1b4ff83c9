"""Kernel for the part of a decoding step before attention: writes new keys and values to the caches, and rotates keys and queries.

Rows of 8-bit caches are quantised (``quantise``). The unit of work is a line, one head of one row. The lines of new keys, of new values and
of queries have consecutive ranges of programs; each program finds from the tables which lines it has and where they go. For any table
contents it writes nothing outside the caches: a line without a place is skipped.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.append_arguments import (
    CachePlaces,
    DescaleStrides,
    EightBits,
    LineScales,
    LineStrides,
    Rotary,
    ScaleForm,
)
from anyattn.backends.triton.kernels.quantise import bytes_of_lines

__all__ = ["NUMBERS", "TENSORS", "cache_step"]

_BY_ENTRY, _NUMBER, _PLAIN = tl.constexpr(int(ScaleForm.BY_ENTRY)), tl.constexpr(int(ScaleForm.NUMBER)), tl.constexpr(int(EightBits.NONE))

TENSORS = (
    "new_k", "new_v", "q", "k_cache", "v_cache", "turned", "cos", "sin", "cached", "rows", "ends", "pages",
    "k_descale", "v_descale", "saturated",
)  # fmt: skip
# (strides of last dimensions and of tables come last: they are usually 1, and Triton specialises on that)
NUMBERS = (
    "new_k_b", "new_k_s", "new_k_h", "new_v_b", "new_v_s", "new_v_h", "q_b", "q_s", "q_h", "head_dim", "head_dim_v",
    "k_cache_b", "k_cache_s", "k_cache_h", "v_cache_b", "v_cache_s", "v_cache_h", "cos_s", "sin_s", "half",
    "pages_b", "batch", "per_entry_new", "per_entry_q", "rows_new", "rows_q",
    "heads_kv", "heads_q", "positions", "capacity", "storage", "page_size", "k_programs", "v_programs",
    "k_descale_b", "k_descale_s", "k_descale_h", "v_descale_b", "v_descale_s", "v_descale_h", "k_number", "v_number",
)  # fmt: skip


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=NUMBERS)
def cache_step(
    new_k, new_v, q, k_cache, v_cache, turned, cos, sin, cached, rows, ends, pages, k_descale, v_descale, saturated,
    new_k_b: tl.int64, new_k_s: tl.int64, new_k_h: tl.int64, new_v_b: tl.int64, new_v_s: tl.int64, new_v_h: tl.int64,
    q_b: tl.int64, q_s: tl.int64, q_h: tl.int64, head_dim: tl.int32, head_dim_v: tl.int32,
    k_cache_b: tl.int64, k_cache_s: tl.int64, k_cache_h: tl.int64, v_cache_b: tl.int64, v_cache_s: tl.int64, v_cache_h: tl.int64,
    cos_s: tl.int64, sin_s: tl.int64, half: tl.int32, pages_b: tl.int64,
    batch: tl.int32, per_entry_new: tl.int32, per_entry_q: tl.int32, rows_new: tl.int32, rows_q: tl.int32, heads_kv: tl.int32,
    heads_q: tl.int32, positions: tl.int32, capacity: tl.int32,
    storage: tl.int32, page_size: tl.int32, k_programs: tl.int32, v_programs: tl.int32,
    k_descale_b: tl.int64, k_descale_s: tl.int64, k_descale_h: tl.int64, v_descale_b: tl.int64, v_descale_s: tl.int64,
    v_descale_h: tl.int64, k_number: tl.float32, v_number: tl.float32,
    new_k_d, new_v_d, q_d, k_cache_d, v_cache_d, cos_d, sin_d,
    NEW_IS_PACKED: tl.constexpr, Q_IS_PACKED: tl.constexpr, HAS_ROWS: tl.constexpr, HAS_PAGES: tl.constexpr, TURNS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IS_LAST: tl.constexpr, FOLLOWS: tl.constexpr, UNIT: tl.constexpr, CACHE_UNIT: tl.constexpr, TABLE_UNIT:
    tl.constexpr, FORMAT: tl.constexpr, K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, COUNTS: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    LINES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Processes one block of lines: of new keys, then of new values, then of queries. See ``CacheStep``;
    ``turned``: the queries, contiguous.

    rows_new, rows_q: rows of all entries together. k_programs, v_programs: numbers of blocks of lines of the new keys and values.
    positions: rows of the rotary tables; a row at a position beyond them becomes NaN. UNIT, CACHE_UNIT, TABLE_UNIT: of the strides of
    inputs and the head_dims, of the caches' strides, and of the tables' strides and ``half``, in elements. FORMAT: ``EightBits``; if not
    NONE, the caches are passed as uint8. K_SCALES, V_SCALES: ``ScaleForm``. COUNTS: adds the number of saturated values to ``saturated``.
    """
    of_k = LineStrides(entry=new_k_b * UNIT, row=new_k_s * UNIT, head=new_k_h * UNIT)
    of_v = LineStrides(entry=new_v_b * UNIT, row=new_v_s * UNIT, head=new_v_h * UNIT)
    of_q = LineStrides(entry=q_b * UNIT, row=q_s * UNIT, head=q_h * UNIT)
    of_k_cache = LineStrides(entry=k_cache_b * CACHE_UNIT, row=k_cache_s * CACHE_UNIT, head=k_cache_h * CACHE_UNIT)
    of_v_cache = LineStrides(entry=v_cache_b * CACHE_UNIT, row=v_cache_s * CACHE_UNIT, head=v_cache_h * CACHE_UNIT)
    head_dim, head_dim_v = head_dim * UNIT, head_dim_v * UNIT
    table = CachePlaces(rows=rows, pages=pages, pages_entry=pages_b, capacity=capacity, storage=storage, page_size=page_size)
    rotary = Rotary(
        cos=cos, cos_row=cos_s * TABLE_UNIT, cos_element=cos_d, sin=sin, sin_row=sin_s * TABLE_UNIT, sin_element=sin_d,
        half=half * TABLE_UNIT, positions=positions,
    )  # fmt: skip
    program = tl.program_id(0)
    if program < k_programs + v_programs:
        is_k = program < k_programs
        lane = tl.where(is_k, program, program - k_programs) * LINES + tl.arange(0, LINES)
        row, head = lane // heads_kv, lane % heads_kv
        entry, at, exists = _entry(row, row < rows_new, ends, batch, per_entry_new, NEW_IS_PACKED, SEARCH_STEPS)
        position = tl.load(cached + entry, mask=exists, other=0).to(tl.int64) + at
        first, second, exists = _slot(entry, position, exists, table, HAS_ROWS, HAS_PAGES)
        source_b, source_s = entry.to(tl.int64), at.to(tl.int64)
        if NEW_IS_PACKED:
            source_b, source_s = source_b * 0, row.to(tl.int64)
        if is_k:
            source = _line(new_k, source_b, source_s, head, of_k)
            target = _line(k_cache, first, second, head, of_k_cache)
            strides = DescaleStrides(first=k_descale_b, row=k_descale_s, head=k_descale_h)
            # a name of its own: where one descale is a number, the types of the two differ
            scales_of_k = _scales(k_descale, k_number, saturated, entry, first, second, head, strides, K_SCALES)
            _store_line(
                source, new_k_d, target, k_cache_d, head_dim, exists, position, rotary, scales_of_k, TURNS, INTERLEAVED, IS_LAST, FORMAT,
                K_SCALES, COUNTS, BLOCK_D,
            )  # fmt: skip
        else:
            source = _line(new_v, source_b, source_s, head, of_v)
            target = _line(v_cache, first, second, head, of_v_cache)
            strides = DescaleStrides(first=v_descale_b, row=v_descale_s, head=v_descale_h)
            scales_of_v = _scales(v_descale, v_number, saturated, entry, first, second, head, strides, V_SCALES)
            _store_line(
                source, new_v_d, target, v_cache_d, head_dim_v, exists, position, rotary, scales_of_v, False, INTERLEAVED, IS_LAST, FORMAT,
                V_SCALES, COUNTS, BLOCK_DV,
            )  # fmt: skip
    elif TURNS:
        lane = (program - k_programs - v_programs) * LINES + tl.arange(0, LINES)
        row, head = lane // heads_q, lane % heads_q
        entry, at, exists = _entry(row, row < rows_q, ends, batch, per_entry_q, Q_IS_PACKED, SEARCH_STEPS)
        position = tl.load(cached + entry, mask=exists, other=0).to(tl.int64)
        if FOLLOWS:
            position += at
        source_b, source_s = entry.to(tl.int64), at.to(tl.int64)
        if Q_IS_PACKED:
            source_b, source_s = source_b * 0, row.to(tl.int64)
        source = _line(q, source_b, source_s, head, of_q)
        turned_line = turned + lane.to(tl.int64) * head_dim
        # rows of no entry are written too, with any rotation: their results are not used, but no memory stays uninitialised
        position = tl.where(exists, position, 0)
        unscaled = LineScales(at=k_descale, number=k_number, saturated=saturated)
        _store_line(
            source,
            q_d,
            turned_line,
            1,
            head_dim,
            row < rows_q,
            position,
            rotary,
            unscaled,
            TURNS,
            INTERLEAVED,
            IS_LAST,
            _PLAIN,
            _NUMBER,
            False,
            BLOCK_D,
        )


@triton.jit
def _entry(row, is_row, ends, batch, per_entry, IS_PACKED: tl.constexpr, STEPS: tl.constexpr):
    """The entry of each row, its place among the entry's rows, and whether the row belongs to an entry."""
    if IS_PACKED:
        low, high = row * 0, row * 0 + batch
        for _ in tl.static_range(STEPS):
            is_open, middle = low < high, (low + high) // 2
            is_behind = tl.load(ends + middle + 1, mask=is_open, other=0) <= row
            low, high = tl.where(is_open & is_behind, middle + 1, low), tl.where(is_open & (is_behind == 0), middle, high)
        exists = is_row & (low < batch)
        entry = tl.where(exists, low, 0)
        at = row - tl.load(ends + entry, mask=exists, other=0).to(tl.int32)
        return entry, at, exists & (at >= 0)
    else:
        entry = row // per_entry
        return tl.where(is_row, entry, 0), row - entry * per_entry, is_row


@triton.jit
def _line(base, first, second, head, strides):
    """Pointers to lines. first, second: the two leading indices, in 64 bits. strides: ``LineStrides``."""
    return base + first * strides.entry + second * strides.row + head * strides.head


@triton.jit
def _slot(entry, position, exists, table, HAS_ROWS: tl.constexpr, HAS_PAGES: tl.constexpr):
    """The two leading indices into the cache of storage row ``position`` of each entry, and whether the row is inside. table:
    ``CachePlaces``."""
    exists = exists & (position >= 0) & (position < table.capacity)
    first, second = entry.to(tl.int64), tl.where(exists, position, 0)
    if HAS_PAGES:
        # existing positions fit 32 bits, in which division is cheaper
        page = second.to(tl.int32) // table.page_size
        first = tl.load(table.pages + first * table.pages_entry + page, mask=exists, other=-1).to(tl.int64)
        second = second - page * table.page_size
    elif HAS_ROWS:
        first = tl.load(table.rows + first, mask=exists, other=-1).to(tl.int64)
    exists = exists & (first >= 0) & (first < table.storage)
    return tl.where(exists, first, 0), second, exists


@triton.jit
def _scales(descale, number, saturated, entry, first, second, head, strides, FORM: tl.constexpr):
    """``LineScales`` of lines at (first, second, head) of a cache. strides: ``DescaleStrides``."""
    place = entry.to(tl.int64) if FORM == _BY_ENTRY else first
    return LineScales(at=descale + place * strides.first + second * strides.row + head * strides.head, number=number, saturated=saturated)


@triton.jit
def _store_line(
    source, source_d, target, target_d, width, exists, position, rotary, scales,
    TURNS: tl.constexpr, INTERLEAVED: tl.constexpr, IS_LAST: tl.constexpr, FORMAT: tl.constexpr, SCALES: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies rows from ``source`` to ``target``, and rotates their first ``2 * rotary.half`` elements, or with IS_LAST their last, by the
    angle of their position."""
    d = tl.arange(0, BLOCK)
    there = exists[:, None] & (d < width)[None, :]
    x = tl.load(source[:, None] + (d * source_d)[None, :], mask=there)
    wide_dtype: tl.constexpr = tl.float64 if x.dtype == tl.float64 else tl.float32
    if TURNS:
        turned, is_inside = d, d < 2 * rotary.half
        if IS_LAST:
            turned = d - (width - 2 * rotary.half)
            is_inside = turned >= 0
        if INTERLEAVED:
            is_first, other, pair = turned % 2 == 0, d - turned + (turned ^ 1) if IS_LAST else d ^ 1, turned // 2
        else:
            is_first = turned < rotary.half
            other = tl.where(is_first, d + rotary.half, d - rotary.half)
            pair = tl.where(is_first, turned, turned - rotary.half)
        is_turned = there & is_inside[None, :]
        y = tl.load(source[:, None] + (other * source_d)[None, :], mask=is_turned, other=0.0).to(wide_dtype)
        known = is_turned & ((position >= 0) & (position < rotary.positions))[:, None]
        cos = rotary.cos + position[:, None] * rotary.cos_row + (pair * rotary.cos_element)[None, :]
        sin = rotary.sin + position[:, None] * rotary.sin_row + (pair * rotary.sin_element)[None, :]
        c = tl.load(cos, mask=known, other=float("nan")).to(wide_dtype)
        s = tl.load(sin, mask=known, other=float("nan")).to(wide_dtype)
        # (a, b) -> (a cos - b sin, b cos + a sin), with each product and the sum rounded as in torch
        result = x.to(wide_dtype) * c + tl.where(is_first[None, :], -y, y) * s
        # an 8-bit cache gets the exact result, which is rounded only once
        stored_dtype: tl.constexpr = x.dtype if FORMAT == _PLAIN else wide_dtype
        x = tl.where(is_turned, result.to(stored_dtype), x.to(stored_dtype))
    if FORMAT != _PLAIN:
        x = bytes_of_lines(x.to(tl.float32), there, exists, scales, SCALES, FORMAT, COUNTS)
    tl.store(target[:, None] + (d * target_d)[None, :], x, mask=there)
