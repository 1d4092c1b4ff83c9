"""Numbers that scores are multiplied or divided by: what float32 holds, in which scores are computed unless the inputs are float64."""

from __future__ import annotations

__all__ = ["LARGEST_SCALE", "check_held"]


def largest_scale() -> float:
    """0.99 ln 2 times the largest number of float32, which then also holds it times log2(e), by which kernels count in powers of two. As a
    literal of code: Dynamo takes a module's float for an input that may change."""
    return 0.99 * 0.6931471805599453 * (2 - 2.0**-23) * 2.0**127


LARGEST_SCALE = largest_scale()


def check_held(name: str, number: float, *, is_divisor: bool = False, way_out: str = "inputs of float64") -> None:
    """Raises ``ValueError``, which ends with the way out, for a number by which no score is finite in float32.

    >>> check_held("cap", 1e-300, is_divisor=True)
    Traceback (most recent call last):
    ValueError: cap=1e-300; wanted at least 1.18e-38, for scores are computed in float32, or inputs of float64
    """
    least = 2.0**-126  # the least normal number: a smaller one may be taken for 0, and its reciprocal for infinity
    if abs(number) > largest_scale():
        wanted = f"at most {largest_scale():.3g} in size"
    elif is_divisor and abs(number) < least:
        wanted = f"at least {least:.3g}"
    else:
        return
    raise ValueError(f"{name}={number!r}; wanted {wanted}, for scores are computed in float32, or {way_out}")
