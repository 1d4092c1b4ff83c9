"""The torch backend's forward and backward pass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from anyattn import plan
from anyattn.backends.result import Result
from anyattn.backends.torch import backward as backward_pass
from anyattn.backends.torch import decode, in_order, reductions, unstreamed
from anyattn.backends.torch import forward as forward_pass
from anyattn.backends.torch.combine import combine
from anyattn.backends.torch.compiled import forward as compiled
from anyattn.backends.torch.compiled.work import work_of
from anyattn.backends.torch.coverage import Coverage, cover, split_of
from anyattn.backends.torch.drops import Drops
from anyattn.backends.torch.plan import TorchPlan
from anyattn.backends.torch.tiles import Call, Masks, blank_unused_rows, results_of, rows_of_queries
from anyattn.backends.torch.workspace import Workspace
from anyattn.problem import Problem

__all__ = ["Repeater"]


class Repeater(plan.Repeater):
    """Computes the calls of one plan by torch operations; they share the plan and, if only sizes decide it, the coverage. A plan that is
    not reusable has one call, whose passes share the coverage."""

    def __init__(self, problem: Problem, plan: TorchPlan) -> None:
        self.plan = plan
        has_sizes_only = not any(p.tensors for p in problem.predicates) and problem.blocks is None and problem.sequences is None
        self.coverage = _cover(problem, plan) if has_sizes_only else None
        self._work = work_of(problem, self.coverage) if plan.has_loops and self.coverage is not None else None

    def reads_lists(self, problem: Problem) -> bool:
        return problem.blocks is not None

    def forward(self, problem: Problem) -> Result:
        plan = self.plan
        if problem.is_batch_invariant:
            return in_order.forward(problem, plan) if problem.has_pairs else forward_pass.forward(_call(problem, plan, self.coverage))
        if plan.num_splits > 1:
            return _forward_by_splits(problem, plan)
        if not plan.is_reusable and plan.has_loops:
            self.coverage = _cover(problem, plan)
            self._work = work_of(problem, self.coverage)
        if plan.has_loops:
            result = results_of(problem)
            if compiled.forward(problem, self._work or work_of(problem, _cover(problem, plan)), result):
                return result
        if problem.skip is None and (decoded := decode.forward(problem, plan)) is not None:
            return decoded
        call = _call(problem, plan, self.coverage)
        by_spans = problem.skip is None and not (plan.needs_lse or problem.wants_lse or problem.wants_max)
        return Result(unstreamed.forward(call), None, None) if by_spans else forward_pass.forward(call)

    def backward(self, problem: Problem, out: Tensor, lse: Tensor | None, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        call = _call(problem, self.plan, self.coverage)
        if lse is None:  # the forward pass computed whole spans
            return *unstreamed.backward(call, dout), None
        in_pages = problem.sequences is not None and problem.sequences.page_table is not None
        # the forward pass in the keys' order copies keys out of pages; the loops of the backward pass do not read them
        work = (self._work or work_of(problem, call.coverage)) if self.plan.has_loops and not in_pages else None
        return backward_pass.backward(call, out, lse, dout, dlse, work)

    def key_sums(self, problem: Problem, lse: Tensor, first: int) -> Tensor:
        return reductions.key_sums(*self._exact(problem, lse), first)

    def block_reductions(
        self, problem: Problem, lse: Tensor, block: tuple[int, int], wants_sums: bool, wants_max: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return reductions.block_reductions(*self._exact(problem, lse), block, wants_sums, wants_max)

    def _exact(self, problem: Problem, lse: Tensor) -> tuple[Call, Tensor]:
        """A call whose products are not rounded to 16 bits, and its log-sum-exp: that of rounded scores would leave the rounding of each
        row's greatest score in its probabilities."""
        exact = replace(self.plan, product_dtype=problem.stat_dtype)
        if problem.q.element_size() == 2:
            found = forward_pass.forward(_call(problem.like(wants_lse=True, wants_max=False), exact, self.coverage)).lse
            assert found is not None
            lse = found
        return _call(problem, exact, self.coverage), lse


def _cover(problem: Problem, plan: TorchPlan) -> Coverage:
    return cover(problem, plan.tile_m, plan.pairs_at_once)


def _call(problem: Problem, plan: TorchPlan, coverage: Coverage | None = None) -> Call:
    coverage = coverage or _cover(problem, plan)
    return Call(problem, plan, coverage, Masks(problem, coverage), Workspace(problem.q.device), Drops(problem))


def _forward_by_splits(problem: Problem, plan: TorchPlan) -> Result:
    """Forward pass with split-KV: each split covers its keys of every row tile,
    in the statistics' dtype; the sink is added when combining."""
    call = _call(problem.like(sink=None, wants_lse=True), plan)
    parts = []
    for split in range(plan.num_splits):
        coverage = split_of(call.coverage, split, plan.num_splits)
        parts.append(forward_pass.forward(replace(call, coverage=coverage), problem.stat_dtype))
    sink = None if problem.sink is None else problem.sink.to(problem.stat_dtype)[:, None]
    out, lse = combine(torch.stack([p.out for p in parts]), torch.stack([p.lse for p in parts if p.lse is not None]), sink)
    if problem.sink is not None:
        blank_unused_rows(problem, lse)
    highest = torch.stack([p.max_scores for p in parts if p.max_scores is not None]).amax(0) if problem.wants_max else None
    merged = rows_of_queries(problem, out.shape[3], problem.q.dtype).copy_(out)
    return Result(merged, lse if problem.wants_lse else None, highest)
