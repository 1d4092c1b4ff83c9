"""How often each value of a mod's expression is computed in a fragment of scores: analysis for the emitter and the choice of tiles."""

from __future__ import annotations

from functools import lru_cache

from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr, category

__all__ = ["reads_apart", "reads_straight", "stages", "straight"]


@lru_cache(maxsize=256)
def stages(expr: Expr) -> tuple[str, ...]:
    """For each node "once", "row", "col" or "tile": with what it changes."""
    return tuple("tile" if d.score or (d.q and d.kv) else "row" if d.q else "col" if d.kv else "once" for d in dependence(expr))


@lru_cache(maxsize=256)
def straight(expr: Expr) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes that go by a whole number that grows evenly from key to key: casts of it to float, and reads along a last dimension."""
    due, deps = stages(expr), dependence(expr)
    casts, reads = [], []
    for i, node in enumerate(expr.nodes):
        if due[i] != "tile" or not node.args:
            continue
        last = node.args[-1]
        if due[last] != "tile" or deps[last].slope is None or category(expr.nodes[last].dtype) != "int":
            continue
        if node.op == "cast" and category(node.dtype) == "float":
            casts.append(i)
        elif node.op == "load" and all(due[a] in ("once", "row") for a in node.args[:-1]):
            reads.append(i)
    return tuple(casts), tuple(reads)


def reads_apart(expr: Expr) -> bool:
    """Whether some tensor is read for every score at a place of its own, not along its last dimension."""
    along = straight(expr)[1]
    if any(n.op == "tensor" for n in expr.nodes):  # a CuTe function reads it as it likes
        return True
    return any(n.op == "load" and due == "tile" and i not in along for i, (n, due) in enumerate(zip(expr.nodes, stages(expr), strict=True)))


def reads_straight(expr: Expr) -> bool:
    """Whether some tensor is read for every score along its last dimension."""
    return bool(straight(expr)[1])
