"""Forward kernel (device code): online softmax in base 2 over the key tiles that a row tile visits.

One body serves every variant. Its caller, an entry generated for the call's mods, passes the groups of ``kernels.arguments``, and the mods
as functions.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.addressing import Portion, is_off, parted, row_offsets, sequence_of, tile_of, work_of
from anyattn.backends.triton.kernels.arguments import OF_HEAD, KeyFactors, KeyStorage, RowsOfParts, Scales
from anyattn.backends.triton.kernels.dropout import factor_of, places
from anyattn.backends.triton.kernels.eight_bits import halved
from anyattn.backends.triton.kernels.even_shares import item_at, next_in_share, start_of_share, store_no_rows, store_part
from anyattn.backends.triton.kernels.key_tiles import rows_at
from anyattn.backends.triton.kernels.paged_kv import NEARBY, first_numbers, inside, page_numbers
from anyattn.backends.triton.kernels.results import no_output, no_results, store_results, whole_output
from anyattn.backends.triton.kernels.softmax.ascending import ascending
from anyattn.backends.triton.kernels.softmax.visits import (
    add_late,
    row_values,
    visit,
    visit_all,
    visit_far,
    visit_late,
    visit_or_skip,
    visit_portion,
    visit_run,
    visit_sections,
)
from anyattn.backends.triton.kernels.tile_iterator import (
    full_at,
    inside_of,
    near_keys,
    partial_at,
    sure_of,
    visits_of,
)
from anyattn.backends.triton.kernels.wrapped_rows import wraps_of

__all__ = ["forward_tile", "rows_of"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_OF_HEAD: tl.constexpr = tl.constexpr(OF_HEAD)


@triton.jit
def rows_of(b, h, q_idx, q_places, mods):
    """``RowsOfParts``; any tuple for a part that does not exist. q_places: the rows' ``kernels.dropout.places``."""
    return RowsOfParts(
        score=row_values(mods.score, b, h, q_idx), mask=row_values(mods.mask, b, h, q_idx), always=row_values(mods.always, b, h, q_idx),
        dropout=row_values(mods.dropout, b, h, q_places), sure=(0, 0),
    )  # fmt: skip


@triton.jit
def visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c):
    """(output times sums in ``output_columns``, row_sum, row_max, greatest scores) of a portion of the keys of ``tile``, which has some;
    the latter two in base 2."""
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
        v_factors = tensors.v_factors + spans.v_factors.rows * b.to(tl.int64)
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
        acc, row_sum, row_max, top = visit_sections(
            row_max, q, portion.first, visits, seqlen_k, key, pages, kept, b, q_head, cache, scales, mods, c
        )
        row_sum = row_sum[:, None]
    elif c.IS_SHARED and c.RANGES > 0:
        acc, row_sum, row_max, nearby = visit_portion(
            acc, row_sum, row_max, q, begin, stop, full, seqlen_k, runs, key, pages, kept, b, q_head, cache, scales, mods, c
        )
        begin, stop = full, full
    elif (mods.score.has_after or mods.score.has_before) and c.PAGE_SIZE == 0:
        tl.static_assert(c.RANGES == 1 and not c.HAS_SKIP, "the full tiles are one run, and all are visited")
        last_row = tl.minimum(first_row + c.TILE_M // tile.group, tile.end) - 1
        near, near_end = near_keys(
            mods.score, first_row + sequence.q_first, last_row + sequence.q_first, runs.full_0.first, start, end_full, c.TILE_N
        )
        if mods.score.has_after:
            acc, row_sum, row_max = visit_far(
                acc, row_sum, row_max, q, start, near, runs, key, kept, b, q_head, q_idx, scales, mods.score.after, mods, c
            )
        acc, row_sum, row_max = visit_run(acc, row_sum, row_max, q, near, near_end, runs, key, kept, b, q_head, scales, mods, c)
        if mods.score.has_before:
            acc, row_sum, row_max = visit_far(
                acc, row_sum, row_max, q, near_end, end_full, runs, key, kept, b, q_head, q_idx, scales, mods.score.before, mods, c
            )
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
    if c.SECTION == 0:
        top = row_max
    total = acc if c.SECTION > 0 else whole_output(acc, c)
    if c.V_SCALE == _OF_HEAD and c.SECTION == 0:  # of a row that sees no key it may be anything
        of_head = tl.load(tensors.v_factors + b.to(tl.int64) * spans.v_factors.rows + kv_head * spans.v_factors.head)
        total = tl.where(tl.sum(row_sum, 1)[:, None] == 0, 0.0, total * of_head)
    if mods.dropout.exists:
        total = total * factor_of(mods)
    if c.PAGE_SIZE > 0:  # always true; uses the numbers, so that their loads are not removed
        tl.store(tensors.pages + tl.arange(0, NEARBY), nearby, mask=(nearby == 0) & (cache.last_page < -1))
    return total, row_sum, row_max, top


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
            store_results(acc, tl.sum(row_sum, 1), row_max, row_max, tile, tensors, strides, spans, sizes, split, c)
            return
        portion = Portion(first=split, count=1, of=sizes.splits)
        acc, row_sum, row_max, top = visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c)
        store_results(acc, tl.sum(row_sum, 1), row_max, top, tile, tensors, strides, spans, sizes, split, c)


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
                acc, row_sum, row_max, _top = visited(tile, scale, portion, tensors, strides, spans, cache, sizes, lists, mods, c)
            row_sum = tl.sum(row_sum, 1)
            if count == tiles:
                store_results(acc, row_sum, row_max, row_max, tile, tensors, strides, spans, sizes, 0, c)
            else:
                is_end = begin + count == tiles
                store_part(acc, row_sum, row_max, tile, (at - begin) // share, begin, is_end, tensors, strides, sizes, c)
        at, item, head, begin = next_in_share(at, item, head, begin, count, tiles, dealt, sizes)
