"""Releases of other packages that the tests have run with."""

from __future__ import annotations

import re
import warnings
from functools import cache

import torch

__all__ = ["TESTED", "is_newer", "range_of", "warn_of_newer_torch"]

# lowest and highest; a patch of the highest release counts as that release
TESTED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "nvidia-cutlass-dsl": ("4.8.1", "4.8.1"),
    "transformers": ("4.57", "5.24"),
}


def range_of(package: str) -> str:
    """``"2.11 to 2.15"``."""
    return " to ".join(dict.fromkeys(TESTED[package]))


def is_newer(package: str, version: str) -> bool:
    """Whether a version is of a later release than the tested ones, its pre-releases and nightly builds included.

    >>> is_newer("torch", "2.15.3+cu132"), is_newer("torch", "2.16.0.dev20270101")
    (False, True)
    """
    highest = _numbers(TESTED[package][1])
    return _numbers(version)[: len(highest)] > highest


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.split("+")[0])))


@cache
def warn_of_newer_torch() -> None:
    """Warns, once in a process, of a torch that the tests have not run with."""
    if is_newer("torch", torch.__version__):
        warnings.warn(
            f"anyattn is tested with torch {range_of('torch')} and finds torch {torch.__version__}; results are those of public "
            "functions, but torch.compile may find private names changed, and then runs attention uncompiled after a warning. "
            "`anyattn doctor` checks results; a newer anyattn may know this torch",
            stacklevel=2,
        )
