"""Launches of compiled kernels, which are identified by config and kinds of arguments, compiled once and cached on disk.

Lengths, strides, scales, window bounds and captured values are run-time values and not part of the key. Through tvm-ffi a kernel takes
torch's tensors as they are and runs on torch's current stream; without tvm-ffi each tensor is wrapped at every launch.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from anyattn import disk_cache
from anyattn.backends.hopper.compile import build
from anyattn.backends.hopper.compile.cache_key import AnyConfig, NoContentError, key_of
from anyattn.backends.hopper.compile.packed import packed_launch
from anyattn.triton_tools import launch_log
from anyattn.triton_tools.recording import Recorder, active_recorder

__all__ = ["compiling_only", "forget", "indexable", "is_compiling", "kinds_of", "launch", "loaded", "prepare", "warm"]


class _Known(dict[tuple, Callable[..., None]]):
    """The kernels of one config by the kinds of their arguments. Stored on config objects, and dropped when one is pickled."""

    def __reduce__(self) -> tuple[type, tuple]:
        return _Known, ()


_kernels: dict[AnyConfig, _Known] = {}
_lock = threading.RLock()
_is_compiling_only = False
_BOOL, _SCALARS = torch.bool, frozenset((type(None), int, float))
_SLOT = "_launch_kernels"  # in the __dict__ of a config object, as functools.cached_property would keep it


def launch(config: AnyConfig, arguments: tuple) -> None:
    """Runs the kernel for ``config`` on the current stream of the tensors' device.

    arguments: those of the kernel class's ``__call__`` (such as ``HopperForward``'s), in order, without the stream: CUDA tensors, None,
    floats (float32 in the kernel), ints (int32), and tuples of these. For 16-bit tensors of three and more dimensions that are not inside a
    tuple, the address and all strides must be multiples of 16 bytes, except the last stride, which must be 1; other tensors may have any.
    Raises ValueError or RuntimeError (of tvm-ffi) if a tensor is not so; the first launch also raises the compiler's errors.
    """
    if launch_log.noted is not None:
        launch_log.noted.append(f"hopper {build.name_of(config)}")
    kinds, is_plain = kinds_of(arguments)
    try:
        function = config.__dict__[_SLOT][kinds]
    except KeyError:
        function = prepare(config, kinds)
    arguments = arguments if is_plain else indexable(arguments)
    function(*arguments)
    recorder = active_recorder()
    if recorder is not None:
        _record(recorder, function, arguments)


def _record(recorder: Recorder, function: Callable[..., None], arguments: tuple) -> None:
    """Reports a launch, by addresses if possible. The recorder takes arguments one by one; a forward kernel's end with two tuples."""
    if _is_compiling_only:
        recorder.refuse("a kernel is compiled and not launched")
    packed = packed_launch(function, arguments)
    if packed is not None:
        recorder.launched(packed.launch, (), [a for a in arguments if isinstance(a, Tensor)])
        return
    sizes = [len(a) for a in arguments if isinstance(a, tuple)]
    if not sizes:
        recorder.launched(lambda grid, values: function(*values), (), arguments, takes_addresses=False)
        return
    assert len(sizes) == 2 and all(isinstance(a, tuple) for a in arguments[-2:])
    first, second = len(arguments) - 2, len(arguments) - 2 + sizes[0]

    def launcher(grid: tuple[int, ...], values: Sequence[Any]) -> None:
        function(*values[:first], values[first:second], values[second:])

    recorder.launched(launcher, (), (*arguments[:-2], *arguments[-2], *arguments[-1]), takes_addresses=False)


def kinds_of(arguments: tuple) -> tuple[tuple, bool]:
    """The properties of its arguments that a kernel is specialised for, flat; and whether the arguments can be passed as they are.

    A tensor gives its dtype and its rank, which is negative if the last stride is not 1; a number or None gives its type; a tuple gives its
    length, and then its items.

    >>> kinds_of((torch.zeros(2, 3).T, None, 1.0, (2,)))
    ((torch.float32, -2, <class 'NoneType'>, <class 'float'>, 1, <class 'int'>), True)
    """
    kinds: list[Any] = []
    is_plain = _add_kinds(kinds, arguments)
    return tuple(kinds), is_plain


def _add_kinds(kinds: list[Any], items: tuple) -> bool:
    """Appends the kinds of ``items``; returns whether they can be passed as they are. The loop makes few calls, because it takes most of
    the host time of a launch that is not prepared."""
    is_plain, add = True, kinds.append
    for a in items:
        kind = type(a)
        if kind in _SCALARS:
            add(kind)
        elif kind is Tensor or isinstance(a, Tensor):
            dtype, strides = a.dtype, a.stride()
            if not strides or dtype is _BOOL:
                is_plain = False
            rank = len(strides)
            add(dtype)
            # the stride of a last dimension of one entry is never used
            add(rank if not rank or strides[-1] == 1 or a.shape[-1] == 1 else -rank)
        elif isinstance(a, tuple):
            add(len(a))
            if a and not _add_kinds(kinds, a):
                is_plain = False
        else:
            add(kind)
    return is_plain


def prepare(config: AnyConfig, kinds: tuple) -> Callable[..., None]:
    """The kernel as a function of the arguments: from this process, from disk, or compiled now."""
    with _lock:
        if _is_compiling_only:
            warm(config, kinds)
            return lambda *arguments: None
        known = _kernels.setdefault(config, _Known())
        config.__dict__[_SLOT] = known
        if kinds not in known:
            known[kinds] = _found_or_made(config, kinds) if build.has_tvm_ffi() else build.dlpack_function(config, kinds)
        return known[kinds]


def loaded(config: AnyConfig) -> Mapping[tuple, Callable[..., None]]:
    """The kernels for ``config`` that this process has loaded, by kinds; ``forget`` empties it for good."""
    return config.__dict__.get(_SLOT, {})


def forget() -> None:
    """Drops all kernels that this process knows, also those stored on config objects: the next launch reads the disk cache again."""
    with _lock:
        for known in _kernels.values():
            known.clear()
        _kernels.clear()


@contextlib.contextmanager
def compiling_only() -> Iterator[None]:
    """Context in which kernels not loaded yet are only compiled to disk: tensors may be on the CPU, results are undefined."""
    global _is_compiling_only
    before, _is_compiling_only = _is_compiling_only, True
    try:
        yield
    finally:
        _is_compiling_only = before


def is_compiling() -> bool:
    """Whether launches compile and run nothing."""
    return _is_compiling_only


def _found_or_made(config: AnyConfig, kinds: tuple) -> Callable[..., None]:
    try:
        return build.load(warm(config, kinds))
    except OSError as error:  # for example, no folder for temporary files may hold code; an object file is loaded to memory instead
        warnings.warn(f"anyattn compiles a kernel again that cannot be loaded from disk: {error}", RuntimeWarning, stacklevel=4)
        return build.load(build.make(config, kinds, may_link=False))


def warm(config: AnyConfig, kinds: tuple) -> disk_cache.Payload:
    """The kernel's payload on disk, compiled if it is missing; nothing is loaded, and no GPU is needed."""
    cache = disk_cache.open_cache()
    try:
        key = key_of(config, kinds)
    except NoContentError:
        cache = None
    if cache is None:
        return build.make(config, kinds, may_link=False)  # an object file: the compiler, which is installed here, loads it without a linker
    return cache.get_or_make(key, lambda: build.make(config, kinds), build.is_loadable)


def indexable(item: Any) -> Any:
    """Arguments that the kernel can index: bools as bytes, a single value with one dimension."""
    if isinstance(item, Tensor):
        item = item.view(torch.uint8) if item.dtype is torch.bool else item
        return item.reshape(1) if item.ndim == 0 else item
    return tuple(map(indexable, item)) if isinstance(item, tuple) else item
