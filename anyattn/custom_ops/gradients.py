"""Gradients of the operators: the autograd kernel of each, and their ``torch.func.grad`` and ``vjp``.

A call without gradients, modes and transforms runs directly from the dispatcher's first step. Otherwise one ``autograd.Function``, in the
form that ``torch.func`` requires, takes every tensor of the arguments, including those in lists, as an argument of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from anyattn.autograd import refuse_second_derivative
from anyattn.custom_ops.arguments import Arguments, Results
from anyattn.custom_ops.flops import complete_counters
from anyattn.tensors import kinds

__all__ = ["called", "differentiable", "returned", "without_gradients"]

_BELOW, _Below = torch._C._after_autograd_keyset, torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]
_MEMORY = (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
_is_grad_enabled, _any_requires_grad = torch._C.is_grad_enabled, torch._C._any_requires_grad  # type: ignore[attr-defined]


class _Rule(NamedTuple):
    """An operator's derivative, see ``differentiable``; backward is None for an operator without one."""

    operator: Any
    arguments: Arguments
    backward: Any = None
    of: tuple[str, ...] = ()
    constant: tuple[int, ...] = ()


_rules: dict[Any, _Rule] = {}


def differentiable(operator: Any, backward: Any, of: tuple[str, ...], constant: tuple[int, ...] = ()) -> None:
    """Gives an operator of (out, lse, ...) its derivative: the operator ``backward``,
    which takes the record of its arguments and ``Results``.

    of: the arguments whose gradients ``backward`` returns, in order, with lists flattened. constant: results without a gradient.
    """
    _rules[operator] = _rules[operator]._replace(backward=backward, of=of, constant=constant)


def called(operator: Any, *records: Any) -> Any:
    """The operator's results for arguments in records, also inside function transforms;
    raises for tensors that a transform hides from it."""
    rule = _rules[operator]
    values = rule.arguments.flat(*records)
    complete_counters()
    active = kinds.transforms()
    if not active:
        return operator(*values)
    _, tensors = rule.arguments.split(values)
    for t in tensors:
        if t is not None:
            kinds.refuse("an argument of attention", t)
    return _differentiated(rule, operator, values) if "grad" in active else operator(*values)


def returned(gradients: Sequence[Tensor | None], wants: Sequence[bool], sources: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """The results of a backward operator: a gradient for each of ``sources`` that wants one, zeros if a mod lets no gradient through
    (``detach``, ``floor``); otherwise an empty tensor, which does not share ``like``'s memory."""
    return [
        like.new_empty(0) if t is None or not w else t.new_zeros(t.shape) if g is None else g
        for g, w, t in zip(gradients, wants, sources, strict=True)
    ]


def without_gradients(operator: Any, arguments: Arguments, run: Callable[..., Any]) -> Callable[..., Any]:
    """The autograd kernel of an operator, without derivative until ``differentiable`` adds one. run: its implementation."""
    _rules[operator] = _Rule(operator, arguments)
    plain: dict[int, bool] = {}  # by dispatch key set: whether all tensors are plain memory and no mode intercepts

    def kernel(keyset: Any, *values: Any) -> Any:
        if _is_grad_enabled() and _any_requires_grad(*values):

            def below(*values: Any) -> Any:
                with _Below():
                    return operator.redispatch(keyset & _BELOW, *values)

            return _differentiated(_rules[operator], below, values)
        keys = keyset.raw_repr()
        is_plain = plain.get(keys)
        if is_plain is None:
            rest = (keyset & _BELOW).remove(torch._C.DispatchKey.ADInplaceOrView)
            is_plain = plain[keys] = rest.highestPriorityTypeId() in _MEMORY
        with _Below():
            return run(*values) if is_plain else operator.redispatch(keyset & _BELOW, *values)

    return kernel


def _differentiated(rule: _Rule, call: Callable[..., Any], values: tuple) -> Any:
    others, tensors = rule.arguments.split(values)
    results = _Differentiated.apply(call, rule, others, *tensors)  # type: ignore[no-untyped-call]
    return results if len(rule.operator._schema.returns) > 1 else list(results)


def _refuse(operator: Any) -> NoReturn:
    name = operator._schema.name
    if name.endswith("_backward"):
        refuse_second_derivative()
    raise NotImplementedError(
        f"{name} has no derivative, and was given tensors that require one; wanted detach()ed ones, or torch.no_grad()"
    )


class _Differentiated(torch.autograd.Function):
    """An operator's call. others, tensors: its arguments, as from ``Arguments.split``."""

    @staticmethod
    def forward(call: Callable[..., Any], rule: _Rule, others: tuple, *tensors: Tensor | None) -> tuple:  # type: ignore[override]
        return tuple(call(*rule.arguments.joined(others, tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        _, rule, others, *tensors = inputs
        ctx.rule, ctx.others, ctx.count = rule, others, len(output)
        if rule.backward is None:
            return
        sources = rule.arguments.of(rule.of, rule.arguments.joined(others, tensors))
        ctx.wants = [t is not None and t.is_floating_point() and t.requires_grad for t in sources]
        ctx.save_for_backward(*output, *tensors)
        ctx.mark_non_differentiable(*(output[i] for i in rule.constant))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        rule: _Rule = ctx.rule
        if rule.backward is None:
            _refuse(rule.operator)
        saved = ctx.saved_tensors  # read once: saved-tensor hooks unpack at every access, and checkpoints refuse a second one
        (out, lse, *_), tensors = saved[: ctx.count], saved[ctx.count :]
        dout, dlse = torch.zeros_like(out) if grads[0] is None else grads[0], grads[1]
        values = rule.arguments.joined(ctx.others, tensors)
        gradients = called(rule.backward, *rule.arguments.records(values), Results(out, lse, dout, dlse, ctx.wants))
        wanted = iter([g if w else None for g, w in zip(gradients, ctx.wants, strict=True)])
        by_argument = list(rule.arguments.joined(ctx.others, repeat(None)))
        for name in rule.of:
            i = rule.arguments.names.index(name)
            by_argument[i] = [next(wanted) for _ in by_argument[i]] if isinstance(by_argument[i], list) else next(wanted)
        return None, None, None, *rule.arguments.split(tuple(by_argument))[1]
