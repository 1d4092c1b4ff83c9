"""A mark for tests of what one version of Triton's compiler makes of a loop: registers, vectors, numbers of instructions."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

__all__ = ["judged_with_the_pinned_triton"]

_PINNED = "3.6."  # as in constraints.txt, and on the GPUs on which tiles were chosen and measured
_INSTALLED = importlib.metadata.version("triton") if importlib.util.find_spec("triton") is not None else _PINNED

# A wrong or impossible kernel fails with any version: only assertions are expected to.
judged_with_the_pinned_triton = pytest.mark.xfail(
    not _INSTALLED.startswith(_PINNED),
    raises=AssertionError,
    reason=f"Triton {_INSTALLED} allocates registers and vectors otherwise than {_PINNED}x",
    strict=False,
)
