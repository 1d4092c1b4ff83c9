"""The autograd node: connects a backend's forward and backward pass to torch's autograd."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from anyattn import hardware
from anyattn.backends import repeater_of
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.tracing.default_device import UsersDefaultDevice, without_default_device
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.planner import for_backward
from anyattn.problem import Problem
from anyattn.sparsity.derived import write_counts
from anyattn.tensors import autocast, kinds
from anyattn.tensors.dynamo import opaque

__all__ = ["backward", "compute", "differentiable_once", "forward", "in_memory", "refuse_second_derivative", "requiring_grad"]

_GIVEN = "a gradient that backward was given"
_are_transforms_active = torch._C._are_functorch_transforms_active  # type: ignore[attr-defined]
_is_profiled = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]
_is_grad_enabled, _is_autocast = torch.is_grad_enabled, autocast.is_on  # looked up once


def forward(problem: Problem, plan: Plan) -> Any:
    """The backend's result, outside autograd and autocast."""
    if _is_autocast():
        with autocast.disabled():
            return forward(problem, plan)
    return repeater_of(problem, plan).forward(problem)


def backward(problem: Problem, plan: Plan, *results: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs``. results: out, lse, dout and dlse of the forward pass that ``plan`` made."""
    if _is_autocast():
        with autocast.disabled():
            return backward(problem, plan, *results)
    problem, chosen = problem.in_any_batch, plan
    if plan.backward != plan.backend:  # that plan depends on the same properties of the call as ``plan``
        if plan.backward_plan is None:
            plan.keep(backward_plan=for_backward(plan, problem, hardware.of(problem.q.device.type)))
        chosen = plan.backward_plan  # type: ignore[assignment]
    repeater = repeater_of(problem, chosen)
    if _is_profiled():
        with record_function(f"anyattn::attention_backward ({chosen.backend})"):
            return repeater.backward(problem, *results)  # type: ignore[arg-type]
    return repeater.backward(problem, *results)  # type: ignore[arg-type]


@opaque
def compute(problem: Problem, plan: Plan, is_named: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, lse, max_scores of ``problem``; out and lse carry gradients to ``problem.grad_inputs`` if autograd records.

    is_named: a profiler, if one is active, has the call's name.
    """
    if _is_autocast():
        with autocast.disabled():
            return compute(problem, plan)
    if not is_named and _is_profiled():
        with record_function(f"anyattn::attention ({plan.backend})"):
            return compute(problem, plan, True)
    if not problem.needs_grad:
        return repeater_of(problem, plan).forward(problem)
    if _are_transforms_active():
        raise TypeError(
            f"attention is called inside torch.func.{kinds.transforms()[-1]} with plain tensors that require grad outside of it; "
            f"wanted tensors that do not: detach() them, or pass them to the transformed function"
        )
    inputs = problem.grad_inputs
    with UsersDefaultDevice():  # hooks of saved tensors are called
        found = _apply(problem, plan, *inputs)
    return found if type(found) is tuple else (found, None, None)


class _Attention(torch.autograd.Function):
    """The node of the autograd graph for one call. It returns out, or out, lse and max_scores if the call wants one of the latter.

    It keeps the problem's fields without the tensors, which torch saves and checks for in-place changes. Block lists are not saved: their
    write counters are compared here, so that hooks of saved tensors do not copy them.
    """

    @staticmethod
    @without_default_device
    def forward(ctx: Any, problem: Problem, plan: Plan, *inputs: Tensor | None) -> Any:  # type: ignore[override]
        wants_lse, fields = problem.wants_lse, vars(problem)
        keeps_lse = wants_lse or plan.needs_lse
        if keeps_lse is not wants_lse or problem.sequences is not None:
            fields = fields.copy()
            fields["wants_lse"] = keeps_lse
            if problem.sequences is not None:
                fields["sequences"] = problem.sequences.kept()
            problem = Problem.of_fields(fields)
        out, lse, highest = repeater_of(problem, plan).forward(problem)
        ctx.call = _without_inputs(fields), plan, None if problem.blocks is None else write_counts(problem.blocks)
        if problem.predicates:  # the backward pass reads the masks' tensors again, though no gradient flows to them
            inputs = (*inputs, out, lse, *[t for p in problem.predicates for t in p.tensors if not t.is_inference()])
        else:
            inputs = (*inputs, out, lse)
        if problem.dropout is not None:  # last, so that a checkpoint's second forward pass provides its own seed
            inputs = (*inputs, *problem.dropout.keep.tensors)
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        if highest is not None:
            ctx.mark_non_differentiable(highest)
        elif not wants_lse:
            return out
        return out, lse if wants_lse else None, highest

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, _: Any = None) -> Any:  # type: ignore[override]
        if _are_transforms_active():
            for t in (dout, dlse):
                kinds.refuse_hidden(_GIVEN, t)
        if kinds.count_modes():
            _warn_of_modes()
        needed, saved, (fields, plan, writes) = ctx.needs_input_grad, ctx.saved_tensors, ctx.call
        if writes is not None and write_counts(fields["blocks"]) != writes:
            raise RuntimeError(
                "block lists have been modified by an inplace operation after the attention call whose gradients are computed; wanted "
                "backward() first, or lists of its own for each call"
            )
        if not _is_grad_enabled():
            return None, None, *_gradients(fields, plan, needed[2:], saved, dout, dlse)
        with torch.no_grad():
            found = _gradients(fields, plan, needed[2:], saved, dout, dlse)
        return None, None, *differentiable_once(found, (*saved[: len(found)], dout, dlse))


@cache
def _warn_of_modes() -> None:
    """Warns once, when modes are entered between the passes: the backward pass of an operator is an operator, and this node is of none."""
    warnings.warn(
        "a dispatch mode (FlopCounterMode) is active in attention's backward pass but was not in its forward pass; it sees what the "
        "backend does, which a FLOP counter does not count as attention: run the forward pass inside of the mode too",
        stacklevel=3,
    )


# The function that ``_Attention.apply`` calls outside of function transforms. ``tensors.kinds`` sends calls inside them to the operators.
_apply = super(torch.autograd.Function, _Attention).apply


@without_default_device
def _gradients(
    fields: dict[str, Any], plan: Plan, needed: tuple[bool, ...], saved: tuple[Any, ...], dout: Tensor | None, dlse: Tensor | None
) -> list[Tensor | None]:
    """The gradients of the inputs of ``_Attention``; grad mode is off. fields, saved: kept by the node. needed: one bool per input."""
    # saved begins with the inputs
    inputs = [t if t is None or t.requires_grad is n else requiring_grad(t, n) for t, n in zip(saved, needed)]
    out, lse = saved[len(inputs) : len(inputs) + 2]
    dout, dlse = in_memory(dout), in_memory(dlse)
    try:
        problem = _with_inputs(fields, inputs)
        if problem.dropout is not None:
            problem = problem.like(dropout=dropout_of(Seeded(saved[-1], problem.dropout.p)))
        found = backward(problem, plan, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
    except RuntimeError:
        for t in (dout, dlse):
            kinds.refuse_batched(_GIVEN, t)
        raise
    return [g if n else None for g, n in zip(found, needed, strict=True)]


def in_memory(t: Tensor | None) -> Tensor | None:
    """A gradient that backward was given, with its values in memory, where kernels read them: torch may pass a gradient whose sign is not
    applied yet (of a conjugated tensor), zeros without memory, or the awaited result of a collective. Raises ``TypeError`` for other
    subclasses without memory on a GPU."""
    if t is None:
        return None
    if t.is_neg():
        t = t.resolve_neg()
    if t._is_zerotensor():  # type: ignore[attr-defined]
        t = torch.zeros(t.shape, dtype=t.dtype, device=t.device)
    if type(t) is not Tensor and t.device.type != "cpu":  # torch operations, which run on a CPU, are dispatched to the subclass
        t = t.clone()  # of an AsyncCollectiveTensor, a plain tensor
        kinds.refuse_hidden(_GIVEN, t)
    return t


def differentiable_once(grads: list[Tensor | None], origins: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The gradients under ``create_graph=True``, attached to the tensors that they were computed from, so that differentiating them raises
    instead of treating them as constants."""
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
    """Raises ``NotImplementedError``; called in place of the derivative of a backward pass."""
    raise NotImplementedError(
        "attention has no second derivative: a gradient that was computed with create_graph=True (or by torch.func inside of torch.func, "
        "as hessian does) was differentiated again; wanted one derivative, or detach() the gradient where it is a constant"
    )


def requiring_grad(t: Tensor | None, is_needed: bool) -> Tensor | None:
    """The tensor with ``requires_grad`` set to ``is_needed``. Grad mode is off, so the user's own tensor may be returned."""
    return t if t is None or t.requires_grad is is_needed else t.detach().requires_grad_(is_needed)


def _without_inputs(fields: dict[str, Any]) -> dict[str, Any]:
    """A problem's fields without its differentiable tensors, for ``_with_inputs``. Cached row limits are kept."""
    fields = fields.copy()
    fields["q"] = fields["k"] = fields["v"] = fields["sink"] = None
    score = fields["score"]
    if score is not None and (score.tensors or score.source is not None):
        fields["score"] = TracedMod.of_fields({**vars(score), "tensors": (), "source": None})
    return fields


def _with_inputs(fields: dict[str, Any], inputs: list[Tensor | None]) -> Problem:
    fields = fields.copy()  # a node's backward pass may run again
    fields["q"], fields["k"], fields["v"], fields["sink"], *captured = inputs  # only the sink may be None
    if captured:
        fields["score"] = TracedMod.of_fields({**vars(fields["score"]), "tensors": tuple(captured)})
    return Problem.of_fields(fields)
