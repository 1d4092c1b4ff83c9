"""Results of an ``AuxRequest`` from two primitives of a backend: sums of P per key, and sums and maxima per block."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyattn import hardware, planner
from anyattn.arithmetic import ceil_div
from anyattn.backends import repeater_of
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.plan import Plan, Repeater
from anyattn.problem import Problem
from anyattn.reductions.request import Reductions
from anyattn.tensors import autocast

__all__ = ["results"]


@without_default_device
def results(problem: Problem, plan: Plan, lse: Tensor, wanted: Reductions) -> list[Tensor]:
    """The tensors that are asked for, in the order of ``AuxOutput``. lse: of the call, (B, Hq, Sq), whose plan is ``plan``."""
    with torch.no_grad(), autocast.disabled():
        return _results(problem.like(dropout=None, skip=None), plan, lse.detach().contiguous(), wanted)


def _results(problem: Problem, plan: Plan, lse: Tensor, wanted: Reductions) -> list[Tensor]:
    repeater, seqlen_q = _repeater(problem, plan), problem.q.shape[2]
    found: list[Tensor | None] = []
    if wanted.key_sums or wanted.key_block:
        first = max(0, seqlen_q - wanted.last) if wanted.last else 0
        sums = repeater.key_sums(problem, lse, first)
        found += [sums] if wanted.key_sums else []
        found += [_by_blocks(sums, wanted.key_block)] if wanted.key_block else []
    sum_block, max_block, list_block, indices = wanted.sum_block, wanted.max_block, wanted.list_block, wanted.indices
    made: dict[tuple[int, int], tuple[Tensor | None, Tensor | None]] = {}
    for block in dict.fromkeys((sum_block, max_block, list_block)):
        if block[0]:
            made[block] = repeater.block_reductions(problem, lse, block, block in (sum_block, list_block), block == max_block)
    found += [made[block][at] for at, block in enumerate((sum_block, max_block)) if block[0]]
    if indices is not None:
        found.append(_listed(made[list_block][0], indices))
    return [t for t in found if t is not None]


def _repeater(problem: Problem, plan: Plan) -> Repeater:
    """Of the backend that has the reductions of a call with ``plan``: torch's and Triton's their own, Hopper's calls take Triton's."""
    if plan.backend != "hopper":
        return repeater_of(problem, plan)
    if plan.reduction_plan is None:
        plan.keep(reduction_plan=planner.choose(problem.like(packs=None), hardware.of(problem.q.device.type), "triton"))
    return repeater_of(problem, plan.reduction_plan)  # type: ignore[arg-type]


def _by_blocks(sums: Tensor, block: int) -> Tensor:
    """(B, H, N): sums of ``block`` keys each, from those of single keys."""
    count = ceil_div(sums.shape[-1], block)
    return pad(sums, (0, count * block - sums.shape[-1])).unflatten(-1, (count, block)).sum(-1)


def _listed(sums: Tensor | None, indices: Tensor) -> Tensor:
    """The sums (B, H, M, N) at the blocks ``indices`` (B, G, M, k), added over the heads that share them."""
    assert sums is not None
    groups, blocks = indices.shape[1], sums.shape[3]
    if not blocks or not groups:
        return sums.new_zeros(indices.shape)
    of_groups = sums.unflatten(1, (groups, sums.shape[1] // groups)).sum(2)
    is_block = (indices >= 0) & (indices < blocks)
    return of_groups.gather(3, torch.where(is_block, indices, 0).long()).masked_fill_(~is_block, 0.0)
