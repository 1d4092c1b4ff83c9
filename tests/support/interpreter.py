"""Patches of Triton's interpreter (``TRITON_INTERPRET=1``) where it fails, is slow or computes differently from a GPU.

Tests, fuzzers and mutants that launch kernels call ``mend`` first; ``tests/conftest.py`` does so for everything that pytest runs.

NumPy 2.4 no longer converts an array of one element to a loop's bound; float32 is truncated to bfloat16, where hardware rounds to nearest;
products and most casts of bfloat16 use the raw bits, and it has no constants; NaN, infinities and the least numbers of 8 bits become other
numbers; a comparison of scalars becomes a float when it is broadcast; an integer from 2^31 to 2^32 is computed with in 32 bits where 64 are
annotated; sums of products depend on how many rows a block has, by the processor; threads that launch at the same time share one grid
position (``interpreter_speed`` and ``interpreter_blocks`` patch the slow parts).
Only a process that interprets is patched.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from anyattn.triton_tools.interpreter import is_interpreting
from tests.support import interpreter_blocks, interpreter_speed

__all__ = ["mend"]


@lru_cache(maxsize=1)
def mend() -> None:
    """Makes the interpreter compute like a GPU, once; without the interpreter does nothing."""
    if is_interpreting():
        _mend_numbers()
        interpreter_speed.mend_types()
        interpreter_speed.mend_operations()
        interpreter_blocks.mend_blocks()
        interpreter_speed.mend_reductions()
        interpreter_speed.mend_rewriting()
        interpreter_speed.mend_launches()


def _mend_numbers() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, splat, cast, convert = builder.create_dot, builder.create_splat, builder.cast_impl, interpreter._convert_float
    as_argument = interpreter._implicit_cvt

    eights = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    wides = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}

    def rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source in eights and target in wides:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.uint8)).view(eights[source]).to(wides[target])
            bits = values.view(torch.int32 if target is tl.float32 else torch.int16).numpy()
            return bits.view(np.uint32 if target is tl.float32 else np.uint16).reshape(data.shape)
        if source is tl.float32 and target is tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        a, b = widened(a), widened(b)
        if d.dtype.scalar is not tl.float32 or a.dtype.scalar is not tl.float32 or b.dtype.scalar is not tl.float32:
            return dot(self, a, b, d, input_precision, most)
        # a sum in float32 would depend on how many rows the block has, on processors whose matrix products are the Haswell kernels
        # of OpenBLAS; in float64 products are exact, and sums differ by less than what rounding them once leaves
        return handle(np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32) + d.data, tl.float32)

    def widened(x: Any) -> Any:
        if x.dtype.scalar is tl.float16:  # NumPy would add in another order than it does for bfloat16
            return handle(x.data.astype(np.float32), tl.float32)
        if x.dtype.scalar is not tl.bfloat16:
            return x
        return handle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def casted(self: Any, x: Any, kind: Any) -> Any:
        both = x.dtype.scalar, kind.scalar
        if tl.bfloat16 in both and tl.float32 not in both and both[0] is not both[1]:
            x = cast(self, x, tl.float32)
        return cast(self, x, kind)

    def spread(self: Any, kind: Any, arg: Any) -> Any:
        if np.asarray(arg.data).dtype == np.bool_ and arg.dtype.scalar is not tl.int1:
            arg = handle(arg.data, tl.int1)
        return splat(self, kind, arg)

    def argument(arg: Any) -> Any:
        if isinstance(arg, int) and 2**31 <= arg < 2**32:
            return tl.tensor(handle(np.array([arg], dtype=np.int64), tl.int64), tl.int64)
        return as_argument(arg)

    def bfloat16(self: Any, value: float) -> Any:
        return self.create_fp_trunc(self.get_fp32(value), tl.bfloat16)

    builder.get_bf16 = bfloat16
    interpreter._convert_float, interpreter._implicit_cvt = rounded, argument
    builder.create_dot, builder.cast_impl, builder.create_splat = product, casted, spread
