"""Results of a row tile (device code): output, log-sum-exp and greatest score, with the sink."""

import triton
import triton.language as tl

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.triton.kernels.addressing import row_offsets

__all__ = ["places_of_rows", "store_results"]

_LOG2E: tl.constexpr = tl.constexpr(LOG2E)
_LN2: tl.constexpr = tl.constexpr(LN2)


@triton.jit
def places_of_rows(tile, sizes):
    """[TILE_M], int64: the places of a tile's rows among the statistics."""
    return (tile.sequence.q_row.to(tl.int64) * sizes.heads + tile.heads) * sizes.positions + tile.at


@triton.jit
def store_results(acc, row_sum, row_max, tile, tensors, strides, spans, sizes, split, c):
    """Writes the output and statistics of a ``RowTile``. A split writes to [split][q row][head][position]; the sink is added when splits
    are combined."""
    h, is_row, q_row = tile.heads, tile.is_row, tile.sequence.q_row
    statistic = places_of_rows(tile, sizes)
    part = tl.cast(split, tl.int64) * spans.part_statistics
    if c.HAS_MAX:
        seen = tl.where(row_sum == 0, float("-inf"), row_max * _LN2)
        tl.store(tensors.max_scores + part + statistic, seen, mask=is_row)
    if c.HAS_SINK:
        logit = tl.load(tensors.sink + h).to(tl.float32) * _LOG2E
        highest = tl.maximum(row_max, logit)
        rescale = tl.exp2(row_max - highest)
        row_sum = row_sum * rescale + tl.exp2(logit - highest)
        acc = acc * rescale[:, None]
        row_max = highest
    total = tl.where(row_sum == 0, 1.0, row_sum)
    if c.HAS_LSE:  # before the output, since a program may have to wait for the output's copy engine
        lse = tl.where(row_sum == 0, float("-inf"), row_max * _LN2 + tl.log(total))
        tl.store(tensors.lse + part + statistic, lse, mask=is_row)
    if c.PRECISION == "ieee":
        acc = acc / total[:, None]
    else:  # one division instead of many, each of seven instructions
        acc = acc * (1.0 / total)[:, None]
    if c.IS_DESCRIBED >= 3:
        tensors.out.store([tile.b, tile.h, tile.first, 0], tl.reshape(acc.to(tensors.out.dtype), (1, 1, acc.shape[0], c.BLOCK_DV)))
    else:
        offsets = row_offsets(q_row, h, tile.at, strides.out)
        d = tl.arange(0, c.BLOCK_DV)[None, :]
        out = tensors.out + tl.cast(split, tl.int64) * strides.part_out
        tl.store(out + offsets[:, None] + d, acc.to(out.dtype.element_ty), mask=is_row[:, None] & (d < c.HEAD_DIM_V))
