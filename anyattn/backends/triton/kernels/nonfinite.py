"""What a program computes once more because a sum has come out infinite or NaN: now without what a mask hides. Kernel side.

All tiles are asked the mask, in pieces of few keys or rows, and for few columns of the result at a time, without haste: so this takes no
register that the loops have whose work it does again, and little of the compiler's time. Turns: see ``products.turned``.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.addressing import key_places
from anyattn.backends.triton.kernels.matmul import TURNS, plus_product, settled, turned
from anyattn.backends.triton.kernels.paged_kv import inside, page_numbers, paged_places
from anyattn.backends.triton.kernels.tile_iterator import tile_at

__all__ = ["dkdv_again", "dq_again", "out_again"]


@triton.jit
def out_again(
    top, total, out, is_row, q, begin, stop, full, seqlen_k, runs, key, rows, b, h, pages, last_page, scales, captured,
    SCORES: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr,
    HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr, RANGES: tl.constexpr, TILE_N: tl.constexpr,
    LIST_N: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, PRECISION: tl.constexpr, IS_RAW: tl.constexpr,
):  # fmt: skip
    """Writes the output of rows at ``out`` [rows] that see tiles ``begin`` to ``stop``. top, total: their maxima in base 2, and their sums.

    SCORES: ``scores_of`` of ``forward_kernel``, as are the other arguments; key begins with pointers.
    """
    STEP: tl.constexpr = 16  # keys of a piece
    CUT: tl.constexpr = TILE_N // STEP
    C: tl.constexpr = min(32, BLOCK_DV)
    for column in tl.range(0, HEAD_DIM_V, C, num_stages=1):
        d = column + tl.arange(0, C)[None, :]
        acc = tl.zeros((q.shape[0], C), tl.float32)
        for turn in tl.range(0, TURNS, num_stages=1):
            for i in tl.range(begin * CUT, stop * CUT, num_stages=1):
                first, end, is_shown = tile_at(runs, i // CUT, full, seqlen_k, RANGES, TILE_N, LIST_N)
                first += i % CUT * STEP
                numbers = 0
                if PAGE_SIZE > 0:
                    numbers = inside(page_numbers(key.start + first, key.start + end - 1, pages, STEP, PAGE_SIZE, False, True), last_page)
                s = SCORES(
                    q, first, end, is_shown, key, rows, b, h, numbers, scales, captured, SCORE, MASK, ALWAYS,
                    True, HAS_SCORE, HAS_MASK, HAS_ALWAYS, RANGES, STEP, HEAD_DIM, BLOCK_D, PAGE_SIZE, False, PRECISION, IS_RAW, 0, False,
                )  # fmt: skip
                if PAGE_SIZE > 0:
                    at = paged_places(first + key.start, end - 1 + key.start, numbers, key.v_strides, STEP, PAGE_SIZE, False, True)
                else:
                    at = key_places(key.start + tl.minimum(first + tl.arange(0, STEP), end - 1), key.row, key.v_strides)
                v = tl.load(key.v + at[:, None] + d, mask=d < HEAD_DIM_V, other=0.0)
                p = tl.exp2((s * scales.base_2 if IS_RAW else s) - top[:, None])
                p = tl.where(turn < 2, (s != float("-inf")).to(tl.float32), p)
                acc = plus_product(acc, None, p, turned(v, turn), PRECISION)
            acc = settled(acc, turn)
        tl.store(out[:, None] + d, (acc / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None] & (d < HEAD_DIM_V))


@triton.jit
def dq_again(
    out, q, dout, lse, delta, is_row, q_first, row_count, full, partial, seqlen_k, runs, key, offsets, rows, b, h, scale, captured,
    VISIT: tl.constexpr, SCORE: tl.constexpr, MASK: tl.constexpr, ALWAYS: tl.constexpr, SCATTER: tl.constexpr, HAS_SCORE: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ALWAYS: tl.constexpr, TILE_N: tl.constexpr, LIST_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, RANGES: tl.constexpr,
    IS_NEAR: tl.constexpr,
):  # fmt: skip
    """Writes dq of rows at ``out``; nothing is sent to captured tensors. VISIT: ``_visit_keys`` of
    ``backward_kernel``, as are the other arguments.

    One turn: a key that is not finite makes the scores of rows that see it NaN, and with them their dq.
    """
    STEP: tl.constexpr = 16  # keys of a piece
    CUT: tl.constexpr = TILE_N // STEP
    C: tl.constexpr = min(32, BLOCK_D)
    for column in tl.range(0, HEAD_DIM, C, num_stages=1):
        dq = tl.zeros((q.shape[0], C), tl.float32)
        for i in tl.range(0, (full + partial) * CUT, num_stages=1):
            first, end, is_shown = tile_at(runs, i // CUT, full, seqlen_k, RANGES, TILE_N, LIST_N)
            first += i % CUT * STEP
            dq = VISIT(
                dq, q, dout, lse, delta, is_row, q_first, row_count, first, end, is_shown, key, offsets, rows, b, h, scale, captured,
                SCORE, MASK, ALWAYS, SCATTER, True, HAS_SCORE, HAS_MASK, HAS_ALWAYS, False,
                STEP, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PRECISION, RANGES, IS_NEAR, True, column,
            )  # fmt: skip
        d = column + tl.arange(0, C)[None, :]
        tl.store(out + d, (dq * scale).to(out.dtype.element_ty), mask=is_row[:, None] & (d < HEAD_DIM))


@triton.jit
def dkdv_again(
    outs, is_key, k, v, kv_head, n_first, n_end, sequence, offsets, line, tensors, strides, spans, sizes, lists, b, scale, captured, early,
    VISIT: tl.constexpr, VISITORS: tl.constexpr, SCORE_ROWS: tl.constexpr, SCORE: tl.constexpr, MASK_ROWS: tl.constexpr,
    MASK: tl.constexpr, ALWAYS_ROWS: tl.constexpr, ALWAYS: tl.constexpr, HAS_SCORE: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALWAYS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, LIST_M: tl.constexpr, HAS_FULL: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_ENTRIES: tl.constexpr,
    PRECISION: tl.constexpr, RANGES: tl.constexpr, IS_NEAR: tl.constexpr, IS_GROUPED: tl.constexpr, IS_NVIDIA: tl.constexpr,
    HAS_DK: tl.constexpr, HAS_DV: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv of keys at ``outs``. VISIT, VISITORS: ``_visit_rows`` and ``_visitors`` of
    ``backward_kernel``, as are the other arguments.

    What is not finite of q has made its row's probabilities NaN; only what is not of dout has to be counted.
    """
    STEP: tl.constexpr = 16  # rows of a piece
    CUT: tl.constexpr = TILE_M // STEP
    C: tl.constexpr = min(32, max(BLOCK_D, BLOCK_DV))
    for column in tl.range(0, max(HEAD_DIM, HEAD_DIM_V), C, num_stages=1):
        dk, dv = tl.zeros((TILE_N, C), tl.float32), tl.zeros((TILE_N, C), tl.float32)
        for turn in tl.range(0, TURNS, num_stages=1):
            for g in tl.range(0, sizes.ratio if IS_GROUPED else 1, num_stages=1):
                h = kv_head * sizes.ratio + g
                heads, runs, fulls, partials = VISITORS(
                    early, tensors, strides, spans, sizes, lists, sequence, b, h, line, n_first, n_end,
                    RANGES, TILE_M, TILE_N, LIST_M, HAS_FULL, HAS_ENTRIES, IS_GROUPED,
                )  # fmt: skip
                for i in tl.range(0, (fulls + partials) * CUT, num_stages=1):
                    if RANGES > 0:
                        first, end, is_shown = (runs.first + i // CUT) * TILE_M, sequence.seqlen_q, False
                    else:
                        first, end, is_shown = tile_at(runs, i // CUT, fulls, sequence.seqlen_q, 0, TILE_M, LIST_M)
                    first += i % CUT * STEP
                    dk, dv = VISIT(
                        dk, dv, k, v, first, end, is_shown, n_first, n_end, sequence, heads, offsets, strides, b, h, scale, captured,
                        SCORE_ROWS, SCORE, MASK_ROWS, MASK, ALWAYS_ROWS, ALWAYS, True, HAS_SCORE, HAS_MASK, HAS_ALWAYS,
                        STEP, TILE_N, HEAD_DIM, HEAD_DIM_V, BLOCK_D, BLOCK_DV, PRECISION, RANGES, IS_NEAR, IS_NVIDIA, HAS_DK,
                        HAS_DV, (column, turn),
                    )  # fmt: skip
            dk, dv = tl.where(turn < 2, 0.0, dk), settled(dv, turn)
        d = column + tl.arange(0, C)[None, :]
        dk_out, dv_out = outs
        tl.store(dk_out + d, (dk * scale).to(dk_out.dtype.element_ty), mask=is_key & (d < HEAD_DIM) & HAS_DK)
        tl.store(dv_out + d, dv.to(dv_out.dtype.element_ty), mask=is_key & (d < HEAD_DIM_V) & HAS_DV)
