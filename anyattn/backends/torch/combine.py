"""Combination of partial results over parts of the keys, by their log-sum-exps (torch operations)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["combine"]


def combine(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """outs: (parts, ..., Dv), lses: (parts, ...), natural logarithm -> out (..., Dv), lse (...), in their dtypes.

    A part whose lse is -inf has seen nothing: its output is ignored. sink: a logit that broadcasts with lse and is added to the
    denominator once.
    """
    top = lses.amax(0) if sink is None else torch.maximum(lses.amax(0), sink)
    finite_top = top.masked_fill(torch.isneginf(top), 0.0).detach()  # any number near the greatest will do
    weights = torch.exp(lses - finite_top)
    total = weights.sum(0) if sink is None else weights.sum(0) + torch.exp(sink - finite_top)
    # cleared before they are weighted, not after: 0 x NaN would come back as a gradient
    seen = outs.masked_fill((weights == 0)[..., None], 0.0)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    out = (seen * weights[..., None]).sum(0) / total[..., None]
    return out, (finite_top + total.log()).masked_fill(blind, -math.inf)
