"""Shows, before anything runs, that a mod reads its captured tensors inside their bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.mods.dependence import Dep, dependence
from anyattn.mods.evaluate import run
from anyattn.mods.intervals import spans
from anyattn.mods.ir import Builder, Expr
from anyattn.mods.range_tables import RangeTables
from anyattn.mods.trace import TracedMod

__all__ = ["check_loads"]

_TILE = 128
_INSIDE: set[tuple] = set()  # calls of which it is known: by expression, captured numbers, shapes and lengths


def check_loads(mod: TracedMod, B: int, H: int, seqlen_q: int, seqlen_k: int) -> None:
    """Raises ``ValueError`` if ``mod`` would index a captured tensor out of its range at some (b, h, q_idx, kv_idx).

    Negative indices count from the end, as in torch. Cheap where an index is b, h, q_idx or kv_idx itself; otherwise the range of the
    index over all positions decides, and where that is too coarse the index is evaluated exactly: in O(S) where it depends on one
    position or on q_idx - kv_idx only, else tile by tile, only where in doubt.
    """
    sizes = {"b": B, "h": H, "q_idx": seqlen_q, "kv_idx": seqlen_k}
    if min(sizes.values()) == 0:
        return
    doubtful = [
        (node.attr, dim, arg)
        for node in mod.expr.nodes
        if node.op == "load"
        for dim, arg in enumerate(node.args)
        if not _plainly_inside(mod, arg, sizes, mod.tensors[node.attr].shape[dim])  # type: ignore[index, call-overload]
    ]
    if not doubtful:
        return
    known = (mod.expr, mod.scalars, tuple(t.shape for t in mod.tensors), tuple(sizes.values()))
    if known in _INSIDE:
        return
    _check_doubtful(mod, doubtful, sizes)
    if not any(node.op == "load" for _, _, arg in doubtful for node in _index(mod, arg).nodes):  # no captured value can move them
        if len(_INSIDE) > 4096:
            _INSIDE.clear()
        _INSIDE.add(known)


def _check_doubtful(mod: TracedMod, doubtful: list[tuple[Any, int, int]], sizes: dict[str, int]) -> None:
    device = mod.tensors[0].device
    box = {name: (torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), n - 1, device=device)) for name, n in sizes.items()}
    box["score"] = (torch.full((1,), float("nan"), device=device),) * 2
    indices = Expr(mod.expr.nodes, tuple(arg for _, _, arg in doubtful))
    indices, positions = _without_dead_nodes(indices)
    found = spans(indices, box, mod.scalars, RangeTables(mod.tensors, device)) if not indices.uses_score else None
    deps = dependence(mod.expr)
    for (slot, dim, arg), position in zip(doubtful, positions, strict=True):
        size = mod.tensors[slot].shape[dim]  # type: ignore[index, call-overload]
        if found is not None and not found[position].wild and bool((found[position].lo >= -size) & (found[position].hi < size)):
            continue
        _settle(mod, slot, dim, arg, deps[arg], sizes)  # type: ignore[arg-type]


def _index(mod: TracedMod, arg: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(mod.expr, arg))


def _plainly_inside(mod: TracedMod, arg: int, sizes: dict[str, int], size: int) -> bool:
    node = mod.expr.nodes[arg]
    if node.op == "const":
        return -size <= node.attr < size  # type: ignore[operator]
    return node.op == "index" and sizes[node.attr] <= size  # type: ignore[index, call-overload]


def _without_dead_nodes(expr: Expr) -> tuple[Expr, tuple[int, ...]]:
    builder = Builder()
    pruned = builder.build(*(builder.copy(expr, o) for o in expr.outputs))
    return pruned, pruned.outputs


def _settle(mod: TracedMod, slot: int, dim: int, arg: int, dep: Dep, sizes: dict[str, int]) -> None:
    index = _index(mod, arg)
    size = mod.tensors[slot].shape[dim]
    if index.uses_score:
        raise ValueError(_message(mod, slot, dim, "an index computed from the score, which has no known range"))
    device = mod.tensors[0].device
    if dep.q and dep.kv and not dep.diagonal:
        _settle_by_tiles(mod, slot, dim, index, sizes)
        return
    span = {name: torch.arange(n, device=device) for name, n in sizes.items()}
    if dep.diagonal:
        difference = torch.arange(1 - sizes["kv_idx"], sizes["q_idx"], device=device)
        q, kv = difference.clamp(min=0), (-difference).clamp(min=0)
    else:
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        q, kv = span["q_idx"] if dep.q else zero, span["kv_idx"] if dep.kv else zero
    leaves = {"b": span["b"][:, None, None], "h": span["h"][:, None], "q_idx": q, "kv_idx": kv}
    value = _run(index, leaves, mod)
    bad = (value < -size) | (value >= size)
    if bool(bad.any()):
        at = bad.broadcast_to(torch.broadcast_shapes(bad.shape, (1, 1, 1))).nonzero()[0].tolist()
        value = value.broadcast_to(torch.broadcast_shapes(value.shape, (1, 1, 1)))
        places = {"b": at[0], "h": at[1], "q_idx": _at(q, at[2]), "kv_idx": _at(kv, at[2])}
        place = ", ".join(f"{name}={i}" for name, i in places.items())
        raise ValueError(_message(mod, slot, dim, f"index {int(value[tuple(at)])} (at {place})"))


def _at(positions: Tensor, i: int) -> int:
    return int(positions[min(i, len(positions) - 1)])


def _run(index: Expr, leaves: dict[str, Any], mod: TracedMod) -> Tensor:
    value = run(index, leaves, mod.scalars, mod.tensors)[0]
    return value if isinstance(value, Tensor) else torch.tensor(value)


def _settle_by_tiles(mod: TracedMod, slot: int, dim: int, index: Expr, sizes: dict[str, int]) -> None:
    """The index stays inside exactly where the mask ``-size <= index < size`` is full."""
    from anyattn.mods.bounds import FULL, classify  # bounds imports this module

    size = mod.tensors[slot].shape[dim]
    builder = Builder()
    node = builder.copy(index)
    low = builder.add("ge", node, builder.const(-size, torch.int64))
    high = builder.add("lt", node, builder.const(size, torch.int64))
    inside = TracedMod("mask", builder.build(builder.add("and", low, high)), mod.scalars, mod.tensors, mod.name)
    classes = classify(inside, sizes["q_idx"], sizes["kv_idx"], _TILE, _TILE, sizes["b"], sizes["h"])
    outside = (classes != FULL).nonzero()
    if len(outside):
        b, h, i, j = outside[0].tolist()
        q, kv = i * _TILE, j * _TILE
        rows, columns = torch.arange(q, min(q + _TILE, sizes["q_idx"])), torch.arange(kv, min(kv + _TILE, sizes["kv_idx"]))
        device = mod.tensors[0].device
        leaves = {"b": b, "h": h, "q_idx": rows.to(device)[:, None], "kv_idx": columns.to(device)}
        value = _run(index, leaves, mod)
        at = ((value < -size) | (value >= size)).nonzero()[0].tolist()
        place = f"b={b}, h={h}, q_idx={q + at[0]}, kv_idx={kv + at[1]}"
        raise ValueError(_message(mod, slot, dim, f"index {int(value[tuple(at)])} (at {place})"))


def _message(mod: TracedMod, slot: int, dim: int, what: str) -> str:
    shape = tuple(mod.tensors[slot].shape)
    return (
        f"{mod.kind}_mod {mod.name!r} reads dimension {dim} of a captured tensor of shape {shape} at {what}; "
        f"wanted an index from {-shape[dim]} to {shape[dim] - 1}. Capture a tensor that covers every position of this call, "
        "or keep the index inside with torch.clamp"
    )
