"""Kernels compiled once and kept: a config and the kinds of what the mods capture name one; lengths, strides and values are run-time."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import Tensor

from anyattn.backends.hopper.config import Config

__all__ = ["compiled", "cute_tensor", "launch"]

_kernels: dict[tuple, Any] = {}
_lock = threading.Lock()


def launch(config: Config, arguments: tuple) -> None:
    """Runs the kernel on the current stream. arguments: those of ``HopperForward.__call__`` without the stream."""
    import cuda.bindings.driver as cuda

    *given, scalars, tensors = arguments
    numbers = tuple(_number(s) for s in scalars)
    captured = tuple(cute_tensor(_indexable(t)) for t in tensors)
    converted = [cute_tensor(x) if isinstance(x, Tensor) else x if x is None else _number(x) for x in given]
    stream = cuda.CUstream(torch.cuda.current_stream(arguments[0].device).cuda_stream)
    kinds = (tuple(type(n) for n in numbers), tuple((t.dtype, max(t.ndim, 1)) for t in tensors))
    converted = (*converted, numbers, captured, stream)
    compiled(config, kinds, converted)(*converted)


def compiled(config: Config, kinds: tuple, arguments: tuple) -> Any:
    """The kernel for ``config``, compiled with the first call's arguments as an example. kinds: what else it is specialised for."""
    with _lock:
        if (config, kinds) not in _kernels:
            import cutlass.cute as cute

            from anyattn.backends.hopper.kernel import HopperForward

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of CuTe DSL's own deprecations
                _kernels[config, kinds] = cute.compile(HopperForward(config), *arguments)
        return _kernels[config, kinds]


def cute_tensor(x: Tensor) -> Any:
    """``x`` for CuTe, without a copy; sizes and strides are run-time but for the last stride, which is 1."""
    from cutlass.cute.runtime import from_dlpack

    alignment = 16 if x.dtype in (torch.bfloat16, torch.float16) and x.ndim == 4 else x.element_size()
    return from_dlpack(x.detach(), assumed_align=alignment).mark_layout_dynamic(leading_dim=x.ndim - 1)


def _indexable(x: Tensor) -> Tensor:
    """A captured tensor that CuTe can index: bools as bytes, a single value with one dimension, the last stride 1."""
    x = x.view(torch.uint8) if x.dtype is torch.bool else x
    x = x.reshape(1) if x.ndim == 0 else x
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _number(value: int | float) -> Any:
    from cutlass import Float32, Int32

    return Float32(value) if isinstance(value, float) else Int32(value)
