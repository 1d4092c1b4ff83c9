"""Matrix product added to a loop's accumulator (device code)."""

import triton
import triton.language as tl

__all__ = ["plus_product"]


@triton.jit
def plus_product(acc, rescale, p, v, PRECISION: tl.constexpr):
    """acc * rescale + p @ v, p in v's dtype. rescale: [rows], None is 1.

    In float32 each tile's product is computed separately and then added: the error of a single running sum grows with the number of keys.
    The addition is an fma, because Triton's compiler would fold a plain addition into the product.
    """
    if v.dtype == tl.float32:
        product = tl.dot(p, v, input_precision=PRECISION)
        if rescale is None:
            return tl.fma(acc, 1.0, product)
        else:
            return tl.fma(acc, rescale[:, None], product)
    elif rescale is None:
        return tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    else:
        return tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
