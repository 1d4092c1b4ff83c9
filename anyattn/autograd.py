"""The autograd node: connects a backend's forward and backward pass to torch's autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn import hardware
from anyattn.backends import backend_module
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.planner import for_backward
from anyattn.problem import Problem
from anyattn.tensors import autocast, kinds
from anyattn.tensors.dynamo import opaque

__all__ = ["backend_of", "backward", "compute", "forward", "refuse_second_derivative", "wanting"]

_GIVEN = "a gradient that backward was given"
_are_transforms_active = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]


def backend_of(plan: Plan) -> Any:
    """The module with ``forward`` of the plan's backend, imported when first used."""
    return backend_module(plan.backend)


def forward(problem: Problem, plan: Plan) -> Any:
    """The backend's result, outside autograd and autocast."""
    if autocast.is_on():
        with autocast.disabled():
            return backend_of(plan).forward(problem, plan)
    return backend_of(plan).forward(problem, plan)


def backward(problem: Problem, plan: Plan, *results: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs``. results: out, lse, dout and dlse of the forward pass that ``plan`` made."""
    if autocast.is_on():
        with autocast.disabled():
            return backward(problem, plan, *results)
    chosen = plan
    if plan.backward:  # by another backend, whose plan depends on the same properties of the call
        found = plan.prepared.get("backward plan")
        if found is None:
            found = plan.prepared["backward plan"] = for_backward(plan, problem, hardware.of(problem.q.device.type))
        chosen = found
    return backend_of(chosen).backward(problem, chosen, *results)


@opaque
def compute(problem: Problem, plan: Plan) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse, max_scores of ``problem``; out and lse carry gradients to ``problem.grad_inputs`` where autograd records."""
    if autocast.is_on():
        with autocast.disabled():
            return compute(problem, plan)
    if not problem.needs_grad:
        result = backend_of(plan).forward(problem, plan)
        return result.out, result.lse, result.max_scores
    if _are_transforms_active():
        raise TypeError(
            f"attention is called inside torch.func.{kinds.transforms()[-1]} with plain tensors that require grad outside of it; "
            f"wanted tensors that do not: detach() them, or pass them to the transformed function"
        )
    out, lse, highest = _Attention.apply(problem, plan, *problem.grad_inputs)
    return out, lse if problem.wants_lse else None, highest


class _Attention(torch.autograd.Function):
    """One node of the autograd graph. It keeps ``problem`` without its tensors; torch saves those, and detects in-place changes to them."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, plan: Plan, *inputs: Tensor | None) -> Any:  # type: ignore[override]
        # a plan of whole spans recomputes its probabilities without the log-sum-exp
        keeps_lse = problem.wants_lse or not plan.whole_spans
        sequences = None if problem.sequences is None else problem.sequences.kept()
        if keeps_lse is not problem.wants_lse or sequences is not None:
            problem = problem.like(wants_lse=keeps_lse, sequences=sequences)
        result = backend_of(plan).forward(problem, plan)
        ctx.problem, ctx.plan = _without_inputs(problem), plan
        # the backward pass reads the masks' tensors again, though no gradient flows to them
        ctx.save_for_backward(*inputs, result.out, result.lse, *(t for p in problem.predicates for t in p.tensors if not t.is_inference()))
        ctx.set_materialize_grads(False)
        if result.max_scores is not None:
            ctx.mark_non_differentiable(result.max_scores)
        return result.out, result.lse, result.max_scores

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> Any:  # type: ignore[override]
        if _are_transforms_active():
            for t in (dout, dlse):
                kinds.refuse_hidden(_GIVEN, t)
        needed = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors
        inputs, (out, lse) = saved[: len(needed)], saved[len(needed) : len(needed) + 2]
        with torch.no_grad():
            given = torch.zeros_like(out) if dout is None else dout
            tensors = tuple([wanting(t, n) for t, n in zip(inputs, needed, strict=True)])
            try:
                grads = backward(_with_inputs(ctx.problem, tensors), ctx.plan, out, lse, given, dlse)
            except RuntimeError:
                for t in (dout, dlse):
                    kinds.refuse_batched(_GIVEN, t)
                raise
        found = [g if n else None for g, n in zip(grads, needed, strict=True)]
        return None, None, *(_differentiable_once(found, (*inputs, dout, dlse)) if torch.is_grad_enabled() else found)


def _differentiable_once(grads: list[Tensor | None], origins: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients under ``create_graph=True``, attached to what they were computed from, so that differentiating them raises instead of
    treating them as constants."""
    made = iter(_Gradients.apply([g for g in grads if g is not None], *origins))
    return [None if g is None else next(made) for g in grads]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *origins: Tensor | None) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(grads)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        refuse_second_derivative()


def refuse_second_derivative(*_: Any) -> Any:
    """Raises ``NotImplementedError``; stands where the derivative of an operator's backward pass would."""
    raise NotImplementedError(
        "attention has no second derivative: a gradient that was computed with create_graph=True (or by torch.func inside of torch.func, "
        "as hessian does) was differentiated again; wanted one derivative, or detach() the gradient where it is a constant"
    )


def wanting(t: Tensor | None, is_needed: bool) -> Tensor | None:
    """The tensor with ``requires_grad`` set to ``is_needed``. Grad mode is off, so the user's own tensor may be returned."""
    return t if t is None or t.requires_grad is is_needed else t.detach().requires_grad_(is_needed)


def _without_inputs(problem: Problem) -> Problem:
    """The problem without its differentiable tensors, for ``_with_inputs``. Cached row limits are kept."""
    score = problem.score and TracedMod.of_fields(vars(problem.score) | {"tensors": (), "source": None})
    return problem.like(q=None, k=None, v=None, sink=None, score=score)


def _with_inputs(problem: Problem, inputs: tuple[Tensor | None, ...]) -> Problem:
    q, k, v, sink, *captured = inputs  # only the sink may be None
    score = None if problem.score is None else TracedMod.of_fields(vars(problem.score) | {"tensors": tuple(captured)})
    assert q is not None and k is not None and v is not None
    return problem.like(q=q, k=k, v=v, sink=sink, score=score)
