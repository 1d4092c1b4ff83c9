"""Range checks of numbers that scores are multiplied or divided by: scores are float32, except that float64 inputs have float64 scores."""

from __future__ import annotations

__all__ = ["LARGEST_SCALE", "LEAST_SCALE", "check_held", "is_ordinary_scale"]


def largest_scale() -> float:
    """0.99 ln 2 times the largest float32: times log2(e), which kernels multiply by to use powers of two, it is still finite. A function
    that returns a literal: Dynamo treats a float of a module as an input that may change."""
    return 0.99 * 0.6931471805599453 * (2 - 2.0**-23) * 2.0**127


LARGEST_SCALE = largest_scale()
LEAST_SCALE = 1e-30


def is_ordinary_scale(scale: float) -> bool:
    """Whether the scale is positive, and the limits of a score times it are neither 0 nor infinite."""
    return LEAST_SCALE < scale < 1 / LEAST_SCALE


def check_held(name: str, number: float, *, is_divisor: bool = False, way_out: str = "inputs of float64") -> None:
    """Raises ``ValueError``, ending with ``way_out``, for a number that leaves no score finite in float32.

    >>> check_held("cap", 1e-300, is_divisor=True)
    Traceback (most recent call last):
    ValueError: cap=1e-300; wanted at least 1.18e-38, for scores are computed in float32, or inputs of float64
    """
    least = 2.0**-126  # the least normal number: hardware may flush smaller ones to 0, whose reciprocal is infinite
    if abs(number) > largest_scale():
        wanted = f"at most {largest_scale():.3g} in size"
    elif is_divisor and abs(number) < least:
        wanted = f"at least {least:.3g}"
    else:
        return
    raise ValueError(f"{name}={number!r}; wanted {wanted}, for scores are computed in float32, or {way_out}")
