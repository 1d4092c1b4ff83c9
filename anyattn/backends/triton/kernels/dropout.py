"""Dropout of attention weights (device code)."""

import triton
import triton.language as tl

__all__ = ["factor_of", "kept_of"]


@triton.jit
def kept_of(p, b, h, kv, rows, captured, DROPOUT: tl.constexpr, HAS_DROPOUT: tl.constexpr):
    """Weights, or their gradients, with 0 where dropout drops them. rows: the part's row values."""
    if HAS_DROPOUT:
        return tl.where(DROPOUT(b, h, kv, rows, captured.dropout.scalars, captured.dropout.tensors), p, 0.0)
    else:
        return p


@triton.jit
def factor_of(captured):
    """The factor of the weights that dropout keeps."""
    return tl.cast(tl.full((), captured.dropout.scalars[1], tl.int64), tl.float64, bitcast=True).to(tl.float32)
