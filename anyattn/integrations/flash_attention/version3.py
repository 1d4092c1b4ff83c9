"""The functions of FlashAttention 3's ``flash_attn_interface``, with its signatures, meanings and results."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn import flash
from anyattn.integrations.flash_attention.call import common, computed, computed_with_cache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``anyattn.flash_attn_func``. Returns out, or with return_attn_probs (out, softmax_lse)."""
    return computed(
        flash.flash_attn_func, q, k, v, softmax_scale=softmax_scale, qv=qv, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa,
        deterministic=deterministic, sm_margin=sm_margin, return_lse=bool(return_attn_probs), **common(causal, window_size, softcap),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_func`` of qkv (B, S, 3, H, D), or with num_heads_q (B, S, Hq + 2 Hkv, D)."""
    return computed(
        flash.flash_attn_qkvpacked_func, qkv, num_heads_q=num_heads_q, softmax_scale=softmax_scale, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk, deterministic=deterministic, sm_margin=sm_margin,
        return_lse=bool(return_attn_probs), **common(causal, window_size, softcap),
    )  # fmt: skip


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None, causal=False,
    qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``anyattn.flash_attn_varlen_func``. Returns out, or with return_attn_probs (out, softmax_lse)."""
    return computed(
        flash.flash_attn_varlen_func, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
        seqused_k=seqused_k, softmax_scale=softmax_scale, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        attention_chunk=attention_chunk, num_splits=num_splits, pack_gqa=pack_gqa, deterministic=deterministic, sm_margin=sm_margin,
        return_lse=bool(return_attn_probs), **common(causal, window_size, softcap),
    )  # fmt: skip


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """``anyattn.flash_attn_combine``, in out_dtype. out: where the result is written, in out_dtype."""
    found, lse = computed(flash.flash_attn_combine, out_partial, lse_partial)
    found = found.to(out_dtype or found.dtype)
    if out is None:
        return found, lse
    if out.shape != found.shape or out.dtype != found.dtype:
        raise ValueError(f"out has shape {tuple(out.shape)} and dtype {out.dtype}; wanted {tuple(found.shape)} and out_dtype={found.dtype}")
    return out.copy_(found), lse


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None,
    rotary_seqlens=None, q_descale=None, k_descale=None,
    v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """``anyattn.flash_attn_with_kvcache``. Returns out, or with return_softmax_lse (out, softmax_lse) and two empty tensors, the partial
    results of split keys. scheduler_metadata: what ``get_scheduler_metadata`` returns, which changes nothing."""
    if cu_seqlens_k_new is cu_seqlens_q:  # new keys are packed as q is
        cu_seqlens_k_new = None
    if scheduler_metadata is not None and not (isinstance(scheduler_metadata, Tensor) and scheduler_metadata.dtype is torch.int32):
        raise TypeError(f"scheduler_metadata={scheduler_metadata!r}; wanted None or what get_scheduler_metadata returns")
    out, lse = computed_with_cache(
        flash.flash_attn_with_kvcache, q, k_cache, v_cache, k, v, qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, softmax_scale=softmax_scale, attention_chunk=attention_chunk,
        rotary_interleaved=rotary_interleaved, num_splits=num_splits, pack_gqa=pack_gqa, sm_margin=sm_margin,
        **common(causal, window_size, softcap),
    )  # fmt: skip
    if not return_softmax_lse:
        return out
    nothing = torch.empty(0, dtype=torch.float32, device=out.device)
    return out, lse, nothing, nothing


def get_scheduler_metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens, qkv_dtype=torch.bfloat16,
    headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, cache_leftpad=None,
    page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, has_softcap=False,
    num_splits=0, pack_gqa=None, sm_margin=0,
):  # fmt: skip
    """An empty int32 tensor on cache_seqlens' device: anyattn's kernels read the lengths when they run, and need no schedule."""
    return torch.empty(0, dtype=torch.int32, device=cache_seqlens.device)
