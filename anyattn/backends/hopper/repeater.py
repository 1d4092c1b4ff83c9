"""Calls of one Hopper plan, and the launches that they repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anyattn import plan
from anyattn.backends.hopper.api import ForwardLaunches, Parts
from anyattn.backends.hopper.backward import BackwardLaunches
from anyattn.backends.hopper.make_backward_config import by_lengths
from anyattn.backends.result import Result
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Repeater"]


class Repeater(plan.Repeater):
    """Computes the calls of one plan. What the plan's signature leaves open selects their launches."""

    reports_launches = True

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self._packs, self._splits = plan.heads_per_tile > 1, plan.num_splits
        self._forward: dict[tuple[bool, bool], ForwardLaunches] = {}
        self._backward: dict[Any, BackwardLaunches] = {}

    def reads_lists(self, problem: Problem) -> bool:
        return self._launches(problem).reads_lists

    def forward(self, problem: Problem) -> Result:
        return self._launches(problem).run(problem)

    def forward_parts(self, problem: Problem) -> Parts:
        """The results of each split of the keys, of a plan with several."""
        return self._launches(problem).run_parts(problem)

    def again(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple | None] | None:
        return self._launches(problem).again(problem)

    def _launches(self, problem: Problem) -> ForwardLaunches:
        key = problem.wants_lse, problem.scale > 0
        launches = self._forward.get(key)
        if launches is None:
            launches = self._forward[key] = ForwardLaunches(problem, self._packs, self._splits)
        return launches

    def backward(self, problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        # a backward pass may want the gradients of only some of the inputs that require them; the numbers of packed rows are not in the
        # signature, but choose tiles and parts
        slots, lengths = () if problem.score is None else problem.wanted_slots, problem.sequences is not None and by_lengths(problem)
        key = slots, lengths, problem.wide_kv_grads
        launches = self._backward.get(key)
        if launches is None:
            launches = self._backward[key] = BackwardLaunches(problem)
        return launches.run(problem, out, lse, dout, dlse)
