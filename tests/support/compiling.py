"""Shared code of the tests of compiled calls: compiled beside eager, with gradients and a count of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from anyattn.custom_ops import dynamo


def fresh(call: Callable, backend: str = "aot_eager", **options: Any) -> tuple[Callable, CompileCounterWithBackend]:
    """``call`` compiled as one graph, and the counter of the graphs made."""
    torch._dynamo.reset()
    dynamo.run_uncompiled(False)  # an earlier test's refusal makes entry points opaque to Dynamo
    counter = CompileCounterWithBackend(backend)
    return torch.compile(call, fullgraph=True, backend=counter, **options), counter


def results(call: Callable, args: Sequence[Any], sources: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a call and the gradients of a weighted sum of them for ``sources``."""
    outs = call(*args)
    outs = [*outs] if isinstance(outs, (tuple, list)) else [outs]
    if not sources:
        return outs
    total = sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outs if o.requires_grad)
    return [o.detach() for o in outs] + [*torch.autograd.grad(total, sources)]


def same(compiled: Callable, eager: Callable, args: Sequence[Any], sources: Sequence[Tensor] = ()) -> bool:
    """Whether both give the same bits."""
    pairs = zip(results(compiled, args, sources), results(eager, args, sources), strict=True)
    return all(a.dtype is b.dtype and torch.equal(a, b) for a, b in pairs)


def nearly_same(compiled: Callable, eager: Callable, args: Sequence[Any], sources: Sequence[Tensor] = ()) -> bool:
    """Whether both agree but for a few roundings of the greatest element: sums of another order, as other strides or fusions make them."""
    for a, b in zip(results(compiled, args, sources), results(eager, args, sources), strict=True):
        if a.dtype is not b.dtype or a.shape != b.shape:
            return False
        if float((a - b).abs().max()) > 32 * torch.finfo(b.dtype).eps * float(b.abs().max()):
            return False
    return True
