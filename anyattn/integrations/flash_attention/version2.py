"""The functions of FlashAttention 2's ``flash_attn`` and ``flash_attn.flash_attn_interface``, with its signatures, meanings and results.

A row that sees no key has out 0 and lse -inf, as everywhere in anyattn (FlashAttention 2: lse inf).
"""

from __future__ import annotations

from typing import Any

import torch

from anyattn import flash
from anyattn.integrations.flash_attention import ring
from anyattn.integrations.flash_attention.call import common, computed, computed_with_cache

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_flash_attn_forward = _wrapped_flash_attn_forward = ring.forward
_flash_attn_backward = _wrapped_flash_attn_backward = ring.backward
_flash_attn_varlen_forward = _wrapped_flash_attn_varlen_forward = ring.varlen_forward
_flash_attn_varlen_backward = _wrapped_flash_attn_varlen_backward = ring.varlen_backward


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """``anyattn.flash_attn_func``. Returns out, or with return_attn_probs (out, softmax_lse, S_dmask), S_dmask empty as without dropout."""
    return _computed(
        flash.flash_attn_func, (q, k, v), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of qkv (B, S, 3, H, D)."""
    return _computed(
        flash.flash_attn_qkvpacked_func, (qkv,), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of kv (B, S, 2, Hkv, D)."""
    return _computed(
        flash.flash_attn_kvpacked_func, (q, kv), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """``anyattn.flash_attn_varlen_func``; with block_table k and v are pages, and cu_seqlens_k says how many keys each sequence has."""
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _computed(
        flash.flash_attn_varlen_func, (q, k, v, *places), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs, page_table=block_table,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` of qkv (total, 3, H, D)."""
    return _computed(
        flash.flash_attn_varlen_qkvpacked_func, (qkv, cu_seqlens, max_seqlen), dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_varlen_func`` of kv (total_k, 2, Hkv, D)."""
    places = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _computed(
        flash.flash_attn_varlen_kvpacked_func, (q, kv, *places), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    """``anyattn.flash_attn_with_kvcache``. Returns out, or (out, softmax_lse)."""
    out, lse = computed_with_cache(
        flash.flash_attn_with_kvcache, q, k_cache, v_cache, k, v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=block_table,
        softmax_scale=softmax_scale, rotary_interleaved=rotary_interleaved, alibi_slopes=alibi_slopes, num_splits=num_splits,
        **common(causal, window_size, softcap),
    )  # fmt: skip
    return (out, lse) if return_softmax_lse else out


def _computed(
    function: Any, arguments: tuple, dropout_p: float, softmax_scale: Any, causal: Any, window_size: Any, softcap: Any, slopes: Any,
    deterministic: Any, return_attn_probs: Any, **others: Any,
) -> Any:  # fmt: skip
    if return_attn_probs and dropout_p:
        raise ValueError("return_attn_probs=True is given with dropout_p above 0; wanted dropout_p=0.0: the probabilities are never stored")
    options = common(causal, window_size, softcap, dropout_p) | others
    result = computed(
        function, *arguments, softmax_scale=softmax_scale, alibi_slopes=slopes, deterministic=deterministic,
        return_lse=bool(return_attn_probs), **options,
    )  # fmt: skip
    return (*result, torch.empty(0, dtype=result[0].dtype, device=result[0].device)) if return_attn_probs else result
