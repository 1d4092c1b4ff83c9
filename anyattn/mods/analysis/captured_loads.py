"""Captured loads: how (query, key) pairs share the entries of captured tensors that a score mod reads, and so their gradient sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.analysis.far_sides import far_sides
from anyattn.mods.ir.dependence import Dep, dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import Gradients, LoadGradient, score_gradients

__all__ = [
    "UNIT",
    "DistanceTable",
    "contends",
    "distance_tables",
    "even_slots",
    "loads_even_tiles",
    "moves_along_diagonals",
    "slots_alone",
    "tells_apart",
]

UNIT = 8  # elements: 16 bytes of a 16-bit dtype, the width of one load instruction


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


def even_slots(expr: Expr, tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The slots of captured tensors of which a tile of scores reads a tile (``_slots_by_tile``), and whose rows are even: they have
    multiples of ``UNIT`` elements and begin at multiples of as many and of 16 bytes. Kernels load such rows in wide pieces."""
    return tuple(slot for slot in _slots_by_tile(expr) if has_even_rows(tensors[slot]))


def has_even_rows(t: Tensor) -> bool:
    """See ``even_slots``."""
    if t.ndim < 2 or t.shape[-1] % UNIT or t.stride(-1) != 1 or t.data_ptr() & 15:
        return False
    return not any(s % UNIT and n > 1 for s, n in zip(t.stride()[:-1], t.shape[:-1], strict=True))


@lru_cache(maxsize=4096)
def loads_even_tiles(expr: Expr, even: tuple[int, ...]) -> bool:
    """Whether there are values at the keys, all loaded from tensors of ``even_slots``."""
    deps = dependence(expr)
    return bool(even) and all(n.attr in even for n, due in zip(expr.nodes, deps, strict=True) if n.op == "load" and due.kv)


@lru_cache(maxsize=4096)
def _slots_by_tile(expr: Expr) -> tuple[int, ...]:
    """The slots that are only loaded with kv_idx itself as the last index and indices before it of which one is of the row and none of the
    key, and whose values are not indices themselves.

    >>> from anyattn.mods.tracing.trace import trace
    >>> bias, kinds, table = torch.rand(4, 8, 8), torch.zeros(8, 8, dtype=torch.int64), torch.rand(5)
    >>> _slots_by_tile(trace(lambda s, b, h, q, k: s + bias[h, q, k] + table[kinds[q, k]], "score").expr)
    (0,)
    """
    deps, nodes = dependence(expr), expr.nodes
    places: set[int] = set()  # nodes on which an index of a load depends
    slots: set[object] = set()
    others: set[object] = set()
    for at in range(len(nodes) - 1, -1, -1):
        node = nodes[at]
        if node.op == "load" or at in places:
            places.update(node.args)
        if node.op == "load":
            rows, last = node.args[:-1], node.args[-1] if node.args else at
            is_tile = nodes[last].op == "index" and nodes[last].attr == "kv_idx" and not any(deps[r].kv for r in rows)
            is_tile = is_tile and any(deps[r].q for r in rows) and at not in places
            (slots if is_tile else others).add(node.attr)
    return tuple(sorted(slots - others))  # type: ignore[arg-type]


# ---- tables by row and distance


class DistanceTable(NamedTuple):
    """A table by row and distance, such as ``table[b, h, q_idx, clamp(q_idx - kv_idx, -8, 8) + 8]``: one row of one head alone reads a row.
    slot: of the captured tensor. by_key: its rows are keys. places: the last index of its load as an expression, near the diagonal,
    with queries far after their keys and with queries far before them."""

    slot: int
    by_key: bool
    places: tuple[Expr, Expr, Expr]


@lru_cache(maxsize=1024)
def distance_tables(expr: Expr, wanted: tuple[int, ...], is_float16: bool = False) -> tuple[DistanceTable, ...]:
    """The tables by row and distance among the ``wanted`` slots of a score mod with two far sides, on which one entry of a row is read. All
    of one orientation have one derivative. is_float16: only those where it is 1 or -1, for products with other numbers may leave float16's
    range, or most of its digits, where the scores' derivatives do not.

    >>> from anyattn.mods.tracing.trace import trace
    >>> table = torch.zeros(1, 1, 9, 17)
    >>> mod = trace(lambda s, b, h, q, k: s + table[b, h, k, torch.clamp(q - k, -8, 8) + 8], "score").expr
    >>> [(found.slot, found.by_key) for found in distance_tables(mod, (0,))]
    [(0, True)]
    """
    sides = far_sides(expr)
    if sides[0] is None or sides[1] is None:
        return ()
    exprs = expr, sides[0].expr, sides[1].expr
    gradients = tuple(score_gradients(e) for e in exprs)
    found: dict[tuple[int, bool], DistanceTable] = {}
    factors: dict[bool, tuple] = {}
    for slot in wanted:
        loads = [[load for load in g.loads if load.slot == slot] for g in gradients]
        if any(len(of_one) != 1 for of_one in loads):
            continue
        kinds = {_orientation(g, of_one[0], i > 0) for i, (g, of_one) in enumerate(zip(gradients, loads, strict=True))}
        by_key = kinds.pop()
        if kinds or by_key is None:
            continue
        own = tuple(_alone(g, of_one[0].output) for g, of_one in zip(gradients, loads, strict=True))
        if is_float16 and not _is_unit(own[0]):
            continue
        if factors.setdefault(by_key, own) == own:
            places = tuple(_alone(g, of_one[0].indices[-1]) for g, of_one in zip(gradients, loads, strict=True))
            found[slot, by_key] = DistanceTable(slot, by_key, places)  # type: ignore[arg-type]
    return tuple(found.values())


def _orientation(gradients: Gradients, load: LoadGradient, is_far: bool) -> bool | None:
    """Whether the rows of a load's table are keys; None if it is no table by row and distance."""
    expr, deps = gradients.expr, dependence(gradients.expr)
    places = [expr.outputs[i] for i in load.indices]
    if len(places) != 4:
        return None
    names = [expr.nodes[p].attr if expr.nodes[p].op == "index" else None for p in places[:3]]
    last = deps[places[3]]
    is_distance = last.per_head if is_far else last.q and last.kv and last.diagonal and not last.score
    if names[:2] != ["b", "h"] or names[2] not in ("q_idx", "kv_idx") or not is_distance:
        return None
    return names[2] == "kv_idx"


def _is_unit(derivative: Expr) -> bool:
    return derivative.output.op == "const" and derivative.output.attr in (1.0, -1.0)


def _alone(gradients: Gradients, output: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(gradients.expr, gradients.expr.outputs[output]))
