"""Operators: ``torch.library.custom_op``s whose arguments are records, and their derivatives.

One piece is our own: the ``autograd.Function`` of ``register_autograd`` has no ``setup_context``, without which ``torch.func.grad`` and
``vjp`` refuse it (torch 2.13, 2.15). ``called`` differentiates there, by the same formulas. Inductor's code calls no operator but its
``direct`` function (``direct.py``): torch's checks of results and the passes through its dispatcher take longer than a warm attention call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from anyattn.autograd import refuse_second_derivative
from anyattn.custom_ops.arguments import Arguments, Results
from anyattn.custom_ops.direct import direct, install
from anyattn.custom_ops.flops import complete_counters
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.tensors import kinds
from anyattn.tensors.dynamo import opaque

__all__ = ["called", "differentiable", "operator", "returned"]


def operator(
    *records: type, fake: Callable[..., Any], left_out: dict[str, Any] | None = None, changed: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Decorates the implementation of ``anyattn::NAME`` for every device, where NAME is the function's name; returns the operator.

    records, left_out: of its ``Arguments``; the implementation and the fake implementation take the records. changed: the tensors among
    them that it writes to. Its results are new memory. It has no derivative unless ``differentiable`` adds one. Its attribute ``direct`` is
    the function that Inductor's code calls instead.
    """
    arguments = Arguments(*records, left_out=left_out)

    def define(fn: Callable[..., Any]) -> Any:
        @without_default_device
        def run(*values: Any) -> Any:
            return fn(*arguments.records(values))

        schema = arguments.schema(fn, changed)
        custom = torch.library.custom_op(f"anyattn::{fn.__name__}", opaque(run), mutates_args=changed, schema=schema)
        custom.register_fake(lambda *values: fake(*arguments.records(values)))
        overload = getattr(torch.ops.anyattn, fn.__name__).default
        written = [arguments.names.index(c) for c in changed]
        overload.direct = opaque(without_default_device(direct(overload, arguments, run, written)))
        install(overload, fn.__module__)
        _derivatives[overload] = _Derivative(custom, arguments)
        return overload

    return define


def differentiable(operator: Any, backward: Any, of: tuple[str, ...], constant: tuple[int, ...] = ()) -> None:
    """Gives an operator of (out, lse, ...) its derivative: the operator ``backward``,
    which takes the record of its arguments and ``Results``.

    of: the arguments whose gradients ``backward`` returns, in order, with lists flattened. constant: results without a gradient.
    """
    _derivatives[operator] = _derivatives[operator]._replace(backward=backward, of=of, constant=constant)
    for each in map(_derivatives.__getitem__, (operator, backward)):
        each.custom.register_autograd(each.gradients, setup_context=each.save)


def called(operator: Any, *records: Any) -> Any:
    """The operator's results for arguments in records, also inside function transforms;
    raises for tensors that a transform hides from it."""
    values = _derivatives[operator].arguments.flat(*records)
    complete_counters()
    active = kinds.transforms()
    if not active:
        return operator(*values)
    leaves, spec = pytree.tree_flatten(values, is_leaf=_is_leaf)
    for t in leaves:
        if isinstance(t, Tensor):
            kinds.refuse("an argument of attention", t)
    if "grad" not in active:
        return operator(*values)
    results = _Transformed.apply(operator, spec, *leaves)  # type: ignore[no-untyped-call]
    return list(results) if isinstance(results, tuple) and len(operator._schema.returns) == 1 else results


def returned(gradients: Sequence[Tensor | None], wants: Sequence[bool], sources: Sequence[Tensor | None], like: Tensor) -> list[Tensor]:
    """The results of a backward operator: a gradient for each of ``sources`` that wants one, zeros if a mod lets no gradient through
    (``detach``, ``floor``); otherwise an empty tensor, which does not share ``like``'s memory."""
    return [
        like.new_empty(0) if t is None or not w else t.new_zeros(t.shape) if g is None else g
        for g, w, t in zip(gradients, wants, sources, strict=True)
    ]


class _Derivative(NamedTuple):
    """An operator's derivative, as ``register_autograd`` takes it. custom: the operator's ``CustomOpDef``. backward, of, constant: of
    ``differentiable``; backward is None for an operator without a derivative, and for a backward operator."""

    custom: Any
    arguments: Arguments
    backward: Any = None
    of: tuple[str, ...] = ()
    constant: tuple[int, ...] = ()

    def save(self, ctx: Any, inputs: tuple, output: Any) -> None:
        """``setup_context``."""
        if self.backward is None:
            return
        leaves, ctx.spec = pytree.tree_flatten(inputs, is_leaf=_is_leaf)
        ctx.leaves = [Tensor if isinstance(x, Tensor) else x for x in leaves]
        ctx.save_for_backward(*output[:2], *(x for x in leaves if isinstance(x, Tensor)))
        ctx.wants = [t is not None and t.is_floating_point() and t.requires_grad for t in self.arguments.of(self.of, inputs)]
        ctx.mark_non_differentiable(*(output[i] for i in self.constant))
        ctx.set_materialize_grads(False)

    def gradients(self, ctx: Any, *grads: Tensor | None) -> tuple:
        """``backward``: a gradient or None for each argument, a list of them for a list of tensors."""
        if self.backward is None:
            refuse_second_derivative()
        out, lse, *tensors = ctx.saved_tensors  # read once: hooks unpack at every access, and checkpoints refuse a second one
        dout, dlse = torch.zeros_like(out) if grads[0] is None else grads[0], grads[1]
        rest = iter(tensors)
        values = pytree.tree_unflatten([next(rest) if x is Tensor else x for x in ctx.leaves], ctx.spec)
        results = called(self.backward, *self.arguments.records(values), Results(out, lse, dout, dlse, ctx.wants))
        wanted = iter([g if w else None for g, w in zip(results, ctx.wants, strict=True)])

        def gradient(name: str) -> Tensor | None:
            return next(wanted) if name in self.of else None

        by_argument = zip(self.arguments.names, values, strict=True)
        return tuple([gradient(n) for _ in value] if _holds_tensors(value) else gradient(n) for n, value in by_argument)


_derivatives: dict[Any, _Derivative] = {}


def _holds_tensors(value: Any) -> bool:
    """Whether an argument is a list of tensors, as ``register_autograd`` judges it: an empty list of numbers is one too."""
    return isinstance(value, list) and all(isinstance(t, Tensor) for t in value)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, tuple) and not _holds_tensors(value)


class _Transformed(torch.autograd.Function):
    """An operator's call inside ``torch.func.grad`` or ``vjp``. leaves, spec: its arguments, with lists of tensors flattened."""

    @staticmethod
    def forward(operator: Any, spec: Any, *leaves: Any) -> Any:  # type: ignore[override]
        results = operator(*pytree.tree_unflatten(leaves, spec))
        return tuple(results) if isinstance(results, list) else results

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        operator, spec, *leaves = inputs
        ctx.operator = operator
        _derivatives[operator].save(ctx, pytree.tree_unflatten(leaves, spec), output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, *pytree.tree_leaves(_derivatives[ctx.operator].gradients(ctx, *grads))
