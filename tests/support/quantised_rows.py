"""8-bit caches of tests: scales in every form, and the float32 numbers at which rounding to a dtype changes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from anyattn.kvcache.quantise import LIMITS

__all__ = ["DTYPES", "FORMS", "descales", "every_rounding"]

DTYPES = tuple(LIMITS)
FORMS = ("none", "number", "one element", "by entry", "by page", "by token", "inline")


def descales(form: str, caches: list[Tensor], batch: int, g: torch.Generator) -> tuple[list[Tensor], list[Tensor | float | None]]:
    """The caches, and a descale of a form for each. "by token" and "inline" are written by appending, the others given. "inline": the
    caches lie in new memory, where the four bytes of a scale follow each head's bytes."""
    storage, rows, heads = caches[0].shape[:3]
    if form == "inline":
        found = [_inline(cache) for cache in caches]
        return [cache for cache, _ in found], [scales for _, scales in found]
    if form == "by token":
        wide = [torch.full((storage, heads, rows), math.nan).transpose(1, 2) for _ in caches]  # heads outside, as caches may have them
        return caches, wide  # type: ignore[return-value]
    shapes = {"one element": (1,), "by entry": (batch, heads), "by page": (storage, 1, heads)}
    if form == "none":
        return caches, [None, None]
    if form == "number":
        return caches, [0.02, 0.3]
    return caches, [(torch.rand(shapes[form], generator=g) + 0.01) / 10 for _ in caches]


def _inline(cache: Tensor) -> tuple[Tensor, Tensor]:
    storage, rows, heads, width = cache.shape
    memory = torch.full((storage, rows, heads, width + 4), 0xFF, dtype=torch.uint8)
    memory[..., :width] = cache.view(torch.uint8)
    return memory[..., :width].view(cache.dtype), memory.view(-1).view(torch.float32).view(storage, rows, heads, -1)[..., width // 4]


def every_rounding(dtype: torch.dtype) -> Tensor:
    """float32: all numbers of the dtype, the numbers halfway between neighbours, the float32 next to each of these, and numbers out of
    range, with both signs."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values.unique()
    beyond = torch.tensor([every[-1] + (every[-1] - every[-2]), 1e30, math.inf, LIMITS[dtype].above])
    halfway = (every[1:] + every[:-1]) / 2
    points = torch.cat((every, halfway, beyond, -beyond, (every[-1] + beyond[:1]) / 2, (every[:1] - beyond[:1]) / 2))
    near = [torch.nextafter(points, torch.full_like(points, side)) for side in (-math.inf, math.inf)]
    return torch.cat((points, *near, torch.tensor([0.0, -0.0, math.nan, 1e-45, -1e-45])))
