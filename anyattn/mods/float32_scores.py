"""Numbers that scores are multiplied or divided by: what float32 holds, in which scores are computed unless the inputs are float64."""

from __future__ import annotations

from anyattn.arithmetic import LN2

__all__ = ["LARGEST_SCALE", "SMALLEST_DIVISOR", "check_held"]

_LARGEST = (2 - 2.0**-23) * 2.0**127  # of float32
LARGEST_SCALE = 0.99 * LN2 * _LARGEST  # float32 also holds it times log2(e), by which kernels count in powers of two
SMALLEST_DIVISOR = 2.0**-126  # the least normal number: a smaller one may be taken for 0, and its reciprocal for infinity


def check_held(name: str, number: float, *, is_divisor: bool = False, way_out: str = "inputs of float64") -> None:
    """Raises ``ValueError``, which ends with the way out, for a number by which no score is finite in float32.

    >>> check_held("cap", 1e-300, is_divisor=True)
    Traceback (most recent call last):
    ValueError: cap=1e-300; wanted at least 1.18e-38, for scores are computed in float32, or inputs of float64
    """
    if abs(number) > LARGEST_SCALE:
        wanted = f"at most {LARGEST_SCALE:.3g} in size"
    elif is_divisor and abs(number) < SMALLEST_DIVISOR:
        wanted = f"at least {SMALLEST_DIVISOR:.3g}"
    else:
        return
    raise ValueError(f"{name}={number!r}; wanted {wanted}, for scores are computed in float32, or {way_out}")
