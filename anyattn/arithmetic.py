"""Ceiling division, next power of two, and the factors between natural and base-2 logarithms."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["LN2", "LOG2E", "ceil_div", "next_power_of_2"]

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


def ceil_div(a: Any, b: Any) -> Any:
    """``a / b`` rounded up, for b > 0 and a > -b; works on Python ints, integer tensors (elementwise) and CuTe DSL integers.

    >>> ceil_div(257, 128)
    3
    """
    return (a + (b - 1)) // b


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not below n, for n > 0.

    >>> next_power_of_2(96)
    128
    """
    return 1 << (n - 1).bit_length()
