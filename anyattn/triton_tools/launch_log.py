"""Log of kernel launches, recorded only inside ``noting()``; ``anyattn doctor`` uses it to name the kernels that ran.

Backends record a launch when it is prepared; repetitions of a prepared launch are not recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["noted", "noting"]

noted: list[str] | None = None  # global, not per thread: a backward pass on a GPU runs in another thread


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Context in which the names of launched kernels are appended to the list that it yields, in order."""
    global noted
    before, noted = noted, []
    try:
        yield noted
    finally:
        noted = before
