"""Quantisation of new rows for an 8-bit KV cache: scales, saturating conversion, and the number of values that saturate.

A cache of ``float8_e4m3fn``, ``float8_e5m2`` or ``int8`` holds numbers whose product with a scale, the descale, is the value. Appending
reads the descale, or, where that has a place for each row and head, computes the scale of a row and writes it there.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "LIMITS", "SMALLEST_SCALE", "UNSCALED", "Limits", "QuantisedRows", "Scaling", "check_saturated", "check_written", "given_scale",
    "is_written", "quantised", "row_scales",
]  # fmt: skip

SMALLEST_SCALE = 2.0**-126  # the least normal float32: a row of zeros has a scale too, and dividing by it is exact


class Limits(NamedTuple):
    """Numbers of an 8-bit dtype.

    least, greatest: its range. row_max: the number that a row's greatest magnitude becomes under the row's own scale. below, above: the
    least and the greatest float32 that rounding brings into the range; what lies beyond saturates.
    """

    least: float
    greatest: float
    row_max: float
    below: float
    above: float


# int8 has -128, as in vLLM's caches, but a row's own scale is symmetric. Ties round to even: 464 to 448, 61440 to 65536, 127.5 to 128
LIMITS: dict[torch.dtype, Limits] = {
    torch.float8_e4m3fn: Limits(-448.0, 448.0, 448.0, -464.0, 464.0),
    torch.float8_e5m2: Limits(-57344.0, 57344.0, 57344.0, -61439.99609375, 61439.99609375),
    torch.int8: Limits(-128.0, 127.0, 127.0, -128.5, 127.49999237060547),
}


class Scaling(NamedTuple):
    """How appending scales the rows of a cache.

    descale: None (1.0), a number, or float32: of one element, (B, Hkv), or 3 dimensions that broadcast to the cache's first three.
    saturated: an integer tensor of one element to which the number of saturated values is added; None if they are not counted.
    """

    descale: Tensor | float | None = None
    saturated: Tensor | None = None


UNSCALED = Scaling()


class QuantisedRows(NamedTuple):
    """Rows in the cache's dtype. saturated: int64, the number of values that were out of range."""

    rows: Tensor
    saturated: Tensor


def is_written(descale: Any, cache: Tensor) -> bool:
    """Whether appending writes the descale: it has memory of its own for every row and head of the cache.

    >>> cache = torch.zeros(6, 16, 2, 8, dtype=torch.int8)
    >>> is_written(torch.ones(6, 16, 2), cache), is_written(torch.ones(6, 1, 2), cache)
    (True, False)
    """
    if not isinstance(descale, Tensor) or descale.ndim != 3 or descale.shape != cache.shape[:3]:
        return False
    strides = descale.stride()
    return 0 not in strides or all(stride for size, stride in zip(descale.shape, strides, strict=True) if size > 1)


def row_scales(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 (...): for each row (..., D) the scale that brings its greatest finite magnitude to the end of the dtype's range.

    >>> row_scales(torch.tensor([[0.0, 0.0], [-254.0, 3.0]]), torch.int8).tolist()
    [1.1754943508222875e-38, 2.0]
    """
    magnitudes = rows.float().abs()
    return (_without_infinite(magnitudes).amax(-1) / LIMITS[dtype].row_max).clamp(min=SMALLEST_SCALE)


def _without_infinite(magnitudes: Tensor) -> Tensor:
    return torch.where(magnitudes < math.inf, magnitudes, 0.0)  # False for NaN


def quantised(rows: Tensor, scales: Tensor | float, dtype: torch.dtype) -> QuantisedRows:
    """``rows / scales`` in float32, rounded to the nearest number of the dtype, ties to even; beyond the range the nearest end of it.

    rows: (..., H, D), any float dtype. scales: a number or (..., H). NaN stays NaN; in int8, which has none, it becomes 0 and counts as
    saturated.

    >>> quantised(torch.tensor([[1.0, 2.5, -300.0]]), 1.0, torch.int8)
    QuantisedRows(rows=tensor([[   1,    2, -128]], dtype=torch.int8), saturated=tensor(1))
    """
    limits = LIMITS[dtype]
    exact = rows.float() / (scales[..., None] if isinstance(scales, Tensor) else scales)
    is_out = (exact > limits.above) | (exact < limits.below)
    found = exact.clamp(limits.least, limits.greatest)
    if dtype is torch.int8:
        is_nan = exact.isnan()
        is_out, found = is_out | is_nan, found.round().masked_fill(is_nan, 0.0)
    return QuantisedRows(found.to(dtype), is_out.sum())


def check_written(name: str, descale: Any, cache: Tensor) -> None:
    """Raises ``ValueError`` for scales that appending can neither take as given nor write: one per row, but not for each head and row.

    >>> check_written("k_descale", torch.ones(6, 16, 1), torch.zeros(6, 16, 2, 8, dtype=torch.int8))
    Traceback (most recent call last):
    ValueError: k_descale has shape (6, 16, 1) and strides (16, 1, 1): appending would write scales that heads or cache rows share; wanted \
(6, 16, 2) with memory of its own, or one scale per page and head, (6, 1, 2), which appending reads
    """
    if not isinstance(descale, Tensor) or descale.ndim != 3 or is_written(descale, cache):
        return
    entries, rows, heads = cache.shape[:3]
    if rows > 1 and descale.shape[1] == rows and descale.stride(1):
        raise ValueError(
            f"{name} has shape {tuple(descale.shape)} and strides {descale.stride()}: appending would write scales that heads or cache "
            f"rows share; wanted {(entries, rows, heads)} with memory of its own, or one scale per page and head, {(entries, 1, heads)}, "
            f"which appending reads"
        )


def given_scale(name: str, scale: Any, shape: tuple[int, int], device: torch.device) -> float | Tensor:
    """A constant scale as a number, or as float32 of ``shape``, (layers, heads).

    >>> given_scale("k_descale", torch.tensor([0.5, 0.0]), (1, 2), torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: k_descale is 0.0 for layer 0, head 1; wanted a finite number above 0
    """
    if not isinstance(scale, Tensor):
        if not isinstance(scale, (int, float)) or isinstance(scale, bool):
            raise TypeError(f"{name} is a {type(scale).__name__}; wanted None, a number or a float32 tensor")
        if not SMALLEST_SCALE <= scale < math.inf:
            raise ValueError(f"{name} is {scale}; wanted a finite number above 0")
        return float(scale)
    if scale.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {scale.dtype}; wanted float32: convert it with .float()")
    if scale.numel() != 1 and tuple(scale.shape) not in (shape, shape[1:]):
        raise ValueError(
            f"{name} has shape {tuple(scale.shape)}; wanted one element, {shape[1:]} for the heads, or {shape} for layers and heads"
        )
    found = (scale.reshape(()) if scale.numel() == 1 else scale).detach().to(device).expand(shape).clone()
    wrong = (~((found >= SMALLEST_SCALE) & (found < math.inf))).nonzero().tolist()
    if wrong:
        layer, head = wrong[0]
        raise ValueError(f"{name} is {float(found[layer, head])} for layer {layer}, head {head}; wanted a finite number above 0")
    return found


def check_saturated(saturated: Any, device: torch.device) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless ``saturated`` can count saturated values on the device.

    >>> check_saturated(torch.zeros(2, dtype=torch.int64), torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: saturated has shape (2,); wanted one element: torch.zeros(1, dtype=torch.int64)
    """
    if saturated is None:
        return
    cure = "torch.zeros(1, dtype=torch.int64)"
    if not isinstance(saturated, Tensor) or saturated.dtype not in (torch.int32, torch.int64):
        what = f"has dtype {saturated.dtype}" if isinstance(saturated, Tensor) else f"is a {type(saturated).__name__}"
        raise TypeError(f"saturated {what}; wanted an int64 or int32 tensor of one element: {cure}")
    if saturated.numel() != 1:
        raise ValueError(f"saturated has shape {tuple(saturated.shape)}; wanted one element: {cure}")
    if saturated.device != device:
        raise ValueError(f"saturated is on {saturated.device} but q is on {device}; wanted one device: move it with .to({str(device)!r})")
