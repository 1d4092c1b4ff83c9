"""Attention of few query rows on a CPU without gradients: ATen's flash-attention kernel over the keys that the rows see.

A decoding step is a few microseconds of arithmetic. The mask says once for all layers which keys are visible, so a layer slices them, adds
the padding's bias if there is padding, and calls the kernel; with one query row,
the query heads that share a key head are the kernel's rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyattn.backends.torch import aten_flash
from anyattn.determinism import is_batch_invariant
from anyattn.integrations.transformers.description import Aligned, Cached, MaskDescription

__all__ = ["attention", "serves"]


def serves(query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, sink: Tensor | None) -> bool:
    """Whether the kernel can compute this call: one dtype, one head_dim, no gradients; in a compiled graph also one row and no sink. Its
    bits are not those of a prefill, which ``anyattn.batch_invariant`` asks for."""
    if is_batch_invariant():
        return False
    if query.shape[3] != value.shape[3] or not query.dtype == key.dtype == value.dtype:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if torch.compiler.is_compiling():
        return mask.is_decoding and sink is None
    return mask.rows is not None and aten_flash.has_few_rows(query, key, value)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, scaling: float | None, sink: Tensor | None) -> Tensor:
    """query: (B, Hq, Sq, D); key, value: (B, Hkv, Sk, D). Returns (B, Sq, Hq, D)."""
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    if length == 1:
        query = query.reshape(batch, kv_heads, heads // kv_heads, width)
    if torch.compiler.is_compiling():
        return _in_a_graph(query, key, value, mask, scaling).reshape(batch, 1, heads, width)
    lo, hi, _, is_causal = mask.rows  # type: ignore[misc]
    if hi - lo != key.shape[2]:
        key, value = key[:, :, lo:hi], value[:, :, lo:hi]
    if length > 1 and heads != kv_heads:
        key, value = (t.repeat_interleave(heads // kv_heads, dim=1) for t in (key, value))
    out, lse = aten_flash.few_rows(query, key, value, mask.bias(query.dtype), scaling, is_causal)
    out = out.reshape(batch, heads, length, width)
    if sink is not None:
        # the softmax denominator has one more logit: the keys' share of it scales the output
        share = torch.sigmoid(lse.reshape(batch, heads, length) - sink.to(lse.dtype)[:, None])
        out = (out * share[..., None]).to(query.dtype)
    return out.transpose(1, 2)


def _in_a_graph(rows: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, scaling: float | None) -> Tensor:
    """Inside a graph: keys are selected by tensors, so that one graph serves every step;
    all layers share the bias, which is one expression."""
    way = mask.way
    bias = None
    if isinstance(way, Aligned):
        left = way.window[0]
        if left >= 0:
            key, value = key[:, :, -(left + 1) :], value[:, :, -(left + 1) :]
    elif isinstance(way, Cached):
        bias = _bias_of(way, key)
    return scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling)


def _bias_of(way: Cached, key: Tensor) -> Tensor:
    places = torch.arange(key.shape[2], device=key.device)
    lengths = way.lengths[:, None] if way.lengths is not None else torch.full((1, 1), key.shape[2], device=key.device)
    seen = places < lengths
    left = way.window[0]
    if left >= 0:
        seen = seen & (places >= lengths - (left + 1))
    if way.leftpad is not None:
        seen = seen & (places >= way.leftpad[:, None])
    return torch.zeros((), dtype=key.dtype, device=key.device).masked_fill(~seen, float("-inf"))[:, None, None]
