"""Formats of vLLM's KV cache: views of keys, values and scales in the one tensor that a layer has.

vLLM (since 0.33) gives each layer a tensor (pages, Hkv, page_size, content), with the strides of any of its layouts. A cell's content is
the key, then the value. In the formats with a scale per token and head both are followed by their scale, four bytes of float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["FORMATS", "SCALE_BYTES", "CacheFormat", "CacheViews", "cache_views", "format_of"]

SCALE_BYTES = 4


class CacheFormat(NamedTuple):
    """dtype: of the stored numbers; None for the model's. has_inline_scales: whether a scale per token and head is stored with them."""

    dtype: torch.dtype | None = None
    has_inline_scales: bool = False


FORMATS = {
    "auto": CacheFormat(),
    "float16": CacheFormat(),
    "bfloat16": CacheFormat(),
    "fp8": CacheFormat(torch.float8_e4m3fn),
    "fp8_e4m3": CacheFormat(torch.float8_e4m3fn),
    "fp8_e5m2": CacheFormat(torch.float8_e5m2),
    "fp8_per_token_head": CacheFormat(torch.float8_e4m3fn, has_inline_scales=True),
    "int8_per_token_head": CacheFormat(torch.int8, has_inline_scales=True),
}


class CacheViews(NamedTuple):
    """k: (pages, page_size, Hkv, D). v: the same with Dv. k_scale, v_scale: float32 (pages, page_size, Hkv), if they are inline."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


def format_of(kv_cache_dtype: str) -> CacheFormat:
    """Raises ``ValueError`` for a format that anyattn does not read."""
    if kv_cache_dtype not in FORMATS:
        raise ValueError(f"kv_cache_dtype={kv_cache_dtype!r}; wanted one of {', '.join(FORMATS)}: --kv-cache-dtype auto")
    return FORMATS[kv_cache_dtype]


def cache_views(kv_cache: Tensor, head_size: int, stored: CacheFormat) -> CacheViews:
    """Keys, values and scales of a layer's cache; nothing is copied.

    >>> kv_cache = torch.zeros(9, 2, 16, 2 * 64)
    >>> cache_views(kv_cache, 64, FORMATS["auto"]).v.shape
    torch.Size([9, 16, 2, 64])
    >>> quantised = torch.zeros(9, 2, 16, 2 * (64 + 4), dtype=torch.uint8)
    >>> cache_views(quantised, 64, FORMATS["fp8_per_token_head"]).k_scale.shape
    torch.Size([9, 16, 2])
    """
    scales = SCALE_BYTES if stored.has_inline_scales else 0
    content = kv_cache.shape[-1]
    if kv_cache.ndim != 4 or content <= head_size + scales:
        raise ValueError(
            f"kv_cache has shape {tuple(kv_cache.shape)} for head_size {head_size}; wanted (pages, heads, page_size, key and value), as "
            "vLLM 0.33 allocates it: use vLLM 0.33 or newer"
        )
    numbers = kv_cache if stored.dtype is None else kv_cache.view(stored.dtype)
    cells = numbers.transpose(1, 2)
    if not scales:
        return CacheViews(*cells.split_with_sizes((head_size, content - head_size), -1))  # faster than split
    k, _, v, _ = cells.split_with_sizes((head_size, scales, content - head_size - 2 * scales, scales), -1)
    floats = kv_cache.view(torch.float32).transpose(1, 2)
    return CacheViews(k, v, floats.select(-1, head_size // scales), floats.select(-1, -1))
