"""Faster blocks in Triton's interpreter: constants, types, loads, shapes of stores and matrix products; part of ``interpreter.mend``.

Each patch handles the usual case in a few steps of Python and leaves all others to Triton's own code: constants and ranges are made once, a
scalar is broadcast to a block without its type, and loads and products skip properties that only a compiler needs.
The results are those of Triton's interpreter, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

__all__ = ["mend_blocks"]

_INT32 = range(-(2**31), 2**31)
_LOADED = {"fp16", "fp32", "fp64", "bf16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_CAST = {("fp16", "fp32"), ("fp32", "fp16"), ("int32", "fp32"), ("int64", "fp32")}


def mend_blocks() -> None:
    """After ``interpreter_speed.mend_types`` and ``mend_operations``, whose functions stay for all that is not the usual case."""
    import triton.language as tl
    from triton.runtime import interpreter

    make = _makers(tl, interpreter)
    _mend_handles(interpreter)
    _mend_constants(tl, interpreter)
    _mend_shapes(tl, interpreter, *make)
    _mend_loads(tl, interpreter, *make)
    _mend_products(tl, interpreter, make[0])
    _mend_casts(tl, interpreter, make[0])


def _makers(tl: Any, interpreter: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A block of numbers of a scalar type, and a scalar's number in every place of a block."""
    types: dict[tuple[Any, ...], Any] = {}
    handle, tensor, numpy_of = interpreter.TensorHandle, tl.tensor, interpreter._get_np_dtype

    def block(data: np.ndarray, scalar: Any) -> Any:
        at = scalar.name, data.shape
        if at not in types:
            types[at] = tl.block_type(scalar, list(data.shape))
        return tensor(handle(data, scalar), types[at])

    def spread(value: Any, shape: tuple[int, ...]) -> np.ndarray | None:
        """None where a truth value is of a number's type, which Triton's way sees to."""
        data, kind = value.handle.data, numpy_of(value.dtype)
        if data.dtype != kind:
            return None
        found: np.ndarray = np.empty(shape, dtype=kind)
        found.fill(data.reshape(-1)[0])
        return found

    return block, spread


def _mend_handles(interpreter: Any) -> None:
    has_room = interpreter._validate_np_data_size

    def made(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if not has_room(data, dtype):
            self.__post_init__()

    interpreter.TensorHandle.__init__ = made


def _mend_constants(tl: Any, interpreter: Any) -> None:
    semantic = interpreter.TritonSemantic
    to_tensor, arange, tensor = semantic.to_tensor, semantic.arange, tl.tensor
    numbers: dict[tuple[type, Any], Any] = {}
    ranges: dict[tuple[Any, Any], Any] = {}

    def as_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        kind = type(value)
        if kind is tensor:
            return value
        if kind is bool or (kind is int and value in _INT32):
            if (kind, value) not in numbers:
                numbers[kind, value] = to_tensor(self, value, check_type)
            return numbers[kind, value]
        return to_tensor(self, value, check_type)

    def counted(self: Any, start: Any, end: Any, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None or type(start) is not int or type(end) is not int:
            return arange(self, start, end, ret_ty=ret_ty)
        if (start, end) not in ranges:
            ranges[start, end] = arange(self, start, end)
        return ranges[start, end]

    semantic.to_tensor, semantic.arange = as_tensor, counted


def _mend_shapes(tl: Any, interpreter: Any, block: Callable[..., Any], spread: Callable[..., Any]) -> None:
    semantic, block_type = interpreter.TritonSemantic, tl.block_type
    alike, broadcast = semantic.broadcast_impl_value, semantic.broadcast_impl_shape

    def of_one_shape(self: Any, a: Any, b: Any) -> Any:
        is_block = type(a.type) is block_type, type(b.type) is block_type
        if is_block == (True, True):
            if a.handle.data.shape == b.handle.data.shape:
                return a, b
        elif is_block == (False, False):
            return a, b
        else:
            own, other = (a, b) if is_block[0] else (b, a)
            data = spread(other, own.handle.data.shape)
            if data is not None:
                other = block(data, other.dtype)
                return (a, other) if is_block[0] else (other, b)
        return alike(self, a, b)

    def broadened(self: Any, value: Any, shape: Any) -> Any:
        if type(value.type) is not block_type and shape:
            data = spread(value, tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape))
            if data is not None:
                return block(data, value.dtype)
        return broadcast(self, value, shape)

    semantic.broadcast_impl_value, semantic.broadcast_impl_shape = of_one_shape, broadened


def _mend_loads(tl: Any, interpreter: Any, block: Callable[..., Any], spread: Callable[..., Any]) -> None:
    semantic, numpy_of, block_type = interpreter.TritonSemantic, interpreter._get_np_dtype, tl.block_type
    load, read = semantic.load, interpreter._interpreter.load

    @cache
    def filled(shape: tuple[int, ...], value: int, kind: Any) -> np.ndarray:
        found = np.full(shape, value, dtype=kind)
        found.flags.writeable = False
        return found

    def shaped(value: Any, shape: tuple[int, ...]) -> np.ndarray | None:
        if type(value.type) is not block_type:
            return spread(value, shape)
        data: np.ndarray = value.handle.data
        return data if data.shape == shape else None

    def loaded(self: Any, pointer: Any, mask: Any, other: Any, boundary: Any, padding: Any, *rest: Any) -> Any:
        scalar = pointer.dtype
        if not scalar.is_ptr() or boundary or padding or (mask is None and other is not None):
            return load(self, pointer, mask, other, boundary, padding, *rest)
        kind, places, is_block = scalar.element_ty, pointer.handle.data, type(pointer.type) is block_type
        if kind.name not in _LOADED or not (is_block or all(x is None or type(x.type) is not block_type for x in (mask, other))):
            return load(self, pointer, mask, other, boundary, padding, *rest)
        shape, numpy_kind = places.shape, numpy_of(kind)
        shown = filled(shape, 1, np.bool_) if mask is None else shaped(mask, shape)
        behind = filled(shape, 0, numpy_kind) if other is None else shaped(self.cast(other, kind), shape)
        if shown is None or shown.dtype != np.bool_ or behind is None or behind.dtype != numpy_kind:
            return load(self, pointer, mask, other, boundary, padding, *rest)
        found = read(places, shown, behind, numpy_kind)
        return block(found, kind) if is_block else tl.tensor(interpreter.TensorHandle(found, kind), kind)

    semantic.load = loaded


def _mend_products(tl: Any, interpreter: Any, block: Callable[..., Any]) -> None:
    semantic, builder = interpreter.TritonSemantic, interpreter.interpreter_builder
    dot = semantic.dot

    def multiplied(self: Any, a: Any, b: Any, acc: Any, precision: Any, most: Any, out: Any) -> Any:
        """Of two matrices of 16 or 32 bits into float32."""
        is_usual = a.dtype is b.dtype and a.dtype in (tl.float16, tl.bfloat16, tl.float32) and out is tl.float32
        x, y = a.handle.data, b.handle.data
        if not is_usual or x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[0]:
            return dot(self, a, b, acc, precision, most, out)
        if acc is None:
            total = interpreter.TensorHandle(np.zeros((x.shape[0], y.shape[1]), dtype=np.float32), tl.float32)
        elif acc.dtype is tl.float32 and acc.handle.data.shape == (x.shape[0], y.shape[1]):
            total = acc.handle
        else:
            return dot(self, a, b, acc, precision, most, out)
        return block(builder.create_dot(a.handle, b.handle, total, None, 0).data, tl.float32)

    semantic.dot = multiplied


def _mend_casts(tl: Any, interpreter: Any, block: Callable[..., Any]) -> None:
    semantic, numpy_of = interpreter.TritonSemantic, interpreter._get_np_dtype
    cast = semantic.cast

    def converted(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        scalar = kind.scalar
        names = value.dtype.name, scalar.name
        if names in _CAST and fp_downcast_rounding is None and type(value.type) is tl.block_type:
            return block(value.handle.data.astype(numpy_of(scalar)), scalar)
        return cast(self, value, kind, fp_downcast_rounding)

    semantic.cast = converted
