"""``replace_flex_attention``: programs that call ``torch.nn.attention.flex_attention.flex_attention`` run on anyattn without an edit.

Programs hold torch's function in many ways: imported by name, compiled when a module was imported, stored in a singleton. So the function
object stays the same, and its code is replaced by that of ``_dispatch``: all references run the new code, compiled callers too, because
Dynamo guards on a function's code. Undoing restores torch's code.

This module does not import torch: ``autoload`` runs at the end of ``import torch``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings

from anyattn.integrations.torchs_function import torchs_function

__all__ = ["Replacement", "autoload", "replace_flex_attention"]

VARIABLE = "ANYATTN_REPLACE_FLEX_ATTENTION"
_lock = threading.RLock()


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
    >>> from anyattn import replaced
    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> q = torch.randn(1, 2, 32, 16)
    >>> with replace_flex_attention():
    ...     out = flex_attention(q, q, q)
    >>> replaced().taken
    1
    """
    return Replacement()


_active = 0  # replacements


def _no_compilation() -> contextlib.AbstractContextManager:
    """Context in which no other thread compiles: guards of code that changes during compilation fail at once, which Dynamo reports as an
    error.

    It is entered before ``_lock``: a thread that compiles, and so holds Dynamo's lock, may replace the function too.
    """
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None) or contextlib.nullcontext()


def _enter() -> None:
    global _active
    torchs = torchs_function()
    if _active == 0:
        torchs.function.__code__ = _DISPATCHING
    _active += 1


def _leave() -> None:
    global _active
    _active -= 1
    if _active == 0:
        torchs = torchs_function()
        torchs.function.__code__ = torchs.code


# Its code runs inside torch's function: defaults are torch's, and globals are those of torch's module.
def _dispatch(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux):  # type: ignore
    from anyattn.integrations.torch_flex_call import flex_attention

    return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)


_DISPATCHING = _dispatch.__code__.replace(co_name="flex_attention")  # one object, so that Dynamo's guards recognise it


def autoload() -> None:
    """The ``torch.backends`` entry point, which torch calls at the end of ``import torch``; replaces if the variable says so."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("", "0"):
        return
    try:
        if asked != "1":
            raise ValueError(f"{VARIABLE}={asked!r}; wanted 1 or 0")
        replace_flex_attention()
    except Exception as error:  # an exception here would make `import torch` fail
        warnings.warn(f"torch's flex_attention is not replaced by anyattn's: {error}", stacklevel=2)
