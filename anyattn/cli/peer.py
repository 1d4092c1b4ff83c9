"""The demo's peer: the same attention written in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from anyattn.gallery import Mods, Variant
from anyattn.testing.harness import dense

__all__ = ["peer"]


def peer(variant: Variant, mods: Mods, heads: int, seqlen: int) -> tuple[str, Callable[..., Tensor]]:
    """A name, and a function (q, k, v) -> out. Dense masks and biases are made here, outside the timed function."""
    if variant.name == "causal":
        return "SDPA, is_causal", lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True)
    where = dense.places(1, heads, seqlen, seqlen, "cpu")
    seen = dense.visible(mods, where)
    if mods.score is None:
        return "SDPA, dense mask", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen)
    if dense.is_additive(mods):
        bias = dense.bias(mods, where, torch.float32)
        return "SDPA, dense bias", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
    return "eager formula", lambda q, k, v: dense.formula(q, k, v, mods.score, where, seen)
