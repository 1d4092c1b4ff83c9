"""Patches of Triton's interpreter (``TRITON_INTERPRET=1``), for where it fails, is slow or computes differently from a GPU.

Tests, fuzzers and mutants that launch kernels call ``mend`` first; ``tests/conftest.py`` does so for all that pytest runs.

Correctness: NumPy 2.4 no longer converts an array of one element to a loop's bound; float32 is truncated to bfloat16 where hardware rounds
to nearest; products and most casts of bfloat16 use the numbers' bits; a comparison of scalars becomes a float when it is broadcast; an
integer from 2^31 to 2^32 is computed with in 32 bits where 64 are annotated; threads that launch at once share one grid position.
Speed: after a launch the whole storage behind a CPU tensor is copied onto itself, gigabytes for a small view; the language is patched again
for every function that a kernel calls, a third of all time; sums of integers are computed three times, for a check that only a GPU makes,
half of the rest; a block's shape and type are made anew for each of its values, a third of what is left; reductions by our own functions
go through a tile number by number; Python allocates and frees a stack chunk at each call that just exceeds the one it has.
Only a process that interprets is patched.
"""

from __future__ import annotations

import math
import threading
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from anyattn.triton_tools.interpreter import is_interpreting

__all__ = ["mend"]

_DEEP = 60_000  # entries of a frame, half a megabyte: Python then asks for a megabyte at once, which holds all that a kernel's calls take


@lru_cache(maxsize=1)
def mend() -> None:
    """Makes the interpreter compute like a GPU, once; without the interpreter does nothing."""
    if is_interpreting():
        _mend_numbers()
        _mend_time()
        _mend_launches()


def _mend_numbers() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, splat, cast, convert = builder.create_dot, builder.create_splat, builder.cast_impl, interpreter._convert_float
    as_argument = interpreter._implicit_cvt

    def rounded(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if source is tl.float32 and target is tl.bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
            return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        return convert(data, source, target, rounding_mode)

    def product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most: Any) -> Any:
        return dot(self, widened(a), widened(b), d, input_precision, most)

    def widened(x: Any) -> Any:
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

    interpreter._convert_float, interpreter._implicit_cvt = rounded, argument
    builder.create_dot, builder.cast_impl, builder.create_splat = product, casted, spread


def _mend_time() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    block_init, numpy_kind = tl.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    kinds_of_numpy: dict[str, Any] = {}

    @cache
    def shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(n) for n in lengths]), tl.constexpr(math.prod(lengths))

    def made_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = shape_of(tuple(kind.shape) if kind.is_block() else ())

    def made_block(self: Any, kind: Any, lengths: Any) -> None:
        at = kind.name, *(n.value if isinstance(n, tl.constexpr) else n for n in lengths)
        if at not in blocks:
            block_init(self, kind, lengths)
            blocks[at] = dict(self.__dict__)
        self.__dict__.update(blocks[at])

    def kind_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in kinds_of_numpy:
            kinds_of_numpy[name] = numpy_kind(kind.scalar)
        return kinds_of_numpy[name]

    def reduced(self: Any, given: Any) -> list[Any]:
        """By neighbours: half as many numbers each time. A dimension has a power of two of them, as all of Triton's."""
        parts, axis = self.unravel(given, self.axis)
        data, kinds = [x.handle.data for x in parts], [x.dtype for x in parts]
        while data[0].shape[axis] > 1:
            pairs = [[np.take(x, range(i, x.shape[axis], 2), axis) for x in data] for i in (0, 1)]
            sides = (self.to_tensor(x, kind) for side in pairs for x, kind in zip(side, kinds, strict=True))
            found = self.combine_fn.fn(*sides)
            data = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
        if not self.keep_dims:
            data = [x.squeeze(axis) for x in data]
        elif self.axis is None:
            data = [x.reshape((1,) * given[0].handle.data.ndim) for x in data]
        return [self.to_tensor(x, kind) for x, kind in zip(data, kinds, strict=True)]

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduced
    tl.tensor.__init__, tl.block_type.__init__ = made_tensor, made_block
    interpreter._get_np_dtype = kind_of


def _mend_launches() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    executor, patch, patch_tensor = interpreter.GridExecutor, interpreter._patch_lang, interpreter._patch_lang_tensor
    launch, restore, one_at_a_time = executor.__call__, executor._restore_args_dev, threading.RLock()

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    @lru_cache(maxsize=4096)
    def used_by(fn: Any) -> list[Any]:
        return [m for m in (tl, tl.core) if any(value is m for value in fn.__globals__.values())]

    def patched_language(fn: Any) -> Any:
        return patch(fn) if any(tl.core.is_builtin(m.load) for m in used_by(fn)) else interpreter._LangPatchScope()

    def restored(self: Any, args: Any, *rest: Any) -> None:
        if any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in torch.utils._pytree.tree_leaves(args)):
            restore(self, args, *rest)

    def launched(self: Any, *args: Any, **options: Any) -> None:
        with one_at_a_time:
            launch(self, *args, **options)

    launched.__code__ = launched.__code__.replace(co_stacksize=_DEEP)
    interpreter._patch_lang, interpreter._patch_lang_tensor = patched_language, patched_tensor
    executor._restore_args_dev, executor.__call__ = restored, launched
