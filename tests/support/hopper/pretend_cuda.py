"""CPU memory that claims to be a GPU's, so that a kernel's own checks of its arguments can be tested without a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["on_cuda"]

_CUDA = 2
_CODES = {torch.bfloat16: (4, 16), torch.float32: (2, 32), torch.float16: (2, 16), torch.int32: (0, 32), torch.uint8: (1, 8)}


class _Tensor(ctypes.Structure):
    """DLPack's DLManagedTensor, version 0."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _Exporter:
    def __init__(self, x: torch.Tensor) -> None:
        numbers = ctypes.c_int64 * x.ndim
        self.held = x, numbers(*x.shape), numbers(*x.stride())
        self.tensor = _Tensor(x.data_ptr(), _CUDA, 0, x.ndim, *_CODES[x.dtype], 1, self.held[1], self.held[2], 0, None, None)

    def __dlpack__(self, **_: object) -> object:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


_exported: list[_Exporter] = []  # nobody says when a tensor is done with


def on_cuda(item: Any) -> Any:
    """``item`` with every torch tensor in it as tvm-ffi's, of the same memory, sizes and strides, that claims to be on GPU 0."""
    if isinstance(item, tuple):
        return tuple(map(on_cuda, item))
    if not isinstance(item, torch.Tensor):
        return item
    import tvm_ffi

    _exported.append(_Exporter(item.detach()))
    return tvm_ffi.from_dlpack(_exported[-1])
