"""Partial results over parts of the keys, merged by their log-sum-exps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["combine"]


def combine(outs: Tensor, lses: Tensor, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """outs: (parts, ..., Dv), lses: (parts, ...), natural logarithm -> out (..., Dv), lse (...), in their dtypes.

    A part whose lse is -inf has seen nothing: whatever stands in its output does not matter. sink: a logit that broadcasts with lse and
    joins the denominator once.
    """
    top = lses.amax(0) if sink is None else torch.maximum(lses.amax(0), sink)
    finite_top = top.masked_fill(torch.isneginf(top), 0.0)
    weights = torch.exp(lses - finite_top)
    total = weights.sum(0) if sink is None else weights.sum(0) + torch.exp(sink - finite_top)
    weighted = (outs * weights[..., None]).masked_fill_((weights == 0)[..., None], 0.0)
    out = weighted.sum(0).div_(total.masked_fill(total == 0, 1.0)[..., None])
    return out, torch.where(total == 0, -math.inf, finite_top + total.log())
