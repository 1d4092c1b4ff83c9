"""Dense attention in plain torch: a bool mask, an additive score mod as a bias, and the plain formula."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyattn.gallery import Mods
from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.trace import trace

__all__ = ["bias", "entries_and_heads", "formula", "is_additive", "places", "visible"]


def entries_and_heads(mods: Mods) -> tuple[bool, bool]:
    """Whether the mask differs between batch entries, and between heads."""
    if mods.mask is None:
        return False, False
    expr = trace(mods.mask, "mask").expr
    found = dependence(expr)[expr.outputs[0]]
    return found.b, found.h


def is_additive(mods: Mods) -> bool:
    """Whether the score mod adds a bias that does not depend on the score."""
    return mods.score is not None and additive_bias(trace(mods.score, "score").expr) is not None


def places(batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: str) -> tuple[Tensor, ...]:
    """b, h, q_idx, kv_idx that broadcast to (batch, heads, seqlen_q, seqlen_k)."""
    counts = [torch.arange(n, device=device) for n in (batch, heads, seqlen_q, seqlen_k)]
    return tuple(count.reshape(-1, *[1] * (3 - axis)) for axis, count in enumerate(counts))


def visible(mods: Mods, where: tuple[Tensor, ...]) -> Tensor | None:
    """The mask as bools (1 or batch, 1 or heads, seqlen_q, seqlen_k), None if everything is visible."""
    if mods.mask is None:
        return None
    by_entry, by_head = entries_and_heads(mods)
    b, h, q_idx, kv_idx = where
    b, h = b if by_entry else b[:1], h if by_head else h[:1]
    return mods.mask(b, h, q_idx, kv_idx).expand(len(b), len(h), len(q_idx), len(kv_idx))


def bias(mods: Mods, where: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
    """The bias of an additive score mod, contiguous (1 or batch, heads, seqlen_q, seqlen_k); -inf where the mask hides."""
    assert mods.score is not None
    added = torch.as_tensor(mods.score(torch.zeros((), device=where[0].device), *where), device=where[0].device)
    seen = visible(mods, where)
    added = added.expand(torch.broadcast_shapes(added.shape, *(t.shape for t in where[1:])))
    return (added if seen is None else added.masked_fill(~seen, -math.inf)).to(dtype).contiguous()


def formula(q: Tensor, k: Tensor, v: Tensor, score: Any, where: tuple[Tensor, ...], seen: Tensor | None) -> Tensor:
    """softmax(mask(score(Q K^T / sqrt(head dim)))) V over (batch, heads, length, head dim); 0 for a row without visible keys."""
    ratio = q.shape[1] // k.shape[1]
    if ratio > 1:
        k, v = (t.repeat_interleave(ratio, dim=1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if score is not None:
        scores = score(scores, *where)
    if seen is not None:
        scores = scores.masked_fill(~seen, -math.inf)
    weights = torch.softmax(scores.float(), -1)
    return (weights if seen is None else weights.masked_fill(~seen, 0.0)).to(v.dtype) @ v
