"""Log of kernel launches, written only inside ``noting()``: ``anyattn doctor`` names the kernels that ran.

Backends write to it where a launch is prepared; a prepared launch that is repeated is not noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["noted", "noting"]

noted: list[str] | None = None  # of the whole process: a backward pass on a GPU runs in a thread of its own


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Context in which the names of launched kernels are appended to the list that it yields, in order."""
    global noted
    before, noted = noted, []
    try:
        yield noted
    finally:
        noted = before
