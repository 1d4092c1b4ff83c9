"""Results of a forward pass, in one form for all backends."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Result"]


class Result(NamedTuple):
    """out: (B, Hq, Sq, Dv) in the inputs' dtype. lse, max_scores: (B, Hq, Sq) in the statistics' dtype (float32 on a GPU), or None if not
    wanted; lse in nats."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None
