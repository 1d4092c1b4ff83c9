"""The gradient of the sink's logits on a GPU, from each row's delta."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.problem import Problem

__all__ = ["delta_of_rows", "sink_gradient"]


def delta_of_rows(problem: Problem) -> Tensor | None:
    """Memory for each row's delta, (B, Hq, Sq) zeros in float32, if the sink needs a gradient, else None."""
    sink, q = problem.sink, problem.q
    return torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device) if sink is not None and sink.requires_grad else None


def sink_gradient(problem: Problem, lse: Tensor, delta: Tensor | None) -> Tensor | None:
    """The gradient of the sink's logits: minus the sink's probability times delta of each row, summed per head. None without delta."""
    sink = problem.sink
    if sink is None or delta is None:
        return None
    share = torch.exp(sink.detach().float()[:, None] - lse)
    return -(share * delta).masked_fill(torch.isneginf(lse), 0.0).sum((0, 2)).to(sink.dtype)
