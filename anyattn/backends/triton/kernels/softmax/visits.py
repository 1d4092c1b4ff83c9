"""Visits of tiles of keys (device code): their scores, the weights of an online softmax in base 2, and the products with their values.

A visit takes and returns (acc, row_sum, row_max). The loops differ in what they load ahead and in which order.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.arguments import OF_KEY, Mods, RowsOfParts
from anyattn.backends.triton.kernels.dropout import first_block, plus_kept, scores
from anyattn.backends.triton.kernels.eight_bits import widened, widened_rows
from anyattn.backends.triton.kernels.key_tiles import factors_at, keys_at, pairs_at, whole_keys_at
from anyattn.backends.triton.kernels.paged_kv import first_numbers, inside, page_numbers
from anyattn.backends.triton.kernels.results import no_output
from anyattn.backends.triton.kernels.softmax.ascending import visit_at, visits_before
from anyattn.backends.triton.kernels.softmax.sections import merged, nothing_yet, settled
from anyattn.backends.triton.kernels.softmax.weights import scaled_weights_of, weights_of
from anyattn.backends.triton.kernels.tile_iterator import first_at, full_at, lanes_of

__all__ = [
    "add_late", "kv_for", "probabilities", "row_values", "seen_by_rows", "seen_in", "shown_by", "visit", "visit_all", "visit_far",
    "visit_late", "visit_or_skip", "visit_portion", "visit_run", "visit_sections",
]  # fmt: skip

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_OF_KEY: tl.constexpr = tl.constexpr(OF_KEY)


@triton.jit
def kv_for(kv, end, mod, IS_WHOLE: tl.constexpr):
    """The keys that a mod is evaluated at for ``kv``: none beyond the sequence, unless the mod loads nothing there (``is_padded``)."""
    if IS_WHOLE or mod.is_padded:
        return kv
    else:
        return tl.minimum(kv, end - 1)


@triton.jit
def row_values(mod, b, h, q_idx):
    """The values of a part's rows; any tuple for a part that does not exist."""
    if mod.exists:
        return mod.rows(b, h, q_idx, mod.scalars, mod.tensors)
    else:
        return (q_idx, q_idx)


@triton.jit
def shown_by(mod, b, h, lanes, end, rows, IS_WHOLE: tl.constexpr):
    """Where a mask shows the keys at positions ``lanes``; rows: its ``row_values``."""
    return mod.value(b, h, kv_for(lanes, end, mod, IS_WHOLE), rows, mod.scalars, mod.tensors)


@triton.jit
def seen_by_rows(seen, is_shown, b, h, lanes, end, q_idx, mods, IS_PARTIAL: tl.constexpr):
    """``seen`` [keys, rows] without what the masks hide, the one for all tiles and, with IS_PARTIAL, that of ranges or lists, unless
    is_shown."""
    if IS_PARTIAL and mods.mask.exists:
        seen = seen & (shown_by(mods.mask, b, h, lanes, end, row_values(mods.mask, b, h, q_idx), False) | is_shown)
    if mods.always.exists:
        seen = seen & shown_by(mods.always, b, h, lanes, end, row_values(mods.always, b, h, q_idx), False)
    return seen


@triton.jit
def probabilities(s, lse, b, h, kv, rows, scale, mods, AXIS: tl.constexpr):
    """(the probabilities of products ``s``, what the score mod's gradient program returns, or any tuple). lse: of the rows, in base 2.
    AXIS: the dimension of s that is not the rows'. rows: the score mod's ``row_values``."""
    if mods.score.exists:
        of_score = mods.score.value(s * scale, s * (scale * _LOG2E), b, h, kv, rows, mods.score.scalars, mods.score.tensors)
        return tl.exp2(of_score[0] - tl.expand_dims(lse, AXIS)), of_score
    else:
        return tl.exp2(s * (scale * _LOG2E) - tl.expand_dims(lse, AXIS)), (s, s)


@triton.jit
def scores_of(
    q, first, end, is_shown, key, rows, b, h, numbers, scales, mods, c, IS_PARTIAL: tl.constexpr, IS_WHOLE: tl.constexpr,
    IS_CUT: tl.constexpr,
):  # fmt: skip
    """([rows, TILE_N]: the scores of the keys at place ``first`` (``tile_iterator``), -inf where hidden, in base 2 unless IS_RAW; these
    keys).

    end: keys from it on do not exist (IS_WHOLE: all keys of the tile exist; unless IS_PARTIAL, missing ones are zeros). is_shown: all
    others are visible regardless of the mask. key: ``KeyStorage``. rows: ``RowsOfParts``. numbers: of the tile's pages, see
    ``paged_kv.page_numbers``. IS_CUT: keys from ``end`` on are not loaded.
    """
    lane = lanes_of(first, c)
    IS_PLAIN: tl.constexpr = not IS_PARTIAL and not (c.ONE_KV and IS_CUT)  # a value that does not exist is 0
    k = widened_rows(whole_keys_at(key, first, end, numbers, c, IS_CUT, IS_PLAIN), first_block(q, c).dtype, c)
    s = scores(q, k, end, c)
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
    return tl.where(shown_by(mod, b, h, lanes, end, rows.always, IS_WHOLE), s, float("-inf"))


@triton.jit
def seen_in(lanes, end, is_shown, rows, b, h, mods, c, IS_WHOLE: tl.constexpr):
    """Whether the keys at positions ``lanes`` of a partial tile are visible by ranges or lists; see ``scores_of``."""
    if c.RANGES > 0:  # the rows' limits are inside the sequence
        return mods.mask.value(b, h, lanes, rows.mask, mods.mask.scalars, mods.mask.tensors)
    else:
        seen = lanes < end
        if mods.mask.exists:
            seen = seen & (shown_by(mods.mask, b, h, lanes, end, rows.mask, IS_WHOLE) | is_shown)
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
def visit_run(acc, row_sum, row_max, q, begin, stop, runs, key, rows, b, h, scales, mods, c):
    """Full tiles ``begin`` to ``stop``; keys are not in pages."""
    for i in range(begin, stop):
        first = full_at(runs, i, c.RANGES, c.TILE_N, c.LIST_N)
        acc, row_sum, row_max = visit(acc, row_sum, row_max, q, first, first + c.TILE_N, True, key, rows, b, h, 0, scales, mods, c, False)
    return acc, row_sum, row_max


@triton.jit
def visit_far(acc, row_sum, row_max, q, begin, stop, runs, key, rows, b, h, q_idx, scales, score, mods, c):
    """``visit_run`` on a far side, ``score``."""
    rows = RowsOfParts(
        score=score.rows(b, h, q_idx, score.scalars, score.tensors), mask=rows.mask, always=rows.always, dropout=rows.dropout,
        sure=rows.sure,
    )  # fmt: skip
    return visit_run(
        acc, row_sum, row_max, q, begin, stop, runs, key, rows, b, h, scales,
        Mods(score=score, mask=mods.mask, always=mods.always, dropout=mods.dropout), c,
    )  # fmt: skip


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
    """(acc, row_sum, row_max, greatest scores if HAS_MAX) of the visits ``begin`` to ``stop`` alone, in the order of the keys. row_max:
    before the first key. Whole and cut tiles are computed alike, and one that hides all keys from a row changes none of its bits: so these
    are the same in every tile."""
    acc, row_sum, top = no_output(c), tl.zeros((c.TILE_M, c.SUMS), tl.float32), row_max
    for i in range(begin, stop):
        first, is_shown, is_whole = visit_at(visits, i, seqlen_k, c)
        numbers = 0
        if c.PAGE_SIZE > 0:
            numbers = inside(page_numbers(key.start + first, key.start + seqlen_k - 1, pages, c, True), cache.last_page)
        s, k = scores_of(q, first, seqlen_k, True, key, rows, b, h, numbers, scales, mods, c, False, False, True)
        if is_whole == 0:
            lanes = first + tl.arange(0, c.TILE_N)[None, :]
            s = tl.where(seen_in(lanes, seqlen_k, is_shown, rows, b, h, mods, c, False), s, float("-inf"))
        if c.HAS_MAX:
            tl.static_assert(c.V_SCALE != _OF_KEY, "in float16 these scores lack a factor that row_max has; no call asks for both")
            top = tl.maximum(top, tl.max(s, 1))
        acc, row_sum, row_max = weighed(acc, row_sum, row_max, q, s, k, first, seqlen_k, key, rows, b, h, numbers, scales, mods, c, True)
    return acc, row_sum, row_max, top


@triton.jit
def visit_sections(lowest, q, part, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c):
    """(acc, row_sum, row_max, greatest scores if HAS_MAX) of all sections of the keys, merged in their order; with IS_PART of section
    ``part`` alone. Both of the latter are in base 2. lowest: row_max before the first key."""
    if c.IS_PART:
        begin, stop = visits_before(visits, part * c.SECTION, c), visits_before(visits, (part + 1) * c.SECTION, c)
        found = visit_in_order(lowest, q, begin, stop, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c)
        total, sums, row_max, top = settled(*found, scales, c)
    else:
        total, sums, row_max = nothing_yet(c)
        top = row_max
        i = visits.count * 0
        while i < visits.count:
            first, _is_shown, _is_whole = visit_at(visits, i, seqlen_k, c)
            stop = tl.maximum(visits_before(visits, (first // c.SECTION + 1) * c.SECTION, c), i + 1)
            found = visit_in_order(lowest, q, i, stop, visits, seqlen_k, key, pages, rows, b, h, cache, scales, mods, c)
            acc, row_sum, of_section, highest = settled(*found, scales, c)
            total, sums, row_max = merged(total, sums, row_max, acc, row_sum, of_section)
            if c.HAS_MAX:
                top = tl.maximum(top, highest)
            i = stop
    return total, sums, row_max, top
