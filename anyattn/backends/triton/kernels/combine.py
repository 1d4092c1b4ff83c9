"""Kernel that combines partial results over parts of the keys by their log-sum-exps."""

import triton
import triton.language as tl

__all__ = ["combine_row"]

_NUMBERS = (
    "heads", "positions", "parts", "part_out", "part_lse", "sink_b", "sink_h", "sink_s", "out_b", "out_h", "out_s", "width",
)  # fmt: skip


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
    top = tl.full((), float("-inf"), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + lane
        lse_of_parts = tl.load(lses + start + part.to(tl.int64) * part_lse, mask=part < parts, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse_of_parts, 0))
    is_unused = top == float("inf")
    if HAS_SINK:
        logit = tl.load(sink + b.to(tl.int64) * sink_b + h.to(tl.int64) * sink_h + s.to(tl.int64) * sink_s).to(tl.float32)
        top = tl.maximum(top, logit)
    near = tl.where(top == float("-inf"), 0.0, top)  # any value near the maximum works
    if HAS_UNUSED:
        near = tl.where(is_unused, 0.0, near)
    acc, total = tl.zeros((BLOCK,), tl.float32), tl.full((), 0.0, tl.float32)
    for first in range(0, parts, PARTS):
        part = first + lane
        lse_of_parts = tl.load(lses + start + part.to(tl.int64) * part_lse, mask=part < parts, other=float("-inf"))
        weight = tl.exp(lse_of_parts - near)
        if HAS_UNUSED:
            weight = tl.where(is_unused, 0.0, weight)
        # the output of a part without weight is not loaded: it may be NaN
        is_seen = (weight > 0)[:, None] & (d < width)[None, :]
        at = part.to(tl.int64)[:, None] * part_out + start * width + d[None, :]
        acc += tl.sum(tl.load(outs + at, mask=is_seen, other=0.0) * weight[:, None], 0)
        total += tl.sum(weight, 0)
    if HAS_SINK:
        share = tl.exp(logit - near)
        if HAS_UNUSED:
            share = tl.where(is_unused, 0.0, share)
        total += share
    is_blind = total == 0
    total = tl.where(is_blind, 1.0, total)
    target = out + b.to(tl.int64) * out_b + h.to(tl.int64) * out_h + s.to(tl.int64) * out_s
    tl.store(target + d, (acc / total).to(out.dtype.element_ty), mask=d < width)
    if HAS_LSE:
        tl.store(lse + start, tl.where(is_blind, float("-inf"), near + tl.log(total)))
