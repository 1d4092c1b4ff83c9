"""Row families: loads of a row's elements, ``a[q_idx, 0]`` to ``a[q_idx, 63]``, whose derivatives are one expression of the element.

A mod that reduces rows of captured tensors (``mods/tracing/vectors.py``) is written out element by element, but its gradients need not be:
if the derivative by element c, and c's indices, are the same expression of c for all elements, a kernel computes them in a loop. Written
out, 128 additions to totals take Triton's compiler many minutes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from anyattn.mods.ir.expr import Builder, Expr, Node
from anyattn.mods.ir.grad import Gradients, LoadGradient, score_gradients
from anyattn.problem import Problem

__all__ = ["Family", "families", "reason_against"]

_FEWEST = 4  # loads; fewer are written out
_MOST = 48  # loads written out: the kernel compiles for half a minute, with twice as many for many minutes


class Family(NamedTuple):
    """expr: outputs are the derivative by one element's load and that load's indices; the captured number of slot ``element``, one more
    than the mod captures, selects the element. slot: of the tensor. elements: those that the family covers."""

    expr: Expr
    slot: int
    element: int
    elements: range


def families(gradients: Gradients, element: int) -> tuple[list[Family], list[LoadGradient]]:
    """The families among the loads, and the loads in no family. element: the slot of the number that selects the element."""
    groups: dict[tuple, list[tuple[int, LoadGradient]]] = {}
    alone, row_families = [], []
    nodes, outputs = gradients.expr.nodes, gradients.expr.outputs
    for load in gradients.loads:
        places = [outputs[i] for i in load.indices]
        at = next((d for d in reversed(range(len(places))) if nodes[places[d]].op == "const"), None)
        if at is None:
            alone.append(load)
        else:
            others = tuple(p for d, p in enumerate(places) if d != at)
            groups.setdefault((load.slot, at, others), []).append((nodes[places[at]].attr, load))  # type: ignore[arg-type]
    for (slot, _, _), members in groups.items():
        members.sort(key=lambda member: member[0])
        family = _family(gradients, slot, members, element) if len(members) >= _FEWEST else None
        if family is None:
            alone += [load for _, load in members]
        else:
            row_families.append(family)
    return row_families, sorted(alone, key=gradients.loads.index)


def reason_against(problem: Problem) -> str | None:
    """None if a kernel can add the derivatives of a call to its score mod's captured gradients, else the reason against it, for people."""
    score = problem.score
    if score is None:
        return None
    count = _written_out(score.expr, tuple(slot for slot, t in enumerate(score.tensors) if t.requires_grad))
    if count <= _MOST:
        return None
    return f"the score mod needs {count} separate expressions for the gradients of captured tensors; its kernels have room for {_MOST}"


@lru_cache(maxsize=1024)
def _written_out(expr: Expr, wanted: tuple[int, ...]) -> int:
    if sum(node.op == "load" and node.attr in wanted for node in expr.nodes) <= _MOST:
        return 0
    gradients = score_gradients(expr)
    return len(families(Gradients(gradients.expr, tuple(load for load in gradients.loads if load.slot in wanted)), 0)[1])


def _family(gradients: Gradients, slot: int, members: list[tuple[int, LoadGradient]], element: int) -> Family | None:
    values = [value for value, _ in members]
    step = values[1] - values[0]
    elements = range(values[0], values[-1] + 1, step) if step > 0 else range(0)
    if list(elements) != values:
        return None
    exprs = [_alone(gradients, load) for _, load in members]
    first = exprs[0]
    if any(len(e.nodes) != len(first.nodes) or e.outputs != first.outputs for e in exprs):
        return None
    offsets: list[int | None] = []  # by node: a literal's difference from the element's number, None if the node is equal for all elements
    for same in zip(*(e.nodes for e in exprs), strict=True):
        if all(node == same[0] and repr(node.attr) == repr(same[0].attr) for node in same):  # -0.0 is equal to 0.0
            offsets.append(None)
        elif _are_indices(same) and len(apart := {node.attr - value for node, value in zip(same, values, strict=True)}) == 1:
            offsets.append(apart.pop())
        else:
            return None
    return Family(_of_element(first, offsets, element), slot, element, elements)


def _alone(gradients: Gradients, load: LoadGradient) -> Expr:
    builder, outputs = Builder(), gradients.expr.outputs
    return builder.build(*(builder.copy(gradients.expr, outputs[i]) for i in (load.output, *load.indices)))


def _are_indices(nodes: tuple[Node, ...]) -> bool:
    return all(node.op == "const" and node.dtype is torch.int64 for node in nodes)


def _of_element(expr: Expr, offsets: list[int | None], element: int) -> Expr:
    """``expr`` with literals that differ between elements replaced by expressions of the element's number."""
    builder = Builder()
    number = builder.cast(builder.add("scalar", dtype=int, attr=element), torch.int64)
    new: list[int] = []
    for node, offset in zip(expr.nodes, offsets, strict=True):
        if offset is None:
            new.append(builder.add(node.op, *(new[a] for a in node.args), dtype=node.dtype, attr=node.attr))
        else:
            new.append(builder.add("add", number, builder.const(offset, torch.int64)))
    return builder.build(*(new[o] for o in expr.outputs))
