"""Forward kernel (device code): online softmax in base 2 over the key tiles that a row tile visits.

One body serves every variant. Its caller, an entry generated for the call's mods, passes the groups of ``kernels.arguments``, and the mods
as functions.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.addressing import Portion, is_off, parted, row_offsets, sequence_of, tile_of, work_of
from anyattn.backends.triton.kernels.arguments import OF_HEAD, OF_KEY, KeyFactors, KeyStorage, RowsOfParts, Scales
from anyattn.backends.triton.kernels.dropout import factor_of, first_block, places, plus_kept, scores
from anyattn.backends.triton.kernels.eight_bits import halved, widened, widened_rows
from anyattn.backends.triton.kernels.even_shares import item_at, next_in_share, start_of_share, store_no_rows, store_part
from anyattn.backends.triton.kernels.key_tiles import factors_at, keys_at, pairs_at, rows_at, whole_keys_at
from anyattn.backends.triton.kernels.paged_kv import NEARBY, first_numbers, inside, page_numbers
from anyattn.backends.triton.kernels.results import no_output, no_results, store_results, whole_output
from anyattn.backends.triton.kernels.softmax.ascending import ascending, visit_at, visits_before
from anyattn.backends.triton.kernels.softmax.sections import merged, nothing_yet, settled
from anyattn.backends.triton.kernels.softmax.weights import scaled_weights_of, weights_of
from anyattn.backends.triton.kernels.tile_iterator import first_at, full_at, inside_of, lanes_of, partial_at, sure_of, visits_of
from anyattn.backends.triton.kernels.wrapped_rows import wraps_of

__all__ = ["forward_tile", "rows_of"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_OF_HEAD: tl.constexpr = tl.constexpr(OF_HEAD)
_OF_KEY: tl.constexpr = tl.constexpr(OF_KEY)


@triton.jit
def rows_of(b, h, q_idx, q_places, mods):
    """``RowsOfParts``; any tuple for a part that does not exist. q_places: the rows' ``kernels.dropout.places``."""
    score_rows, mask_rows, always_rows, dropout_rows = (q_idx, q_idx), (q_idx, q_idx), (q_idx, q_idx), (q_idx, q_idx)
    if mods.score.exists:
        score_rows = mods.score.rows(b, h, q_idx, mods.score.scalars, mods.score.tensors)
    if mods.mask.exists:
        mask_rows = mods.mask.rows(b, h, q_idx, mods.mask.scalars, mods.mask.tensors)
    if mods.always.exists:
        always_rows = mods.always.rows(b, h, q_idx, mods.always.scalars, mods.always.tensors)
    if mods.dropout.exists:
        dropout_rows = mods.dropout.rows(b, h, q_places, mods.dropout.scalars, mods.dropout.tensors)
    return RowsOfParts(score=score_rows, mask=mask_rows, always=always_rows, dropout=dropout_rows, sure=(0, 0))


@triton.jit
def kv_for(kv, end, mod, IS_WHOLE: tl.constexpr):
    """The keys that a mod is evaluated at for ``kv``: none beyond the sequence, unless the mod loads nothing there (``is_padded``)."""
    if IS_WHOLE or mod.is_padded:
        return kv
    else:
        return tl.minimum(kv, end - 1)


@triton.jit
def scores_of(
    q, first, end, is_shown, key, rows, b, h, numbers, scales, mods, c, IS_PARTIAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    IS_CUT: tl.constexpr,
):  # fmt: skip
    """([rows, TILE_N]: the scores of the keys at place ``first``, -inf where hidden, in base 2 unless IS_RAW; these keys).

    end: keys from it on do not exist (IS_WHOLE: all keys of the tile exist; unless IS_PARTIAL, missing ones are zeros). is_shown: all
    others are visible regardless of the mask. key: ``KeyStorage``. rows: ``RowsOfParts``. numbers: of the tile's pages, see
    ``paged_kv.page_numbers``. IS_CUT: keys from ``end`` on are not loaded.
    """
    lane = lanes_of(first, c)
    IS_PLAIN: tl.constexpr = not IS_PARTIAL and not (c.ONE_KV and IS_CUT)  # a value that does not exist is 0
    k = widened_rows(whole_keys_at(key, first, end, numbers, c, IS_CUT, IS_PLAIN), first_block(q, c).dtype, c)
    s = scores(q, k, c)
    if c.IS_HALVED:
        s = s * scales.rows
    if c.K_SCALE == _OF_KEY:
        s = s * factors_at(key, first, end, numbers, c, False, IS_CUT)[None, :]
    if mods.score.exists:
        s = s * scales.score
    elif not c.IS_RAW:
        s = s * scales.base_2
    lanes = lane[None, :]
    if mods.score.exists:
        s = mods.score.value(s, b, h, kv_for(lanes, end, mods.score, IS_WHOLE), rows.score, mods.score.scalars, mods.score.tensors).to(
            tl.float32
        )
    if IS_PARTIAL:
        s = tl.where(seen_in(lanes, end, is_shown, rows, b, h, mods, c, IS_WHOLE), s, float("-inf"))
    if mods.always.exists and (mods.always.sure is None or c.JOINS > 0):
        s = seen_always(s, lanes, end, rows, b, h, mods.always, IS_WHOLE)
    elif mods.always.exists:  # noqa: SIM102 (the first condition is decided at compile time, the second at run time)
        if (first < rows.sure[0]) | (first + c.TILE_N > rows.sure[1]):
            s = seen_always(s, lanes, end, rows, b, h, mods.always, IS_WHOLE)
    return s, k


@triton.jit
def seen_always(s, lanes, end, rows, b, h, mod, IS_WHOLE: tl.constexpr):
    """Scores of the keys at positions ``lanes``, -inf where the mask that every tile evaluates hides them."""
    kv = kv_for(lanes, end, mod, IS_WHOLE)
    return tl.where(mod.value(b, h, kv, rows.always, mod.scalars, mod.tensors), s, float("-inf"))


@triton.jit
def seen_in(lanes, end, is_shown, rows, b, h, mods, c, IS_WHOLE: tl.constexpr):
    """Whether the keys at positions ``lanes`` of a partial tile are visible by ranges or lists; see ``scores_of``."""
    if c.RANGES > 0:  # the rows' limits are inside the sequence
        return mods.mask.value(b, h, lanes, rows.mask, mods.mask.scalars, mods.mask.tensors)
    else:
        seen = lanes < end
        if mods.mask.exists:
            kv = kv_for(lanes, end, mods.mask, IS_WHOLE)
            seen = seen & (mods.mask.value(b, h, kv, rows.mask, mods.mask.scalars, mods.mask.tensors) | is_shown)
        return seen


@triton.jit
def weighed(acc, row_sum, row_max, q, s, k, first, end, key, rows, b, h, numbers, scales, mods, c, IS_CUT: tl.constexpr):
    """(acc, row_sum, row_max) with the values of one tile of keys ``k``, weighed by their scores ``s``; see ``scores_of``."""
    DTYPE: tl.constexpr = tl.bfloat16 if c.IS_HALVED else first_block(q, c).dtype  # of products
    if c.V_SCALE == _OF_KEY:
        factors = factors_at(key, first, end, numbers, c, True, IS_CUT)[None, :]
        p, rescale, row_sum, row_max = scaled_weights_of(
            s, factors, row_sum, row_max, scales.base_2, mods.score.exists, c.IS_RAW, tl.float16 == DTYPE
        )
    else:
        p, rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, c.IS_RAW, c.SECTION > 0)
    if c.HAS_PAIRS:
        even, odd = pairs_at(key, first, end, numbers, DTYPE, c, IS_CUT)
        even = plus_kept(acc[0], rescale, p, even, b, h, first, rows, mods, c.PRECISION)
        odd = plus_kept(acc[1], rescale, p, odd, b, h, first, rows, mods, c.PRECISION)
        acc = (even, odd)
    else:
        if c.ONE_KV:
            v = first_block(k, c)
        else:
            v = widened(keys_at(key, first, end, numbers, c, True, IS_CUT, not IS_CUT), DTYPE, c.IS_NVIDIA)
        acc = plus_kept(acc, rescale, p, v, b, h, first, rows, mods, c.PRECISION)
    return acc, row_sum, row_max


@triton.jit
def visit(acc, row_sum, row_max, q, first, end, is_shown, key, rows, b, h, numbers, scales, mods, c, IS_PARTIAL: tl.constexpr):
    """Adds one tile of keys, at place ``first``, to (acc, row_sum, row_max); see ``scores_of``."""
    s, k = scores_of(q, first, end, is_shown, key, rows, b, h, numbers, scales, mods, c, IS_PARTIAL, not IS_PARTIAL, IS_PARTIAL)
    return weighed(acc, row_sum, row_max, q, s, k, first, end, key, rows, b, h, numbers, scales, mods, c, IS_PARTIAL)


@triton.jit
def visit_or_skip(
    acc, row_sum, row_max, skipped, q, first, end, is_shown, key, rows, b, h, below, scales, mods, c, IS_PARTIAL: tl.constexpr
):  # fmt: skip
    """``visit`` of a tile that is left out if in every row the greatest probability is less than 2 ** ``below`` of that of row_max. NaN is
    not. skipped: the number of such tiles. Keys are not in pages."""
    s, k = scores_of(q, first, end, is_shown, key, rows, b, h, 0, scales, mods, c, IS_PARTIAL, not IS_PARTIAL, IS_PARTIAL)
    distance = tl.max(s, 1) - row_max
    if c.IS_RAW:
        distance = distance * scales.base_2
    is_needed = tl.max((distance < below).to(tl.int32) ^ 1, 0) > 0
    if is_needed:
        acc, row_sum, row_max = weighed(acc, row_sum, row_max, q, s, k, first, end, key, rows, b, h, 0, scales, mods, c, IS_PARTIAL)
    return acc, row_sum, row_max, tl.where(is_needed, skipped, skipped + 1)


@triton.jit
def add_late(acc, pending_rescale, p, before, key, rows, b, h, mods, c):
    """``acc`` with the second product of the tile at position ``before``, whose keys all exist and are not in pages."""
    v = keys_at(key, before, before + c.TILE_N, 0, c, True, False, True)
    return plus_kept(acc, pending_rescale, p, v, b, h, before, rows, mods, c.PRECISION)


@triton.jit
def visit_late(acc, row_sum, row_max, p, pending_rescale, before, q, first, key, rows, b, h, scales, mods, c):
    """``visit`` of a full tile that runs the second product of the tile before, at position ``before`` with weights ``p``, while this
    tile's exponentials are computed. Returns (acc, row_sum, row_max, p, pending_rescale). Keys are not in pages.

    pending_rescale: the factor by which acc is still to be multiplied. p is float32: in 16 bits the compiler would pass it through shared
    memory.
    """
    s, _k = scores_of(q, first, first + c.TILE_N, True, key, rows, b, h, 0, scales, mods, c, False, True, False)
    acc = add_late(acc, pending_rescale, p, before, key, rows, b, h, mods, c)
    p, pending_rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, c.IS_RAW)
    return acc, row_sum, row_max, p, pending_rescale


@triton.jit
def visit_all(acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, rows, b, h, scales, mods, c):
    """Tiles ``begin`` to ``stop`` in one loop. Partial tiles, from ``full`` on, evaluate the mask in a branch, so that the loads of the
    first partial tile are pipelined like all others. Returns (acc, row_sum, row_max). Needs ranges, and descriptors,
    which know the end of the keys."""
    p, pending_rescale = tl.zeros((c.TILE_M, c.TILE_N), tl.float32), tl.full((c.TILE_M,), 1.0, tl.float32)
    before = begin * 0
    if c.IS_LATE and begin < stop:
        before = first_at(runs, begin, full, seqlen_k, c)
    for i in range(begin, stop):
        first = first_at(runs, i, full, seqlen_k, c)
        s, _k = scores_of(q, first, seqlen_k, True, key, rows, b, h, 0, scales, mods, c, False, False, False)
        if i >= full:
            lane = first + tl.arange(0, c.TILE_N)
            s = tl.where(mods.mask.value(b, h, lane[None, :], rows.mask, mods.mask.scalars, mods.mask.tensors), s, float("-inf"))
        if c.IS_LATE:
            acc = add_late(acc, pending_rescale, p, before, key, rows, b, h, mods, c)
            p, pending_rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, c.IS_RAW)
            before = first
        else:
            p, rescale, row_sum, row_max = weights_of(s, row_sum, row_max, scales.base_2, c.IS_RAW)
            acc = add_late(acc, rescale, p, first, key, rows, b, h, mods, c)
    if c.IS_LATE:  # noqa: SIM102 (the first condition is decided at compile time, the second at run time)
        if begin < stop:
            acc = add_late(acc, pending_rescale, p, before, key, rows, b, h, mods, c)
    return acc, row_sum, row_max


@triton.jit
def visit_portion(acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, pages, rows, b, h, cache, scales, mods, c):
    """Tiles ``begin`` to ``stop`` in one loop: ``visit_all`` for keys without descriptors, in pages or not. Returns (acc, row_sum,
    row_max, nearby page numbers). The first partial tile is loaded ahead like all others."""
    numbers, near, coming, nearby = 0, 0, 0, 0
    if c.PAGE_SIZE > 0:
        numbers, near, coming, nearby = first_numbers(runs, begin, stop, full, key.start, seqlen_k, pages, cache.last_page, c)
    for i in range(begin, stop):
        first = first_at(runs, i, full, seqlen_k, c)
        of_tile = numbers
        if c.PAGE_SIZE > 0:  # loaded three tiles ahead, see ``visited``
            numbers, near = tl.minimum(near, cache.last_page), tl.maximum(coming, 0)
            beyond = first_at(runs, tl.minimum(i + 3, stop - 1), full, seqlen_k, c)
            coming = page_numbers(key.start + beyond, key.start + seqlen_k - 1, pages, c, True)
        s, k = scores_of(q, first, seqlen_k, True, key, rows, b, h, of_tile, scales, mods, c, False, False, True)
        if i >= full:
            lanes = first + tl.arange(0, c.TILE_N)[None, :]
            s = tl.where(seen_in(lanes, seqlen_k, True, rows, b, h, mods, c, False), s, float("-inf"))
        acc, row_sum, row_max = weighed(acc, row_sum, row_max, q, s, k, first, seqlen_k, key, rows, b, h, of_tile, scales, mods, c, True)
    return acc, row_sum, row_max, nearby


@triton.jit
def visit_in_order(row_max, q, begin, stop, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c):
    """(acc, row_sum, row_max) of the visits ``begin`` to ``stop`` alone, in the order of the keys. row_max: before the first key. Whole and
    cut tiles are computed alike, and one that hides all keys from a row changes none of its bits: so these are the same in every tile."""
    acc, row_sum = no_output(c), tl.zeros((c.TILE_M, c.SUMS), tl.float32)
    for i in range(begin, stop):
        first, is_shown, is_whole = visit_at(visits, i, seqlen_k, c)
        numbers = 0
        if c.PAGE_SIZE > 0:
            numbers = inside(page_numbers(key.start + first, key.start + seqlen_k - 1, pages, c, True), cache.last_page)
        s, k = scores_of(q, first, seqlen_k, True, key, rows, b, h, numbers, scales, mods, c, False, False, True)
        if is_whole == 0:
            lanes = first + tl.arange(0, c.TILE_N)[None, :]
            s = tl.where(seen_in(lanes, seqlen_k, is_shown, rows, b, h, mods, c, False), s, float("-inf"))
        acc, row_sum, row_max = weighed(acc, row_sum, row_max, q, s, k, first, seqlen_k, key, rows, b, h, numbers, scales, mods, c, True)
    return acc, row_sum, row_max


@triton.jit
def visit_sections(lowest, q, part, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c):
    """(acc, row_sum, row_max in base 2) of all sections of the keys, merged in their order; with IS_PART of section ``part`` alone.
    lowest: row_max before the first key."""
    if c.IS_PART:
        begin, stop = visits_before(visits, part * c.SECTION, c), visits_before(visits, (part + 1) * c.SECTION, c)
        acc, row_sum, row_max = visit_in_order(lowest, q, begin, stop, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c)
        total, sums, top = settled(acc, row_sum, row_max, scales, c)
    else:
        total, sums, top = nothing_yet(c)
        i = visits.count * 0
        while i < visits.count:
            first, _is_shown, _is_whole = visit_at(visits, i, seqlen_k, c)
            stop = tl.maximum(visits_before(visits, (first // c.SECTION + 1) * c.SECTION, c), i + 1)
            acc, row_sum, row_max = visit_in_order(lowest, q, i, stop, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c)
            acc, row_sum, row_max = settled(acc, row_sum, row_max, scales, c)
            total, sums, top = merged(total, sums, top, acc, row_sum, row_max)
            i = stop
    return total, sums, top


@triton.jit
def visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c):
    """(output times sums in ``output_columns``, row_sum, row_max in base 2) of a portion of the keys of ``tile``, which has some."""
    sequence, b, position, heads, first_row = tile.sequence, tile.b, tile.position, tile.heads, tile.first
    _total, row_sum, row_max = no_results(c)
    acc = no_output(c)
    factor = tl.full((), _LOG2E, tl.float32) if mods.score.exists else scale * _LOG2E
    if c.K_SCALE == _OF_HEAD:
        of_head = tl.load(tensors.k_factors + b.to(tl.int64) * spans.k_factors.rows + tile.kv_head.to(tl.int64) * spans.k_factors.head)
        scale = scale * of_head
        if not mods.score.exists:
            factor = factor * of_head
    if c.IS_RAW:  # finite after scaling too
        row_max = row_max / tl.maximum(factor, 1.0)
    seqlen_k = sequence.seqlen_k
    k_wrap, v_wrap = wraps_of(tile.kv_head, tensors, strides, c)
    if c.IS_DESCRIBED == 4:
        q = tl.reshape(tensors.q.load([b, tile.h, first_row, 0]), (c.TILE_M, c.BLOCK_D))
    else:
        offsets = row_offsets(sequence.q_row, heads, tile.at, strides.q)
        q = rows_at(tensors.q, offsets[:, None], tile.is_row[:, None], c, c.Q_BYTES, c.WRAP, k_wrap)
    of_rows = 1.0
    if c.IS_HALVED:
        q, of_rows = halved(q, c.BLOCK_TAIL)
    of_values = 1.0
    if c.V_SCALE == _OF_HEAD and c.SECTION > 0:
        v_factors = tensors.v_factors + b.to(tl.int64) * spans.v_factors.rows
        of_values = tl.load(v_factors + tile.kv_head.to(tl.int64) * spans.v_factors.head)
    scales = Scales(score=scale, base_2=factor, rows=of_rows, output=of_values)
    q_idx = (position + sequence.q_first)[:, None]
    if c.IS_PACKED:
        q_head = heads[:, None]
    else:
        q_head = tile.h
    # heads in one tile are 8 rows apart with other words
    q_places = places(first_row + sequence.q_first, c.TILE_M, True, False) if c.HAS_FOURS and not c.IS_PACKED else q_idx
    kept = rows_of(b, q_head, q_idx, q_places, mods)
    kv_head = tile.kv_head.to(tl.int64)
    if c.IS_DESCRIBED >= 2:
        k_from, v_from = tensors.k, tensors.v
    else:
        k_from, v_from = tensors.k + kv_head * strides.k.head, tensors.v + kv_head * strides.v.head
    if c.IS_DESCRIBED == 1:
        row, start = sequence.k_row.to(tl.int64), (tile.m * 0 + sequence.k_start).to(tl.int64)
        k_from = tl.make_tensor_descriptor(
            k_from + row * strides.k.rows + start * strides.k.position,
            [seqlen_k, c.HEAD_DIM],
            [strides.k.position, 1],
            [c.TILE_N, c.BLOCK_D],
        )
        v_from = tl.make_tensor_descriptor(
            v_from + row * strides.v.rows + start * strides.v.position,
            [seqlen_k, c.HEAD_DIM_V],
            [strides.v.position, 1],
            [c.TILE_N, c.BLOCK_DV],
        )
    factors = KeyFactors(
        k=tensors.k_factors + kv_head * spans.k_factors.head, v=tensors.v_factors + kv_head * spans.v_factors.head,
        k_strides=spans.k_factors, v_strides=spans.v_factors,
    )  # fmt: skip
    key = KeyStorage(
        k=k_from, v=v_from, row=sequence.k_row, start=sequence.k_start, k_strides=strides.k, v_strides=strides.v,
        head=kv_head.to(tl.int32), factors=factors, k_wrap=k_wrap, v_wrap=v_wrap,
    )  # fmt: skip
    pages = tensors.pages + b.to(tl.int64) * sizes.pages_each
    if c.IS_RISING:
        last_row = tl.minimum(first_row + c.TILE_M // tile.group, tile.end) - 1
        limits = (
            mods.mask.rows(b, tile.h, first_row + sequence.q_first, mods.mask.scalars, mods.mask.tensors),
            mods.mask.rows(b, tile.h, last_row + sequence.q_first, mods.mask.scalars, mods.mask.tensors),
        )
    else:
        limits = kept.mask
    runs, full, partial = visits_of(limits, lists, spans.lists, sequence, b, tile.h, tile.line, seqlen_k, c, c.IS_RISING)
    begin, stop = full * 0, full + partial
    if c.IS_SHARED:
        begin = (portion.first.to(tl.int64) * stop // portion.of).to(tl.int32)
        stop = ((portion.first + portion.count).to(tl.int64) * stop // portion.of).to(tl.int32)
    elif portion.of > 1:  # equal shares, as in sequences.split_kv
        share = (full + partial + portion.of - 1) // portion.of
        begin = tl.minimum(portion.first * share, full + partial)
        stop = tl.minimum(begin + share, full + partial)
    if c.RANGES > 0:
        kept = RowsOfParts(
            score=kept.score, mask=inside_of(kept.mask, seqlen_k, c.RANGES), always=kept.always, dropout=kept.dropout,
            sure=sure_of(b, q_head, q_idx, seqlen_k, mods.always, c),
        )  # fmt: skip
    start, end_full = tl.minimum(begin, full), tl.minimum(stop, full)
    nearby = 0
    if c.SECTION > 0:
        visits = ascending(runs, full, partial, c)
        acc, row_sum, row_max = visit_sections(
            row_max, q, portion.first, visits, seqlen_k, key, pages, kept, b, q_head, cache, scales, mods, c
        )
        row_sum = row_sum[:, None]
    elif c.IS_SHARED and c.RANGES > 0:
        acc, row_sum, row_max, nearby = visit_portion(
            acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, pages, kept, b, q_head, cache, scales, mods, c
        )
        begin, stop = full, full
    elif c.IS_JOINED:
        tl.static_assert(c.RANGES > 0 and c.PAGE_SIZE == 0 and c.IS_DESCRIBED > 0, "tiles of both kinds are loaded alike")
        acc, row_sum, row_max = visit_all(
            acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, kept, b, q_head, scales, mods, c
        )
        begin, stop = full, full
    elif c.HAS_SKIP:
        tl.static_assert(c.PAGE_SIZE == 0 and not c.IS_HALVED, "of flex_attention alone")
        below, skipped = tl.log2(tl.load(tensors.skip_below + heads)), begin * 0
        for i in range(start, end_full):
            first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
            acc, row_sum, row_max, skipped = visit_or_skip(
                acc, row_sum, row_max, skipped, q, first, first + c.TILE_N, True, key, kept, b, q_head, below, scales, mods, c, False
            )
        for i in range(tl.maximum(begin - full, 0), tl.maximum(stop - full, 0)):
            first, end, is_shown = partial_at(runs, i, seqlen_k, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
            acc, row_sum, row_max, skipped = visit_or_skip(
                acc, row_sum, row_max, skipped, q, first, end, is_shown, key, kept, b, q_head, below, scales, mods, c, True
            )
        if c.COUNTS_SKIPS:
            is_head = tile.is_row & (tl.arange(0, c.TILE_M) < tile.group)
            counts = tensors.skip_counts + (b.to(tl.int64) * sizes.heads + heads) * 2
            tl.atomic_add(counts, tl.zeros_like(heads) + skipped, mask=is_head, sem="relaxed")
            tl.atomic_add(counts + 1, tl.zeros_like(heads) + (stop - begin), mask=is_head, sem="relaxed")
        begin, stop = full, full
    elif c.IS_LATE:
        tl.static_assert(c.PAGE_SIZE == 0, "page numbers are loaded ahead of one tile's keys and values, not of two tiles'")
        p, pending_rescale = tl.zeros((c.TILE_M, c.TILE_N), tl.float32), tl.full((c.TILE_M,), 1.0, tl.float32)
        before = start * 0
        if start < end_full:
            before = full_at(runs, start, c.RANGES, c.TILE_N, c.LIST_N)
        for i in range(start, end_full):
            first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
            acc, row_sum, row_max, p, pending_rescale = visit_late(
                acc, row_sum, row_max, p, pending_rescale, before, q, first, key, kept, b, q_head, scales, mods, c
            )
            before = first
        if start < end_full:
            acc = add_late(acc, pending_rescale, p, before, key, kept, b, q_head, mods, c)
    else:
        # Page numbers are loaded three tiles ahead and clamped closer to their use: Triton does not pipeline a loop
        # that passes on an unchanged value
        numbers, near, coming = 0, 0, 0
        if c.PAGE_SIZE > 0:
            numbers, near, coming, nearby = first_numbers(runs, start, end_full, full, key.start, seqlen_k, pages, cache.last_page, c)
        for i in range(start, end_full):
            first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
            of_tile = numbers
            if c.PAGE_SIZE > 0:
                numbers, near = tl.minimum(near, cache.last_page), tl.maximum(coming, 0)
                beyond = full_at(runs, tl.minimum(i + 3, end_full - 1), c.RANGES, c.TILE_N, c.LIST_N)
                coming = page_numbers(key.start + beyond, 0, pages, c, False)
            acc, row_sum, row_max = visit(
                acc, row_sum, row_max, q, first, first + c.TILE_N, True, key, kept, b, q_head, of_tile, scales, mods, c, False
            )
    if c.SECTION == 0:
        for i in range(tl.maximum(begin - full, 0), tl.maximum(stop - full, 0)):
            first, end, is_shown = partial_at(runs, i, seqlen_k, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
            if c.PAGE_SIZE > 0:
                of_tile = inside(page_numbers(key.start + first, key.start + end - 1, pages, c, True), cache.last_page)
            else:
                of_tile = 0
            acc, row_sum, row_max = visit(
                acc, row_sum, row_max, q, first, end, is_shown, key, kept, b, q_head, of_tile, scales, mods, c, True
            )
    if c.IS_RAW and c.SECTION == 0:
        row_max = row_max * factor
    total = acc if c.SECTION > 0 else whole_output(acc, c)
    if c.V_SCALE == _OF_HEAD and c.SECTION == 0:  # of a row that sees no key it may be anything
        of_head = tl.load(tensors.v_factors + b.to(tl.int64) * spans.v_factors.rows + kv_head * spans.v_factors.head)
        total = tl.where(tl.sum(row_sum, 1)[:, None] == 0, 0.0, total * of_head)
    if mods.dropout.exists:
        total = total * factor_of(mods)
    if c.PAGE_SIZE > 0:  # always true; uses the numbers, so that their loads are not removed
        tl.store(tensors.pages + tl.arange(0, NEARBY), nearby, mask=(nearby == 0) & (cache.last_page < -1))
    return total, row_sum, row_max


@triton.jit
def forward_tile(tensors, strides, spans, cache, dealt, sizes, shares, lists, scale, mods, c):
    """One row tile, one split of its keys, or with IS_SHARED an equal share of all key tiles of the call.

    c: ``ForwardConstants``.
    """
    if c.HAS_GUARD and is_off(tensors.guard):
        return
    if c.IS_SHARED:
        share_of_tiles(tensors, strides, spans, cache, dealt, sizes, shares, lists, scale, mods, c)
    else:
        m, b, h, kv_head, split = work_of(sizes, dealt, tensors.order, c.HAS_ENTRIES)
        if m < 0:
            return
        tile = tile_of(m, b, h, kv_head, sequence_of(b, tensors, cache, sizes, c), dealt, sizes, c)
        if tile.first >= tile.end:
            return
        if tile.sequence.seqlen_k <= 0:  # mods must not be evaluated for a sequence without keys: captured tensors need not cover it
            acc, row_sum, row_max = no_results(c)
            store_results(acc, tl.sum(row_sum, 1), row_max, tile, tensors, strides, spans, sizes, split, c)
            return
        portion = Portion(first=split, count=1, of=sizes.splits)
        acc, row_sum, row_max = visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c)
        store_results(acc, tl.sum(row_sum, 1), row_max, tile, tensors, strides, spans, sizes, split, c)


@triton.jit
def share_of_tiles(tensors, strides, spans, cache, dealt, sizes, shares, lists, scale, mods, c):
    """The row tiles, or portions of their keys, in this program's share. A row tile whose keys are all in one share is stored as a result,
    any other by parts, which ``combine.combine_shares`` adds."""
    at, stop, item, head, begin, share = start_of_share(tensors, cache, dealt, sizes, shares, c)
    if (at >= stop) | (begin == 0):
        store_no_rows(tensors, c)
    while (at < stop) & (item < shares.items):
        b, m, tiles = item_at(item, tensors, cache, sizes, shares, c)
        count = tl.minimum((tiles - begin).to(tl.int64), stop - at).to(tl.int32)
        if tiles > 0:
            kv_head, group = parted(head, dealt.tiles_each)
            sequence = sequence_of(b, tensors, cache, sizes, c)
            tile = tile_of(m, b, kv_head * sizes.ratio + group * dealt.packed, kv_head, sequence, dealt, sizes, c)
            acc, row_sum, row_max = no_results(c)
            if (sequence.seqlen_k > 0) & (tile.first < tile.end):
                portion = Portion(first=begin, count=count, of=tiles)
                acc, row_sum, row_max = visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c)
            row_sum = tl.sum(row_sum, 1)
            if count == tiles:
                store_results(acc, row_sum, row_max, tile, tensors, strides, spans, sizes, 0, c)
            else:
                is_end = begin + count == tiles
                store_part(acc, row_sum, row_max, tile, (at - begin) // share, begin, is_end, tensors, strides, sizes, c)
        at, item, head, begin = next_in_share(at, item, head, begin, count, tiles, dealt, sizes)
