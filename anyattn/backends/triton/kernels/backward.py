"""Backward kernels (device code): dq over the key tiles that a row tile visits; dk and dv over the row tiles that visit a key tile.

The probabilities are recomputed from the log-sum-exp. Arguments are the groups of ``kernels.arguments``.

lse is a row's log-sum-exp in base 2 (infinite in a row without visible keys, so that its probabilities are 0); delta is the sum of out *
dout minus the gradient of the log-sum-exp, which is subtracted from the derivative by every weight of the row. Both are stored by the row
tiles of dk and dv (``slot_of``), so that each sequence's values begin at an aligned place and a tile's are one load, issued while the tile
before is computed.

Where a tile reaches beyond its sequence, the last row or key is read again for each missing one and its results are hidden: no load in a
loop needs a mask, and the addresses of a full tile are a moving pointer plus constant offsets.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.addressing import (
    entry,
    is_off,
    place_of_program,
    row_at,
    row_offsets,
    row_tile,
    slot_of,
    tile_offsets,
)
from anyattn.backends.triton.kernels.arguments import KeyStorage, Mods, RowsOfParts, TileOfScores
from anyattn.backends.triton.kernels.bands.keep import kept, no_sums, store_sums
from anyattn.backends.triton.kernels.dropout import (
    factor_of,
    first_block,
    first_product,
    kept_of,
    no_rows,
    places,
    plus_product,
    plus_rows,
    scores,
)
from anyattn.backends.triton.kernels.forward import rows_of
from anyattn.backends.triton.kernels.key_tiles import load_rest, load_rows, load_tile, offsets_of, rest_of, rows_at, store_whole, whole_tile
from anyattn.backends.triton.kernels.row_tile_bounds import first_spans, full_rows_at, partial_rows_at, rows_that_see, store_span
from anyattn.backends.triton.kernels.softmax.visits import kv_for, probabilities, row_values, seen_by_rows, seen_in, shown_by
from anyattn.backends.triton.kernels.tile_iterator import (
    clipped,
    full_at,
    inside_of,
    lanes_of,
    near_keys,
    near_rows,
    partial_at,
    visits_of,
)
from anyattn.triton_tools import device_math

__all__ = ["dkdv_tile", "dq_tile", "prepare_tile"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


class HeadPointers(NamedTuple):
    """One query head of a sequence. q, dout: pointers to its storage. lse, delta: pointers to float32, at the sequence's first row."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


@triton.jit
def prepare_tile(tensors, strides, spans, sizes, lists, scale, mods, c):
    """Statistics of one row tile, and for each of its mask's row ranges the least lo, greatest hi, greatest lo and least hi of its rows.
    Without HAS_DELTA the only statistic is lse, and out and dout are not read.

    tensors, strides, spans, c: ``PrepareTensors`` and so on.
    """
    if c.HAS_GUARD and is_off(tensors.guard):
        return
    m, b, h = place_of_program(sizes, tensors.order, False, c.HAS_ENTRIES)
    if m < 0:
        return
    sequence = entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)
    first_row, end_row = m * c.TILE_M, sequence.seqlen_q
    if first_row >= end_row:
        return
    position = first_row + tl.arange(0, c.TILE_M)
    is_row = position < end_row
    position = tl.minimum(position, end_row - 1)
    at = sequence.q_start + position
    row = sequence.q_row.to(tl.int64)
    place = (row * sizes.heads + h) * sizes.positions + at
    lse = tl.load(tensors.natural_lse + place, mask=is_row, other=float("-inf"))
    slot = slot_of(sequence, m, b, h, sizes, c.TILE_M, c.TILE_M) + tl.arange(0, c.TILE_M)
    tl.store(tensors.lse + slot, tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E))
    if c.HAS_DELTA:
        o_at, d_at = row_offsets(row, h, at, strides.out), row_offsets(row, h, at, strides.dout)
        out = load_rows(tensors.out, o_at[:, None], is_row[:, None], c.HEAD_DIM_V, c.BLOCK_DV, False).to(tl.float32)
        dout = load_rows(tensors.dout, d_at[:, None], is_row[:, None], c.HEAD_DIM_V, c.BLOCK_DV, False).to(tl.float32)
        delta = tl.sum(tl.where(out == 0.0, 0.0, out * dout), 1)  # 0 x NaN: dout of a row without visible keys
        if c.HAS_DLSE:
            delta -= tl.load(tensors.dlse + row_offsets(row, h, at, spans.dlse), mask=is_row, other=0.0).to(tl.float32)
        tl.store(tensors.delta + slot, delta)
        if c.HAS_SINK:
            tl.store(tensors.natural_delta + place, delta, mask=is_row)
    if c.RANGES > 0:
        rows = mods.mask.rows(b, h, (position + sequence.q_first)[:, None], mods.mask.scalars, mods.mask.tensors)
        place = tensors.spans + slot_of(sequence, m, b, h, sizes, c.TILE_M, 4 * c.RANGES)
        store_span(place, clipped(rows[0], sequence.seqlen_k, c.TILE_M), clipped(rows[1], sequence.seqlen_k, c.TILE_M))
        if c.RANGES == 2:
            store_span(place + 4, clipped(rows[2], sequence.seqlen_k, c.TILE_M), clipped(rows[3], sequence.seqlen_k, c.TILE_M))


@triton.jit
def _visit_keys(
    dq, sums, q, dout, lse, delta, is_row, q_first, row_count, first, end, is_shown,
    key, offsets, rows, b, h, scale, mods, c, IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Adds one tile of keys to dq, which is not scaled yet, and sums (``bands.keep``); arguments as in ``kernels.forward.visit``. offsets:
    of full tiles.

    q_first: the tile's first row for mods. row_count: its number of rows."""
    lane = lanes_of(first, c)
    k_at, v_at = offsets
    start = first
    if c.JOINS > 0:
        start, local = row_count * 0, tl.minimum(lane, end - 1)
        k_at, v_at = offsets_of(local, key.k_strides, c), tile_offsets(local, key.v_strides, c.BLOCK_DV, c.IS_NEAR)
    elif IS_PARTIAL:
        start = tl.minimum(first, end - 1)
        local = tl.minimum(tl.arange(0, c.TILE_N), end - 1 - start)
        k_at, v_at = offsets_of(local, key.k_strides, c), tile_offsets(local, key.v_strides, c.BLOCK_DV, c.IS_NEAR)
    at, row = key.start + start, key.row.to(tl.int64)
    k = whole_tile(key.k + row * key.k_strides.rows + row_at(at, key.k_strides, c.IS_NEAR), k_at, c)
    if c.ONE_KV:
        v = first_block(k, c)
    else:
        v = load_tile(key.v + row * key.v_strides.rows + row_at(at, key.v_strides, c.IS_NEAR), v_at, c.HEAD_DIM_V, c.BLOCK_DV)
    s = scores(q, k, end, c)
    lanes = lane[None, :]
    p, of_score = probabilities(s, lse, b, h, kv_for(lanes, end, mods.score, not IS_PARTIAL), rows.score, scale, mods, 1)
    # in a missing row lse is infinite, and dq is not stored
    seen = seen_in(lanes, end, is_shown, rows, b, h, mods, c, False) if IS_PARTIAL else lanes < end
    if mods.score.scatter is not None:
        seen = seen & is_row[:, None]
    if mods.always.exists:
        seen = seen & shown_by(mods.always, b, h, lanes, end, rows.always, not IS_PARTIAL)
    if IS_PARTIAL or mods.always.exists:
        p = tl.where(seen, p, 0.0)
    dp = first_product(dout, v, None, end, c)
    if mods.dropout.exists:
        dp = kept_of(dp, b, h, first, rows.dropout, mods.dropout, False) * factor_of(mods)
    ds = p * (dp - delta[:, None])
    if mods.score.scatter is not None:
        tile = TileOfScores(b=b, h=h, q_first=q_first, k_first=first, rows=row_count, keys=end - first)
        mods.score.scatter(
            ds, seen, is_row[:, None], (lane < end)[None, :], of_score, tile, mods.score.scalars, mods.score.tensors,
            mods.score.totals, not IS_PARTIAL and not mods.always.exists, dout.dtype,
        )  # fmt: skip
    if mods.score.band is not None:
        part = mods.score.band(ds, of_score)
        if IS_PARTIAL or mods.always.exists:
            part = tl.where(seen, part, 0.0)
        sums = kept(sums, part, is_row[:, None], (lane < end)[None, :], b, h, q_first, first, mods.score, True, not IS_PARTIAL)
    if mods.score.exists:
        ds = ds * of_score[1].to(tl.float32)
        if (IS_PARTIAL or mods.always.exists) and of_score[1].type.is_block():
            ds = tl.where(seen, ds, 0.0)  # the derivative at a hidden score is arbitrary unless it is the same for all scores
    if c.HAS_DQ:
        dq = plus_rows(dq, ds, k, c)
    return dq, sums


@triton.jit
def _visit_key_run(
    dq, sums, q, dout, lse, delta, is_row, q_first, row_count, begin, stop, runs, key, offsets, rows, b, h, scale, mods, c
):  # fmt: skip
    """``_visit_keys`` of the full tiles ``begin`` to ``stop``."""
    for i in range(begin, stop):
        first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
        dq, sums = _visit_keys(
            dq, sums, q, dout, lse, delta, is_row, q_first, row_count, first, first + c.TILE_N, True,
            key, offsets, rows, b, h, scale, mods, c, False,
        )  # fmt: skip
    return dq, sums


@triton.jit
def _of_side(rows, b, h, q_idx, score):
    """``RowsOfParts`` with the values of a far side, ``score``."""
    own = score.rows(b, h, q_idx, score.scalars, score.tensors)
    return RowsOfParts(score=own, mask=rows.mask, always=rows.always, dropout=rows.dropout, sure=rows.sure)


@triton.jit
def dq_tile(tensors, strides, spans, sizes, lists, scale, mods, c):
    """dq of one row tile (if HAS_DQ), and the gradients of the score mod's captured tensors from its scores. With GROUP the tile has the
    rows of all query heads of a K/V head, GROUP of a position, and there are no such gradients and no dropout."""
    if c.HAS_GUARD and is_off(tensors.guard):
        return
    m, b, h = place_of_program(sizes, tensors.order, True, c.HAS_ENTRIES)
    if m < 0:
        return
    sequence = entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)
    seqlen_k = sequence.seqlen_k
    line, first_row, end_row = row_tile(m, sequence.seqlen_q, c.TILE_M, c.LIST_M, c.GROUP if c.GROUP > 0 else 1)
    if first_row >= end_row:
        return
    if c.GROUP > 0:
        r = tl.arange(0, c.TILE_M)
        position, heads, h = first_row + r // c.GROUP, h * sizes.ratio + r % c.GROUP, h * sizes.ratio
        is_row = (position < end_row) & (heads < h + sizes.ratio)
        heads = tl.minimum(heads, h + sizes.ratio - 1)
        q_head = heads[:, None]
    else:
        position = first_row + tl.arange(0, c.TILE_M)
        is_row = position < end_row
        heads, q_head = h, h
    position = tl.minimum(position, end_row - 1)
    at = sequence.q_start + position
    row, head = sequence.q_row.to(tl.int64), heads.to(tl.int64)
    q_at, do_at = row_offsets(row, head, at, strides.q)[:, None], row_offsets(row, head, at, strides.dout)[:, None]
    q = rows_at(tensors.q, q_at, is_row[:, None], c)
    dout = load_rows(tensors.dout, do_at, is_row[:, None], c.HEAD_DIM_V, c.BLOCK_DV, False)
    slot = slot_of(sequence, 0, b, heads, sizes, c.SLOT_M, c.SLOT_M) + position
    lse = tl.load(tensors.lse + slot, mask=is_row, other=float("inf"))
    delta = tl.load(tensors.delta + slot, mask=is_row, other=0.0)
    q_idx = (position + sequence.q_first)[:, None]
    q_places = places(first_row + sequence.q_first, c.TILE_M, c.HAS_FOURS, False)
    own = rows_of(b, q_head, q_idx, q_places, mods)
    kv_head = (h // sizes.ratio).to(tl.int64)
    key = KeyStorage(
        k=tensors.k + kv_head * strides.k.head, v=tensors.v + kv_head * strides.v.head, row=sequence.k_row, start=sequence.k_start,
        k_strides=strides.k, v_strides=strides.v, head=kv_head, factors=0, k_wrap=0, v_wrap=0,
    )  # fmt: skip
    n_lane = tl.arange(0, c.TILE_N)
    offsets = offsets_of(n_lane, key.k_strides, c), tile_offsets(n_lane, key.v_strides, c.BLOCK_DV, c.IS_NEAR)
    dq, sums = no_rows(c.TILE_M, c), no_sums(mods.score, c.TILE_M)
    q_first, row_count = first_row + sequence.q_first, end_row - first_row
    runs, full, partial = visits_of(own.mask, lists, spans.lists, sequence, b, h, line, seqlen_k, c, False)
    if c.RANGES > 0:
        inside = inside_of(own.mask, seqlen_k, c.RANGES)
        own = RowsOfParts(score=own.score, mask=inside, always=own.always, dropout=own.dropout, sure=own.sure)
    near, near_end = 0, full
    if mods.score.has_after or mods.score.has_before:
        near, near_end = near_keys(mods.score, q_first, q_first + tl.minimum(row_count, c.TILE_M) - 1, runs.full_0.first, 0, full, c.TILE_N)
    if mods.score.has_after:
        of_side = _of_side(own, b, q_head, q_idx, mods.score.after)
        dq, sums = _visit_key_run(
            dq, sums, q, dout, lse, delta, is_row, q_first, row_count, 0, near, runs, key, offsets, of_side, b, q_head, scale,
            Mods(score=mods.score.after, mask=mods.mask, always=mods.always, dropout=mods.dropout), c,
        )  # fmt: skip
    dq, sums = _visit_key_run(
        dq, sums, q, dout, lse, delta, is_row, q_first, row_count, near, near_end, runs, key, offsets, own, b, q_head, scale, mods, c
    )
    if mods.score.has_before:
        of_side = _of_side(own, b, q_head, q_idx, mods.score.before)
        dq, sums = _visit_key_run(
            dq, sums, q, dout, lse, delta, is_row, q_first, row_count, near_end, full, runs, key, offsets, of_side, b, q_head, scale,
            Mods(score=mods.score.before, mask=mods.mask, always=mods.always, dropout=mods.dropout), c,
        )  # fmt: skip
    for i in range(0, partial):
        first, end, is_shown = partial_at(runs, i, seqlen_k, c.RANGES, c.TILE_N, c.LIST_N, c.JOINS)
        dq, sums = _visit_keys(
            dq, sums, q, dout, lse, delta, is_row, q_first, row_count, first, end, is_shown, key, offsets, own, b, q_head, scale, mods, c,
            True,
        )  # fmt: skip
    store_sums(sums, b, h, position, is_row, mods.score)
    if c.HAS_DQ:
        store_whole(tensors.dq + row_offsets(row, head, at, strides.dq)[:, None], dq, scale, is_row[:, None], c)


@triton.jit
def _visit_rows(
    dk, dv, sums, k, v, first, end, is_shown, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c,
    IS_PARTIAL: tl.constexpr,
):  # fmt: skip
    """Adds rows ``first`` to ``end`` of one head to dk, which is not scaled yet, dv and sums (``bands.keep``). Scores are [keys, rows].

    heads: ``HeadPointers``. offsets: of a full tile's q and dout.
    """
    m_lane = tl.arange(0, c.TILE_M)
    row = device_math.unknown(m_lane, 0 if IS_PARTIAL else first, c.IS_NVIDIA)  # partial tiles may keep it in registers
    q_at, do_at = offsets
    start, slot = first, first
    if IS_PARTIAL:
        start, slot = tl.minimum(first, end - 1), tl.where(first < end, first, 0)
        local = tl.minimum(m_lane, end - 1 - start)
        q_at, do_at = offsets_of(local, strides.q, c), tile_offsets(local, strides.dout, c.BLOCK_DV, c.IS_NEAR)
        row = tl.minimum(row, end - 1 - start)
    is_row = first + m_lane < end
    position = start + row
    at = sequence.q_start + start
    q = whole_tile(heads.q + row_at(at, strides.q, c.IS_NEAR), q_at, c)
    lse = tl.load(heads.lse + slot + m_lane)
    s = scores(k, q, end, c)
    dout = load_tile(heads.dout + row_at(at, strides.dout, c.IS_NEAR), do_at, c.HEAD_DIM_V, c.BLOCK_DV)
    dp = first_product(v, dout, None, end, c)
    q_idx = (position + sequence.q_first)[None, :]
    lanes = (n_first + tl.arange(0, c.TILE_N))[:, None]
    kv = kv_for(lanes, n_end, mods.score, False)
    p, of_score = probabilities(s, lse, b, h, kv, row_values(mods.score, b, h, q_idx), scale, mods, 0)
    if IS_PARTIAL or mods.always.exists:
        # by ranges lse is infinite in a missing row
        seen = True if IS_PARTIAL and c.RANGES > 0 else is_row[None, :]
        p = tl.where(seen_by_rows(seen, is_shown, b, h, lanes, n_end, q_idx, mods, IS_PARTIAL), p, 0.0)
    kept_p = p
    if mods.dropout.exists:
        rows = mods.dropout.rows(
            b, h, places(first + sequence.q_first, c.TILE_M, c.HAS_FOURS, True), mods.dropout.scalars, mods.dropout.tensors
        )
        kept_p = kept_of(p.to(dout.dtype), b, h, n_first, rows, mods.dropout, True)
        dp = kept_of(dp, b, h, n_first, rows, mods.dropout, True) * factor_of(mods)
    if c.HAS_DV:
        dv = plus_product(dv, None, kept_p, dout, c.PRECISION)
    # loaded only here, so that it takes no registers before
    delta = tl.load(heads.delta + slot + m_lane)
    ds = p * (dp - delta[None, :])
    if mods.score.band is not None:
        part = mods.score.band(ds, of_score)
        if IS_PARTIAL or mods.always.exists:
            part = tl.where(p != 0.0, part, 0.0)
        sums = kept(sums, part, lanes < n_end, is_row[None, :], b, h, n_first, first, mods.score, False, not IS_PARTIAL)
    if mods.score.exists:
        ds = ds * of_score[1].to(tl.float32)
        if (IS_PARTIAL or mods.always.exists) and of_score[1].type.is_block():
            ds = tl.where(p != 0.0, ds, 0.0)  # the derivative at a hidden score is arbitrary unless it is the same for all scores
    if IS_PARTIAL and c.RANGES == 0:
        ds = tl.where(p != 0.0, ds, 0.0)  # lists may begin tiles at other places than delta's slots, after which memory is arbitrary
    if c.HAS_DK:
        dk = plus_rows(dk, ds, q, c)
    return dk, dv, sums


@triton.jit
def _visit_row_run(
    dk, dv, sums, k, v, begin, stop, runs, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c
):  # fmt: skip
    """``_visit_rows`` of the full tiles ``begin`` to ``stop``."""
    for i in range(begin, stop):
        start = full_rows_at(runs, i, c)
        dk, dv, sums = _visit_rows(
            dk, dv, sums, k, v, start, start + c.TILE_M, True,
            n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c, False,
        )  # fmt: skip
    return dk, dv, sums


@triton.jit
def _visit_either(dk, dv, k, v, first, end, is_cut, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c):
    """``_visit_rows`` for a tile that is full or, with is_cut, partial, by ranges and without a score mod. end: of the sequence.

    The mask is evaluated in a branch, so that one loop serves all tiles: a window has few tiles, and two loops have two prologues."""
    m_lane = tl.arange(0, c.TILE_M)
    at = sequence.q_start + first
    is_row = (m_lane < end - first)[:, None]
    q_at, do_at = heads.q + row_at(at, strides.q, c.IS_NEAR), heads.dout + row_at(at, strides.dout, c.IS_NEAR)
    q_offsets, do_offsets = offsets
    q = rest_of(q_at, q_offsets, is_row, c)
    lse = tl.load(heads.lse + first + m_lane)
    s = scores(k, q, end, c)
    dout = load_rest(do_at + do_offsets, is_row, c.HEAD_DIM_V, c.BLOCK_DV)
    dp = first_product(v, dout, None, end, c)
    delta = tl.load(heads.delta + first + m_lane)
    p = tl.exp2(s * (scale * _LOG2E) - lse[None, :])
    if is_cut:
        position = first + tl.minimum(device_math.unknown(m_lane, first, c.IS_NVIDIA), end - 1 - first)
        rows = row_values(mods.mask, b, h, (position + sequence.q_first)[None, :])
        p = tl.where(shown_by(mods.mask, b, h, (n_first + tl.arange(0, c.TILE_N))[:, None], n_end, rows, False), p, 0.0)
    if c.HAS_DV:
        dv = plus_product(dv, None, p, dout, c.PRECISION)
    if c.HAS_DK:
        dk = plus_rows(dk, p * (dp - delta[None, :]), q, c)
    return dk, dv


@triton.jit
def _visitors(early, tensors, strides, spans, sizes, lists, sequence, b, h, line, n_first, n_end, c):
    """(``HeadPointers``, the row tiles that see keys n_first to n_end, how many see all of them, how many see some).

    The row tiles are a ``RowRun`` by ranges, or ``ListedTiles``. early: the first head's ``first_spans``.
    """
    q_row = sequence.q_row.to(tl.int64)
    slot = slot_of(sequence, 0, b, h, sizes, c.TILE_M, c.TILE_M)
    heads = HeadPointers(
        q=tensors.q + (q_row * strides.q.rows + h.to(tl.int64) * strides.q.head),
        dout=tensors.dout + (q_row * strides.dout.rows + h.to(tl.int64) * strides.dout.head),
        lse=tl.multiple_of(tensors.lse + slot, 16), delta=tl.multiple_of(tensors.delta + slot, 16),
    )  # fmt: skip
    runs, fulls, partials = rows_that_see(early, tensors.spans, spans, sizes, lists, sequence, b, h, line, n_first, n_end, c)
    return heads, runs, fulls, partials


@triton.jit
def dkdv_tile(tensors, strides, spans, sizes, lists, scale, mods, c):
    """dk and dv of one tile of keys, summed over the query heads that share them (IS_GROUPED: several). lists: per tile of keys. HAS_DK,
    HAS_DV: which of the two is needed. IS_JOINED: there are ranges and neither a score mod nor a mask for all tiles, and one loop visits
    partial and full tiles.

    With two loops full tiles come last: registers that only partial tiles need are free by then.
    """
    if c.HAS_GUARD and is_off(tensors.guard):
        return
    n, b, kv_head = place_of_program(sizes, tensors.order, False, c.HAS_ENTRIES)
    if n < 0:
        return
    sequence = entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)
    seqlen_q = sequence.seqlen_q
    line, n_first, n_end = row_tile(n, sequence.seqlen_k, c.TILE_N, c.LIST_N, 1)
    if n_first >= n_end:
        return
    lane = n_first + tl.arange(0, c.TILE_N)
    is_key = (lane < n_end)[:, None]
    at = (sequence.k_start + tl.minimum(lane, n_end - 1)).to(tl.int64)[:, None]
    row, head = sequence.k_row.to(tl.int64), kv_head.to(tl.int64)
    tile_end = tl.minimum(n_first + c.TILE_N, n_end)  # n_end is the sequence's end
    early = 0
    if c.RANGES > 0 and not c.SEES_ALL:  # loaded before the keys, and as slow to arrive
        spans_at = tensors.spans + slot_of(sequence, 0, b, kv_head * sizes.ratio, sizes, c.TILE_M, 4 * c.RANGES)
        early = first_spans(spans_at, seqlen_q, n_first, tile_end, c.RANGES, c.TILE_M)
    k = rows_at(tensors.k, row_offsets(row, head, at, strides.k), is_key, c)
    if c.ONE_KV:
        v = first_block(k, c)
    else:
        v = load_rows(tensors.v, row_offsets(row, head, at, strides.v), is_key, c.HEAD_DIM_V, c.BLOCK_DV, False)
    dk = no_rows(c.TILE_N, c)
    dv = tl.zeros((c.TILE_N, c.BLOCK_DV), tl.float32)
    m_lane = tl.arange(0, c.TILE_M)
    offsets = offsets_of(m_lane, strides.q, c), tile_offsets(m_lane, strides.dout, c.BLOCK_DV, c.IS_NEAR)
    for g in range(0, sizes.ratio if c.IS_GROUPED else 1):
        h = kv_head * sizes.ratio + g
        heads, runs, fulls, partials = _visitors(early, tensors, strides, spans, sizes, lists, sequence, b, h, line, n_first, n_end, c)
        if c.IS_JOINED:
            for m in range(runs.first, runs.first + fulls + partials):
                is_cut = (m < runs.full) | (m >= runs.full + fulls)
                dk, dv = _visit_either(
                    dk, dv, k, v, m * c.TILE_M, seqlen_q, is_cut, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c
                )
        else:
            sums = no_sums(mods.score, c.TILE_N)
            for i in range(0, partials):
                start, stop, is_shown = partial_rows_at(runs, i, fulls, seqlen_q, c)
                dk, dv, sums = _visit_rows(
                    dk, dv, sums, k, v, start, stop, is_shown, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c, True
                )
            near, near_end = 0, fulls
            if mods.score.has_after or mods.score.has_before:
                near, near_end = near_rows(mods.score, sequence.q_first, n_first, tile_end - 1, runs.full, fulls, c.TILE_M)
            if mods.score.has_before:
                dk, dv, sums = _visit_row_run(
                    dk, dv, sums, k, v, 0, near, runs, n_first, n_end, sequence, heads, offsets, strides, b, h, scale,
                    Mods(score=mods.score.before, mask=mods.mask, always=mods.always, dropout=mods.dropout), c,
                )  # fmt: skip
            dk, dv, sums = _visit_row_run(
                dk, dv, sums, k, v, near, near_end, runs, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, mods, c
            )
            if mods.score.has_after:
                dk, dv, sums = _visit_row_run(
                    dk, dv, sums, k, v, near_end, fulls, runs, n_first, n_end, sequence, heads, offsets, strides, b, h, scale,
                    Mods(score=mods.score.after, mask=mods.mask, always=mods.always, dropout=mods.dropout), c,
                )  # fmt: skip
            store_sums(sums, b, h, lane, lane < n_end, mods.score)
    if mods.dropout.exists:
        dv = dv * factor_of(mods)
    d = tl.arange(0, c.BLOCK_DV)[None, :]
    dk_out = tensors.dk + row_offsets(row, head, at, strides.dk)
    dv_out = tensors.dv + row_offsets(row, head, at, strides.dv)
    if c.HAS_DK:
        store_whole(dk_out, dk, scale, is_key, c)
    tl.store(dv_out + d, dv.to(dv_out.dtype.element_ty), mask=is_key & (d < c.HEAD_DIM_V) & c.HAS_DV)
