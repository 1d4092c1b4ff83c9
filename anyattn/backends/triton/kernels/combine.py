"""Kernels that combine partial results over parts of the keys: those of splits, and of even shares."""

import triton
import triton.language as tl

from anyattn.arithmetic import LN2, LOG2E

__all__ = ["combine_row", "combine_shares"]

_LN2: tl.constexpr = tl.constexpr(LN2)
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)

_NUMBERS = (
    "heads", "positions", "parts", "part_out", "part_lse", "sink_b", "sink_h", "sink_s", "out_b", "out_h", "out_s", "width",
)  # fmt: skip

_OF_SHARES = ("used", "heads", "positions", "out_b", "out_h", "out_s")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def combine_row(
    outs, lses, sink, out, lse, heads: tl.int32, positions: tl.int32, parts: tl.int32, part_out: tl.int64, part_lse: tl.int64,
    sink_b: tl.int64, sink_h: tl.int64, sink_s: tl.int64, out_b: tl.int64, out_h: tl.int64, out_s: tl.int64, width: tl.int32,
    HAS_SINK: tl.constexpr, HAS_UNUSED: tl.constexpr, HAS_LSE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines one row. Grid: (batch * heads * positions,).

    outs: float32 [parts][row][width]. lses: float32 [parts][row], natural logarithm. part_out, part_lse: strides between parts. sink, out:
    at the row's batch entry, head and position. HAS_UNUSED: a row with lses of +inf belongs to no sequence and gives 0 and -inf. PARTS: how
    many parts are loaded at once.
    """
    row = tl.program_id(0)
    b, h, s = row // positions // heads, row // positions % heads, row % positions
    lane, d = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    start = row.to(tl.int64)
    acc, total, top = tl.zeros((BLOCK,), tl.float32), tl.full((), 0.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    is_unused = tl.full((), False, tl.int1)
    if HAS_SINK:
        top = tl.load(sink + b.to(tl.int64) * sink_b + h.to(tl.int64) * sink_h + s.to(tl.int64) * sink_s).to(tl.float32)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    for first in range(0, parts, PARTS):
        part = first + lane
        exists, at = part < parts, part.to(tl.int64)
        lse_of_parts = tl.load(lses + start + at * part_lse, mask=exists, other=float("-inf"))
        # not after the weights are known: a program has little to do but to wait for what it loads
        of_parts = tl.load(
            outs + at[:, None] * part_out + start * width + d[None, :], mask=exists[:, None] & (d < width)[None, :], other=0.0
        )
        if HAS_UNUSED:
            is_unused = is_unused | (tl.max(lse_of_parts, 0) == float("inf"))
            lse_of_parts = tl.where(is_unused, float("-inf"), lse_of_parts)
        highest = tl.maximum(top, tl.max(lse_of_parts, 0))
        near = tl.where(highest == float("-inf"), 0.0, highest)  # any value near the maximum works
        rescale, weight = tl.exp(top - near), tl.exp(lse_of_parts - near)
        # the output of a part without weight is not added: it may be NaN
        acc = acc * rescale + tl.sum(tl.where((weight > 0)[:, None], of_parts * weight[:, None], 0.0), 0)
        total, top = total * rescale + tl.sum(weight, 0), highest
    if HAS_UNUSED:
        total = tl.where(is_unused, 0.0, total)
    is_blind = total == 0
    total = tl.where(is_blind, 1.0, total)
    target = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + s.to(tl.int64) * out_s
    tl.store(target + d, (acc / total).to(out.dtype.element_ty), mask=d < width)
    if HAS_LSE:
        tl.store(lse + start, tl.where(is_blind, float("-inf"), top + tl.log(total)))


@triton.jit(do_not_specialize=_OF_SHARES, do_not_specialize_on_alignment=_OF_SHARES)
def combine_shares(
    parts, part_sums, part_rows, sink, out, lse, used: tl.int32, heads: tl.int32, positions: tl.int32, out_b: tl.int64, out_h: tl.int64,
    out_s: tl.int64, HAS_SINK: tl.constexpr, HAS_LSE: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Combines one row of the row tile that a program ended and another began. Grid: (programs * used,).

    used: rows of a tile that may exist. parts, part_sums, part_rows: ``even_shares.store_part``. sink: (heads,), contiguous. out: (batch,
    heads, positions, WIDTH). lse: float32 (batch, heads, positions), contiguous. PARTS: how many parts are loaded at once.
    """
    program, r = tl.program_id(0) // used, tl.program_id(0) % used
    table = part_rows + program.to(tl.int64) * (TILE_M + 1)
    row, first = tl.load(table + r), tl.load(table + TILE_M)
    if row < 0:
        return
    h = row // positions % heads
    lane, d = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    count = program - first + 1
    acc, total, top = tl.zeros((BLOCK,), tl.float32), tl.full((), 0.0, tl.float32), tl.full((), float("-inf"), tl.float32)
    if HAS_SINK:
        total, top = total + 1, tl.load(sink + h).to(tl.float32) * _LOG2E
    for begin in range(0, count, PARTS):
        part = begin + lane
        at = ((first + part) * 2 + (part == 0)) * TILE_M + r
        exists = part < count
        sums = tl.load(part_sums + at * 2, mask=exists, other=0.0)
        maxima = tl.load(part_sums + at * 2 + 1, mask=exists, other=float("-inf"))
        outs = tl.load(parts + at[:, None] * BLOCK + d[None, :], mask=exists[:, None], other=0.0)
        highest = tl.maximum(top, tl.max(maxima, 0))
        near = tl.where(highest == float("-inf"), 0.0, highest)
        rescale, weight = tl.exp2(top - near), tl.exp2(maxima - near)
        acc = acc * rescale + tl.sum(outs * weight[:, None], 0)
        total, top = total * rescale + tl.sum(sums * weight, 0), highest
    is_blind = total == 0
    total = tl.where(is_blind, 1.0, total)
    target = out + row // positions // heads * out_b + h * out_h + row % positions * out_s
    tl.store(target + d, (acc / total).to(out.dtype.element_ty), mask=d < WIDTH)
    if HAS_LSE:
        tl.store(lse + row, tl.where(is_blind, float("-inf"), top * _LN2 + tl.log(total)))
