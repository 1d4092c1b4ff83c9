"""Stand-in: formats of the KV cache and what a layer says of its cache."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from vllm.v1.kv_cache_layout import KVCacheLayout

__all__ = ["AttentionSpec", "KVCacheLayout", "KVQuantMode", "get_kv_quant_mode"]


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def get_kv_quant_mode(kv_cache_dtype):
    if kv_cache_dtype.endswith("_per_token_head"):
        return KVQuantMode[kv_cache_dtype.upper()]
    return KVQuantMode.FP8_PER_TENSOR if kv_cache_dtype.startswith("fp8") else KVQuantMode.NONE


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    head_size_v: Any = None
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    state_content_bytes: Any = None

    def __post_init__(self):
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)

    @property
    def state_content_size_bytes(self):
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self.head_size_v) * self.dtype.itemsize
