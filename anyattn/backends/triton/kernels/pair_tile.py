"""Backward kernel of small problems (device code): one tile has all pairs of an entry, in a chunk of the batch entries of one head.

What depends neither on the entry nor on the score, such as a bias by pair, is loaded once. The gradients of captured tensors that all
entries share are summed over the chunk before they are added to memory: one atomic addition per pair and chunk, not per pair and entry.

dq, dk and dv take five products instead of the seven of ``backward.dq_tile`` and ``dkdv_tile``, and delta comes from the tile's own
weights. Such a delta has the rounding of the log-sum-exp, which 16 bits do not show and float32 does. Arguments are the groups of
``kernels.arguments``.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.addressing import row_at, row_offsets
from anyattn.backends.triton.kernels.arguments import TileOfScores
from anyattn.backends.triton.kernels.dropout import factor_of, kept_of, places
from anyattn.backends.triton.kernels.key_tiles import load_rows
from anyattn.backends.triton.kernels.softmax.visits import kv_for, probabilities, shown_by

__all__ = ["pair_tile"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


@triton.jit
def _store(base, entry, strides, lane, x, is_row, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, IS_NEAR: tl.constexpr):
    """Stores rows of an entry. base: of a head of the first entry."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = base + entry * strides.rows + row_at(lane[:, None], strides, IS_NEAR) + d
    tl.store(at, x.to(base.dtype.element_ty), mask=is_row[:, None] & (d < HEAD_DIM))


@triton.jit
def _once(h, q_idx, lanes, end, mod, c):
    """The values of a part that all entries share; any tuple for a part that does not exist."""
    if mod.exists:
        return mod.rows(h, q_idx, kv_for(lanes, end, mod, not c.IS_CUT), mod.scalars, mod.tensors)
    else:
        return (q_idx, q_idx)


@triton.jit
def _seen(is_pair, b, h, q_idx, lanes, end, of_mask, of_always, mods, c):
    """The visible pairs of an entry. of_mask, of_always: ``_once`` of these parts; ranges have row values instead."""
    seen = is_pair
    if mods.mask.exists:
        if c.RANGES > 0:
            limits = mods.mask.rows(b, h, q_idx, mods.mask.scalars, mods.mask.tensors)
            seen = seen & mods.mask.value(b, h, lanes, limits, mods.mask.scalars, mods.mask.tensors)
        else:
            seen = seen & shown_by(mods.mask, b, h, lanes, end, of_mask, not c.IS_CUT)
    if mods.always.exists:
        seen = seen & shown_by(mods.always, b, h, lanes, end, of_always, not c.IS_CUT)
    return seen


@triton.jit
def pair_tile(tensors, strides, spans, sizes, lists, scale, mods, c):
    """The pairs of one head in ``sizes.entries`` batch entries: dq, dk and dv (HAS_DQ, HAS_DK, HAS_DV: those needed), and the sums of
    captured tensors' gradients if there are TERMS."""
    h, begin = tl.program_id(0), tl.program_id(1) * sizes.entries
    head = h.to(tl.int64)
    m_lane, n_lane = tl.arange(0, c.TILE_M), tl.arange(0, c.TILE_N)
    is_row, is_key = m_lane < sizes.seqlen_q, n_lane < sizes.seqlen_k
    q_idx, lanes = tl.minimum(m_lane, sizes.seqlen_q - 1)[:, None], n_lane[None, :]
    is_pair = is_row[:, None] & is_key[None, :]
    q_base, do_base = tensors.q + head * strides.q.head, tensors.dout + head * strides.dout.head
    k_base, v_base = tensors.k + head * strides.k.head, tensors.v + head * strides.v.head
    kv = kv_for(lanes, sizes.seqlen_k, mods.score, not c.IS_CUT)
    of_pairs, of_always = _once(h, q_idx, lanes, sizes.seqlen_k, mods.score, c), _once(h, q_idx, lanes, sizes.seqlen_k, mods.always, c)
    of_mask = of_always
    if c.RANGES == 0:
        of_mask = _once(h, q_idx, lanes, sizes.seqlen_k, mods.mask, c)
    q_places = places(0, c.TILE_M, c.HAS_FOURS, False)
    HAS_MASK: tl.constexpr = mods.mask.exists or mods.always.exists
    HIDES: tl.constexpr = c.IS_CUT or HAS_MASK
    zero = tl.zeros((c.TILE_M, c.TILE_N), tl.float32)
    first_sum, second_sum = zero, zero
    for i in range(0, tl.minimum(sizes.entries, sizes.batch - begin)):
        b = begin + i
        entry = b.to(tl.int64)
        q_at, do_at = row_at(m_lane[:, None], strides.q, c.IS_NEAR), row_at(m_lane[:, None], strides.dout, c.IS_NEAR)
        k_at, v_at = row_at(n_lane[:, None], strides.k, c.IS_NEAR), row_at(n_lane[:, None], strides.v, c.IS_NEAR)
        q = load_rows(q_base + entry * strides.q.rows, q_at, is_row[:, None], c.HEAD_DIM, c.BLOCK_D, not c.IS_CUT)
        k = load_rows(k_base + entry * strides.k.rows, k_at, is_key[:, None], c.HEAD_DIM, c.BLOCK_D, not c.IS_CUT)
        v = load_rows(v_base + entry * strides.v.rows, v_at, is_key[:, None], c.HEAD_DIM_V, c.BLOCK_DV, not c.IS_CUT)
        dout = load_rows(do_base + entry * strides.dout.rows, do_at, is_row[:, None], c.HEAD_DIM_V, c.BLOCK_DV, not c.IS_CUT)
        place = (entry * sizes.heads + h) * sizes.seqlen_q + m_lane
        lse = tl.load(tensors.lse + place, mask=is_row, other=float("-inf"))
        lse = tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)
        s = tl.dot(q, tl.trans(k), input_precision=c.PRECISION)
        p, of_score = probabilities(s, lse, b, h, kv, of_pairs, scale, mods, 1)
        dp = tl.dot(dout, tl.trans(v), input_precision=c.PRECISION)
        dropout_rows = (q_idx, q_idx)
        if mods.dropout.exists:
            dropout_rows = mods.dropout.rows(b, h, q_places, mods.dropout.scalars, mods.dropout.tensors)
            dp = kept_of(dp, b, h, 0, dropout_rows, mods.dropout, False) * factor_of(mods)
        seen, shown = None, None
        if HIDES:
            seen = _seen(is_pair, b, h, q_idx, lanes, sizes.seqlen_k, of_mask, of_always, mods, c)
            p = tl.where(seen, p, 0.0)
        if HAS_MASK:  # beyond the sequences' ends dp is 0, and the sums are not read
            shown = seen
            dp = tl.where(seen, dp, 0.0)
        delta = tl.sum(p * dp, 1)
        if c.HAS_DLSE:
            delta -= tl.load(tensors.dlse + row_offsets(b, h, m_lane, spans.dlse), mask=is_row, other=0.0).to(tl.float32)
        if c.HAS_DELTA:
            tl.store(tensors.delta + place, delta, mask=is_row)
        ds = p * (dp - delta[:, None])
        if c.TERMS > 0:
            terms = mods.score.terms(ds, shown, of_score)
            first_sum += terms[0]
            if c.TERMS > 1:
                second_sum += terms[1]
        if c.HAS_DV:
            kept_p = p
            if mods.dropout.exists:
                kept_p = kept_of(p.to(k.dtype), b, h, 0, dropout_rows, mods.dropout, False)
            dv = tl.dot(tl.trans(kept_p.to(k.dtype)), dout, input_precision=c.PRECISION)
            if mods.dropout.exists:
                dv = dv * factor_of(mods)
            _store(tensors.dv + head * strides.dv.head, entry, strides.dv, n_lane, dv, is_key, c.HEAD_DIM_V, c.BLOCK_DV, c.IS_NEAR)
        if mods.score.exists:
            ds = ds * of_score[1].to(tl.float32)
            if HIDES and of_score[1].type.is_block():
                ds = tl.where(seen, ds, 0.0)  # the derivative at a hidden score is arbitrary unless it is the same for all scores
        rounded = ds.to(k.dtype)
        if c.HAS_DQ:
            dq = tl.dot(rounded, k, input_precision=c.PRECISION) * scale
            _store(tensors.dq + head * strides.dq.head, entry, strides.dq, m_lane, dq, is_row, c.HEAD_DIM, c.BLOCK_D, c.IS_NEAR)
        if c.HAS_DK:
            dk = tl.dot(tl.trans(rounded), q, input_precision=c.PRECISION) * scale
            _store(tensors.dk + head * strides.dk.head, entry, strides.dk, n_lane, dk, is_key, c.HEAD_DIM, c.BLOCK_D, c.IS_NEAR)
    if c.TERMS > 0:
        # places are evaluated again instead of being kept in registers
        again = _once(h, q_idx, lanes, sizes.seqlen_k, mods.score, c)
        found = mods.score.value(zero, zero, begin, h, kv, again, mods.score.scalars, mods.score.tensors)
        at = TileOfScores(b=begin, h=h, q_first=0, k_first=0, rows=sizes.seqlen_q, keys=sizes.seqlen_k)
        mods.score.scatter(
            (first_sum, second_sum), is_pair, is_row[:, None], is_key[None, :], found, at, mods.score.scalars, mods.score.tensors,
            mods.score.totals, False, tensors.q.dtype.element_ty,
        )  # fmt: skip
