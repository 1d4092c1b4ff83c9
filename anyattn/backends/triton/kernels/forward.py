"""Forward kernel (device code): online softmax in base 2 over the key tiles that a row tile visits.

One body serves every variant. Its caller, an entry generated for the call's mods, passes the groups of ``kernels.arguments``, and the mods
as functions.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.triton.kernels.addressing import cache_entry, entry, is_off, key_places, row_offsets, row_tile, work_of
from anyattn.backends.triton.kernels.arguments import KeyStorage, RowsOfParts, Scales
from anyattn.backends.triton.kernels.dropout import factor_of, places, plus_kept
from anyattn.backends.triton.kernels.paged_kv import NEARBY, first_numbers, inside, page_numbers, paged_places
from anyattn.backends.triton.kernels.tile_iterator import full_at, inside_of, partial_at, visits_of
from anyattn.backends.triton.tile_config import FEW

__all__ = ["forward_tile", "load_rows", "rows_of"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LN2: tl.constexpr = tl.constexpr(LN2)
# Lower bound of a row maximum: -inf minus it is -inf, not NaN.
_LOWEST: tl.constexpr = tl.constexpr(-1.7014118e38)
_FEW: tl.constexpr = tl.constexpr(FEW)


@triton.jit
def load_rows(base, offsets, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ALL_ROWS: tl.constexpr):
    """[rows, BLOCK_D]: rows at 64-bit ``offsets`` [rows, 1]; zeros for rows not in ``is_row`` (ALL_ROWS: all are), and beyond HEAD_DIM."""
    d = tl.arange(0, BLOCK_D)[None, :]
    if ALL_ROWS and HEAD_DIM == BLOCK_D:
        return tl.load(base + offsets + d)
    elif ALL_ROWS:
        return tl.load(base + offsets + d, mask=d < HEAD_DIM, other=0.0)
    elif HEAD_DIM == BLOCK_D:
        return tl.load(base + offsets + d, mask=is_row, other=0.0)
    else:
        return tl.load(base + offsets + d, mask=is_row & (d < HEAD_DIM), other=0.0)


@triton.jit
def rows_of(
    b, h, q_idx, q_places, captured,
    SCORE_ROWS: tl.constexpr, MASK_ROWS: tl.constexpr, ALWAYS_ROWS: tl.constexpr, DROPOUT_ROWS: tl.constexpr, HAS_SCORE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr, HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """``RowsOfParts``; any tuple for a part that does not exist. q_places: the rows' ``kernels.dropout.places``."""
    score_rows, mask_rows, always_rows, dropout_rows = (q_idx, q_idx), (q_idx, q_idx), (q_idx, q_idx), (q_idx, q_idx)
    if HAS_SCORE:
        score_rows = SCORE_ROWS(b, h, q_idx, captured.score.scalars, captured.score.tensors)
    if HAS_MASK:
        mask_rows = MASK_ROWS(b, h, q_idx, captured.mask.scalars, captured.mask.tensors)
    if HAS_ALWAYS:
        always_rows = ALWAYS_ROWS(b, h, q_idx, captured.always.scalars, captured.always.tensors)
    if HAS_DROPOUT:
        dropout_rows = DROPOUT_ROWS(b, h, q_places, captured.dropout.scalars, captured.dropout.tensors)
    return RowsOfParts(score=score_rows, mask=mask_rows, always=always_rows, dropout=dropout_rows)


@triton.jit
def scores_of(
    q, first, end, is_shown, key, rows, b, h, numbers, scales, captured,
    SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr,
    IS_PARTIAL: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr, RANGES: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, FITS: tl.constexpr,
    PRECISION: tl.constexpr, IS_RAW: tl.constexpr, IS_DESCRIBED: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """[rows, TILE_N]: the scores of the keys from position ``first`` on, -inf where hidden; in base 2, unless IS_RAW.

    end: keys from it on do not exist (IS_WHOLE: all keys of the tile exist; unless IS_PARTIAL, missing ones are zeros). is_shown: all
    others are visible regardless of the mask. key: ``KeyStorage``. rows: ``RowsOfParts``. numbers: of the tile's pages, see
    ``paged_kv.page_numbers``.
    """
    lane = first + tl.arange(0, TILE_N)
    k = keys_at(
        key.k, key.k_strides, first, end, key, numbers, IS_PARTIAL, HEAD_DIM, BLOCK_D, PAGE_SIZE, FITS, TILE_N, IS_DESCRIBED,
        q.shape[0] <= _FEW,
    )  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if HAS_SCORE:
        s = s * scales.score
    elif not IS_RAW:
        s = s * scales.base_2
    kv = lane[None, :]
    if not IS_WHOLE:
        kv = tl.minimum(kv, end - 1)  # mods are not evaluated beyond the sequence
    if HAS_SCORE:
        s = SCORE(s, b, h, kv, rows.score, captured.score.scalars, captured.score.tensors).to(tl.float32)
    if IS_PARTIAL:
        if RANGES > 0:  # the rows' limits are inside the sequence
            seen = MASK(b, h, lane[None, :], rows.mask, captured.mask.scalars, captured.mask.tensors)
        else:
            seen = (lane < end)[None, :]
            if HAS_MASK:
                seen = seen & (MASK(b, h, kv, rows.mask, captured.mask.scalars, captured.mask.tensors) | is_shown)
        s = tl.where(seen, s, float("-inf"))
    if HAS_ALWAYS:
        s = tl.where(ALWAYS(b, h, kv, rows.always, captured.always.scalars, captured.always.tensors), s, float("-inf"))
    return s


@triton.jit
def keys_at(
    source, strides, first, end, key, numbers,
    IS_PARTIAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PAGE_SIZE: tl.constexpr, FITS: tl.constexpr,
    TILE_N: tl.constexpr, IS_DESCRIBED: tl.constexpr, FEW_ROWS: tl.constexpr,
):  # fmt: skip
    """[TILE_N, BLOCK_D]: keys or values from position ``first``; zeros from ``end`` on (partial tiles only).

    source, strides: of the keys or values of ``key``. source is a pointer, or with IS_DESCRIBED a descriptor, which knows the sequence's
    end or, from 2 on, the end of the whole storage.
    """
    if IS_DESCRIBED >= 2:
        return tl.reshape(source.load([key.row, key.head, first + key.start, 0]), (TILE_N, BLOCK_D))
    elif IS_DESCRIBED == 1:
        return source.load([first, 0])
    else:
        is_key = (first + tl.arange(0, TILE_N) < end)[:, None]
        if PAGE_SIZE > 0:
            at = paged_places(first + key.start, end - 1 + key.start, numbers, strides, TILE_N, PAGE_SIZE, FITS, IS_PARTIAL)
        elif FEW_ROWS and not IS_PARTIAL:
            # with few rows there are registers for every row's offset in the tile, so a tile costs one addition per row
            step = strides.position
            at = key.row.to(tl.int64) * strides.rows + (first + key.start).to(tl.int64) * step + tl.arange(0, TILE_N) * step
        else:
            lane = first + tl.arange(0, TILE_N) + key.start
            if IS_PARTIAL:
                lane = tl.minimum(lane, key.start + end - 1)
            at = key_places(lane, key.row, strides)
        return load_rows(source, at[:, None], is_key, HEAD_DIM, BLOCK_D, not IS_PARTIAL)


@triton.jit
def whole_keys_at(
    source, strides, first, key, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE_N: tl.constexpr, IS_DESCRIBED: tl.constexpr
):  # fmt: skip
    """``keys_at`` for a tile whose keys all exist, without pages and for many rows."""
    return keys_at(
        source, strides, first, first + TILE_N, key, 0, False, HEAD_DIM, BLOCK_D, 0, False, TILE_N, IS_DESCRIBED, False
    )  # fmt: skip


@triton.jit
def sums_of(p, row_sum):
    """[rows, parts]: the sums of every row's weights, in as many partial sums as row_sum has."""
    PARTS: tl.constexpr = row_sum.shape[1]
    if PARTS == 1:
        return tl.sum(p, 1, keep_dims=True)
    elif p.shape[1] == PARTS:
        return p
    else:
        return tl.sum(tl.reshape(p, (p.shape[0], p.shape[1] // PARTS, PARTS)), 1)


@triton.jit
def weights_of(s, row_sum, row_max, scale, IS_RAW: tl.constexpr):
    """(exponentials of scores, factor for earlier ones, row_sum, row_max).

    With IS_RAW neither scores nor row_max are in base 2: the factor is part of the exponential's argument, and both are one instruction.
    """
    highest = tl.maximum(row_max, tl.max(s, 1))
    if IS_RAW:
        top = highest * scale
        p = tl.exp2(s * scale - top[:, None])
        # a fused multiply-subtract rounds once: for an unchanged maximum the difference might not be 0, and 2 **
        # 100 off in a row that saw no key
        rescale = tl.exp2(tl.where(row_max == highest, 0.0, row_max * scale - top))
    else:
        p = tl.exp2(s - highest[:, None])
        rescale = tl.exp2(row_max - highest)
    return p, rescale, row_sum * rescale[:, None] + sums_of(p, row_sum), highest


@triton.jit
def visit(
    acc, row_sum, row_max, q, first, end, is_shown, key, rows, b, h, numbers, scales, captured,
    SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr, DROPOUT: tl.constexpr,
    IS_PARTIAL: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, RANGES: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, FITS: tl.constexpr, PRECISION: tl.constexpr, IS_RAW: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys, from position ``first``, to (acc, row_sum, row_max); see ``scores_of``."""
    s = scores_of(
        q, first, end, is_shown, key, rows, b, h, numbers, scales, captured, SCORE, MASK, ALWAYS,
        IS_PARTIAL, HAS_SCORE, HAS_MASK, HAS_ALWAYS, RANGES, TILE_N, HEAD_DIM, BLOCK_D, PAGE_SIZE, FITS, PRECISION, IS_RAW, IS_DESCRIBED,
        not IS_PARTIAL,
    )  # fmt: skip
    p, rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, IS_RAW)
    v = keys_at(key.v, key.v_strides, first, end, key, numbers, IS_PARTIAL, HEAD_DIM_V, BLOCK_DV, PAGE_SIZE, FITS, TILE_N, IS_DESCRIBED,
        q.shape[0] <= _FEW,
    )  # fmt: skip
    acc = plus_kept(acc, rescale, p, v, b, h, first, rows.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
    return acc, row_sum, row_max


@triton.jit
def visit_late(
    acc, row_sum, row_max, p, pending_rescale, before, q, first, key, rows, b, h, scales, captured,
    SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, RANGES: tl.constexpr,
    TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, IS_RAW: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """``visit`` of a full tile that runs the second product of the tile before, at position ``before`` with weights ``p``, while this
    tile's exponentials are computed. Returns (acc, row_sum, row_max, p, pending_rescale). Keys are not in pages.

    pending_rescale: the factor by which acc is still to be multiplied. p is float32: in 16 bits the compiler would pass it through shared
    memory.
    """
    s = scores_of(
        q, first, first + TILE_N, True, key, rows, b, h, 0, scales, captured, SCORE, MASK, ALWAYS,
        False, HAS_SCORE, HAS_MASK, HAS_ALWAYS, RANGES, TILE_N, HEAD_DIM, BLOCK_D, 0, False, PRECISION, IS_RAW, IS_DESCRIBED, True,
    )  # fmt: skip
    v = whole_keys_at(key.v, key.v_strides, before, key, HEAD_DIM_V, BLOCK_DV, TILE_N, IS_DESCRIBED)
    acc = plus_kept(acc, pending_rescale, p, v, b, h, before, rows.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
    p, pending_rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, IS_RAW)
    return acc, row_sum, row_max, p, pending_rescale


@triton.jit
def visit_all(
    acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, rows, b, h, scales, captured,
    SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr, DROPOUT: tl.constexpr,
    HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, RANGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, IS_RAW: tl.constexpr, IS_LATE: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Tiles ``begin`` to ``stop`` in one loop. Partial tiles, from ``full`` on, evaluate the mask in a branch, so that the loads of the
    first partial tile are pipelined like all others. Returns (acc, row_sum, row_max). Needs ranges, and descriptors,
    which know the end of the keys."""
    p, pending_rescale = tl.zeros((TILE_M, TILE_N), tl.float32), tl.full((TILE_M,), 1.0, tl.float32)
    before = begin * 0
    if IS_LATE and begin < stop:
        before = first_at(runs, begin, full, seqlen_k, RANGES, TILE_N)
    for i in range(begin, stop):
        first = first_at(runs, i, full, seqlen_k, RANGES, TILE_N)
        s = scores_of(
            q, first, seqlen_k, True, key, rows, b, h, 0, scales, captured, SCORE, MASK, ALWAYS,
            False, HAS_SCORE, HAS_MASK, HAS_ALWAYS, RANGES, TILE_N, HEAD_DIM, BLOCK_D, 0, False, PRECISION, IS_RAW, IS_DESCRIBED, False,
        )  # fmt: skip
        if i >= full:
            lane = first + tl.arange(0, TILE_N)
            s = tl.where(MASK(b, h, lane[None, :], rows.mask, captured.mask.scalars, captured.mask.tensors), s, float("-inf"))
        if IS_LATE:
            v = whole_keys_at(key.v, key.v_strides, before, key, HEAD_DIM_V, BLOCK_DV, TILE_N, IS_DESCRIBED)
            acc = plus_kept(acc, pending_rescale, p, v, b, h, before, rows.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
            p, pending_rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, IS_RAW)
            before = first
        else:
            p, rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, IS_RAW)
            v = whole_keys_at(key.v, key.v_strides, first, key, HEAD_DIM_V, BLOCK_DV, TILE_N, IS_DESCRIBED)
            acc = plus_kept(acc, rescale, p, v, b, h, first, rows.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
    if IS_LATE:  # noqa: SIM102 (the first condition is decided at compile time, the second at run time)
        if begin < stop:
            v = whole_keys_at(key.v, key.v_strides, before, key, HEAD_DIM_V, BLOCK_DV, TILE_N, IS_DESCRIBED)
            acc = plus_kept(acc, pending_rescale, p, v, b, h, before, rows.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
    return acc, row_sum, row_max


@triton.jit
def first_at(runs, i, full, seqlen_k, RANGES: tl.constexpr, TILE_N: tl.constexpr):
    """The first key of the i-th tile, with full tiles before partial ones."""
    partial, _, _ = partial_at(runs, i - full, seqlen_k, RANGES, TILE_N, 0)
    return tl.where(i < full, full_at(runs, i, RANGES, TILE_N, 0), partial)


@triton.jit
def store_results(
    acc, row_sum, row_max, tensors, strides, spans, sizes, q_row, at, h, is_row, split, described_at,
    HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, HAS_MAX: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, IS_DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Writes a row tile's output and statistics. at: its rows of storage. h: their heads. described_at:
    entry, head and row of its first row.

    A split writes to [split][q row][head][position]; the sink is added when splits are combined.
    """
    row_sum = tl.sum(row_sum, 1)
    statistic = (q_row.to(tl.int64) * sizes.heads + h) * sizes.positions + at
    part = split.to(tl.int64) * spans.part_statistics
    if HAS_MAX:
        seen = tl.where(row_sum == 0, float("-inf"), row_max * _LN2)
        tl.store(tensors.max_scores + part + statistic, seen, mask=is_row)
    if HAS_SINK:
        logit = tl.load(tensors.sink + h).to(tl.float32) * _LOG2E
        highest = tl.maximum(row_max, logit)
        rescale = tl.exp2(row_max - highest)
        row_sum = row_sum * rescale + tl.exp2(logit - highest)
        acc = acc * rescale[:, None]
        row_max = highest
    total = tl.where(row_sum == 0, 1.0, row_sum)
    if HAS_LSE:  # before the output, since a program may have to wait for the output's copy engine
        lse = tl.where(row_sum == 0, float("-inf"), row_max * _LN2 + tl.log(total))
        tl.store(tensors.lse + part + statistic, lse, mask=is_row)
    if PRECISION == "ieee":
        acc = acc / total[:, None]
    else:  # one division instead of many, each of seven instructions
        acc = acc * (1.0 / total)[:, None]
    if IS_DESCRIBED >= 3:
        b, head, first = described_at
        tensors.out.store([b, head, first, 0], tl.reshape(acc.to(tensors.out.dtype), (1, 1, acc.shape[0], BLOCK_DV)))
    else:
        offsets = row_offsets(q_row, h, at, strides.out)
        d = tl.arange(0, BLOCK_DV)[None, :]
        out = tensors.out + split.to(tl.int64) * strides.part_out
        tl.store(out + offsets[:, None] + d, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (d < HEAD_DIM_V))


@triton.jit
def forward_tile(
    tensors, strides, spans, cache, dealt, sizes, lists, scale, captured,
    SCORE_ROWS: tl.constexpr, SCORE: tl.constexpr, MASK_ROWS: tl.constexpr, MASK: tl.constexpr, ALWAYS_ROWS: tl.constexpr,
    ALWAYS: tl.constexpr, DROPOUT_ROWS: tl.constexpr, DROPOUT: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALWAYS: tl.constexpr,
    HAS_DROPOUT: tl.constexpr, RANGES: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, LIST_M: tl.constexpr, LIST_N: tl.constexpr, HAS_FULL: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IS_PACKED: tl.constexpr, HAS_ENTRIES: tl.constexpr, IS_CACHE: tl.constexpr, HAS_LEFTPAD: tl.constexpr,
    HAS_ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, HAS_MAX: tl.constexpr,
    PRECISION: tl.constexpr, IS_RAW: tl.constexpr, IS_LATE: tl.constexpr, IS_DESCRIBED: tl.constexpr, IS_JOINED: tl.constexpr,
    HAS_GUARD: tl.constexpr, IS_RISING: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One row tile, or one split of its keys.

    SCORE, MASK, ALWAYS, DROPOUT and their _ROWS: the functions of the score mod, of the mask, of the mask evaluated in every tile, and of
    the mask of the weights that are kept. RANGES: number of the mask's row ranges, 0 if lists select the tiles to visit. IS_PACKED: a tile
    may have several query heads, which share keys.
    IS_CACHE: entries come from the cache's tables. IS_RAW: the greatest product has the greatest score (the scale is positive), or there is
    a score mod, so maxima are taken before the conversion to base 2. IS_LATE: a full tile's second product overlaps the next one's
    exponentials.
    IS_DESCRIBED: keys and values are loaded by tensor descriptors. SUMS: see ``tile_config.row_sums``.
    """
    if HAS_GUARD and is_off(tensors.guard):
        return
    m, b, h, kv_head, split = work_of(sizes, dealt, tensors.order, HAS_ENTRIES)
    if m < 0:
        return
    if IS_CACHE:
        sequence = cache_entry(b, tensors, cache, sizes.seqlen_q, HAS_LEFTPAD, HAS_ROWS)
    else:
        sequence = entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, HAS_ENTRIES)
    seqlen_k = sequence.seqlen_k
    if IS_PACKED:
        packed, group = dealt.packed, dealt.padded
    else:
        packed, group = 1, 1
    line, first_row, end_row = row_tile(m, sequence.seqlen_q, TILE_M, LIST_M, group)
    if first_row >= end_row:
        return
    r = tl.arange(0, TILE_M)
    position = first_row + r // group
    is_row = position < end_row
    position = tl.minimum(position, end_row - 1)  # missing rows are evaluated as the last row, and not stored
    heads = h + r % group
    if IS_PACKED:
        end_head = tl.minimum(h + packed, (kv_head + 1) * sizes.ratio)
        is_row = is_row & (heads < end_head)
        heads = tl.minimum(heads, end_head - 1)
    at = sequence.q_start + position
    acc = tl.zeros((TILE_M, BLOCK_DV), tl.float32)
    row_sum = tl.zeros((TILE_M, SUMS), tl.float32)
    factor = tl.full((), _LOG2E, tl.float32) if HAS_SCORE else scale * _LOG2E
    scales = Scales(score=scale, base_2=factor)
    if IS_RAW:  # finite after scaling too
        row_max = tl.full((TILE_M,), _LOWEST, tl.float32) / tl.maximum(factor, 1.0)
    else:
        row_max = tl.full((TILE_M,), _LOWEST, tl.float32)
    if seqlen_k <= 0:  # mods must not be evaluated for a sequence without keys: captured tensors need not cover it
        store_results(
            acc, row_sum, row_max, tensors, strides, spans, sizes, sequence.q_row, at, heads, is_row, split, (b, h, first_row),
            HAS_SINK, HAS_LSE, HAS_MAX, HEAD_DIM_V, BLOCK_DV, PRECISION, IS_DESCRIBED,
        )  # fmt: skip
        return
    if IS_DESCRIBED == 4:
        q = tl.reshape(tensors.q.load([b, h, first_row, 0]), (TILE_M, BLOCK_D))
    else:
        offsets = row_offsets(sequence.q_row, heads, at, strides.q)
        q = load_rows(tensors.q, offsets[:, None], is_row[:, None], HEAD_DIM, BLOCK_D, False)
    q_idx = (position + sequence.q_first)[:, None]
    if IS_PACKED:
        q_head = heads[:, None]
    else:
        q_head = h
    # heads in one tile are 8 rows apart with other words, and lists of other sizes begin anywhere
    HAS_FOURS: tl.constexpr = not IS_PACKED and LIST_M % 16 == 0 and LIST_N % 16 == 0
    q_places = places(first_row + sequence.q_first, TILE_M, True, False) if HAS_FOURS else q_idx
    kept = rows_of(
        b, q_head, q_idx, q_places, captured, SCORE_ROWS, MASK_ROWS, ALWAYS_ROWS, DROPOUT_ROWS, HAS_SCORE, HAS_MASK, HAS_ALWAYS, HAS_DROPOUT
    )
    kv_head = kv_head.to(tl.int64)
    if IS_DESCRIBED >= 2:
        k_from, v_from = tensors.k, tensors.v
    else:
        k_from, v_from = tensors.k + kv_head * strides.k.head, tensors.v + kv_head * strides.v.head
    if IS_DESCRIBED == 1:
        row, start = sequence.k_row.to(tl.int64), (m * 0 + sequence.k_start).to(tl.int64)
        k_from = tl.make_tensor_descriptor(
            k_from + row * strides.k.rows + start * strides.k.position, [seqlen_k, HEAD_DIM], [strides.k.position, 1], [TILE_N, BLOCK_D]
        )
        v_from = tl.make_tensor_descriptor(
            v_from + row * strides.v.rows + start * strides.v.position, [seqlen_k, HEAD_DIM_V], [strides.v.position, 1], [TILE_N, BLOCK_DV]
        )
    key = KeyStorage(
        k=k_from, v=v_from, row=sequence.k_row, start=sequence.k_start, k_strides=strides.k, v_strides=strides.v, head=kv_head.to(tl.int32)
    )
    # tiles begin at multiples of their size, and so do pages
    FITS: tl.constexpr = (
        PAGE_SIZE > 0 and not HAS_LEFTPAD and (LIST_N == 0 or LIST_N % TILE_N == 0)
        and (TILE_N % max(PAGE_SIZE, 1) == 0 or PAGE_SIZE % TILE_N == 0)
    )  # fmt: skip
    pages = tensors.pages + b.to(tl.int64) * sizes.pages_each
    if IS_RISING:
        last_row = tl.minimum(first_row + TILE_M // group, end_row) - 1
        limits = (
            MASK_ROWS(b, h, first_row + sequence.q_first, captured.mask.scalars, captured.mask.tensors),
            MASK_ROWS(b, h, last_row + sequence.q_first, captured.mask.scalars, captured.mask.tensors),
        )  # fmt: skip
    else:
        limits = kept.mask
    runs, full, partial = visits_of(
        limits, lists, spans.lists, sequence, b, h, line, seqlen_k, RANGES, TILE_M, TILE_N, LIST_N, HAS_FULL, HAS_ENTRIES, IS_RISING
    )
    begin, stop = 0, full + partial
    if sizes.splits > 1:  # equal shares, as in sequences.split_kv
        share = (full + partial + sizes.splits - 1) // sizes.splits
        begin = tl.minimum(split * share, full + partial)
        stop = tl.minimum(begin + share, full + partial)
    if RANGES > 0:
        kept = RowsOfParts(score=kept.score, mask=inside_of(kept.mask, seqlen_k, RANGES), always=kept.always, dropout=kept.dropout)
    start, end_full = tl.minimum(begin, full), tl.minimum(stop, full)
    if IS_JOINED:
        tl.static_assert(RANGES > 0 and PAGE_SIZE == 0 and IS_DESCRIBED > 0, "tiles of both kinds are loaded alike")
        acc, row_sum, row_max = visit_all(
            acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, kept, b, q_head, scales, captured,
            SCORE, MASK, ALWAYS, DROPOUT, HAS_SCORE, HAS_MASK, HAS_ALWAYS, HAS_DROPOUT, RANGES,
            TILE_M, TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PRECISION, IS_RAW, IS_LATE, IS_DESCRIBED,
        )  # fmt: skip
        begin, stop = full, full
    elif IS_LATE:
        tl.static_assert(PAGE_SIZE == 0, "page numbers are loaded ahead of one tile's keys and values, not of two tiles'")
        p, pending_rescale = tl.zeros((TILE_M, TILE_N), tl.float32), tl.full((TILE_M,), 1.0, tl.float32)
        before = start * 0
        if start < end_full:
            before = full_at(runs, start, RANGES, TILE_N, LIST_N)
        for i in range(start, end_full):
            first = full_at(runs, i, RANGES, TILE_N, LIST_N)
            acc, row_sum, row_max, p, pending_rescale = visit_late(
                acc, row_sum, row_max, p, pending_rescale, before, q, first, key, kept, b, q_head, scales, captured,
                SCORE, MASK, ALWAYS, DROPOUT, HAS_SCORE, HAS_MASK, HAS_ALWAYS, HAS_DROPOUT, RANGES,
                TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PRECISION, IS_RAW, IS_DESCRIBED,
            )  # fmt: skip
            before = first
        if start < end_full:
            v = whole_keys_at(key.v, key.v_strides, before, key, HEAD_DIM_V, BLOCK_DV, TILE_N, IS_DESCRIBED)
            acc = plus_kept(acc, pending_rescale, p, v, b, q_head, before, kept.dropout, captured, DROPOUT, HAS_DROPOUT, PRECISION)
    else:
        # Page numbers are loaded three tiles ahead and clamped closer to their use: Triton does not pipeline a loop
        # that passes on an unchanged value
        numbers, near, coming, nearby = 0, 0, 0, 0
        if PAGE_SIZE > 0:
            numbers, near, coming, nearby = first_numbers(
                runs, start, end_full, key.start, seqlen_k, pages, cache.last_page, RANGES, TILE_N, LIST_N, PAGE_SIZE, FITS
            )
        for i in range(start, end_full):
            first = full_at(runs, i, RANGES, TILE_N, LIST_N)
            of_tile = numbers
            if PAGE_SIZE > 0:
                numbers, near = tl.minimum(near, cache.last_page), tl.maximum(coming, 0)
                beyond = full_at(runs, tl.minimum(i + 3, end_full - 1), RANGES, TILE_N, LIST_N)
                coming = page_numbers(key.start + beyond, 0, pages, TILE_N, PAGE_SIZE, FITS, False)
            acc, row_sum, row_max = visit(
                acc, row_sum, row_max, q, first, first + TILE_N, True, key, kept, b, q_head, of_tile, scales, captured,
                SCORE, MASK, ALWAYS, DROPOUT, False, HAS_SCORE, HAS_MASK, HAS_ALWAYS, HAS_DROPOUT, RANGES,
                TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, FITS, PRECISION, IS_RAW, IS_DESCRIBED,
            )  # fmt: skip
    for i in range(tl.maximum(begin - full, 0), tl.maximum(stop - full, 0)):
        first, end, is_shown = partial_at(runs, i, seqlen_k, RANGES, TILE_N, LIST_N)
        if PAGE_SIZE > 0:
            of_tile = inside(page_numbers(key.start + first, key.start + end - 1, pages, TILE_N, PAGE_SIZE, FITS, True), cache.last_page)
        else:
            of_tile = 0
        acc, row_sum, row_max = visit(
            acc, row_sum, row_max, q, first, end, is_shown, key, kept, b, q_head, of_tile, scales, captured,
            SCORE, MASK, ALWAYS, DROPOUT, True, HAS_SCORE, HAS_MASK, HAS_ALWAYS, HAS_DROPOUT, RANGES,
            TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PAGE_SIZE, FITS, PRECISION, IS_RAW, IS_DESCRIBED,
        )  # fmt: skip
    if IS_RAW:
        row_max = row_max * factor
    if HAS_DROPOUT:
        acc = acc * factor_of(captured)
    if PAGE_SIZE > 0:  # always true; uses the numbers, so that their loads are not removed
        tl.store(tensors.pages + tl.arange(0, NEARBY), nearby, mask=(nearby == 0) & (cache.last_page < -1))
    store_results(
        acc, row_sum, row_max, tensors, strides, spans, sizes, sequence.q_row, at, heads, is_row, split, (b, h, first_row),
        HAS_SINK, HAS_LSE, HAS_MAX, HEAD_DIM_V, BLOCK_DV, PRECISION, IS_DESCRIBED,
    )  # fmt: skip
