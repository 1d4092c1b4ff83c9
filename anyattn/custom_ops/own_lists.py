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
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.lists import TupleVariable
from torch._dynamo.variables.tensor import TensorVariable

from anyattn.custom_ops.capture import call_with_mods
from anyattn.custom_ops.define import operator

__all__ = ["own_list", "with_own_lists"]


class OwnList(NamedTuple):
    """The operator's arguments."""

    one: Tensor


@operator(OwnList, fake=lambda given: torch.empty(given.one.shape, dtype=given.one.dtype, device=given.one.device))
def own_list(given: OwnList) -> Tensor:
    """A contiguous copy."""
    return given.one.clone(memory_format=torch.contiguous_format)


def with_own_lists(tx: Any, entry: str, operands: Any) -> Any:
    """The operands of a call that Dynamo traces, with copies of the lists that its graph computes."""
    place = {"flex": 1, "flash": 5}.get(entry)
    if place is None:
        return operands
    items = list(operands.items)
    items[place] = _own(tx, items[place])
    return TupleVariable(items)


def _own(tx: Any, lists: Any) -> Any:
    lists = lists.realize()
    if isinstance(lists, TupleVariable):
        return TupleVariable([_own(tx, one) for one in lists.items])
    if not isinstance(lists, TensorVariable):
        return lists
    node, example = lists.proxy.node, lists.proxy.node.meta["example_value"]
    if _is_from_outside(node, example) or _is_of_operator(node):
        return lists
    copies = vars(tx.output.current_tracer).setdefault("_anyattn_own_lists", {})
    if (known := copies.get((node, example._version))) is None:
        proxy = tx.output.create_proxy("call_function", own_list, (lists.as_proxy(),), {})
        known = copies[node, example._version] = wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)
    return known


def _is_from_outside(node: Any, example: Tensor) -> bool:
    """Whether this is an input of the graph that the graph has not written to."""
    return node.op in ("placeholder", "get_attr") and example._version == 0


def _is_of_operator(node: Any) -> bool:
    """Whether anyattn's own operators have made it, such as that of ``create_block_mask``."""
    return node.op == "call_function" and node.target is python_operator.getitem and node.args[0].target is call_with_mods
