"""Block lists that a graph computes itself, in memory that no kernel of its compiler writes to.

What is made of lists is kept with their tensors, as long as torch counts no write to these (``list_operands``, ``block_sparse_operands``).
A compiler's kernels write without a count, and Inductor gives one tensor's memory, and the same Python object, to a later one of the same
size. So the attention operators take a copy of such lists, which an operator makes: its results are new memory.
"""

from __future__ import annotations

import operator as python_operator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from anyattn.custom_ops.define import operator
from anyattn.custom_ops.gradients import called

__all__ = ["own_list", "own_lists"]

_VIEWS = (python_operator.getitem, torch.ops.aten.select.int, torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class OwnList(NamedTuple):
    """The operator's arguments."""

    one: Tensor


@operator(OwnList, fake=lambda given: torch.empty(given.one.shape, dtype=given.one.dtype, device=given.one.device))
def own_list(given: OwnList) -> Tensor:
    """A contiguous copy."""
    return given.one.clone(memory_format=torch.contiguous_format)


def own_lists(lists: list[Tensor]) -> list[Tensor]:
    """The lists; while calls are written into a graph, copies of those that the graph computes, one for each of them in a graph."""
    mode = get_proxy_mode()
    return lists if mode is None else [_own(one, mode.tracer) for one in lists]


def _own(one: Tensor, tracer: Any) -> Tensor:
    inner = one
    if isinstance(one, FunctionalTensor):
        torch._sync(one)  # writes that are not in the graph yet
        inner = torch._from_functional_tensor(one.elem)
    found: Any = get_proxy_slot(inner, tracer, None)
    if found is None or _is_safe(found.proxy.node):  # what has no node is a constant
        return one
    copies = vars(tracer).setdefault("_anyattn_own_lists", {})
    if found.proxy.node not in copies:
        copies[found.proxy.node] = called(own_list, OwnList(one))
    return copies[found.proxy.node]  # type: ignore[no-any-return]


def _is_safe(node: Any) -> bool:
    """Whether this is an input of the graph, a constant, or what one of anyattn's operators has made."""
    if node.op in ("placeholder", "get_attr"):
        return True
    while node.target in _VIEWS:
        node = node.args[0]
    return getattr(node.target, "namespace", None) == "anyattn"
