"""Document masks: recognises ``ids[q_idx] == ids[kv_idx]``, alone or ANDed with a mask that depends on q_idx - kv_idx only.

Inside a document only the second mask remains, and it does not depend on where the document begins: each document can be computed as a
sequence of its own, whose positions count from 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, Node
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["DocumentForm", "document_form", "ignores_origin", "rest_of"]


class DocumentForm(NamedTuple):
    """A mask of the form ``ids[q_idx] == ids[kv_idx] & rest``, or with ``ids[b, ...]``.

    ids: the slot of the captured ids. rest: the mask inside a document, independent of b and of a common shift of both positions; None if
    it hides nothing. scalars, tensors: for each slot of ``rest`` the slot of the whole mask.
    """

    ids: int
    rest: Expr | None
    scalars: tuple[int, ...]
    tensors: tuple[int, ...]


@lru_cache(maxsize=1024)
def document_form(expr: Expr) -> DocumentForm | None:
    """The form of a mask's program; None if it is not a document mask.

    >>> from anyattn.mods.tracing.trace import trace
    >>> ids = torch.tensor([0, 0, 1])
    >>> document_form(trace(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), "mask").expr).rest.output.op
    'ge'
    """
    if len(expr.outputs) != 1:
        return None
    parts = expr.conjuncts()
    found = [(part, slot) for part in parts if (slot := _compared_ids(expr, expr.nodes[part])) is not None]
    if len(found) != 1:
        return None
    (equality, ids), *_ = found
    others = [part for part in parts if part != equality]
    if not others:
        return DocumentForm(ids, None, (), ())
    builder = Builder()
    joint = builder.copy(expr, others[0])
    for other in others[1:]:
        joint = builder.add("and", joint, builder.copy(expr, other))
    rest, scalars, tensors = _renumbered(builder.build(joint))
    return DocumentForm(ids, rest, scalars, tensors) if ignores_origin(rest) else None


def rest_of(mask: TracedMod, form: DocumentForm) -> TracedMod | None:
    """The mask inside a document, for a ``mask`` of this form; None if every pair of a document is visible."""
    if form.rest is None:
        return None
    scalars, tensors = tuple([mask.scalars[i] for i in form.scalars]), tuple([mask.tensors[i] for i in form.tensors])
    return TracedMod.of_fields(
        {"kind": "mask", "expr": form.rest, "scalars": scalars, "tensors": tensors, "name": mask.name, "source": None}
    )


@lru_cache(maxsize=1024)
def ignores_origin(expr: Expr) -> bool:
    """Whether a mod is independent of b and unchanged by a common shift of q_idx and kv_idx."""
    deps = dependence(expr)
    same: list[bool] = []
    for node, dep in zip(expr.nodes, deps, strict=True):
        stays = node.op == "score" or dep.diagonal or not (dep.q or dep.kv or dep.score)
        same.append(not dep.b and (stays or (bool(node.args) and node.op != "native" and all(same[a] for a in node.args))))
    return all(same[o] for o in expr.outputs)


def _compared_ids(expr: Expr, node: Node) -> int | None:
    """The slot of a tensor whose entries at q_idx and at kv_idx are compared for equality."""
    if node.op != "eq":
        return None
    left, right = (expr.nodes[a] for a in node.args)
    if left.op != "load" or right.op != "load" or left.attr != right.attr:
        return None
    if left.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        return None  # NaN is not equal to itself
    if not left.args or not right.args:
        return None
    (*before, last), (*other_before, other_last) = ([expr.nodes[a] for a in side.args] for side in (left, right))
    if {_index(last), _index(other_last)} != {"q_idx", "kv_idx"} or before != other_before:
        return None
    if [_index(n) for n in before] not in ([], ["b"]):
        return None
    return left.attr  # type: ignore[return-value]


def _index(node: Node) -> Any:
    return node.attr if node.op == "index" else None


def _renumbered(expr: Expr) -> tuple[Expr, tuple[int, ...], tuple[int, ...]]:
    """The same expression with scalar and tensor slots numbered from 0, and their former numbers."""
    slots: dict[str, list[int]] = {"scalar": [], "load": []}
    nodes = []
    for node in expr.nodes:
        kind = "load" if node.op == "tensor" else node.op
        if kind in slots:
            known = slots[kind]
            if node.attr not in known:
                known.append(node.attr)  # type: ignore[arg-type]
            node = node._replace(attr=known.index(node.attr))  # type: ignore[arg-type]
        nodes.append(node)
    return Expr(tuple(nodes), expr.outputs), tuple(slots["scalar"]), tuple(slots["load"])
