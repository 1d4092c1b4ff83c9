"""Refusal of random numbers and clocks inside a mod: read while the mod is traced, they would be one number for all pairs.

torch's functions are caught by name in the tracer's function mode. Python's and NumPy's are not: their modules and functions among a mod's
captures are replaced by an object that raises at the user's line, and other draws are detected by the state of the two global generators.
The clock and the system's own random bytes have no such state: a profile function of the thread sees whose code calls them, in any module.
Calls from C code (``functools.partial(time.time)()``) it does not see; for these, captured clocks are replaced too, also within modules.
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

__all__ = ["RANDOM_CURE", "check_draws", "generators_state", "is_random", "reads_refused", "refuse_random", "refusing"]

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
_SYSTEM_DRAWS = frozenset(("urandom", "getrandom", "generate_time_safe", "UuidCreate"))  # of uuid1 the last two
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
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")  # the folder of Python's own modules
_MT19937 = 624 * 4 + 4  # bytes: its words, and the place among them
_CALLS = 5  # other threads draw too, but hardly during each of five calls


def is_random(name: str) -> bool:
    """Whether torch's function of this name draws random numbers; in-place ones end in an underscore, and ``__rand__`` is ``&``."""
    return name.rstrip("_") in _DRAWS


def refuse_random(what: str) -> None:
    """Raises the ``ModError`` of a mod that draws random numbers by ``what``."""
    raise mod_error(f"{what} is a random number, and would be one and the same for all (b, h, q_idx, kv_idx)", RANDOM_CURE)


class _Refusing:
    """Stands for a source of random numbers that a mod captures."""

    def __init__(self, what: str):
        self._what = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse_random(f"{self._what}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        refuse_random(self._what)


class _Clock:
    """Stands for a clock that a mod captures, or that a module which it captures has."""

    def __init__(self, what: str):
        self.__name__ = what

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_clock(self.__name__)


class _DateTime64:
    """``numpy.datetime64``, of which two strings are the time of the call."""

    def __init__(self, real: type):
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __call__(self, *args: Any) -> Any:
        if args and args[0] in ("now", "today"):
            _refuse_clock(f"numpy.datetime64({args[0]!r})")
        return self._real(*args)


class _Module(types.ModuleType):
    """A module without its clocks and its sources of random numbers."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(sys.modules[self.__name__], name)
        instead = refusing(found)
        return found if instead is None else instead


def _refuse_clock(what: str) -> None:
    raise mod_error(f"{what} reads a clock, which would be one number for all (b, h, q_idx, kv_idx), and another later", _CLOCK_CURE)


def _clock(called: Any) -> str | None:
    """The name of a built-in function that reads a clock for any arguments; None for every other function."""
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(owner, types.ModuleType):
        module = owner.__name__
        return f"{module}.{name}".replace("posix.", "os.") if name in _CLOCKS.get(module, ()) else None
    is_date = name in _DATES and isinstance(owner, type) and issubclass(owner, datetime.date)
    return f"{owner.__name__}.{name}" if is_date else None  # type: ignore[union-attr]


def refusing(item: Any) -> Any:
    """The replacement in a traced mod of what is, or belongs to, a clock or a source of random numbers; None for anything else."""
    if isinstance(item, types.ModuleType):
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


# What has run without a read: a tree by the objects that a mod is made of, none of which is kept alive, with sets of plain values.
_clean: WeakIdKeyDictionary = WeakIdKeyDictionary()
_PLAIN = (int, float, str, types.NoneType, torch.dtype, torch.device)
_MOST_VALUES = 64  # a number that changes at each call would only grow the set


class _Values:
    """The key of the set at an end of the tree."""


def _parts(fn: Any) -> tuple[list[Any], tuple]:
    """The objects that a mod is made of, and the plain values among its captures, each with its place. A function made anew of the same
    ones is the same mod."""
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
    """The plain values with which the objects of ``fn`` have run without a read, and those of ``fn``."""
    for parts in (_parts, _itself):
        with contextlib.suppress(TypeError, ValueError):  # a list has no weak references, a cell may be empty
            objects, values = parts(fn)
            level: Any = _clean
            for item in objects:
                level = level.setdefault(item, WeakIdKeyDictionary())
            return level.setdefault(_Values, set()), values
    return set(), ()


@contextlib.contextmanager
def reads_refused(fn: Any) -> Iterator[None]:
    """Context of the first call of the mod ``fn``: a clock that it reads, and a draw from a source of Python's, raise ``ModError``.

    Only in this thread, and only of code that is no library's. Later calls of the same object, or of a function of the same code and
    captures (tensors may be others), are not watched, which takes as long as to trace it; nor is a thread that has a profile function, such
    as a profiler's.
    """
    clean, values = _clean_values(fn)
    if values in clean or sys.getprofile() is not None:
        yield
        return
    collects = gc.isenabled()
    gc.disable()  # what a finalizer or a callback of the collector reads is no mod's
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
        return  # such as the time of an entry in a log
    module = owner.__name__ if isinstance(owner, types.ModuleType) else None
    is_system = name in _SYSTEM_DRAWS and module is not None
    if isinstance(owner, random.Random) or is_system or (name == "seed" and isinstance(owner, torch.Generator)):
        refuse_random(f"{module or type(owner).__name__}.{name}".replace("posix.", "os."))
    if (clock := _clock(called)) is not None:
        _refuse_clock(clock)


def generators_state() -> tuple:
    """The state of Python's and of NumPy's global generator, to be compared with a later one."""
    numpys = sys.modules.get("numpy.random")
    if numpys is None:
        return (random.getstate(),)
    generator = numpys.get_bit_generator() if hasattr(numpys, "get_bit_generator") else None
    if generator is None or type(generator) is not numpys.MT19937:
        return random.getstate(), repr(numpys.get_state() if generator is None else generator.state)
    return random.getstate(), ctypes.string_at(generator.ctypes.state_address, _MT19937)  # a tenth of the time of get_state


def check_draws(fn: Any, before: tuple, again: Callable[[], Any]) -> None:
    """Raises ``ModError`` if the mod ``fn`` draws from a global generator. before: their state before it was called; again: calls it."""
    for _ in range(_CALLS):
        # NumPy's generator may have been loaded between the two
        if not any(a != b for a, b in zip(before, generators_state(), strict=False)):
            return
        before = generators_state()
        again()
    problem = "a mod draws random numbers, which would be one and the same for all (b, h, q_idx, kv_idx)"
    raise mod_error(problem, RANDOM_CURE, defined_at(fn, "random"))
