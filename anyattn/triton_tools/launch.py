"""Launching Triton kernels: the first launch by Triton's launcher, later ones of the same signature by ``fast_launch``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.captured_loads import UNIT
from anyattn.triton_tools import launch_log
from anyattn.triton_tools.fast_launch import Handle, handle_of, scratch
from anyattn.triton_tools.packed_params import Launcher
from anyattn.triton_tools.recording import active_recorder, unrecorded

__all__ = ["UNIT", "current_device", "known_handle", "launch", "row_bytes", "run_plain", "strides_of", "wrap_bytes"]


def run_plain(
    kernel: Any, programs: int, given: Sequence[Any], special: Sequence[int], device: torch.device, options: dict[str, Any]
) -> None:
    """Launches a kernel on a one-dimensional grid. given: its arguments before ``special``, the numbers that Triton specialises on; it must
    not specialise on other numbers. options: constants, which are the last arguments, and compile options."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    # Triton specialises on whether a pointer is a multiple of 16
    known = (*special, *[x.dtype for x in tensors], *[x.data_ptr() % 16 == 0 for x in tensors])
    with current_device(device):
        launch(kernel, (programs, 1, 1), [*given, *special], device, options, known)


_ready: dict[tuple, Handle] = {}
_MOST_READY = 4096


def launch(
    kernel: Any, grid: tuple[int, ...], given: list[Any], device: torch.device, options: dict[str, Any], known: tuple
) -> Handle | None:
    """Launches a kernel: the first time by Triton's launcher, then by ``fast_launch``. Returns the handle for equal launches.

    known: everything besides the options that Triton would recompile for. A recorder takes the numbers among the arguments for constants.
    """
    handle = _launched(kernel, grid, given, device, options, known)
    recorder = active_recorder()
    if recorder is not None and handle is not None:
        launcher = handle.send if handle.takes_addresses else _on_device(handle.send, device)
        recorder.launched(launcher, grid, given, handle.takes_addresses, handle.pack)
    return handle


def _on_device(launcher: Launcher, device: torch.device) -> Launcher:
    def launch_there(grid: tuple[int, ...], values: Sequence[Any]) -> None:
        with current_device(device):
            launcher(grid, values)

    return launch_there


def _launched(
    kernel: Any, grid: tuple[int, ...], given: list[Any], device: torch.device, options: dict[str, Any], known: tuple
) -> Handle | None:
    if launch_log.noted is not None:
        launch_log.noted.append(f"triton {_name(kernel)}")
    if device.type != "cuda":  # the interpreter, which cannot read tensors that require grad

        def interpreted(grid: tuple[int, ...], given: Sequence[Any]) -> None:
            with unrecorded():
                kernel[grid](*(x.detach() if isinstance(x, Tensor) else x for x in given), **options)

        interpreted(grid, given)
        return Handle(interpreted)
    found = known_handle(kernel, device, options, known)
    if found is not None:
        found.again(grid, given)
        return found
    is_scratched = options.get("IS_DESCRIBED") == 1
    with scratch(device) if is_scratched else nullcontext():
        compiled = kernel[grid](*given, **options)
    if compiled is None:
        return None
    if len(_ready) >= _MOST_READY:
        _ready.clear()
    constants = tuple(options[p.name] for p in kernel.params if p.is_constexpr)
    _ready[_key(kernel, device, options, known)] = made = handle_of(compiled, constants, device, grid, given, is_scratched)
    return made


def known_handle(kernel: Any, device: torch.device, options: dict[str, Any], known: tuple) -> Handle | None:
    """The handle of a kernel that was launched with these options and ``known``."""
    return _ready.get(_key(kernel, device, options, known))


def _key(kernel: Any, device: torch.device, options: dict[str, Any], known: tuple) -> tuple:
    return kernel, device.index, tuple(options.values()), known


def _name(kernel: Any) -> str:
    """The name of a kernel in profiles; for a generated kernel the name of its source."""
    function = kernel.fn
    return str(function.__module__.rpartition(".")[2] if function.__name__ == "entry" else function.__name__)


def current_device(device: torch.device) -> AbstractContextManager:
    """Context of every launch: makes ``device`` the current device, which Triton launches on."""
    is_current = device.type != "cuda" or torch.cuda.device_count() < 2 or device.index == torch.cuda.current_device()
    return nullcontext() if is_current else torch.cuda.device(device)


def strides_of(*tensors: Tensor, more: Sequence[int] = ()) -> tuple[bool, list[int]]:
    """Whether every row of each tensor begins at a multiple of 16 bytes, so that it is loaded in wide pieces; and the strides of all
    dimensions but the last, followed by ``more``, in elements or, if that is so, in units of ``UNIT`` elements."""
    strides = [s if n > 1 else 0 for t in tensors for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True)]
    strides += more
    for s in strides:
        if s % UNIT:
            return False, strides
    for t in tensors:
        if t.data_ptr() % 16:
            return False, strides
    return True, [s // UNIT for s in strides]


def row_bytes(*tensors: Tensor) -> int:
    """The greatest power of two, at most 16, that the address of every row of the tensors is a multiple of.

    >>> row_bytes(torch.empty(4, 132, dtype=torch.int8)[:, 4:])
    4
    """
    together = 16
    for t in tensors:
        together |= t.data_ptr()
        for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True):
            if n > 1:
                together |= s * t.element_size()
    return together & -together


def wrap_bytes(most: int, *tensors: Tensor) -> int:
    """``WRAP`` of ``kernels.wrapped_rows`` for keys and values of 8 bits, (rows, heads, positions, D): the greatest power of two from 8 to
    ``most`` that all rows of a head are equally far beyond a multiple of; 0 if there is none, or all rows are at multiples of 16.

    >>> cache = torch.empty(2, 64, 8, 132, dtype=torch.int8).transpose(1, 2)[..., :128]  # 128 bytes of a head, then its scale
    >>> wrap_bytes(32, cache, cache), wrap_bytes(32, cache[:, :1])
    (32, 0)
    """
    if not 4 <= row_bytes(*tensors) < 16:
        return 0
    together = most
    for t in tensors:
        if t.shape[3] % 4 or t.shape[3] < 16 or t.stride(2) >= 1 << 22:  # a tile has at most 2^10 rows, with offsets of 32 bits
            return 0
        together |= 1 << t.shape[3].bit_length() - 1  # a front is not wider than a row
        for dimension in (0, 2):
            if t.shape[dimension] > 1:
                together |= t.stride(dimension)
    together &= -together
    return together if together >= 8 else 0
