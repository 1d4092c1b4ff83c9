"""The backend's two doors: a problem and its plan in, results out."""

from __future__ import annotations

from torch import Tensor

from anyattn.backends.torch import backward as backward_pass
from anyattn.backends.torch import forward as forward_pass
from anyattn.backends.torch import whole_spans
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
    call = _call(problem, plan)
    return Result(whole_spans.forward(call), None, None) if _by_spans(problem, plan) else forward_pass.forward(call)


def backward(problem: Problem, plan: Plan, out: Tensor, lse: Tensor | None, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs`` in that order, None where none is needed."""
    call = _call(problem, plan)
    if lse is None:  # the forward pass kept whole spans
        return *whole_spans.backward(call, dout), None
    return backward_pass.backward(call, out, lse, dout, dlse)


def _by_spans(problem: Problem, plan: Plan) -> bool:
    return plan.whole_spans and not (problem.wants_lse or problem.wants_max)
