"""Captured loads: how (query, key) pairs share the entries of captured tensors that a score mod reads, and so their gradient sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from anyattn.mods.ir.dependence import Dep
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.grad import score_gradients

__all__ = ["contends", "moves_along_diagonals", "slots_alone", "tells_apart"]


def tells_apart(expr: Expr, at: int, deps: Sequence[Dep]) -> bool:
    """Whether an index changes with every step of each position that it depends on, so that neighbours read different entries (an absolute
    value makes two positions share one): true of ``q_idx`` and ``q_idx - kv_idx + 7``, not of ``ids[q_idx]``."""
    while expr.nodes[at].op in ("abs", "cast"):
        (at,) = expr.nodes[at].args
    return deps[at].slope not in (None, (0, 0))


def contends(expr: Expr, places: Sequence[int], deps: Sequence[Dep], has_diagonals: bool) -> bool:
    """Whether a tile's additions may still contend for few entries, after pairs that provably share an entry have been summed."""
    apart = [deps[p] for p in places if tells_apart(expr, p, deps)]
    by_row, by_key = not any(deps[p].kv for p in places), not any(deps[p].q for p in places)
    if by_row and by_key:
        return False
    if by_row or by_key or has_diagonals:
        return not apart
    return not (any(d.q and not d.kv for d in apart) and any(d.kv and not d.q for d in apart))


def moves_along_diagonals(deps: Sequence[Dep], places: Sequence[int]) -> bool:
    """Whether these indices differ along queries and along keys, and depend on the two positions only by their difference."""
    moving = [deps[p] for p in places if deps[p].q or deps[p].kv]
    return any(d.q for d in moving) and any(d.kv for d in moving) and all(d.diagonal for d in moving)


@lru_cache(maxsize=1024)
def slots_alone(expr: Expr, wanted: tuple[int, ...], sizes: tuple[int, int, int, int], shapes: tuple[torch.Size, ...]) -> tuple[int, ...]:
    """The ``wanted`` slots whose tensor is loaded once, each entry by a single (query, key) pair: the indices are b, h, q_idx and, last,
    kv_idx, and the tensor has room for all ``sizes`` of them. shapes: of all captured tensors."""
    extents = dict(zip(("b", "h", "q_idx", "kv_idx"), sizes, strict=True))
    gradients = score_gradients(expr)
    found = []
    for slot in wanted:
        loads = [load for load in gradients.loads if load.slot == slot]
        nodes = [gradients.expr.nodes[gradients.expr.outputs[i]] for i in loads[0].indices] if loads else []
        names = [node.attr if node.op == "index" else None for node in nodes]
        has_room = bool(loads) and all(name is None or n >= extents[name] for name, n in zip(names, shapes[slot], strict=True))  # type: ignore[index]
        if len(loads) == 1 and len(names) == 4 and extents.keys() == set(names) and names[-1] == "kv_idx" and has_room:
            found.append(slot)
    return tuple(found)
