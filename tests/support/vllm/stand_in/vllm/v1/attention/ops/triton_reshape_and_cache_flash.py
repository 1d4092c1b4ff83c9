"""Stand-in for vLLM's Triton kernels that write a KV cache: it notes its calls."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[Any, ...]] = []


def triton_reshape_and_cache_flash_per_token_head_quant(
    key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, kv_quant_mode
):
    CALLS.append((key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, kv_quant_mode))
