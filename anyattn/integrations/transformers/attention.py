"""Attention interface of Transformers: turns one call of a model's attention layer into one call of anyattn."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from anyattn.flash import flash_attn_func, flash_attn_with_kvcache
from anyattn.flex import flex_attention
from anyattn.integrations.transformers import dense_masks, few_rows
from anyattn.integrations.transformers.description import (
    Aligned,
    Cached,
    Listed,
    MaskDescription,
    Packed,
    Unplanned,
    Way,
    mark_used,
    refuse_dropped,
)
from anyattn.integrations.transformers.packed import Ends, packed_attention, packed_rows
from anyattn.integrations.transformers.planned import refuse_bias, refuse_unplanned

__all__ = ["attention_forward"]


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | Tensor | None = None,
    max_length_k: int | Tensor | None = None,
    output_attentions: bool | None = None,
    position_ids: Tensor | None = None,
    cache: Any = None,
    sinks: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer, with the signature that Transformers expects.

    query: (B, Hq, Sq, D); key: (B, Hkv, Sk, D); value: (B, Hkv, Sk, Dv), from the cache if there is one. attention_mask: the result of
    ``describe_mask``; or the user's ``BlockMask``, or a tensor (B or 1, H or 1, Sq, at least Sk), bool (True is visible) or additive; None
    is no mask, but causality if the layer is causal. softcap, s_aux (one sink logit per query head), position_bias (added to scores): as
    models pass them. cu_seq_lens_*: int (sequences + 1,), for sequences packed into a batch of one. position_ids: int (B or 1, S), which
    keep sequences apart where they start again, if no cache is used and the model has made its mask without them.
    others: arguments that do not affect attention; those that the model's own ``eager_attention_forward`` names are refused.

    Returns the output (B, Sq, Hq, Dv), and None in place of the attention weights.

    Raises ``ValueError`` for output_attentions, sinks that depend on the query and a cache of continuous batching, and for everything
    that anyattn refuses.
    """
    if isinstance(attention_mask, MaskDescription):
        mark_used(attention_mask)
    if output_attentions or cache is not None:
        _refuse(output_attentions, cache)
    if sinks is not None:
        _refuse_unread("sinks", module)
    if not torch.compiler.is_compiling():  # Dynamo cannot read signatures
        for name in _unread(type(module).__module__):
            if others.get(name) is not None:
                _refuse_unread(name, module)
    dropout = dropout if module.training else 0.0
    if cu_seq_lens_q is not None and not _has_documents(attention_mask):
        if _is_causal(module, is_causal):
            refuse_unplanned("cu_seq_lens_q")
        ends = Ends(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        causal, window = _packed_band(module, attention_mask, is_causal, sliding_window)
        out = packed_attention(query, key, value, ends, causal, window, scaling, softcap, s_aux, position_bias, dropout)
        return out, None
    if isinstance(attention_mask, MaskDescription):
        if position_ids is not None:
            attention_mask = attention_mask.separated(position_ids)
        out = _described(query, key, value, attention_mask, scaling, softcap, s_aux, position_bias, dropout)
    elif attention_mask is None:
        out = _unmasked(module, query, key, value, is_causal, scaling, softcap, s_aux, position_bias, dropout)
    else:
        out = _given(query, key, value, attention_mask, module, scaling, softcap, s_aux, position_bias, dropout)
    return out if out.is_contiguous() else out.contiguous(), None


def _refuse(output_attentions: bool | None, cache: Any) -> None:
    if output_attentions:
        raise ValueError(
            "output_attentions=True; the weights are never all in memory: call model.set_attn_implementation('eager') to look at them"
        )
    if cache is not None:
        raise ValueError(f"cache is a {type(cache).__name__}; attn_implementation='anyattn' has no continuous batching, 'sdpa' has")


def _refuse_unread(name: str, module: torch.nn.Module) -> NoReturn:
    raise ValueError(
        f"{type(module).__name__} passes {name} to attention, which attn_implementation='anyattn' does not have: use "
        "attn_implementation='eager' for this model"
    )


@functools.cache
def _unread(layers: str) -> list[str]:
    """The parameters of the eager attention in the module of that name that ``attention_forward`` lacks."""
    eager = getattr(sys.modules.get(layers), "eager_attention_forward", None)
    if eager is None:
        return []
    return [name for name in inspect.signature(eager).parameters if name not in inspect.signature(attention_forward).parameters]


def _has_documents(attention_mask: Any) -> bool:
    """Whether the mask itself separates packed sequences, by position_ids."""
    return isinstance(attention_mask, MaskDescription) and attention_mask.has_documents


def _packed_band(
    module: torch.nn.Module, attention_mask: Any, is_causal: bool | None, sliding_window: int | None
) -> tuple[bool, tuple[int, int]]:
    """Causality and window inside packed sequences: those of the mask, or of the layer if it has no mask."""
    if isinstance(attention_mask, MaskDescription) and isinstance(attention_mask.way, Aligned):
        return attention_mask.way
    if attention_mask is not None:
        raise ValueError(
            f"cu_seq_lens_q is given beside attention_mask={attention_mask!r}; wanted a causal or sliding mask of equally many queries and "
            "keys: pass no attention_mask with packed sequences, and use_cache=False"
        )
    causal = _is_causal(module, is_causal)
    if sliding_window is None:
        return causal, (-1, -1)
    return causal, (sliding_window - 1, 0 if causal else sliding_window - 1)


def _is_causal(module: torch.nn.Module, is_causal: bool | None) -> bool:
    return bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))


def _described(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: MaskDescription,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    if key.shape[2] != mask.seq_lengths[1] or query.shape[2] != mask.seq_lengths[0]:
        cure = "use attn_implementation='sdpa' or 'eager' for this model"
        if query.shape[2] == key.shape[2] == mask.seq_lengths[0]:
            cure += "; or, if these are the rows of one of several ranks, no attention_mask, inside anyattn.distributed.active(plan)"
        raise ValueError(
            f"a layer has {query.shape[2]} queries and {key.shape[2]} keys, its mask is for {mask.seq_lengths}; wanted a mask for this "
            f"layer's cache: {cure}"
        )
    if softcap is None and bias is None and not dropout and few_rows.serves(query, key, value, mask, sink):
        return few_rows.attention(query, key, value, mask, scaling, sink)
    way: Way = mask.way
    if isinstance(way, Listed):
        refuse_bias(way.block_mask, bias)
    if isinstance(way, Cached) and (bias is not None or dropout or _records(query, key, value, sink)):
        way = mask.with_gradients()
    if bias is not None:
        score_mod = dense_masks.score_of(softcap, dense_masks.fitted("position_bias", bias, query, key))
        return _by_mask_of(way, query, key, value, score_mod, scaling, sink, dropout)
    if isinstance(way, Packed):
        return packed_rows(query, key, value, way, scaling, softcap, sink, dropout)
    cap = 0.0 if softcap is None else softcap
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if isinstance(way, Aligned):
        return flash_attn_func(
            q, k, v, softmax_scale=scaling, causal=way.causal, window_size=way.window, softcap=cap, sink=sink, dropout_p=dropout
        )  # fmt: skip
    if isinstance(way, Cached):
        return flash_attn_with_kvcache(
            q, k, v, cache_seqlens=way.lengths, cache_leftpad=way.leftpad, softmax_scale=scaling, causal=way.causal,
            window_size=way.window, softcap=cap, sink=sink, mask_mod=way.mask_mod,
        )  # fmt: skip
    return _by_mask_of(way, query, key, value, dense_masks.score_of(softcap, None), scaling, sink, dropout)


def _records(query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> bool:
    """Whether autograd records this call; a sink parameter that requires grad counts too."""
    if not torch.is_grad_enabled():
        return False
    return any(t is not None and t.requires_grad for t in (query, key, value, sink))


def _by_mask_of(
    way: Way,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None,
    scaling: float | None,
    sink: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention as ``way`` says: ``flex_attention`` with lists or a mask mod, or ``flash_attn_func`` with a window."""
    if isinstance(way, Unplanned):
        way.refuse()
    if isinstance(way, Packed):
        raise ValueError(
            "inside anyattn.batch_invariant() packed sequences have a position_bias, whose positions are of the row and not of a sequence; "
            "wanted one text in each row, padded on the right"
        )
    if isinstance(way, Aligned):
        q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return flash_attn_func(
            q, k, v, softmax_scale=scaling, causal=way.causal, window_size=way.window, sink=sink, score_mod=score_mod, dropout_p=dropout
        )  # fmt: skip
    if isinstance(way, Listed):
        return _flex(query, key, value, scaling, sink, score_mod, dropout, block_mask=way.block_mask)
    return _flex(query, key, value, scaling, sink, score_mod, dropout, mask_mod=way.mask_mod)


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sink: Tensor | None,
    score_mod: Callable | None,
    dropout: float,
    **mask: Any,
) -> Tensor:
    given: dict[str, Any] = {"score_mod": score_mod, "scale": scaling, "enable_gqa": True, "sink": sink, "dropout_p": dropout}
    return flex_attention(query, key, value, **given, **mask).transpose(1, 2)


def _unmasked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool | None,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention of a layer without a mask: everything is visible unless the layer is causal."""
    causal = _is_causal(module, is_causal) and query.shape[2] > 1
    if causal:
        refuse_unplanned("no mask")
    refuse_dropped((query.shape[2], key.shape[2]), "no mask", lambda way: _is_plain(way, causal, query.shape[2]))
    if causal and query.shape[2] != key.shape[2]:
        raise ValueError(
            f"attention_mask is None in a causal layer with {query.shape[2]} queries and {key.shape[2]} keys, which leaves open where the "
            "queries lie; wanted the mask that anyattn.integrations.transformers.register() lets Transformers make, or is_causal=False"
        )
    score_mod = None
    if bias is not None:
        score_mod = dense_masks.score_of(softcap, dense_masks.fitted("position_bias", bias, query, key))
    cap = 0.0 if softcap is None or score_mod is not None else softcap
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return flash_attn_func(q, k, v, softmax_scale=scaling, causal=causal, softcap=cap, sink=sink, score_mod=score_mod, dropout_p=dropout)


def _is_plain(way: Way, causal: bool, rows: int) -> bool:
    """Whether a mask without causality, or with it if ``causal``, is the whole mask."""
    return isinstance(way, Aligned) and way.window == (-1, -1) and (rows == 1 or way.causal == causal)


def _given(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    module: torch.nn.Module,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention with the user's own mask, which must include causality and padding."""
    refuse_dropped((query.shape[2], key.shape[2]), f"a {type(mask).__name__}")
    if getattr(mask, "plan", None) is None and _is_causal(module, None):
        refuse_unplanned(f"a {type(mask).__name__} as its mask")
    refuse_bias(mask, bias)
    added = None if bias is None else dense_masks.fitted("position_bias", bias, query, key)
    if isinstance(mask, torch_flex.BlockMask):
        return _flex(query, key, value, scaling, sink, dense_masks.score_of(softcap, added), dropout, block_mask=mask)
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask is a {type(mask).__name__}; wanted a BlockMask, a tensor of 4 dimensions or None")
    seen = dense_masks.fitted("attention_mask", mask, query, key)
    if seen.dtype is torch.bool:
        return _flex(query, key, value, scaling, sink, dense_masks.score_of(softcap, added), dropout, mask_mod=dense_masks.mask_of(seen))
    return _flex(query, key, value, scaling, sink, dense_masks.score_of(softcap, added, seen), dropout)
