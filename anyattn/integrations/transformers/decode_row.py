"""One query row on a CPU: ATen's flash-attention kernel over the keys that the row sees.

A step of decoding is a few microseconds of arithmetic. The mask has said once for all layers which keys are seen, so a layer slices them,
adds the padding's bias if there is padding, and calls the kernel with the query heads of one key head as its rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyattn.backends.torch import aten_flash
from anyattn.integrations.transformers.description import Aligned, Cached, MaskDescription

__all__ = ["attention", "serves"]


def serves(query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, sink: Tensor | None) -> bool:
    """Whether the kernel computes this call: one dtype, one head_dim, nothing to differentiate; in a graph no sink."""
    if query.shape[3] != value.shape[3] or not query.dtype == key.dtype == value.dtype:
        return False
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        return False
    if torch.compiler.is_compiling():
        return sink is None
    return mask.row is not None and aten_flash.has_few_rows(query)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, scaling: float | None, sink: Tensor | None) -> Tensor:
    """query: (B, Hq, 1, D); key, value: (B, Hkv, Sk, D). Returns (B, 1, Hq, D)."""
    batch, heads, _, width = query.shape
    kv_heads = key.shape[1]
    rows = query.reshape(batch, kv_heads, heads // kv_heads, width)
    if torch.compiler.is_compiling():
        out = _in_a_graph(rows, key, value, mask, scaling)
        return out.reshape(batch, 1, heads, width)
    lo, hi, _ = mask.row
    if hi - lo != key.shape[2]:
        key, value = key[:, :, lo:hi], value[:, :, lo:hi]
    out, lse = aten_flash.few_rows(rows, key, value, mask.bias(query.dtype), scaling)
    out = out.reshape(batch, heads, width)
    if sink is not None:
        # softmax with one more logit: what the keys have is their share of both sums
        share = torch.sigmoid(lse.reshape(batch, heads) - sink.to(lse.dtype))
        out = (out * share[..., None]).to(query.dtype)
    return out[:, None]


def _in_a_graph(rows: Tensor, key: Tensor, value: Tensor, mask: MaskDescription, scaling: float | None) -> Tensor:
    """Keys are chosen by tensors, so that one graph serves every step; the bias is computed once, equal expressions are shared."""
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
