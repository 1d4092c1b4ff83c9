"""Backends: each computes a ``Problem`` according to a ``Plan``; backends do not import one another."""

from __future__ import annotations

import importlib
from copy import copy
from functools import lru_cache
from typing import Any

from anyattn.plan import Plan, Repeater
from anyattn.problem import Problem

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
        repeater = _Gathering(copy(plan)) if plan.gathers else backend_module(plan.backend).Repeater(problem, copy(plan))
        plan.keep(repeater=repeater)
    return repeater


class _Gathering(Repeater):
    """Computes calls without gradients over gathered keys, which Triton gathers and another backend may multiply."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._over: Repeater | None = None

    def forward(self, problem: Problem) -> Any:
        together = backend_module("triton").gathered(problem)
        over = self._over
        if over is None:
            over = self._over = backend_module(self._plan.backend).Repeater(together, self._plan)
        return over.forward(together)

    def reads_lists(self, problem: Problem) -> bool:
        return problem.blocks is not None
