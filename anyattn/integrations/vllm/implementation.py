"""Forward pass of a vLLM attention layer on anyattn: paged decoding and prefill in one batch, cross attention, and encoders."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionImpl, AttentionType

import anyattn
from anyattn.integrations.vllm.cache import cache_views, format_of
from anyattn.integrations.vllm.cache_update import update_cache
from anyattn.integrations.vllm.metadata import AnyAttentionMetadata
from anyattn.integrations.vllm.visibility import visibility

__all__ = ["AnyAttentionImpl"]

_WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class AnyAttentionImpl(AttentionImpl[AnyAttentionMetadata]):
    """A layer's attention. vLLM makes one for each layer, with the layer's numbers of heads, window, softcap, slopes and sinks.

    A layer may have a mask and a score mod of its own: its attributes ``logical_mask_mod``, which vLLM's FLEX_ATTENTION reads too, and
    ``logical_score_mod``. They see (request, query head, position of the query in its request, position of the key). With a trailing
    argument ``aux_tensors`` they also get the batch's ``seq_lens`` and ``query_start_loc``. A mask replaces causality, not the window.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.attn_type = sliding_window, attn_type
        self.kv_cache_dtype, self.format = kv_cache_dtype, format_of(kv_cache_dtype)
        self.logits_soft_cap = float(logits_soft_cap or 0.0)
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        if sinks is not None and sinks.shape[0] != num_heads:
            raise ValueError(f"sinks has shape {tuple(sinks.shape)} for {num_heads} heads; wanted one per head")
        self.sinks = sinks
        self.alibi_slopes: Tensor | None = None
        if alibi_slopes is not None:
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32, device=torch.get_default_device())
        self._options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": self.logits_soft_cap,
            "sink": sinks,
            "alibi_slopes": self.alibi_slopes,
        }
        if _is_batch_invariant():
            self._options["deterministic"] = "batch"

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: AnyAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query: (tokens, Hq, D). key, value: (tokens, Hkv, D), which ``do_kv_cache_update`` has written to kv_cache; encoders read them
        from here. output: (tokens, Hq, Dv), of which the first ``num_actual_tokens`` rows are written."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("anyattn's output is not quantised: vLLM's fusion of attention and quantisation must be off for it")
        if attn_metadata is None:  # vLLM measures the memory that the rest of the model takes
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        q = _first(query, tokens)
        if self.alibi_slopes is not None and self.alibi_slopes.device != query.device:
            self._options["alibi_slopes"] = self.alibi_slopes = self.alibi_slopes.to(query.device)
        options, mask_mod, score_mod = self._options, _of_layer(layer, "logical_mask_mod"), _of_layer(layer, "logical_score_mod")
        if mask_mod is not None or score_mod is not None:
            batch = [attn_metadata.seq_lens, attn_metadata.query_start_loc]
            options = {**options, "score_mod": score_mod, "aux_tensors": batch}
        wanted = _first(output, tokens)
        if wanted.dtype == q.dtype:
            options = {**options, "out": wanted}
        if self.attn_type in _WITHOUT_CACHE:
            assert key is not None and value is not None
            out = self._attend_without_cache(mask_mod, q, _first(key, tokens), _first(value, tokens), attn_metadata, options)
        else:
            out = self._attend_to_cache(layer, mask_mod, q, kv_cache, attn_metadata, options)
        if out is not wanted:
            wanted.copy_(out)
        return output

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        """Writes this step's keys and values to the cache; vLLM calls it before ``forward``, but not for a layer that shares another's."""
        if self.attn_type not in _WITHOUT_CACHE:
            views = cache_views(kv_cache, self.head_size, self.format)
            update_cache(views, self.format, self.kv_cache_dtype, key, value, slot_mapping, layer)

    def _attend_to_cache(
        self, layer: Any, mask_mod: Callable | None, q: Tensor, kv_cache: Tensor, metadata: AnyAttentionMetadata, options: dict[str, Any]
    ) -> Tensor:
        if mask_mod is not None and self.attn_type == AttentionType.ENCODER_DECODER:
            raise ValueError("a layer of cross attention has a logical_mask_mod; wanted none: set it on the layers of self-attention only")
        views = cache_views(kv_cache, self.head_size, self.format)
        if self.format.dtype is not None:
            options = {**options, "k_descale": _scale(views.k_scale, layer._k_scale), "v_descale": _scale(views.v_scale, layer._v_scale)}
        return anyattn.flash_attn_with_kvcache(  # type: ignore[no-any-return]
            q,
            views.k,
            views.v,
            cache_seqlens=metadata.seq_lens,
            page_table=metadata.block_table,
            cu_seqlens_q=metadata.query_start_loc,
            max_seqlen_q=metadata.max_query_len,
            num_splits=0,  # a batch of few long requests fills a GPU only if keys are divided among programs
            **metadata.visible(self.sliding_window, mask_mod, bool(_of_layer(layer, "mm_prefix_clamp_sliding_window"))),
            **options,
        )

    def _attend_without_cache(
        self, mask_mod: Callable | None, q: Tensor, k: Tensor, v: Tensor, metadata: AnyAttentionMetadata, options: dict[str, Any]
    ) -> Tensor:
        seen = visibility(False, self.sliding_window, mask_mod=mask_mod)
        starts, longest = metadata.query_start_loc, metadata.max_query_len
        return anyattn.flash_attn_varlen_func(  # type: ignore[no-any-return]
            q, k, v, starts, starts, longest, longest, **seen._asdict(), **options
        )


def _is_batch_invariant() -> bool:
    """What vLLM reads from its environment, by the same rule: a number that is not 0."""
    try:
        return int(os.environ.get("VLLM_BATCH_INVARIANT", "0")) != 0
    except ValueError:
        return False


def _of_layer(layer: Any, name: str) -> Any:
    """An attribute that a layer, or its class, may have. ``torch.nn.Module.__getattr__`` is slow where there is none."""
    found = layer.__dict__.get(name)
    return getattr(type(layer), name, None) if found is None else found


def _first(rows: Tensor, count: int) -> Tensor:
    return rows if len(rows) == count else rows[:count]


def _scale(inline: Tensor | None, of_layer: Tensor) -> Tensor:
    """The scale of a quantised cache: of each token and head, of each head (1, Hkv), or one."""
    if inline is not None:
        return inline
    return of_layer if of_layer.numel() == 1 else of_layer.view(1, -1)
