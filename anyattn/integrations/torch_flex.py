"""``replace_flex_attention``: programs that call ``torch.nn.attention.flex_attention.flex_attention`` run on anyattn without an edit.

Programs hold torch's function in many ways: imported by name, compiled when a module was imported, stored in a singleton. So the function
object stays the same, and its code is replaced by that of ``_dispatch``: all references run the new code, compiled callers too, because
Dynamo guards on a function's code. Undoing restores torch's code.

This module does not import torch: ``autoload`` runs at the end of ``import torch``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import types
import warnings
from dataclasses import dataclass
from typing import Any

__all__ = ["ReplacedCalls", "Replacement", "autoload", "count_passed_on", "count_taken", "replace_flex_attention", "replaced", "torchs_own"]

VARIABLE = "ANYATTN_REPLACE_FLEX_ATTENTION"
_MODULE = "torch.nn.attention.flex_attention"
_MOST_REASONS = 100
_lock = threading.RLock()


# ---- counting


@dataclass(frozen=True)
class ReplacedCalls:
    """Counts of calls of torch's ``flex_attention`` while it was replaced, since the process started.

    taken: calls that anyattn computed. passed_on: calls that torch's own function computed. reasons: number of passed-on calls by the first
    line of the refusal; lines that differ only in numbers are one reason. Compiled calls are counted when Dynamo traces them, not when the
    graph runs.
    """

    taken: int
    passed_on: int
    reasons: dict[str, int]


class _Counts:
    def __init__(self) -> None:
        self.taken = 0
        self.by_reason: dict[str, int] = {}  # by the reason without its numbers
        self.reasons: dict[str, str] = {}


_counts = _Counts()


def replaced() -> ReplacedCalls:
    """How many calls of torch's ``flex_attention`` anyattn has computed, how many it has passed on to torch's own, and why.

    >>> replaced().passed_on
    0
    """
    with _lock:
        reasons = {_counts.reasons[key]: count for key, count in _counts.by_reason.items()}
        return ReplacedCalls(_counts.taken, sum(reasons.values()), reasons)


def count_taken() -> None:
    """Counts a call that anyattn has computed."""
    with _lock:
        _counts.taken += 1


def count_passed_on(refusal: str) -> None:
    """Counts a call that torch's own function has computed, and warns once per reason. refusal: the whole message."""
    reason = refusal.strip().split("\n", 1)[0]
    key = re.sub(r"\d+", "#", reason)
    with _lock:
        if key not in _counts.by_reason and len(_counts.by_reason) >= _MOST_REASONS:
            reason = key = "other reasons"
        is_first = key not in _counts.by_reason
        _counts.by_reason[key] = _counts.by_reason.get(key, 0) + 1
        _counts.reasons.setdefault(key, reason)
    if is_first:
        warnings.warn(
            f"torch's own flex_attention computes a call that anyattn was to take: {refusal}\n(calls like this one are counted in "
            "anyattn.replaced() without a further warning)",
            stacklevel=4,  # the caller of torch's function
        )


# ---- replacing


class Replacement:
    """One active replacement; a context manager, which ``undo`` ends too. Torch's own code is restored when the last one has ended."""

    def __init__(self) -> None:
        self._is_active = False
        with _no_compilation(), _lock:
            _enter()
            self._is_active = True

    def undo(self) -> None:
        """Ends this replacement; a second call does nothing."""
        with _no_compilation(), _lock:
            if self._is_active:
                self._is_active = False
                _leave()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def replace_flex_attention() -> Replacement:
    """Lets anyattn compute every call of ``torch.nn.attention.flex_attention.flex_attention`` in this process, eager and compiled.

    It does not matter how a program holds the function, or whether it was compiled before. Calls that anyattn refuses run on torch's own
    function, with one warning per reason; ``replaced()`` counts both. ``kernel_options`` without a meaning here are ignored.

    The replacement holds for all threads, until ``undo()`` of the returned object or the end of its ``with`` block; if several are active,
    until the last one ends. For programs that cannot be edited, the environment variable ``ANYATTN_REPLACE_FLEX_ATTENTION=1`` does the same
    for the whole process.

    Raises ``RuntimeError`` if torch's function is not the one that this version of anyattn knows.

    >>> import torch
    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> q = torch.randn(1, 2, 32, 16)
    >>> with replace_flex_attention():
    ...     out = flex_attention(q, q, q)
    >>> replaced().taken
    1
    """
    return Replacement()


class _Torchs:
    """torch's function, its original code, and another function that always runs that code."""

    def __init__(self) -> None:
        module = importlib.import_module(_MODULE)
        self.function = function = module.flex_attention
        if type(function) is not types.FunctionType or function.__globals__ is not vars(module):
            raise RuntimeError(f"{_MODULE}.flex_attention is {function!r}, which is not torch's function: something else has replaced it")
        self.code = function.__code__
        if _arguments(self.code) != _arguments(_dispatch.__code__) or function.__closure__:
            wanted, found = (", ".join(_arguments(code)) for code in (_dispatch.__code__, self.code))
            raise RuntimeError(
                f"torch's flex_attention takes ({found}); wanted ({wanted}): this torch cannot be replaced, call anyattn's own"
            )
        self.dispatching = _dispatch.__code__.replace(co_name=self.code.co_name)  # one object, so that Dynamo's guards recognise it
        self.own = types.FunctionType(self.code, function.__globals__, function.__name__, function.__defaults__)
        for name in ("__kwdefaults__", "__module__", "__doc__", "__annotations__"):
            setattr(self.own, name, getattr(function, name))


_torchs: _Torchs | None = None
_active = 0


def _no_compilation() -> contextlib.AbstractContextManager:
    """Context in which no other thread compiles: guards of code that changes during compilation
    fail at once, which Dynamo reports as an error.

    It must be entered before ``_lock``, which a compiling thread takes to count calls.
    """
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None) or contextlib.nullcontext()


def _found() -> _Torchs:
    global _torchs
    with _lock:
        if _torchs is None:
            _torchs = _Torchs()
        return _torchs


def torchs_own() -> Any:
    """torch's own ``flex_attention``, unaffected by replacements."""
    return _found().own


def _enter() -> None:
    global _active
    torchs = _found()
    if _active == 0:
        torchs.function.__code__ = torchs.dispatching
    _active += 1


def _leave() -> None:
    global _active
    _active -= 1
    if _active == 0:
        torchs = _found()
        torchs.function.__code__ = torchs.code


def _arguments(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# Its code runs inside torch's function: defaults are torch's, and globals are those of torch's module.
def _dispatch(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux):  # type: ignore
    from anyattn.integrations.torch_flex_call import flex_attention

    return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)


# ---- the environment variable


def autoload() -> None:
    """The ``torch.backends`` entry point, which torch calls at the end of ``import torch``;
    replaces if the environment variable says so."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    try:
        if asked != "1":
            raise ValueError(f"{VARIABLE}={asked!r}; wanted 1 or 0")
        replace_flex_attention()
    except Exception as error:  # an exception here would make `import torch` fail
        warnings.warn(f"torch's flex_attention is not replaced by anyattn's: {error}", stacklevel=2)
