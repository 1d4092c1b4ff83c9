"""Padding behind the rows of a shard (``ContextPlan.shard(pad=...)``), which a call leaves out.

Nobody sees a padded row and none of them sees a key: out is 0 there, lse and max_scores are -inf, and gradients are 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyattn.tensors.strides import empty_in_order

if TYPE_CHECKING:
    from anyattn.distributed.local_attention import Gradients, Inputs, Results

__all__ = ["cut", "cut_inputs", "padded_gradients", "padded_results"]


def cut(t: Any, rows: int) -> Any:
    """``t`` (B, H, rows and padding, ...) without padding; None for None."""
    return t if t is None or t.shape[2] == rows else t.detach().narrow(2, 0, rows).requires_grad_(t.requires_grad)


def cut_inputs(inputs: Inputs, rows: int) -> Inputs:
    return inputs._replace(q=cut(inputs.q, rows), k=cut(inputs.k, rows), v=cut(inputs.v, rows))


def padded_results(found: Results, inputs: Inputs) -> Results:
    """Results with the padding of ``inputs``: out is 0 there, lse and max_scores are -inf."""
    more = inputs.q.shape[2] - found.out.shape[2]
    if not more:
        return found
    out = _with_zeros(found.out, empty_in_order(inputs.q, last=inputs.v.shape[3]))
    lse, highest = (None if t is None else torch.nn.functional.pad(t, (0, more), value=-torch.inf) for t in (found.lse, found.max_scores))
    return found._replace(out=out, lse=lse, max_scores=highest)  # type: ignore[arg-type]


def padded_gradients(found: Gradients, inputs: Inputs) -> Gradients:
    """Gradients with the padding of ``inputs``, which is 0."""
    q, k, v = (
        g if g is None or g.shape[2] == t.shape[2] else _with_zeros(g, empty_in_order(t))
        for g, t in zip(found[:3], inputs[:3], strict=True)
    )
    return found._replace(q=q, k=k, v=v)


def _with_zeros(rows: Tensor, made: Tensor) -> Tensor:
    """``made``, with ``rows`` and then zeros, in dimension 2."""
    made.narrow(2, 0, rows.shape[2]).copy_(rows)
    made.narrow(2, rows.shape[2], made.shape[2] - rows.shape[2]).zero_()
    return made
