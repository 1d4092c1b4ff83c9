"""Combination of partial results over parts of the keys by their log-sum-exps, with torch operations."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["combine"]


def combine(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """outs: (parts, ..., Dv), lses: (parts, ...), natural logarithm -> out (..., Dv), lse (...), in their dtypes.

    A part with lse -inf has seen no key: its output is ignored. sink: a logit, broadcast with lse, that is added to the denominator once.
    """
    top = lses.amax(0) if sink is None else torch.maximum(lses.amax(0), sink)
    finite_top = top.masked_fill(torch.isneginf(top), 0.0).detach()  # any value near the maximum works
    weights = torch.exp(lses - finite_top)
    total = weights.sum(0) if sink is None else weights.sum(0) + torch.exp(sink - finite_top)
    # masked before weighting, not after: otherwise 0 x NaN would reach the gradient
    seen = outs.masked_fill((weights == 0)[..., None], 0.0)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    out = (seen * weights[..., None]).sum(0) / total[..., None]
    return out, (finite_top + total.log()).masked_fill(blind, -math.inf)
