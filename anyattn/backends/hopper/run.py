"""The backend's door: a problem and its plan in, results out. The backward pass is another backend's (``Plan.backward``)."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.backends.hopper.config import Config, tiles_for
from anyattn.backends.hopper.launch import launch
from anyattn.backends.hopper.supports import Band, band_of
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Result", "arguments_of", "config_of", "forward"]


class Result(NamedTuple):
    """out: (B, Hq, Sq, D) in the inputs' dtype. lse: (B, Hq, Sq) float32, natural logarithm, or None. max_scores: None."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


def forward(problem: Problem, plan: Plan) -> Result:
    """out and lse of a problem that ``supports.reason_against`` has nothing against."""
    q = problem.q
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) if problem.wants_lse else None
    launch(config_of(problem), arguments_of(problem, out, lse))
    return Result(out, lse, None)


def arguments_of(problem: Problem, out: Tensor, lse: Tensor | None) -> tuple:
    """What ``HopperForward.__call__`` takes for ``problem``, without the stream."""
    band, score = _joint_band(problem), problem.score
    sink = None if problem.sink is None else problem.sink.detach().float().contiguous()
    captured = ((), ()) if score is None else (score.scalars, score.tensors)
    numbers = (problem.scale * math.log2(math.e), band.left or 0, band.right or 0)
    return (problem.q, problem.k, problem.v, out, lse, sink, *numbers, *captured)


def config_of(problem: Problem) -> Config:
    """What the kernel for ``problem`` is specialised for."""
    band, q = _joint_band(problem), problem.q
    expr = None if problem.score is None else problem.score.expr
    return Config(
        q.shape[3],
        q.dtype is torch.bfloat16,
        tiles_for(q.shape[3], expr, band != Band(None, None)),
        expr,
        band.left is not None,
        band.right is not None,
        problem.sink is not None,
        problem.wants_lse,
    )


def _joint_band(problem: Problem) -> Band:
    """What all predicates leave visible."""
    bands = [band for p in problem.predicates if (band := band_of(p)) is not None]
    lefts, rights = [b.left for b in bands if b.left is not None], [b.right for b in bands if b.right is not None]
    return Band(max(lefts) if lefts else None, min(rights) if rights else None)
