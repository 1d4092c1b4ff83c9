"""How Dynamo captures ``call_with_mods``: every mod becomes a subgraph, what it closes over operands of the subgraph.

Dynamo keeps a table from higher-order operators' names to the classes that trace them. It is semi-private: ``install`` enters ours beside
torch's own, and says so where this torch has it otherwise. What cannot be captured (a mod that Dynamo cannot trace, a torch without the
table) breaks the graph once, at the call; the entry points then run as in eager mode, opaque to Dynamo, after one warning.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy

__all__ = ["install"]


class CallWithModsVariable(higher_order_ops.TorchHigherOrderOperatorVariable):
    """``call_with_mods`` while Dynamo traces a call of it."""

    _HOP_NAME = "anyattn.call_with_mods"

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        entry, like, operands, kinds, mods = args
        graphs, captured = [], []
        for (kind, name), fn in zip(kinds.as_python_constant(), mods.items, strict=True):
            if fn.is_python_constant() and fn.as_python_constant() is None:
                graph, lifted = None, ()
            else:
                graph, lifted = _subgraph(tx, self.value, like, fn, kind, name)
            graphs.append(graph)
            captured.append(lifted)
        proxies, _ = proxy_args_kwargs([entry, like, operands, kinds], {})
        proxy = tx.output.create_proxy("call_function", self.value, (*proxies, tuple(graphs), tuple(captured)), {})
        return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)


def _subgraph(tx: Any, operator: Any, like: Any, fn: Any, kind: str, name: str) -> tuple[Any, tuple]:
    """The attribute of Dynamo's graph that holds the mod as a graph, and the proxies of what it closes over."""
    build = VariableTracker.build

    def scalar(dtype: torch.dtype, requires_grad: bool = False) -> Any:
        options = {"dtype": build(tx, dtype), "requires_grad": build(tx, requires_grad)}
        return like.call_method(tx, "new_empty", [build(tx, [])], options)

    with higher_order_ops.discard_graph_changes(tx):
        arguments = [scalar(torch.int64) for _ in range(4)]
        if kind == "score":  # as mods see it in eager mode, whatever the query's dtype
            dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
            arguments.insert(0, scalar(dtype, like.requires_grad))
    with TransformGetItemToIndex():  # table[q_idx] reads an entry, it does not ask for q_idx's value
        _, graph, lifted = higher_order_ops.speculate_subgraph(
            tx, fn, arguments, {}, description=f"anyattn: {name}", source_target=operator, set_subgraph_inputs="flatten_manual"
        )
    installed = tx.output.install_subgraph(name.replace(".", "_"), torch.fx.GraphModule(tx.output.nn_modules, graph))
    return higher_order_ops.make_attr(tx, installed), tuple(lifted)


def install() -> bool:
    table = getattr(higher_order_ops, "_hop_name_to_variable_class", None)
    if table is None:
        return False
    table["anyattn_call_with_mods"] = CallWithModsVariable
    return True


install()
