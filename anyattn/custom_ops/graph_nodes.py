"""Nodes of a graph under capture: the value that a tensor has at this point of the program, after the writes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.made_of import captures

__all__ = ["captures_in_graph", "node_of"]


def node_of(one: Tensor, tracer: Any) -> Any:
    """The tensor's node; None for a constant."""
    inner = one
    if isinstance(one, FunctionalTensor):
        torch._sync(one)  # adds pending writes to the graph
        inner = torch._from_functional_tensor(one.elem)
    slot: Any = get_proxy_slot(inner, tracer, None)
    return None if slot is None else slot.proxy.node


def captures_in_graph(mask: TracedMod) -> tuple[Any, Sequence[Any], Sequence[Tensor]]:
    """``captures`` of a mask that a compiled program runs.

    During graph capture the tensors' nodes are part of the structure: an operator's writes to a functional tensor change its node, but are
    counted only if the operator counts them. Symbolic numbers are replaced by their expressions, whose comparison does not guard the graph.
    """
    structure, numbers, tensors = captures(mask)
    mode = get_proxy_mode()
    nodes = None if mode is None else tuple([node_of(t, mode.tracer) for t in tensors])
    return (structure, nodes), [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers], tensors
