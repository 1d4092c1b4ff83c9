"""Writing new keys and values to vLLM's KV cache, at the slots that vLLM's scheduler has chosen.

On a GPU vLLM's own operations write. They exist for no other device, for which a few torch operations do the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.integrations.vllm.cache import CacheFormat, CacheViews
from anyattn.kvcache import append

__all__ = ["update_cache"]

_LEAST_SCALE = 1e-6  # vLLM's: a head of zeros has a scale too


def update_cache(
    views: CacheViews, stored: CacheFormat, kv_cache_dtype: str, key: Tensor, value: Tensor, slot_mapping: Tensor, layer: Any
) -> None:
    """Writes row i of key and value, (tokens, Hkv, D), to slot ``slot_mapping[i]``; a slot below 0, and rows past the slots, are left out.

    A slot is ``page * page_size + row``. layer: has the scales ``_k_scale`` and ``_v_scale`` of a format whose scales are not inline.
    """
    if key.device.type != "cuda":
        _update_by_torch(views, stored, key, value, slot_mapping, layer)
        return
    if stored.has_inline_scales:
        from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash_per_token_head_quant
        from vllm.v1.kv_cache_interface import get_kv_quant_mode

        mode = get_kv_quant_mode(kv_cache_dtype)
        triton_reshape_and_cache_flash_per_token_head_quant(key, value, *views, slot_mapping, kv_quant_mode=mode)
        return
    from vllm._custom_ops import reshape_and_cache_flash

    reshape_and_cache_flash(key, value, views.k, views.v, slot_mapping, kv_cache_dtype, layer._k_scale, layer._v_scale)


def _update_by_torch(views: CacheViews, stored: CacheFormat, key: Tensor, value: Tensor, slot_mapping: Tensor, layer: Any) -> None:
    kept = (slot_mapping >= 0).nonzero()[:, 0]
    slots = slot_mapping[kept]
    page_size = views.k.shape[1]
    places = slots // page_size, slots % page_size
    for rows, cells, scales, scale in ((key, views.k, views.k_scale, layer._k_scale), (value, views.v, views.v_scale, layer._v_scale)):
        rows = rows[kept]
        if stored.dtype is None:
            append.append(cells, rows, *places)
            continue
        if scales is None:
            scale = scale.view(-1, 1)
        else:
            scale = (rows.float().abs().amax(-1, keepdim=True) / _greatest(stored.dtype)).clamp_min(_LEAST_SCALE)
            scales.index_put_(places, scale[..., 0])
        append.append(cells.view(torch.uint8), _quantised(rows, scale, stored.dtype).view(torch.uint8), *places)


def _greatest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max


def _quantised(rows: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``rows / scale``, rounded to dtype and saturated."""
    wide = rows.float() / scale
    if not dtype.is_floating_point:
        wide = wide.round()
    return wide.clamp(-_greatest(dtype), _greatest(dtype)).to(dtype)
