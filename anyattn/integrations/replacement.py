"""A replacement of other libraries' functions: when it begins and ends, for all threads."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Protocol

__all__ = ["Replaceable", "Replacement"]

_lock = threading.RLock()


class Replaceable(Protocol):
    """Something that replacements replace; it counts them, and restores what was there when the last one has ended."""

    def enter(self) -> None: ...

    def leave(self) -> None: ...


class Replacement:
    """One active replacement; a context manager, which ``undo`` ends too. What was there is restored when the last one has ended."""

    def __init__(self, *replaced: Replaceable) -> None:
        self._replaced: list[Replaceable] = []
        with _no_compilation(), _lock:
            try:
                for one in replaced:
                    one.enter()
                    self._replaced.append(one)
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Ends this replacement; a second call does nothing."""
        with _no_compilation(), _lock:
            while self._replaced:
                self._replaced.pop().leave()

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _no_compilation() -> contextlib.AbstractContextManager:
    """Context in which no other thread compiles: guards of code that changes during compilation fail at once, which Dynamo reports as an
    error.

    It is entered before ``_lock``: a thread that compiles, and so holds Dynamo's lock, may replace functions too.
    """
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None) or contextlib.nullcontext()
