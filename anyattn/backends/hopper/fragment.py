"""Views of an accumulator: rows and columns, and the operand that the next product takes from it."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute

__all__ = ["narrowed", "rows_and_columns"]


def rows_and_columns(x: Any) -> Any:
    """A 64 x n wgmma accumulator, ((2, 2, n / 8), M, N) per thread, seen as ((2, M), (2, n / 8, N)): row, column."""
    shape, stride = x.layout.shape, x.layout.stride
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], shape[0][2], shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], stride[0][2], stride[2])),
    )
    return cute.make_tensor(x.iterator, layout)


def narrowed(x: Any, dtype: Any) -> Any:
    """The accumulator's values in 16 bits, in the order in which wgmma takes its first operand from registers: no thread gives any away."""
    divided = cute.logical_divide(x.layout, ((None, None, 2), None, None))
    shape, stride = divided.shape, divided.stride
    order = cute.make_layout(
        ((shape[0][0], shape[0][1], shape[0][2][0]), shape[1], (shape[0][2][1], shape[2])),
        stride=((stride[0][0], stride[0][1], stride[0][2][0]), stride[1], (stride[0][2][1], stride[2])),
    )
    out = cute.make_rmem_tensor(cute.make_layout(order.shape), dtype)
    out.store(cute.make_tensor(x.iterator, order).load().to(dtype))
    return out
