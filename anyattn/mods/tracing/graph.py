"""Tracing of FX graphs: runs a mod that a compiler passes as a graph on symbolic values, as ``trace.py`` runs a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.tracing.diagnostics import FUNCTION_CURE, MODE_CURE, at_line, mod_error
from anyattn.mods.tracing.symbolic import Value
from anyattn.mods.tracing.symbols import InterceptTorch, surfaced
from anyattn.mods.tracing.trace import TracedMod, Tracer, finished, inputs_of

__all__ = ["trace_graph"]

# The functions by which a graph changes the mode of a part.
_MODE_CHANGES = {torch._C._set_grad_enabled: "grad mode", torch.amp.autocast_mode._enter_autocast: "autocast"}


class _Run(torch.fx.Interpreter):
    """Runs a graph on symbolic values; errors name the user's line that the node came from.

    numbers: the numbers that the compiler keeps symbolic, by scalar slot; ``run`` appends to them.
    """

    extra_traceback = False

    def __init__(self, graph: torch.fx.GraphModule, tracer: Tracer, score_dtype: torch.dtype):
        super().__init__(graph, garbage_collect_values=False)
        self.tracer, self.score_dtype = tracer, score_dtype
        self.numbers: list[Any] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        with at_line(n.stack_trace):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "_name", "") == "autograd_function_apply":
            raise mod_error("a mod applies a torch.autograd.Function, whose backward no kernel could call", FUNCTION_CURE)
        if target in _MODE_CHANGES:
            raise mod_error(f"a mod changes {_MODE_CHANGES[target]} while it computes", MODE_CURE)
        return self.lifted(super().call_function(target, args, kwargs))

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().call_method(target, args, kwargs)
        return self.lifted(found)  # a captured float that has changed between calls is passed as a tensor's item()

    def lifted(self, item: Any) -> Any:
        """A symbolic number, such as a captured tensor's size, as a run-time scalar; other operands unchanged."""
        if isinstance(item, torch.Size):
            return tuple([self.lifted(n) for n in item])
        if isinstance(item, torch.SymFloat):
            # a sum, since torch keeps a float symbolic only in operations with tensors that it knows
            return self.real(torch.zeros((), dtype=torch.float64, device="cpu") + item)  # type: ignore[operator]
        if not isinstance(item, torch.SymInt):
            return item
        slot = next((i for i, n in enumerate(self.numbers) if n.node.expr == item.node.expr), len(self.numbers))
        if slot == len(self.numbers):
            self.numbers.append(item)
        return surfaced(Value(self.tracer, self.tracer.add("scalar", dtype=int, attr=slot)))

    def real(self, number: Tensor) -> Any:
        """A captured float held in a tensor of rank 0, cast to the score's dtype, as torch combines a Python float with a score."""
        value = Value.lift(self.tracer, number)
        return surfaced(Value(self.tracer, self.tracer.cast(value.node, self.score_dtype)))


def trace_graph(
    graph: torch.fx.GraphModule, kind: str, captured: Sequence[Any], *, name: str, score_dtype: torch.dtype, device: torch.device
) -> TracedMod:
    """The ``TracedMod`` of a graph of (score, b, h, q_idx, kv_idx, *captured), or without score for a mask.

    captured: tensors, and the numbers that the compiler keeps symbolic, which become run-time scalars. name: of the mod, for messages.
    Raises ``ModError`` for a graph that the IR cannot express.
    """
    tracer = Tracer(device)
    runner = _Run(graph, tracer, score_dtype)
    arguments = [*inputs_of(tracer, kind, score_dtype), *map(runner.lifted, captured)]
    with InterceptTorch(tracer):
        result = runner.run(*arguments, enable_io_processing=False)
        if isinstance(result, (tuple, list)) and len(result) == 1:
            (result,) = result
        return finished(result, tracer, kind, score_dtype, runner.numbers, name)
