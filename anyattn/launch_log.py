"""A log of the kernels that are launched for the first time, while somebody asks: ``anyattn doctor`` names what ran.

Backends write to it where a launch is prepared; a launch that is made again from what an earlier one left is not noted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["noted", "noting"]

noted: list[str] | None = None  # of the whole process: a backward pass on a GPU runs in a thread of its own


@contextlib.contextmanager
def noting() -> Iterator[list[str]]:
    """Inside, the names of kernels are added to the list that is given, in the order of their launches."""
    global noted
    before, noted = noted, []
    try:
        yield noted
    finally:
        noted = before
