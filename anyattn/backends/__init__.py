"""Backends: each computes a ``Problem`` according to a ``Plan``; backends do not import one another."""

from __future__ import annotations

import importlib
from copy import copy
from functools import lru_cache
from typing import Any

from torch import Tensor, float32

from anyattn.backends.result import Result
from anyattn.plan import Plan, Repeater
from anyattn.problem import Problem
from anyattn.tensors.strides import empty_in_order

__all__ = ["backend_module", "repeater_of"]


@lru_cache(maxsize=8)
def backend_module(name: str) -> Any:
    """The module of the backend called ``name``, with its ``Repeater``; imported when first used."""
    return importlib.import_module(f"anyattn.backends.{name}")


def repeater_of(problem: Problem, plan: Plan) -> Repeater:
    """The repeater of the calls that share ``plan``, made for the first of them. It has a copy of the plan: with the plan itself each would
    keep the other until the next collection of cycles, at every call that is not remembered."""
    repeater = plan.repeater
    if repeater is None:
        repeater = _Gathering(copy(plan)) if plan.gathers else _over_keys(problem, copy(plan))
        plan.keep(repeater=repeater)
    return repeater


def _over_keys(problem: Problem, plan: Plan) -> Repeater:
    """The repeater of calls whose keys the plan's backend reads where they are."""
    own: Repeater = backend_module(plan.backend).Repeater(problem, plan)
    return _Combining(own) if plan.backend == "hopper" and plan.num_splits > 1 else own


class _Combining(Repeater):
    """Computes calls by another repeater's splits of their keys, which Triton combines."""

    reports_launches = True

    def __init__(self, own: Any) -> None:
        self._own = own

    def forward(self, problem: Problem) -> Any:
        parts, q, sink = self._own.forward_parts(problem), problem.q, problem.sink
        out = empty_in_order(q, last=problem.v.shape[3])
        lse = q.new_empty(q.shape[:3], dtype=float32) if problem.wants_lse else None
        logits = None if sink is None else sink.view(1, -1, 1).expand(q.shape[:3])
        backend_module("triton").merge(parts.outs, parts.lses, logits, out, lse, parts.has_unused)
        return Result(out, lse, None)

    def backward(self, problem: Problem, *given: Any) -> tuple[Tensor | None, ...]:
        found: tuple[Tensor | None, ...] = self._own.backward(problem, *given)
        return found

    def reads_lists(self, problem: Problem) -> bool:
        return False


class _Gathering(Repeater):
    """Computes calls without gradients over gathered keys, which Triton gathers and another backend may multiply."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._over: Repeater | None = None

    def forward(self, problem: Problem) -> Any:
        together = backend_module("triton").gathered(problem)
        over = self._over
        if over is None:
            over = self._over = _over_keys(together, self._plan)
        return over.forward(together)

    def reads_lists(self, problem: Problem) -> bool:
        return problem.blocks is not None
