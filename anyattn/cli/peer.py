"""The demo's peer: the same attention as a person would write it in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyattn.gallery import Mods, Variant

__all__ = ["peer"]


def peer(variant: Variant, mods: Mods, heads: int, seqlen: int) -> tuple[str, Callable[..., Tensor]]:
    """A name, and a function (q, k, v) -> out. Dense masks and biases are made here, outside the time that is taken."""
    if variant.name == "causal":
        return "SDPA, is_causal", lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    places = _places(heads, seqlen)
    seen = None if mods.mask is None else mods.mask(*places).expand(1, heads if _uses_heads(mods.mask, places) else 1, seqlen, seqlen)
    if mods.score is None:
        return "SDPA, dense mask", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen)
    score = mods.score
    if variant.is_additive:
        bias = score(torch.zeros(()), *places).expand(1, heads, seqlen, seqlen)
        bias = bias if seen is None else bias.masked_fill(~seen, -math.inf)
        bias = bias.contiguous()
        return "SDPA, dense bias", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    return "eager formula", lambda q, k, v: _formula(q, k, v, score, places, seen)


def _places(heads: int, seqlen: int) -> tuple[Tensor, ...]:
    """b, h, q_idx, kv_idx that broadcast to (1, heads, seqlen, seqlen)."""
    positions = torch.arange(seqlen)
    return torch.zeros((), dtype=torch.int64), torch.arange(heads)[:, None, None], positions[:, None], positions


def _uses_heads(mask: Callable[..., Any], places: tuple[Tensor, ...]) -> bool:
    return mask(*places).ndim > 2


def _formula(q: Tensor, k: Tensor, v: Tensor, score: Callable[..., Any], places: tuple[Tensor, ...], seen: Tensor | None) -> Tensor:
    scores = score(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), *places)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    return torch.softmax(scores.float(), -1).to(v.dtype) @ v
