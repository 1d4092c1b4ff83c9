"""Launches of Triton kernels by the driver's function, with parameters that stay in memory: a launch writes only those that vary.

Triton's launcher is passed some 100 arguments, constants among them, and reads them one by one at every launch, which takes about as long
as the driver's part. The driver tells the sizes of a kernel's parameters; a kernel whose sizes are not those of its signature is left to
Triton.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__ = ["Launcher", "Pack", "packing_of"]

Launcher = Callable[[tuple[int, ...], Sequence[Any]], None]  # of a grid and arguments
# of a grid, arguments, and which of them vary: a launcher of the latter, and their places in the order in which it takes them
Pack = Callable[[tuple[int, ...], Sequence[Any], Sequence[bool]], "tuple[Launcher, list[int]] | None"]

_SIZES = {"i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "fp32": 4}
_POINTER = 8
_MOST_SCRATCHES = 2  # parameters that Triton appends: pointers to memory, null for kernels that need none
_CONFIG = struct.Struct("7I4xQQI4x")  # ``CUlaunchConfig``: grid, threads, shared memory; stream; attributes, their number
_STREAM = 4  # in words of 64 bits
_NO_CONTEXT = 201  # status of a launch by a thread that has not used CUDA: Triton's launcher gives the thread the device's context


class _Driver(NamedTuple):
    """launch: ``cuLaunchKernelEx`` of a config, a function, parameters and None. size_of: of a function's parameter, by its number; None
    behind the last one. error: text of a status."""

    launch: Callable[[int, int, int, None], int]
    size_of: Callable[[int, int], int | None]
    error: Callable[[int], str]


class _Kernel(NamedTuple):
    """What is launched. kinds: of all arguments, those of constants too. watched: whether launches have to go through ``send``."""

    function: int
    threads: int
    shared: int
    kinds: tuple[str, ...]
    device: int
    send: Launcher
    watched: Callable[[], bool]


def packing_of(compiled: Any, device: torch.device, send: Launcher, watched: Callable[[], bool]) -> Pack | None:
    """A function that packs launches of a compiled kernel; None for a kernel that is launched otherwise than by a grid and threads.

    send: launches with all arguments but the kernel's constants. watched: whether a hook wants to see launches.
    """
    try:
        metadata, kinds = compiled.metadata, tuple(compiled.src.signature.values())
        plain = (metadata.num_warps, 1, metadata.shared)
        needs = (
            metadata.global_scratch_size, metadata.profile_scratch_size, metadata.launch_cooperative_grid, metadata.launch_pdl,
        )  # fmt: skip
        is_plain = compiled.packed_metadata == plain and not any(needs)
    except AttributeError:
        return None
    driver = _driver()
    if not is_plain or driver is None or not _has_sizes(driver, compiled.function, kinds):
        return None
    kernel = _Kernel(compiled.function, 32 * metadata.num_warps, metadata.shared, kinds, device.index, send, watched)
    return lambda grid, arguments, varies: _packed(driver, kernel, grid, arguments, varies)


def _has_sizes(driver: _Driver, function: int, kinds: Sequence[Any]) -> bool:
    """Whether the driver's sizes are those of the signature, and pointers behind them."""
    wanted = []
    for kind in kinds:
        if kind != "constexpr":
            size = (_POINTER if kind.startswith("*") else _SIZES.get(kind)) if isinstance(kind, str) else None
            if size is None:
                return False
            wanted.append(size)
    sizes = [driver.size_of(function, i) for i in range(len(wanted) + _MOST_SCRATCHES + 1)]
    behind = [size for size in sizes[len(wanted) :] if size is not None]
    return sizes[: len(wanted)] == wanted and len(behind) <= _MOST_SCRATCHES and all(size == _POINTER for size in behind)


def _packed(
    driver: _Driver, kernel: _Kernel, grid: tuple[int, ...], arguments: Sequence[Any], varies: Sequence[bool]
) -> tuple[Launcher, list[int]] | None:
    kinds = kernel.kinds[: len(arguments)]
    numbers = [i for i, kind in enumerate(kinds) if varies[i] and kind != "fp32"]
    floats = [i for i, kind in enumerate(kinds) if varies[i] and kind == "fp32"]
    if len(grid) != 3 or min(grid) <= 0 or any(kinds[i] == "constexpr" for i in numbers):
        return None
    places = [*numbers, *floats, *(i for i, kind in enumerate(kinds) if kind != "constexpr" and not varies[i])]
    slots, free = {place: slot for slot, place in enumerate(places)}, len(places)
    words = (ctypes.c_int64 * (free + 1))()  # behind the last argument a null pointer, for scratch memory
    for place, slot in slots.items():
        if not varies[place]:
            struct.pack_into("f" if kinds[place] == "fp32" else "q", words, 8 * slot, arguments[place] or 0)
    start = ctypes.addressof(words)
    order = [slots[i] for i, kind in enumerate(kinds) if kind != "constexpr"] + [free] * _MOST_SCRATCHES
    parameters = (ctypes.c_void_p * len(order))(*(start + 8 * slot for slot in order))
    config = ctypes.create_string_buffer(_CONFIG.pack(*grid, kernel.threads, 1, 1, kernel.shared, 0, 0, 0))
    launch = _PackedLaunch(
        driver, kernel, arguments, [*numbers, *floats], (words, parameters, config), f"{len(numbers)}q{'f4x' * len(floats)}"
    )
    return launch.launch, [*numbers, *floats]


class _PackedLaunch:
    """The launches of a kernel whose arguments vary in few places."""

    def __init__(self, driver: _Driver, kernel: _Kernel, arguments: Sequence[Any], places: list[int], memory: tuple, form: str) -> None:
        self._driver, self._kernel, self._arguments, self._places = driver, kernel, arguments, places
        self._words, self._parameters, self._config = memory
        self._write, self._stream = struct.Struct(form).pack_into, memoryview(self._config)[: _CONFIG.size].cast("B").cast("Q")
        self._addresses = ctypes.addressof(self._config), kernel.function, ctypes.addressof(self._parameters), None
        self._lock = threading.Lock()

    def launch(self, grid: tuple[int, ...], values: Sequence[Any]) -> None:
        """Launches on torch's current stream with these values in the places that vary. grid: the packed one."""
        kernel, c = self._kernel, torch._C
        if c._cuda_getDevice() != kernel.device or kernel.watched():  # type: ignore[attr-defined]
            self._send(grid, values)
            return
        with self._lock:  # between threads: the driver reads what is written here
            self._write(self._words, 0, *values)
            self._stream[_STREAM] = c._cuda_getCurrentRawStream(kernel.device)  # type: ignore[attr-defined]
            status = self._driver.launch(*self._addresses)
        if status == _NO_CONTEXT:
            self._send(grid, values)
        elif status:
            raise RuntimeError(f"Triton Error [CUDA]: {self._driver.error(status)}")

    def _send(self, grid: tuple[int, ...], values: Sequence[Any]) -> None:
        arguments = list(self._arguments)
        for place, value in zip(self._places, values, strict=True):
            arguments[place] = value
        self._kernel.send(grid, arguments)


@lru_cache(maxsize=1)
def _driver() -> _Driver | None:
    """The functions of CUDA's driver; None without one, or with one older than 12.4. The interpreter's lock is free during a launch, which
    may wait for its queue."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, info, text = library.cuLaunchKernelEx, library.cuFuncGetParamInfo, library.cuGetErrorString
    except (AttributeError, OSError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    launch.argtypes, info.argtypes = [pointer] * 4, [pointer, size, pointer, pointer]

    def size_of(function: int, number: int) -> int | None:
        offset, found = size(), size()
        return None if info(function, number, ctypes.byref(offset), ctypes.byref(found)) else found.value

    def error(status: int) -> str:
        found = ctypes.c_char_p()
        text(status, ctypes.byref(found))
        return (found.value or b"unknown error").decode()

    return _Driver(launch, size_of, error)
