"""Results of a row tile (device code): the online softmax that its key tiles update, and at the end output, log-sum-exp and greatest score,
with the sink."""

import triton
import triton.language as tl

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.triton.kernels.addressing import row_offsets
from anyattn.backends.triton.kernels.wrapped_rows import output_columns

__all__ = ["LOWEST", "finished", "greatest", "no_output", "no_results", "places_of_rows", "store_results", "whole_output"]

# Lower bound of a row maximum: -inf minus it is -inf, not NaN.
LOWEST = -1.7014118e38
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LN2: tl.constexpr = tl.constexpr(LN2)
_LOWEST: tl.constexpr = tl.constexpr(LOWEST)


@triton.jit
def places_of_rows(tile, sizes):
    """[TILE_M], int64: the places of a tile's rows among the statistics."""
    return (tile.sequence.q_row.to(tl.int64) * sizes.heads + tile.heads) * sizes.positions + tile.at


@triton.jit
def store_results(acc, row_sum, row_max, top, tile, tensors, strides, spans, sizes, split, c):
    """Writes the output and statistics of a ``RowTile``. A split writes to [split][q row][head][position]; the sink is added when splits
    are combined. acc: its columns are in the order of ``output_columns``. top: the greatest scores, in base 2 as row_max, which they may
    exceed. With IS_PART they are stored as they are, for ``softmax.sections.combine_sections``; rows that see no key of the section have
    no output."""
    h, is_row, q_row = tile.heads, tile.is_row, tile.sequence.q_row
    statistic = places_of_rows(tile, sizes)
    part = tl.cast(split, tl.int64) * spans.part_statistics
    if c.IS_PART:
        tl.store(tensors.lse + part + statistic, row_sum, mask=is_row)
        tl.store(tensors.max_scores + part + statistic, row_max, mask=is_row)
        if c.HAS_MAX:  # of three statistics, which are equally far apart, the third
            tl.store(tensors.max_scores + part + spans.part_statistics // 3 + statistic, top, mask=is_row)
        is_row = is_row & (row_sum != 0)
    else:
        if c.HAS_MAX:
            tl.store(tensors.max_scores + part + statistic, greatest(row_sum, top), mask=is_row)
        logit = row_max
        if c.HAS_SINK:
            logit = tl.load(tensors.sink + h).to(tl.float32) * _LOG2E
        acc, lse = finished(acc, row_sum, row_max, logit, c.HAS_SINK, c.PRECISION)
        if c.HAS_LSE:  # before the output, since a program may have to wait for the output's copy engine
            tl.store(tensors.lse + part + statistic, lse, mask=is_row)
    if c.IS_DESCRIBED >= 3:
        tensors.out.store([tile.b, tile.h, tile.first, 0], tl.reshape(acc.to(tensors.out.dtype), (1, 1, acc.shape[0], c.BLOCK_DV)))
    else:
        offsets = row_offsets(q_row, h, tile.at, strides.out)
        d, columns = tl.arange(0, c.BLOCK_DV)[None, :], output_columns(tile.kv_head, tensors, strides, c)[None, :]
        out = tensors.out + tl.cast(split, tl.int64) * strides.part_out
        tl.store(out + offsets[:, None] + columns, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (d < c.HEAD_DIM_V))


@triton.jit
def greatest(row_sum, row_max):
    """The rows' greatest scores, in nats; -inf without a key."""
    return tl.where(row_sum == 0, float("-inf"), row_max * _LN2)


@triton.jit
def finished(acc, row_sum, row_max, logit, HAS_SINK: tl.constexpr, PRECISION: tl.constexpr):
    """(output, log-sum-exp in nats) of rows whose weights are ``2 ** (score - row_max)``. logit: of the sink, in base 2."""
    if HAS_SINK:
        highest = tl.maximum(row_max, logit)
        rescale = tl.exp2(row_max - highest)
        row_sum = row_sum * rescale + tl.exp2(logit - highest)
        acc = acc * rescale[:, None]
        row_max = highest
    total = tl.where(row_sum == 0, 1.0, row_sum)
    lse = tl.where(row_sum == 0, float("-inf"), row_max * _LN2 + tl.log(total))
    if PRECISION == "ieee":
        acc = acc / total[:, None]
    else:  # one division instead of many, each of seven instructions
        acc = acc * (1.0 / total)[:, None]
    return acc, lse


@triton.jit
def no_output(c):
    """The accumulator before the first key: [TILE_M, BLOCK_DV], or even and odd columns apart."""
    if c.HAS_PAIRS:
        return tl.zeros((c.TILE_M, c.BLOCK_DV // 2), tl.float32), tl.zeros((c.TILE_M, c.BLOCK_DV // 2), tl.float32)
    else:
        return tl.zeros((c.TILE_M, c.BLOCK_DV), tl.float32)


@triton.jit
def whole_output(acc, c):
    """[TILE_M, BLOCK_DV]: the accumulator with its columns in order."""
    if c.HAS_PAIRS:
        return tl.reshape(tl.join(acc[0], acc[1]), (c.TILE_M, c.BLOCK_DV))
    else:
        return acc


@triton.jit
def no_results(c):
    """(output, row_sum, row_max) of rows that have seen no key."""
    row_sum = tl.zeros((c.TILE_M, c.SUMS), tl.float32)
    return tl.zeros((c.TILE_M, c.BLOCK_DV), tl.float32), row_sum, tl.full((c.TILE_M,), _LOWEST, tl.float32)
