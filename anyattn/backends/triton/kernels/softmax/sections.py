"""Sums by sections of the keys (device code): each SECTION of positions has sums of its own, which are merged in the order of the keys.

A program that visits all of a row's keys, and one for each section with a kernel that merges them, so compute the same numbers in the same
order. The kernels are compiled without fmas that the code does not name, so that a line has the same roundings wherever it is inlined.
SECTION is 0 without sections; with IS_PART a program visits one.
"""

import triton
import triton.language as tl

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.kernels.arguments import OF_HEAD
from anyattn.backends.triton.kernels.results import LOWEST, finished, greatest, whole_output

__all__ = ["combine_sections", "merged", "nothing_yet", "settled"]

_OF_HEAD: tl.constexpr = tl.constexpr(OF_HEAD)
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)
_NUMBERS = (
    "rows", "heads", "positions", "sections", "part_out", "part_statistics", "sink_b", "sink_h", "sink_s", "out_b", "out_h", "out_s",
)  # fmt: skip


@triton.jit
def nothing_yet(c):
    """(output, sums, maxima in base 2) before the first section."""
    return tl.zeros((c.TILE_M, c.BLOCK_DV), tl.float32), tl.zeros((c.TILE_M,), tl.float32), tl.full((c.TILE_M,), _LOWEST, tl.float32)


@triton.jit
def settled(acc, row_sum, row_max, top, scales, c):
    """(output, sums, maxima, greatest scores if HAS_MAX) of a section, the latter two in base 2. row_sum: [TILE_M, SUMS]."""
    total, row_sum = whole_output(acc, c), tl.sum(row_sum, 1)
    if c.IS_RAW:
        row_max = row_max * scales.base_2
    row_max = tl.where(row_sum == 0, _LOWEST, row_max)  # the same for any number of tiles that hide all keys
    if c.HAS_MAX:
        if c.IS_RAW:
            top = top * scales.base_2
        top = tl.where(row_sum == 0, _LOWEST, top)
    if c.V_SCALE == _OF_HEAD:  # of a row that sees no key it may be anything
        total = tl.where(row_sum[:, None] == 0, 0.0, total * scales.output)
    return total, row_sum, row_max, top


@triton.jit
def merged(total, sums, top, acc, row_sum, row_max):
    """``total``, ``sums`` and ``top`` of some sections, [rows, columns] and [rows], with those of the next. One without keys changes no
    bit: its weight is 0, and the factor of what came before is 1."""
    highest = tl.maximum(top, row_max)
    before, own = tl.exp2(top - highest), tl.exp2(row_max - highest)
    total = tl.fma(total, before[:, None] + tl.zeros_like(total), acc * own[:, None])
    return total, tl.fma(sums, before, row_sum * own), highest


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def combine_sections(
    outs, statistics, sink, out, lse, max_scores, rows: tl.int32, heads: tl.int32, positions: tl.int32, sections: tl.int32,
    part_out: tl.int64, part_statistics: tl.int64, sink_b: tl.int64, sink_h: tl.int64, sink_s: tl.int64, out_b: tl.int64, out_h: tl.int64,
    out_s: tl.int64, WIDTH: tl.constexpr, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, HAS_MAX: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Results of ROWS rows from those of their sections, GROUP of which are loaded at once. Grid: (rows / ROWS,).

    outs: float32 [section][row][WIDTH]. statistics: float32 [section][2, 3 if HAS_MAX][row], sums, maxima that were subtracted, and the
    greatest scores; a sum below 0 marks a row of no sequence, which gives 0 and -inf. part_out, part_statistics: between sections. sink,
    out: at the row's batch entry, head and position. lse, max_scores: float32 [row], in nats.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row, at = row < rows, row.to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    total, sums = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS,), tl.float32)
    top = tl.full((ROWS,), _LOWEST, tl.float32)
    of_all = top
    is_unused = tl.load(statistics + at, mask=is_row, other=0.0) < 0
    for first in range(0, sections, GROUP):  # the loads of a group wait for one another twice, not those of each section
        of_group, accs = (), ()
        for i in tl.static_range(GROUP):
            of_section = statistics + tl.cast(first + i, tl.int64) * part_statistics + at
            is_known = is_row & ~is_unused & (first + i < sections)
            row_sum = tl.load(of_section, mask=is_known, other=0.0)
            of_group += ((row_sum, tl.load(of_section + rows, mask=is_known, other=_LOWEST)),)
            if HAS_MAX:
                highest = tl.load(of_section + 2 * rows.to(tl.int64), mask=is_known & (row_sum != 0), other=_LOWEST)
                of_all = tl.maximum(of_all, highest)
        for i in tl.static_range(GROUP):
            seen = (of_group[i][0] != 0)[:, None] & (d < WIDTH)
            places = outs + tl.cast(first + i, tl.int64) * part_out + at[:, None] * WIDTH + d
            accs += (tl.load(places, mask=seen, other=0.0),)
        for i in tl.static_range(GROUP):
            row_sum, row_max = of_group[i]
            total, sums, top = merged(total, sums, top, accs[i], row_sum, tl.where(row_sum != 0, row_max, _LOWEST))
    b, h, s = row // positions // heads, row // positions % heads, row % positions
    logit = top
    if HAS_SINK:
        place = b.to(tl.int64) * sink_b + h.to(tl.int64) * sink_h + s.to(tl.int64) * sink_s
        logit = tl.load(sink + place, mask=is_row, other=0.0).to(tl.float32) * _LOG2E
    if HAS_MAX:
        tl.store(max_scores + at, greatest(sums, of_all), mask=is_row)
    total, natural = finished(total, sums, top, logit, HAS_SINK, PRECISION)
    if HAS_LSE:
        tl.store(lse + at, tl.where(is_unused, float("-inf"), natural), mask=is_row)
    target = out + (b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + s.to(tl.int64) * out_s)[:, None] + d
    total = tl.where(is_unused[:, None], 0.0, total)
    tl.store(target, total.to(out.dtype.element_ty), mask=is_row[:, None] & (d < WIDTH))
