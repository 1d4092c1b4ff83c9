"""Stand-in for vLLM's operations, which exist on a GPU alone: it notes its calls."""

from __future__ import annotations

from typing import Any

CALLS: list[tuple[Any, ...]] = []


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
    CALLS.append((key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale))
