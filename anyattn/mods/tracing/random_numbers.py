"""Refusal of random numbers inside a mod: drawn during tracing, they would be one number for all pairs.

torch's functions are caught by name in the tracer's function mode. Among a mod's captures the modules, functions and generators of Python
and NumPy that draw, and the functions that read the system's random bytes, are replaced by an object that raises at the user's line. Other
draws from the global generators of Python, torch (on the CPU) and NumPy are detected by their states before and after the trace.
"""

from __future__ import annotations

import ctypes
import random
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from anyattn.mods.tracing.diagnostics import defined_at, mod_error

__all__ = ["check_draws", "generators_state", "is_loaded", "is_random", "refuse_random", "refusing"]

_CURE = (
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
_SYSTEM_DRAWS = frozenset(("urandom", "getrandom", "uuid1", "uuid4"))
_MT19937 = 624 * 4 + 4  # bytes: the words of the state, and the position among them
_CALLS = 5  # another thread may draw too, but hardly during each of five calls


def is_random(name: str) -> bool:
    """Whether torch's function of this name draws random numbers; in-place ones end in an underscore; ``__rand__`` is ``&``."""
    return name.rstrip("_") in _DRAWS


def refuse_random(what: str) -> None:
    """Raises the ``ModError`` for a mod that draws random numbers with ``what``."""
    raise mod_error(f"{what} is a random number, and would be one and the same for all (b, h, q_idx, kv_idx)", _CURE)


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


class _Module(types.ModuleType):
    """A module whose sources of random numbers are replaced."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(sys.modules[self.__name__], name)
        instead = refusing(found)
        return found if instead is None else instead


def is_loaded(module: types.ModuleType) -> bool:
    """Whether importing the module's name gives this module, rather than one that has its name only."""
    return sys.modules.get(module.__name__) is module


def refusing(item: Any) -> Any:
    """The replacement for a source of random numbers, or for a module that contains one; None for anything else."""
    if isinstance(item, types.ModuleType) and is_loaded(item):
        if item.__name__ in ("numpy", "os", "uuid"):
            return _Module(item.__name__)
        return _Refusing(item.__name__) if item.__name__ in ("random", "secrets", "numpy.random") else None
    owner = getattr(item, "__self__", None) if isinstance(item, (types.MethodType, types.BuiltinFunctionType)) else item
    if _is_generator(owner):
        return _Refusing(type(owner).__name__ if owner is item else f"{type(owner).__name__}.{item.__name__}")
    module = getattr(item, "__module__", None) if callable(item) and hasattr(item, "__name__") else None
    is_system = module in ("posix", "nt", "uuid") and item.__name__ in _SYSTEM_DRAWS
    if is_system or module in ("random", "secrets") or (isinstance(module, str) and module.startswith("numpy.random")):
        return _Refusing(f"{module}.{item.__name__}".replace("posix.", "os."))
    return None


def _is_generator(item: Any) -> bool:
    if isinstance(item, random.Random):
        return True
    numpys = sys.modules.get("numpy.random")
    return numpys is not None and isinstance(item, (numpys.Generator, numpys.RandomState))


def generators_state() -> tuple:
    """The states of the global generators of Python, torch (on the CPU) and NumPy, for comparison with later ones."""
    torchs = torch.default_generator.get_state()
    with torch._C.DisableTorchFunction():
        states = random.getstate(), ctypes.string_at(torchs.data_ptr(), torchs.nbytes)
    numpys = sys.modules.get("numpy.random")
    if numpys is None:
        return states
    generator = numpys.get_bit_generator() if hasattr(numpys, "get_bit_generator") else None
    if generator is None or type(generator) is not numpys.MT19937:
        return *states, repr(numpys.get_state() if generator is None else generator.state)
    return *states, ctypes.string_at(generator.ctypes.state_address, _MT19937)  # takes a tenth of the time of get_state


def check_draws(fn: Any, before: tuple, again: Callable[[], Any]) -> None:
    """Raises ``ModError`` if the mod ``fn`` draws from a global generator. before: their states before its call. again: calls it again."""
    for _ in range(_CALLS):
        # NumPy's generator may have been loaded in between
        if not any(a != b for a, b in zip(before, generators_state(), strict=False)):
            return
        before = generators_state()
        again()
    problem = "a mod draws random numbers, which would be one and the same for all (b, h, q_idx, kv_idx)"
    raise mod_error(problem, _CURE, defined_at(fn, "random"))
