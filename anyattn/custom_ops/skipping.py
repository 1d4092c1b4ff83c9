"""The operator of calls with ``skip_below``: the forward pass that leaves tiles out at run time. It has no gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.custom_ops.flex import Attend, call_of, fake_results, operands_of_call, sources_of
from anyattn.custom_ops.flops import count_operator, flex_pairs
from anyattn.custom_ops.operators import called, operator
from anyattn.mods.tracing.trace import TracedMod
from anyattn.reductions.request import NO_GRADIENTS, counting, share_of
from anyattn.tensors import kinds

__all__ = ["attend_skipping", "skipping_with_mods"]


class Skipping(NamedTuple):
    """The arguments of ``anyattn::attend_skipping`` besides those of ``anyattn::attend``. skip_below: float32 (Hq,). counts_tiles: whether
    the share of skipped tiles is wanted."""

    skip_below: Tensor
    counts_tiles: bool


def _fake(operands: Attend, skipping: Skipping) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = operands.q.shape[:2] if skipping.counts_tiles else (0,)
    return *fake_results(operands), operands.q.new_empty(shape, dtype=torch.float32)


@operator(Attend, Skipping, fake=_fake)
def attend_skipping(operands: Attend, skipping: Skipping) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, max_scores, skipped) of one attention; the last two are empty unless wanted."""
    kinds.refuse_forward_mode()
    skip = counting(skipping.skip_below, operands.q.shape[0], skipping.counts_tiles)
    problem, chosen = call_of(operands, skip)
    result = autograd.forward(problem, chosen)
    share = share_of(skip)
    highest = result.max_scores if operands.wants_max else result.lse.new_empty(0)
    return result.out, result.lse, highest, skip.below.new_empty(0) if share is None else share


count_operator(attend_skipping, flex_pairs)


def skipping_with_mods(
    call: tuple,
    lists: tuple[Tensor | None, ...],
    listing: tuple | None,
    backend: str | None,
    options: dict[str, Any] | None,
    skip_below: Tensor,
    counts_tiles: bool,
    score: TracedMod | None,
    listed: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One operator call with traced mods; the first arguments and the last are those of ``flex_with_mods``."""
    operands = operands_of_call(call, lists, listing, backend, options, score, listed, mask)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in sources_of(operands)):
        raise ValueError(NO_GRADIENTS)
    return called(attend_skipping, operands, Skipping(skip_below, counts_tiles))  # type: ignore[no-any-return]
