"""How often each value of a mod's expression has to be computed in a fragment of scores; pure analysis, for emitter and heuristics."""

from __future__ import annotations

from functools import lru_cache

from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr, category

__all__ = ["reads_apart", "reads_straight", "stages", "straight"]


@lru_cache(maxsize=256)
def stages(expr: Expr) -> tuple[str, ...]:
    """For each node "once", "row", "col" or "tile": what it changes with."""
    return tuple("tile" if d.score or (d.q and d.kv) else "row" if d.q else "col" if d.kv else "once" for d in dependence(expr))


@lru_cache(maxsize=256)
def straight(expr: Expr) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes that change by a fixed step from column to column: whole numbers turned into floats, and reads along a tensor's last dimension."""
    stages, deps = stages(expr), dependence(expr)
    casts, reads = [], []
    for i, node in enumerate(expr.nodes):
        if stages[i] != "tile" or not node.args:
            continue
        last = node.args[-1]
        if stages[last] != "tile" or deps[last].slope is None or category(expr.nodes[last].dtype) != "int":
            continue
        if node.op == "cast" and category(node.dtype) == "float":
            casts.append(i)
        elif node.op == "load" and all(stages[a] in ("once", "row") for a in node.args[:-1]):
            reads.append(i)
    return tuple(casts), tuple(reads)


def reads_apart(expr: Expr) -> bool:
    """Whether some tensor is read for every score at a place of its own, not along its last dimension."""
    straight = straight(expr)[1]
    return any(n.op == "load" and due == "tile" and i not in straight for i, (n, due) in enumerate(zip(expr.nodes, stages(expr))))


def readsstraight(expr: Expr) -> bool:
    """Whether ``emit`` may read ahead."""
    return bool(straight(expr)[1])
