"""Gradients of keys that single queries have chosen (device code): a tile of keys, and the queries that list it, gathered.

A row tile has several queries, each with the query heads of the K/V head. Which queries these are is read from one list for each listed
tile of keys, of all its queries in ascending order: sums are added in the same order at every run.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.addressing import entry, is_off, place_of_program, row_offsets, row_tile, slot_of
from anyattn.backends.triton.kernels.dropout import plus_product
from anyattn.backends.triton.kernels.key_tiles import load_rows
from anyattn.backends.triton.kernels.softmax.visits import kv_for, probabilities, row_values, shown_by

__all__ = ["dkdv_of_queries"]


@triton.jit
def dkdv_of_queries(tensors, strides, spans, sizes, lists, scale, mods, c):
    """dk and dv of one tile of keys, or part of one of the lists' tiles, summed over the query heads of their K/V head.

    lists: partial_count: int64 (lines + 1,), where each line's queries begin; a line is a tile of keys of a head and a batch entry, by the
    strides of ``spans.lists``. partial_index: int32, twice the query, and 1 if it sees the whole tile. c: ``DkdvConstants``; a row tile has
    GROUP rows of a query, those of heads that do not exist included.
    """
    if c.HAS_GUARD and is_off(tensors.guard):
        return
    n, b, kv_head = place_of_program(sizes, tensors.order, False, False)
    line, n_first, n_end = row_tile(n, sizes.seqlen_k, c.TILE_N, c.LIST_N, 1)
    if n_first >= n_end:
        return
    sequence = entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, False)
    lane, h = n_first + tl.arange(0, c.TILE_N), kv_head * sizes.ratio
    is_key, at = (lane < n_end)[:, None], tl.minimum(lane, n_end - 1).to(tl.int64)[:, None]
    row, head = b.to(tl.int64), kv_head.to(tl.int64)
    k = load_rows(tensors.k, row_offsets(row, head, at, strides.k), is_key, c.HEAD_DIM, c.BLOCK_D, False)
    v = load_rows(tensors.v, row_offsets(row, head, at, strides.v), is_key, c.HEAD_DIM_V, c.BLOCK_DV, False)
    dk = tl.zeros((c.TILE_N, c.BLOCK_D), tl.float32)
    dv = tl.zeros((c.TILE_N, c.BLOCK_DV), tl.float32)
    place = row * spans.lists.entry + (h // spans.lists.group).to(tl.int64) * spans.lists.head + line
    begin = tl.load(lists.partial_count + place)
    count = (tl.load(lists.partial_count + place + 1) - begin).to(tl.int32)
    r = tl.arange(0, c.TILE_M)
    heads = h + tl.minimum(r % c.GROUP, sizes.ratio - 1)
    slots = slot_of(sequence, 0, b, heads, sizes, c.TILE_M, c.TILE_M)
    q_base, do_base = row_offsets(row, heads, r * 0, strides.q), row_offsets(row, heads, r * 0, strides.dout)
    QUERIES: tl.constexpr = c.TILE_M // c.GROUP
    for i in range(0, (count + QUERIES - 1) // QUERIES):
        number = i * QUERIES + r // c.GROUP
        is_row = ((number < count) & (r % c.GROUP < sizes.ratio))[None, :]
        item = tl.load(lists.partial_index + begin + tl.minimum(number, count - 1))
        position = item >> 1
        q = load_rows(tensors.q, (q_base + position.to(tl.int64) * strides.q.position)[:, None], True, c.HEAD_DIM, c.BLOCK_D, True)
        s = tl.dot(k, tl.trans(q), input_precision=c.PRECISION)
        do_at = (do_base + position.to(tl.int64) * strides.dout.position)[:, None]
        dout = load_rows(tensors.dout, do_at, True, c.HEAD_DIM_V, c.BLOCK_DV, True)
        dp = tl.dot(v, tl.trans(dout), input_precision=c.PRECISION)
        lse, delta = tl.load(tensors.lse + slots + position), tl.load(tensors.delta + slots + position)
        q_idx, q_head, lanes = position[None, :], heads[None, :], lane[:, None]
        kv = kv_for(lanes, n_end, mods.score, False)
        p, of_score = probabilities(s, lse, b, q_head, kv, row_values(mods.score, b, q_head, q_idx), scale, mods, 0)
        seen = is_row
        if mods.mask.exists:
            shown = shown_by(mods.mask, b, q_head, lanes, n_end, row_values(mods.mask, b, q_head, q_idx), False)
            seen = seen & (shown | ((item & 1) != 0)[None, :])
        if mods.always.exists:
            seen = seen & shown_by(mods.always, b, q_head, lanes, n_end, row_values(mods.always, b, q_head, q_idx), False)
        p = tl.where(seen, p, 0.0)
        if c.HAS_DV:
            dv = plus_product(dv, None, p, dout, c.PRECISION)
        if c.HAS_DK:
            ds = p * (dp - delta[None, :])
            if mods.score.exists:  # whose derivative at a hidden score is arbitrary
                ds = tl.where(p != 0.0, ds * of_score[1].to(tl.float32), 0.0)
            dk = plus_product(dk, None, ds, q, c.PRECISION)
    d, d_v = tl.arange(0, c.BLOCK_D)[None, :], tl.arange(0, c.BLOCK_DV)[None, :]
    dk_out = tensors.dk + row_offsets(row, head, at, strides.dk)
    dv_out = tensors.dv + row_offsets(row, head, at, strides.dv)
    tl.store(dk_out + d, (dk * scale).to(dk_out.dtype.element_ty), mask=is_key & (d < c.HEAD_DIM) & c.HAS_DK)
    tl.store(dv_out + d_v, dv.to(dv_out.dtype.element_ty), mask=is_key & (d_v < c.HEAD_DIM_V) & c.HAS_DV)
