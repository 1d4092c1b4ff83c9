"""Launches through tvm-ffi's C interface: a kernel's arguments are laid out once, and only addresses change from launch to launch.

A call from Python describes every tensor anew, and a kernel is passed views: 0.2 and 1 us each, of which a varlen call has eight.
"""

from __future__ import annotations

import builtins
import ctypes
import struct
import threading
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["PackedLaunch", "packed_launch"]

_DTYPES = {  # code and bits in DLPack
    torch.int8: (0, 8), torch.int16: (0, 16), torch.int32: (0, 32), torch.int64: (0, 64), torch.uint8: (1, 8),
    torch.float16: (2, 16), torch.float32: (2, 32), torch.float64: (2, 64), torch.bfloat16: (4, 16),
}  # fmt: skip
_NONE, _INT, _FLOAT, _TENSOR = 0, 1, 3, 7  # kinds of a ``TVMFFIAny``
_CPU, _CUDA = 1, 2  # of DLPack
_WORDS = 6  # of 64 bits of a ``DLTensor``, the first of which is the address
_HEADER = 24  # bytes of a ``TVMFFIObject``; its kind is behind its count of references


class PackedLaunch:
    """A launch of a function of tvm-ffi with the arguments of an earlier one but for the addresses of tensors.

    arguments: tensors, numbers, None and tuples of numbers; shapes, strides and dtypes are those of these tensors.
    """

    def __init__(self, function: Any, arguments: Sequence[Any]) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        ranks = [x.ndim for x in tensors]
        memory = self._memory = (ctypes.c_int64 * (_WORDS * len(tensors) + 2 * sum(ranks) + 2 * len(arguments) + 2))()
        words = memoryview(memory).cast("B").cast("q")
        start = ctypes.addressof(memory)
        free, described = _WORDS * len(tensors), {}
        for number, (x, rank) in enumerate(zip(tensors, ranks, strict=True)):
            described[id(x)] = start + 8 * _WORDS * number
            words[free : free + 2 * rank] = array("q", (*x.shape, *x.stride()))
            words[_WORDS * number + 1 : _WORDS * (number + 1)] = array("q", _described(x, start + 8 * free))
            free += 2 * rank
        self._arguments, self._count, self._kept = start + 8 * free, len(arguments), [function]
        for x in arguments:
            words[free : free + 2] = array("q", (_TENSOR, described[id(x)]) if isinstance(x, Tensor) else self._value(x))
            free += 2
        self._result = start + 8 * free
        self._addresses = memoryview(memory).cast("B").cast("Q")[: _WORDS * len(tensors) : _WORDS]
        self._device = next((x.device for x in tensors if x.device.type == "cuda"), None)
        self._function, self._lock = function.__chandle__(), threading.Lock()

    def _value(self, x: Any) -> tuple[int, int]:
        """The kind and the value of an argument that is no tensor."""
        if isinstance(x, tuple):
            import tvm_ffi

            items = tvm_ffi.convert(list(x))
            self._kept.append(items)
            place = items.__chandle__()
            return ctypes.c_int32.from_address(place + 8).value, place
        if x is None:
            return _NONE, 0
        return (_FLOAT, struct.unpack("q", struct.pack("d", x))[0]) if isinstance(x, float) else (_INT, x)

    def launch(self, grid: tuple[int, ...], addresses: Sequence[int]) -> None:
        """Launches on torch's current stream of the tensors' device. addresses: of the tensors, in order; grid: unused."""
        with self._lock:  # between threads: the function reads what is written here
            self._addresses[:] = array("Q", addresses)
            if self._device is None:
                _library().call(self._function, self._arguments, self._count, self._result)
            else:
                self._launch_on_stream(self._device.index)

    def _launch_on_stream(self, device: int) -> None:
        library, stream = _library(), torch._C._cuda_getCurrentRawStream(device)  # type: ignore[attr-defined]
        before = library.get_stream(_CUDA, device) or 0
        if before == stream:
            library.call(self._function, self._arguments, self._count, self._result)
            return
        library.set_stream(_CUDA, device, stream, None)
        try:
            library.call(self._function, self._arguments, self._count, self._result)
        finally:
            library.set_stream(_CUDA, device, before, None)


def packed_launch(function: Any, arguments: Sequence[Any]) -> PackedLaunch | None:
    """The launch of a kernel with these arguments; None for a function of another kind than tvm-ffi's, or arguments of another kind than
    ``PackedLaunch`` takes."""
    if not _is_function(function) or not all(map(_is_packable, arguments)) or not _is_as_known():
        return None
    return PackedLaunch(function, arguments)


def _described(x: Tensor, sizes: int) -> tuple[int, ...]:
    """All words of a ``DLTensor`` behind the address. sizes: where its shape is, and behind that its strides."""
    code, bits = _DTYPES[x.dtype]
    device = (_CUDA, x.device.index) if x.device.type == "cuda" else (_CPU, 0)
    return *struct.unpack("qq", struct.pack("iiiBBH", *device, x.ndim, code, bits, 1)), sizes, sizes + 8 * x.ndim, 0


def _is_packable(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.dtype in _DTYPES and x.device.type in ("cpu", "cuda")
    return x is None or type(x) in (int, float) or (type(x) is tuple and all(type(n) in (int, float) for n in x))


def _is_function(function: Any) -> bool:
    if not type(function).__module__.startswith("tvm_ffi"):
        return False
    import tvm_ffi

    return isinstance(function, tvm_ffi.Function) and hasattr(function, "__chandle__")


class _Library:
    """Functions of tvm-ffi's library. The interpreter's lock is free while they run, since a launch may wait for its queue."""

    def __init__(self) -> None:
        import tvm_ffi

        found = ctypes.CDLL(tvm_ffi.libinfo.find_libtvm_ffi())
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        self._call = _typed(found.TVMFFIFunctionCall, number, pointer, pointer, number, pointer)
        self.get_stream = _typed(found.TVMFFIEnvGetStream, pointer, number, number)
        self.set_stream = _typed(found.TVMFFIEnvSetStream, number, number, number, pointer, pointer)
        self._take_error = _typed(found.TVMFFIErrorMoveFromRaised, None, pointer)
        self._release = _typed(found.TVMFFIObjectDecRef, number, pointer)

    def call(self, function: int, arguments: int, count: int, result: int) -> None:
        if self._call(function, arguments, count, result):
            raise self._error()

    def _error(self) -> Exception:
        """The error that a function has raised: text of its kind and message follow the object's header."""
        error = ctypes.c_void_p()
        self._take_error(ctypes.byref(error))
        if not error.value:
            return RuntimeError("a kernel was not launched, and tvm-ffi does not say why")
        kind, message = (
            ctypes.string_at(*(ctypes.c_size_t.from_address(error.value + _HEADER + at + part).value for part in (0, 8))).decode()
            for at in (0, 16)
        )
        self._release(error)
        known = getattr(builtins, kind, RuntimeError)
        return known(message) if isinstance(known, type) and issubclass(known, Exception) else RuntimeError(f"{kind}: {message}")


def _typed(function: Any, returned: Any, *arguments: Any) -> Callable[..., Any]:
    function.restype, function.argtypes = returned, arguments
    return function  # type: ignore[no-any-return]


@lru_cache(maxsize=1)
def _library() -> _Library:
    return _Library()


@lru_cache(maxsize=1)
def _is_as_known() -> bool:
    """Whether this tvm-ffi's functions take arguments as they are laid out here: a function of Python says what it is passed."""
    try:
        import tvm_ffi

        if not tvm_ffi.__version__.startswith("0.1."):  # another layout might end the process
            return False
        noted: list[Any] = []

        def note(x: Any, *others: Any) -> None:
            plain = [list(other) if i > 2 else other for i, other in enumerate(others)]
            noted.append((x.data_ptr(), tuple(x.shape), tuple(x.strides), str(x.dtype), *plain))

        x = torch.zeros(3, 4, dtype=torch.bfloat16, device="cpu").T
        PackedLaunch(tvm_ffi.convert(note), (x, None, 1.5, -7, (3, 4), ())).launch((), [x.data_ptr()])
        return noted == [(x.data_ptr(), (4, 3), (1, 4), "bfloat16", None, 1.5, -7, [3, 4], [])]
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError):
        return False
