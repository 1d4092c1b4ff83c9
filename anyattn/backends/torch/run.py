"""The backend's two doors: a problem and its plan in, results out."""

from __future__ import annotations

from torch import Tensor

from anyattn.backends.torch import backward as backward_pass
from anyattn.backends.torch import forward as forward_pass
from anyattn.backends.torch.forward import Result
from anyattn.backends.torch.memory import Workspace
from anyattn.backends.torch.spans import cover
from anyattn.backends.torch.tiles import Call, Masks
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["backward", "forward"]


def _call(problem: Problem, plan: Plan) -> Call:
    coverage = cover(problem, plan.tile_m, plan.pairs_at_once)
    return Call(problem, plan, coverage, Masks(problem, coverage), Workspace(problem.q.device))


def forward(problem: Problem, plan: Plan) -> Result:
    """out, lse and max_scores (the last two None unless wanted) of ``problem``."""
    return forward_pass.forward(_call(problem, plan))


def backward(problem: Problem, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs`` in that order, None where none is needed."""
    return backward_pass.backward(_call(problem, plan), out, lse, dout, dlse)
