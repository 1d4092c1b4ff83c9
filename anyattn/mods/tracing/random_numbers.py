"""Refusal of random numbers and clocks inside a mod: read during tracing, they would be one number for all pairs.

torch's functions are caught by name in the tracer's function mode. Python's and NumPy's modules and functions among a mod's captures are
replaced by an object that raises at the user's line; other draws are detected by the state of the two global generators. Clocks and the
system's random bytes have no such state: a profile function on the thread catches calls of them from any module that is not a library's.
It does not see calls from C code (``functools.partial(time.time)()``), so captured clocks are replaced too, also inside modules.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from anyattn.mods.tracing.diagnostics import RANDOM_FILES, defined_at, is_library, mod_error

__all__ = ["RANDOM_CURE", "check_draws", "generators_state", "is_loaded", "is_random", "reads_refused", "refuse_random", "refusing"]

RANDOM_CURE = (
    "compute it from the position instead, which gives every pair its own number and the backward pass the same one: a hash of a captured "
    "seed, b, h, q_idx and kv_idx in integer arithmetic, such as x = ((seed + b) * 1000003 + h) * 1000003 + q_idx; x = x * 1000003 + "
    "kv_idx; x = (x ^ (x >> 15)) * 2146121005; x = (x ^ (x >> 13)) & 0xFFFFFF, of which x / 2 ** 24 is in [0, 1)"
)

_DRAWS = frozenset(
    (
        "alpha_dropout", "bernoulli", "binomial", "cauchy", "dropout", "dropout1d", "dropout2d", "dropout3d", "exponential",
        "feature_alpha_dropout", "feature_dropout", "geometric", "gumbel_softmax", "log_normal", "multinomial", "native_dropout", "normal",
        "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "random", "randperm", "rrelu", "uniform",
    )
)  # fmt: skip
_SYSTEM_DRAWS = frozenset(("urandom", "getrandom", "generate_time_safe", "UuidCreate"))  # generate_time_safe and UuidCreate: uuid.uuid1
_TIMES = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_CLOCKS = {
    "time": frozenset((*_TIMES, *(f"{name}_ns" for name in _TIMES), "asctime", "ctime", "gmtime", "localtime", "strftime")),
    "posix": frozenset(("times",)),
    "nt": frozenset(("times",)),
    "resource": frozenset(("getrusage",)),
}
_DATES = frozenset(("now", "today", "utcnow"))
_WATCHED = _SYSTEM_DRAWS.union(*_CLOCKS.values(), _DATES, ("random", "getrandbits", "seed"))
_CLOCK_CURE = "read it outside the mod and capture the number: a captured number may change from call to call"
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")  # the folder of the standard library
_MT19937 = 624 * 4 + 4  # bytes: the words of the state, and the position among them
_CALLS = 5  # another thread may draw too, but hardly during each of five calls


def is_random(name: str) -> bool:
    """Whether torch's function of this name draws random numbers; in-place ones end in an underscore; ``__rand__`` is ``&``."""
    return name.rstrip("_") in _DRAWS


def refuse_random(what: str) -> None:
    """Raises the ``ModError`` for a mod that draws random numbers with ``what``."""
    raise mod_error(f"{what} is a random number, and would be one and the same for all (b, h, q_idx, kv_idx)", RANDOM_CURE)


class _Refusing:
    """Replaces a captured source of random numbers."""

    def __init__(self, what: str):
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_random(f"{self._what}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_random(self._what)


class _Clock:
    """Replaces a clock that a mod captures, directly or in a captured module."""

    def __init__(self, what: str):
        self.__name__ = what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_clock(self.__name__)


class _DateTime64:
    """Replaces ``numpy.datetime64``, which reads the clock for the strings "now" and "today"."""

    def __init__(self, real: type):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any) -> Any:
        if args and args[0] in ("now", "today"):
            _refuse_clock(f"numpy.datetime64({args[0]!r})")
        return self._real(*args)


class _Module(types.ModuleType):
    """A module whose clocks and sources of random numbers are replaced."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(sys.modules[self.__name__], name)
        instead = refusing(found)
        return found if instead is None else instead


def _refuse_clock(what: str) -> None:
    raise mod_error(f"{what} reads a clock, which would be one number for all (b, h, q_idx, kv_idx), and another later", _CLOCK_CURE)


def _clock(called: Any) -> str | None:
    """The name of a built-in function that always reads a clock; None for every other function."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
        return f"{module}.{name}".replace("posix.", "os.") if name in _CLOCKS.get(module, ()) else None
    is_date = name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date)
    return f"{owner.__name__}.{name}" if is_date else None  # type: ignore[union-attr]


def is_loaded(module: types.ModuleType) -> bool:
    """Whether importing the module's name gives this module, rather than one that has its name only."""
    return sys.modules.get(module.__name__) is module


def refusing(item: Any) -> Any:
    """The replacement for a clock or a source of random numbers, or for an object that contains one; None for anything else."""
    if isinstance(item, types.ModuleType) and is_loaded(item):
        if item.__name__ in ("numpy", "os", "resource", "time"):
            return _Module(item.__name__)
        return _Refusing(item.__name__) if item.__name__ in ("random", "secrets", "numpy.random") else None
    if isinstance(item, types.BuiltinFunctionType):
        if (clock := _clock(item)) is not None:
            return _Clock(clock)
        if item.__name__ in _SYSTEM_DRAWS:
            return _Refusing(f"{getattr(item.__self__, '__name__', '')}.{item.__name__}".replace("posix.", "os."))
    if item is getattr(sys.modules.get("numpy"), "datetime64", _Clock):
        return _DateTime64(item)
    owner = getattr(item, "__self__", None) if isinstance(item, (types.MethodType, types.BuiltinFunctionType)) else item
    if _is_generator(owner):
        return _Refusing(type(owner).__name__ if owner is item else f"{type(owner).__name__}.{item.__name__}")
    module = getattr(item, "__module__", None) if callable(item) and hasattr(item, "__name__") else None
    if module in ("random", "secrets") or (isinstance(module, str) and module.startswith("numpy.random")):
        return _Refusing(f"{module}.{item.__name__}")
    return None


def _is_generator(item: Any) -> bool:
    if isinstance(item, random.Random):
        return True
    numpys = sys.modules.get("numpy.random")
    return numpys is not None and isinstance(item, (numpys.Generator, numpys.RandomState))


# Mods that have run without reading a clock: a tree over the objects a mod is made of, by weak reference; its leaves are sets of values.
_clean: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PLAIN = (int, float, str, types.NoneType, torch.dtype, torch.device)
_MOST_VALUES = 64  # bounds the set for a number that changes at each call


class _Values:
    """The key of the set at a leaf of the tree."""


def _parts(fn: Any) -> tuple[list[Any], tuple]:
    """The objects that a mod is made of, and the plain values among its captures, each with its place. Two functions with equal results are
    the same mod."""
    objects: list[Any] = []
    values: list[Any] = []
    seen: list[Any] = []
    waiting = [fn]
    while waiting:
        item = waiting.pop()
        if isinstance(item, types.MethodType):
            objects += [item.__self__, item.__func__]
        elif isinstance(item, types.FunctionType) and item not in seen:
            seen.append(item)
            objects.append(item.__code__)
            waiting += [c.cell_contents for c in item.__closure__ or ()]
            waiting += [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
        elif isinstance(item, (torch.Tensor, *_PLAIN)):
            values.append((len(objects), type(item), None if isinstance(item, torch.Tensor) else item))
        else:
            objects.append(item)
    return objects, tuple(values)


def _itself(fn: Any) -> tuple[list[Any], tuple]:
    return ([fn.__self__, fn.__func__] if isinstance(fn, types.MethodType) else [fn]), ()


def _clean_values(fn: Any) -> tuple[set, tuple]:
    """The set of plain values with which the objects of ``fn`` have run without reading a clock, and the plain values of ``fn``."""
    for parts in (_parts, _itself):
        with contextlib.suppress(TypeError, ValueError):  # a list cannot be weakly referenced, and a cell may be empty
            objects, values = parts(fn)
            level: Any = _clean
            for item in objects:
                level = level.setdefault(item, WeakIdKeyDictionary())
            return level.setdefault(_Values, set()), values
    return set(), ()


@contextlib.contextmanager
def reads_refused(fn: Any) -> Iterator[None]:
    """Context of the first call of the mod ``fn``: reading a clock or drawing from one of Python's random sources raises ``ModError``.

    This covers this thread only, and only calls from code outside libraries. Later calls of the same object, or of a function with the same
    code and captures (tensors may differ), are not watched, since that takes as long as tracing; neither is a thread that already has a
    profile function, such as a profiler's.
    """
    clean, values = _clean_values(fn)
    if values in clean or sys.getprofile() is not None:
        yield
        return
    collects = gc.isenabled()
    gc.disable()  # finalizers and callbacks of the collector may read clocks, and are not part of the mod
    sys.setprofile(_refuse_reads)
    try:
        yield
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    if len(clean) >= _MOST_VALUES:
        clean.clear()
    clean.add(values)


def _refuse_reads(frame: types.FrameType, event: str, called: Any) -> None:
    if event != "c_call" or (name := getattr(called, "__name__", "")) not in _WATCHED:
        return
    file, owner = frame.f_code.co_filename, getattr(called, "__self__", None)
    is_standard = file.startswith((_STANDARD, "<frozen")) and "-packages" not in file
    if file not in RANDOM_FILES and (is_standard or is_library(file)):
        return  # such as the timestamp of a log entry
    module = owner.__name__ if isinstance(owner, types.ModuleType) else None
    is_system = name in _SYSTEM_DRAWS and module is not None
    if isinstance(owner, random.Random) or is_system or (name == "seed" and isinstance(owner, torch.Generator)):
        refuse_random(f"{module or type(owner).__name__}.{name}".replace("posix.", "os."))
    if (clock := _clock(called)) is not None:
        _refuse_clock(clock)


def generators_state() -> tuple:
    """The states of Python's and of NumPy's global generator, for comparison with later ones."""
    numpys = sys.modules.get("numpy.random")
    if numpys is None:
        return (random.getstate(),)
    generator = numpys.get_bit_generator() if hasattr(numpys, "get_bit_generator") else None
    if generator is None or type(generator) is not numpys.MT19937:
        return random.getstate(), repr(numpys.get_state() if generator is None else generator.state)
    return random.getstate(), ctypes.string_at(generator.ctypes.state_address, _MT19937)  # takes a tenth of the time of get_state


def check_draws(fn: Any, before: tuple, again: Callable[[], Any]) -> None:
    """Raises ``ModError`` if the mod ``fn`` draws from a global generator. before: their states before its call. again: calls it again."""
    for _ in range(_CALLS):
        # NumPy's generator may have been loaded in between
        if not any(a != b for a, b in zip(before, generators_state(), strict=False)):
            return
        before = generators_state()
        again()
    problem = "a mod draws random numbers, which would be one and the same for all (b, h, q_idx, kv_idx)"
    raise mod_error(problem, RANDOM_CURE, defined_at(fn, "random"))
