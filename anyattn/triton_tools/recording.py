"""Recording of the launches that a call makes, for replays of calls of the same signature with tensors at other addresses.

Between the arguments of a decoding step and its two or three launches lie the problem, its tables, the appending kernel's arguments and the
keys of prepared launches: three quarters of the host's time for a warm call at batch 1 (``benchmarks.host_time``, decode), though the
signature determines all of it but addresses and a few numbers. A recorder watches one call: its allocations, by a dispatch mode, and its
launches, which the functions that make them report. A replay allocates and launches the same.

Besides, a call may copy its arguments before they are used. One that does anything else on the device, or passes a tensor of another
origin, is not recorded, so that what is replayed is complete. A number that the signature does not determine has to be reported as a
``Number``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from anyattn.tensors.strides import allocator
from anyattn.triton_tools.packed_params import Launcher, Pack
from anyattn.triton_tools.replay import Address, Launch, Number, Replay, Source, View, copied, layout_of, replay_of

__all__ = ["Recorder", "active_recorder", "unrecorded"]

_aten = torch.ops.aten
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default, _aten.new_empty.default)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
_COPIES = (_aten._to_copy.default, _aten.clone.default)
_FULL = (_aten.full.default, _aten.full_like.default, _aten.new_full.default)


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


def active_recorder() -> Recorder | None:
    """The recorder of the call that this thread makes, if the call is recorded."""
    return _active.recorder


def unrecorded() -> AbstractContextManager[Any]:
    """Context in which torch's operations are not recorded: those of Triton's interpreter are none of the call's."""
    return nullcontext() if active_recorder() is None else _disable_current_modes()


class Recorder(TorchDispatchMode):
    """Context in which one call is made. tensors: its arguments. reason: why the call cannot be replayed, None if it can."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.reason: str | None = None
        self._count = len(tensors)
        self._arguments: dict[int, Source] = {}  # by address
        equal = []
        for i, t in enumerate(tensors):
            first = self._arguments.setdefault(t.data_ptr(), Source(t, i)).number
            if first is not None and first != i:
                equal.append((first, i))  # a launch that was passed one of them may have been passed either
        self._equal = tuple(equal)
        self._made: list[Source] = []
        self._launches: list[Launch] = []

    def __enter__(self) -> Any:
        _active.recorder = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _active.recorder = None
        return super().__exit__(*error)

    def refuse(self, reason: str) -> None:
        """Marks the call as one that cannot be replayed."""
        self.reason = self.reason or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _EMPTY:
            self._made.append(Source(result))
        elif func in _ZEROS:
            self._made.append(Source(result, fill=0))
        elif func in _FULL:
            self._made.append(Source(result, fill=args[2 if func is _aten.new_full.default else 1]))
        elif func in (_aten.zero_.default, _aten.fill_.Scalar):
            self._fill(args[0], 0 if func is _aten.zero_.default else args[1])
        elif func in _COPIES:
            self._copied(func, result, args, kwargs or {})
        elif not func.is_view:
            self.refuse(f"{func} is neither an allocation nor a view")
        return result

    def _copied(self, func: Any, result: Tensor, args: tuple, options: dict[str, Any]) -> None:
        """Notes a copy, which a replay makes before its launches: of an argument that none of them has been passed, such as a table of
        64-bit integers or a sink of 16 bits."""
        x, *more = args
        address = self._address(x)
        if address is None or address.of.number is None or address.of.is_used or x.dtype is not address.of.tensor.dtype:
            self.refuse(f"{func} of a tensor that is no argument of the call, or after a launch with it")
        else:
            make = copied(func, address.of.number, address.offset // x.element_size(), layout_of(x), tuple(more), options)
            self._made.append(Source(result, make=make))

    def _fill(self, x: Tensor, value: float) -> None:
        source = self._whole(x)
        if source is None or source.is_used:
            self.refuse("a part of an allocation is filled, or a tensor after a launch with it")
        else:
            source.fill = value

    def outlives(self, tensor: Tensor, make: Callable[[], Tensor]) -> None:
        """Notes a tensor that outlives calls, such as a counter that all launches of a stream share: a replay passes that of ``make``."""
        self._made.append(Source(tensor, make=lambda tensors: make()))

    def launched(
        self, launcher: Launcher, grid: Sequence[int], arguments: Sequence[Any], takes_addresses: bool = True, pack: Pack | None = None
    ) -> None:
        """Notes a launch. arguments: those of ``launcher``, with ``Number`` where it applies, and tensors also where ``takes_addresses``:
        otherwise it is passed tensors, of the same shapes and strides. pack: as ``fast_launch.Handle.pack``."""
        found: list[Any] = []
        for x in arguments:
            if isinstance(x, Tensor):
                found.append(self._passed(x, takes_addresses))
            else:
                found.append(x)
                if x is not None and not isinstance(x, (int, float, Number)):
                    self.refuse(f"a launch is passed a {type(x).__name__}")
        self._launches.append(Launch(launcher, tuple(grid), found, pack))

    def _passed(self, x: Tensor, takes_addresses: bool) -> Address | View | None:
        address = self._address(x)
        if address is None or (not takes_addresses and x.dtype is not address.of.tensor.dtype):
            self.refuse("a launch is passed a tensor that is neither an argument nor an allocation of the call")
            return None
        address.of.is_used = True
        if takes_addresses:
            return address
        address.of.is_passed = True
        return View(address.of, address.offset // x.element_size(), layout_of(x))

    def _address(self, x: Tensor) -> Address | None:
        address = x.data_ptr()
        source = self._arguments.get(address) or next((s for s in self._made if s.start <= address < s.end), None)
        return None if source is None else Address(source, address - source.start)

    def _whole(self, x: Tensor) -> Source | None:
        """The allocation of which x has all elements, in any order of dimensions."""
        address = self._address(x)
        if address is None or not address.of.is_allocation or address.offset or x.dtype is not address.of.tensor.dtype:
            return None
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        return address.of if extent == x.numel() == address.of.tensor.numel() else None

    def replay(self, results: Sequence[Tensor | None], numbers: int = 0) -> Replay | None:
        """The replay of the recorded call, which returned ``results``; None if it has none, and ``reason`` says why. numbers: how many
        the score mod captures."""
        found: list[Any] = [None if result is None else (self._whole(result), layout_of(result)) for result in results]
        if any(result is not None and result[0] is None for result in found) or all(result is None for result in found):
            self.refuse("a result is not all of an allocation of the call")
        if not self._launches:
            self.refuse("nothing is launched")
        if self.reason is not None:
            return None
        makes, allocations = [s for s in self._made if not s.is_allocation], [s for s in self._made if s.is_allocation]
        empty = allocator(allocations[0].tensor.device)
        return replay_of(self._count, numbers, makes, allocations, found, self._launches, empty, self._equal)
