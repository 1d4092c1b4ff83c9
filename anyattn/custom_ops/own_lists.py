"""Copies of block lists that a graph computes itself, in memory that the compiler's kernels do not write to.

Data derived from lists is cached with their tensors as long as torch counts no write to them (``list_operands``,
``block_sparse_operands``). A compiler's kernels write without counting, and Inductor reuses a tensor's memory, and its Python object, for a
later tensor of the same size. So the attention operators are given a copy of such lists, made by an operator: its results are new memory.
"""

from __future__ import annotations

import operator as python_operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from anyattn.custom_ops.graph_nodes import node_of
from anyattn.custom_ops.operators import called, operator

__all__ = ["own_list", "own_lists"]

_VIEWS = (python_operator.getitem, torch.ops.aten.select.int, torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class OwnList(NamedTuple):
    """The operator's arguments."""

    one: Tensor


@operator(OwnList, fake=lambda operands: torch.empty(operands.one.shape, dtype=operands.one.dtype, device=operands.one.device))
def own_list(operands: OwnList) -> Tensor:
    """A contiguous copy of the list."""
    return operands.one.clone(memory_format=torch.contiguous_format)


def own_lists(lists: list[Tensor]) -> list[Tensor]:
    """The lists; during graph capture, lists that the graph computes are replaced by copies, one per list and graph."""
    mode = get_proxy_mode()
    return lists if mode is None else [_own(one, mode.tracer) for one in lists]


def _own(one: Tensor, tracer: Any) -> Tensor:
    node = node_of(one, tracer)
    if node is None or _is_safe(node):
        return one
    copies = vars(tracer).setdefault("_anyattn_own_lists", {})
    if node not in copies:
        copies[node] = called(own_list, OwnList(one))
    return copies[node]  # type: ignore[no-any-return]


def _is_safe(node: Any) -> bool:
    """Whether the node is a graph input, a constant, or a result of one of anyattn's operators."""
    if node.op in ("placeholder", "get_attr"):
        return True
    while node.target in _VIEWS:
        node = node.args[0]
    return getattr(node.target, "namespace", None) == "anyattn"
