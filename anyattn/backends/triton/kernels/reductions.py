"""Reduction kernels (device code): sums of the probabilities per key over the row tiles that see it; sums and maxima by blocks.

Scores are recomputed, and probabilities from the log-sum-exp, as in ``kernels.backward``; no values are read. Arguments are the groups of
``kernels.arguments``. lse is in base 2, infinite in rows without visible keys.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.triton.kernels.addressing import entry, place_of_program, row_at, row_offsets, row_tile, slot_of
from anyattn.backends.triton.kernels.arguments import RowsOfParts
from anyattn.backends.triton.kernels.dropout import scores
from anyattn.backends.triton.kernels.forward import rows_of
from anyattn.backends.triton.kernels.key_tiles import offsets_of, rows_at, whole_tile
from anyattn.backends.triton.kernels.row_tile_bounds import full_rows_at, partial_rows_at, rows_that_see
from anyattn.backends.triton.kernels.softmax.visits import kv_for, row_values, seen_by_rows, shown_by
from anyattn.backends.triton.kernels.tile_iterator import full_at, inside_of, partial_at, visits_of
from anyattn.triton_tools import device_math

__all__ = ["block_tile", "key_sums_tile"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LN2: tl.constexpr = tl.constexpr(LN2)


@triton.jit
def _in_base_2(s, b, h, kv, rows, scale, mods):
    """The scores after the score mod, in base 2, of products ``s``. rows: the score mod's row values."""
    if mods.score.exists:
        return mods.score.value(s * scale, b, h, kv, rows, mods.score.scalars, mods.score.tensors).to(tl.float32) * _LOG2E
    else:
        return s * (scale * _LOG2E)


@triton.jit
def _visit_rows(
    total, k, first, end, is_shown, n_first, n_end, first_query, sequence, q_from, lse_from, q_offsets, strides, b, h, scale, mods, c,
    IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """``total`` [keys, rows] plus the probabilities of rows ``first`` to ``end``; see ``kernels.backward._visit_rows``. q_from, lse_from:
    pointers to the head's first row."""
    m_lane = tl.arange(0, c.TILE_M)
    row = device_math.unknown(m_lane, 0 if IS_PARTIAL else first, c.IS_NVIDIA)
    start, kept = first, first
    if IS_PARTIAL:
        start, kept = tl.minimum(first, end - 1), tl.where(first < end, first, 0)
        q_offsets = offsets_of(tl.minimum(m_lane, end - 1 - start), strides.q, c)
        row = tl.minimum(row, end - 1 - start)
    q = whole_tile(q_from + row_at(sequence.q_start + start, strides.q, c.IS_NEAR), q_offsets, c)
    lse = tl.load(lse_from + kept + m_lane)
    s = scores(k, q, 0, c)
    q_idx = (start + row + sequence.q_first)[None, :]
    lanes = (n_first + tl.arange(0, c.TILE_N))[:, None]
    rows = row_values(mods.score, b, h, q_idx)
    p = tl.exp2(_in_base_2(s, b, h, kv_for(lanes, n_end, mods.score, False), rows, scale, mods) - lse[None, :])
    if IS_PARTIAL or mods.always.exists or c.HAS_FIRST:
        seen = (first + m_lane < end)[None, :]
        if c.HAS_FIRST:
            seen = seen & (first + m_lane >= first_query)[None, :]
        p = tl.where(seen_by_rows(seen, is_shown, b, h, lanes, n_end, q_idx, mods, IS_PARTIAL), p, 0.0)
    return total + p


@triton.jit
def key_sums_tile(tensors, strides, spans, sizes, reduced, lists, scale, mods, c):
    """The sums of the probabilities of one head over its queries, for one tile of keys. c: ``ReductionConstants``. lists: per tile of keys.
    HAS_FIRST: only queries from ``reduced.first`` on count."""
    n, b, h = place_of_program(sizes, tensors.q, False, c.HAS_ENTRIES)
    sequence = entry(b, tensors.q, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)
    seqlen_q = sequence.seqlen_q
    line, n_first, n_end = row_tile(n, sequence.seqlen_k, c.TILE_N, c.LIST_N, 1)
    if n_first >= n_end:
        return
    lane = n_first + tl.arange(0, c.TILE_N)
    is_key = lane < n_end
    at = (sequence.k_start + tl.minimum(lane, n_end - 1)).to(tl.int64)[:, None]
    kv_head = (h // sizes.ratio).to(tl.int64)
    k = rows_at(tensors.k, row_offsets(sequence.k_row, kv_head, at, strides.k), is_key[:, None], c)
    q_from = tensors.q + (sequence.q_row.to(tl.int64) * strides.q.rows + h.to(tl.int64) * strides.q.head)
    lse_from = tl.multiple_of(tensors.lse + slot_of(sequence, 0, b, h, sizes, c.TILE_M, c.TILE_M), 16)
    offsets = offsets_of(tl.arange(0, c.TILE_M), strides.q, c)
    runs, fulls, partials = rows_that_see(0, tensors.spans, spans, sizes, lists, sequence, b, h, line, n_first, n_end, c)
    total = tl.zeros((c.TILE_N, c.TILE_M), tl.float32)
    for i in range(0, partials):
        start, stop, is_shown = partial_rows_at(runs, i, fulls, seqlen_q, c)
        if (start + c.TILE_M > reduced.first) | (not c.HAS_FIRST):
            total = _visit_rows(
                total, k, start, stop, is_shown, n_first, n_end, reduced.first, sequence, q_from, lse_from, offsets, strides, b, h, scale,
                mods, c, True,
            )  # fmt: skip
    skipped = fulls * 0
    if c.HAS_FIRST and c.RANGES > 0:
        skipped = tl.minimum(tl.maximum(reduced.first // c.TILE_M - runs.full, 0), fulls)
    for i in range(skipped, fulls):
        start = full_rows_at(runs, i, c)
        if c.RANGES > 0 or (start + c.TILE_M > reduced.first) | (not c.HAS_FIRST):
            total = _visit_rows(
                total, k, start, start + c.TILE_M, True, n_first, n_end, reduced.first, sequence, q_from, lse_from, offsets, strides, b, h,
                scale, mods, c, False,
            )  # fmt: skip
    place = (b.to(tl.int64) * sizes.heads + h) * sizes.seqlen_k + lane
    tl.store(tensors.sums + place, tl.sum(total, 1), mask=is_key)


@triton.jit
def _combined(x, AXIS: tl.constexpr, IS_MAX: tl.constexpr, KEEPS: tl.constexpr):
    if IS_MAX:
        return tl.max(x, AXIS, keep_dims=KEEPS)
    else:
        return tl.sum(x, AXIS, keep_dims=KEEPS)


@triton.jit
def _by_blocks(x, ROWS: tl.constexpr, KEYS: tl.constexpr, IS_MAX: tl.constexpr):
    """A tile's sums or maxima by blocks of ROWS x KEYS, both of which divide the tile."""
    TILE_M: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1] // KEYS
    if COLUMNS == 1:
        x = _combined(x, 1, IS_MAX, True)
    elif KEYS > 1:
        x = _combined(tl.reshape(x, (TILE_M, COLUMNS, KEYS)), 2, IS_MAX, False)
    if ROWS == TILE_M:
        x = _combined(x, 0, IS_MAX, True)
    elif ROWS > 1:
        x = _combined(tl.reshape(x, (TILE_M // ROWS, ROWS, COLUMNS)), 1, IS_MAX, False)
    return x


@triton.jit
def _visit_keys(
    q, lse, is_row, first_row, end_row, first, end, is_shown, tensors, reduced, head, k_from, k_offsets, strides, rows, sequence, b, h,
    scale, mods, c, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Stores the blocks of one tile of keys; see ``kernels.backward._visit_keys``. head: of all entries."""
    n_lane = tl.arange(0, c.TILE_N)
    start = first
    if IS_PARTIAL:
        start = tl.minimum(first, end - 1)
        k_offsets = offsets_of(tl.minimum(n_lane, end - 1 - start), strides.k, c)
    k = whole_tile(k_from + row_at(sequence.k_start + start, strides.k, c.IS_NEAR), k_offsets, c)
    s = scores(q, k, 0, c)
    lanes = (first + n_lane)[None, :]
    s = _in_base_2(s, b, h, kv_for(lanes, end, mods.score, not IS_PARTIAL), rows.score, scale, mods)
    seen = is_row[:, None] & (lanes < end)
    if IS_PARTIAL and mods.mask.exists:
        seen = seen & (shown_by(mods.mask, b, h, lanes, end, rows.mask, False) | is_shown)
    if mods.always.exists:
        seen = seen & shown_by(mods.always, b, h, lanes, end, rows.always, not IS_PARTIAL)
    row = tl.arange(0, c.TILE_M // c.BLOCK_ROWS)[:, None]
    column = tl.arange(0, c.TILE_N // c.BLOCK_KEYS)[None, :]
    exists = (first_row + row * c.BLOCK_ROWS < end_row) & (first + column * c.BLOCK_KEYS < end)
    place = (head * reduced.rows + first_row // c.BLOCK_ROWS + row) * reduced.columns + first // c.BLOCK_KEYS + column
    if c.HAS_MAX:
        highest = _by_blocks(tl.where(seen, s, float("-inf")), c.BLOCK_ROWS, c.BLOCK_KEYS, True)
        tl.store(tensors.maxima + place, highest * _LN2, mask=exists)
    if c.HAS_SUMS:
        p = tl.where(seen, tl.exp2(s - lse[:, None]), 0.0)
        tl.store(tensors.sums + place, _by_blocks(p, c.BLOCK_ROWS, c.BLOCK_KEYS, False), mask=exists)


@triton.jit
def block_tile(tensors, strides, spans, sizes, reduced, lists, scale, mods, c):
    """Sums of the probabilities (HAS_SUMS) and maxima of the scores (HAS_MAX) of the blocks of one row tile that it visits. c:
    ``BlockConstants``. Blocks of BLOCK_ROWS x BLOCK_KEYS divide tiles, and the lists' tiles."""
    m, b, h = place_of_program(sizes, tensors.q, True, c.HAS_ENTRIES)
    sequence = entry(b, tensors.q, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)
    seqlen_k = sequence.seqlen_k
    line, first_row, end_row = row_tile(m, sequence.seqlen_q, c.TILE_M, c.LIST_M, 1)
    if first_row >= end_row:
        return
    position = first_row + tl.arange(0, c.TILE_M)
    is_row = position < end_row
    position = tl.minimum(position, end_row - 1)
    at = sequence.q_start + position
    q = rows_at(tensors.q, row_offsets(sequence.q_row, h, at, strides.q)[:, None], is_row[:, None], c)
    head = b.to(tl.int64) * sizes.heads + h
    lse = position.to(tl.float32)
    if c.HAS_SUMS:
        lse = tl.load(tensors.lse + head * sizes.positions + position, mask=is_row, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)
    q_idx = (position + sequence.q_first)[:, None]
    kept = rows_of(b, h, q_idx, q_idx, mods)
    k_from = tensors.k + (sequence.k_row.to(tl.int64) * strides.k.rows + (h // sizes.ratio).to(tl.int64) * strides.k.head)
    offsets = offsets_of(tl.arange(0, c.TILE_N), strides.k, c)
    runs, full, partial = visits_of(kept.mask, lists, spans.lists, sequence, b, h, line, seqlen_k, c, False)
    if c.RANGES > 0:
        inside = inside_of(kept.mask, seqlen_k, c.RANGES)
        kept = RowsOfParts(score=kept.score, mask=inside, always=kept.always, dropout=kept.dropout, sure=kept.sure)
    for i in range(0, full):
        first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N)
        _visit_keys(
            q, lse, is_row, first_row, end_row, first, first + c.TILE_N, True, tensors, reduced, head, k_from, offsets, strides, kept,
            sequence, b, h, scale, mods, c, False,
        )  # fmt: skip
    for i in range(0, partial):
        first, end, is_shown = partial_at(runs, i, seqlen_k, c.RANGES, c.TILE_N, c.LIST_N)
        _visit_keys(
            q, lse, is_row, first_row, end_row, first, end, is_shown, tensors, reduced, head, k_from, offsets, strides, kept, sequence, b,
            h, scale, mods, c, True,
        )  # fmt: skip
