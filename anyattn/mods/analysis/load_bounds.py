"""Bounds checks of loads: proves, before a call runs, that a mod indexes its captured tensors inside their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.intervals import Tables, spans
from anyattn.mods.analysis.range_tables import Extremes, RangeTables
from anyattn.mods.analysis.tile_classes import FULL, classify
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.ir.dependence import Dep, dependence
from anyattn.mods.ir.expr import Builder, Expr, bool_of
from anyattn.mods.ir.extents import Box, Extent, extents
from anyattn.mods.tracing.trace import TracedMod

__all__ = [
    "Doubt",
    "OutsideError",
    "Unsettled",
    "check_loads",
    "check_loads_ragged",
    "depends_on_masks",
    "doubt",
    "inside",
    "message",
    "unsettled",
]

_TILE = 128
_Load = tuple[int, int, int]  # (slot, dimension, index's node)


class OutsideError(ValueError):
    """An index leaves its captured tensor at some pair, visible or hidden. slot, dim: of the load. arg: the node of the index."""

    def __init__(self, message: str, slot: int, dim: int, arg: int) -> None:
        super().__init__(message)
        self.slot, self.dim, self.arg = slot, dim, arg


_INSIDE: set[tuple] = set()  # memo of calls proved inside, by expression, captured numbers, shapes and lengths


def check_loads(mod: TracedMod, B: int, H: int, seqlen_q: int, seqlen_k: int, *, reads_values: bool = True) -> None:
    """Raises ``OutsideError`` if ``mod`` would index a captured tensor out of its range at some (b, h, q_idx, kv_idx).

    ``visible_loads.check_call`` checks the visible pairs only.

    Negative indices count from the end, as in torch. The check is cheap where an index is b, h, q_idx or kv_idx itself. Otherwise the range
    of the index over all positions decides; where that is too coarse the index is evaluated exactly, in O(S) if it depends on one position
    or on q_idx - kv_idx only, else tile by tile and only in undecided tiles.

    reads_values: False skips checks that need the values of captured tensors, and runs the others on the CPU: then the call does not
    synchronise with the device of the tensors.
    """
    sizes = {"b": B, "h": H, "q_idx": seqlen_q, "kv_idx": seqlen_k}
    if min(sizes.values()) == 0:
        return
    doubtful = _doubtful(mod, sizes)
    if not doubtful:
        return
    known = (mod.expr, mod.scalars, tuple(t.shape for t in mod.tensors), tuple(sizes.values()))
    if known in _INSIDE:
        return
    by_values, others = _apart(mod, doubtful, sizes)
    doubtful = [load for load in doubtful if load in others or (reads_values and load in by_values)]
    if not doubtful:
        return
    if not reads_values or not by_values:  # shapes and numbers decide: computed on the CPU, without synchronising
        mod = replace(mod, tensors=tuple(torch.empty((), dtype=t.dtype, device="cpu").expand(t.shape) for t in mod.tensors))
    deps = dependence(mod.expr)
    # whole tensors' extremes, on the CPU, decide about most: then a device is read once, and no table is built there
    doubtful = list(_still_doubtful(mod, doubtful, _box(sizes, "cpu"), Extremes(mod.tensors)))
    device = mod.tensors[0].device
    for slot, dim, arg in _still_doubtful(mod, doubtful, _box(sizes, device), RangeTables(mod.tensors, device)) if doubtful else ():
        _settle(mod, slot, dim, arg, deps[arg], sizes)
    if not by_values:  # the result does not depend on captured values
        if len(_INSIDE) > 4096:
            _INSIDE.clear()
        _INSIDE.add(known)


class Doubt(NamedTuple):
    """The inputs besides shapes that the bounds checks depend on: captured numbers, and contents of captured tensors, at these slots.

    of_score: an index is computed from the score, which the checks refuse.
    """

    of_numbers: bool
    slots: tuple[int, ...]
    of_score: bool


def doubt(mod: TracedMod, B: int, H: int, seqlen_q: int, seqlen_k: int) -> Doubt:
    """The inputs whose change ``check_loads`` must check again, for a mod with the same program and tensors of the same shapes.

    Numbers in front of those of ``mod.source`` are limits of clamped indices, which the shapes determine.
    """
    sizes = {"b": B, "h": H, "q_idx": seqlen_q, "kv_idx": seqlen_k}
    found = _doubtful(mod, sizes)
    nodes = [node for _, _, arg in found for node in _index(mod, arg).nodes]
    settled = 0 if mod.source is None else len(mod.scalars) - len(mod.source.scalars)
    of_numbers = any(node.op == "scalar" and node.attr >= settled for node in nodes)  # type: ignore[operator]
    by_contents = found if settled else _apart(mod, found, sizes)[0]  # limits prove nothing about the mod without them
    slots = dict.fromkeys(node.attr for _, _, arg in by_contents for node in _index(mod, arg).nodes if node.op == "load")
    return Doubt(of_numbers, tuple(slots), any(node.op == "score" for node in nodes))  # type: ignore[arg-type]


def depends_on_masks(mod: TracedMod, B: int, H: int, seqlen_q: int, seqlen_k: int) -> bool:
    """Whether a load leaves its tensor at some pair, so that a mask has to hide the pair."""
    try:
        check_loads(mod, B, H, seqlen_q, seqlen_k)
    except OutsideError:
        return True
    return False


class Unsettled(NamedTuple):
    """Unproved loads as (slot, dimension, index's node). by_contents: the index is computed from another load, and inside for some of its
    contents only. by_positions: all others."""

    by_contents: list[_Load]
    by_positions: list[_Load]


def unsettled(mod: TracedMod, B: int, H: int, end_q: int, seqlen_k: int, first_q: int = 0) -> Unsettled:
    """The loads that sizes and the mod's numbers do not prove to be inside at all (b, h, q_idx, kv_idx).

    first_q <= q_idx < end_q; first_q is 0 or negative. No tensor is read, so the call does not synchronise.
    """
    sizes = {"b": B, "h": H, "q_idx": max(end_q, -first_q), "kv_idx": seqlen_k}  # a negative q_idx counts from a tensor's end
    if min(sizes.values()) == 0:
        return Unsettled([], [])
    loads = _doubtful(mod, sizes)
    of_score = [load for load in loads if _index(mod, load[2]).uses_score]
    by_contents, by_positions = _apart(mod, [load for load in loads if load not in of_score], sizes, first_q, end_q)
    found = Unsettled(by_contents, of_score)  # an index computed from a score has no range; the check at the call refuses it
    if by_positions:
        box = _box(sizes, "cpu")
        box["q_idx"] = (torch.full((1,), first_q, device="cpu"), torch.full((1,), end_q - 1, device="cpu"))
        found.by_positions.extend(_still_doubtful(mod, by_positions, box, Extremes(mod.tensors)))
    return found


def check_loads_ragged(mod: TracedMod, H: int, seqlens_q: Tensor, seqlens_k: Tensor, q_first: Tensor | None = None) -> None:
    """``check_loads`` for a ragged batch: b is a sequence, and q_idx and kv_idx run over its own rows and keys only.

    seqlens_q, seqlens_k: int64 (B,). q_first: int64 (B,), the q_idx of each sequence's first row; default 0. A sequence without rows or
    without keys has no pairs, so nothing is read for it.
    """
    q_first = torch.zeros_like(seqlens_q) if q_first is None else q_first
    b = ((seqlens_q > 0) & (seqlens_k > 0)).nonzero()[:, 0]
    if H == 0 or len(b) == 0:
        return
    last_q, last_kv = (q_first + seqlens_q - 1)[b], (seqlens_k - 1)[b]
    most_q = max(int(last_q.max()) + 1, -int(q_first[b].min()))  # a negative q_idx counts from a tensor's end
    sizes = {"b": int(b[-1]) + 1, "h": H, "q_idx": most_q, "kv_idx": int(last_kv.max()) + 1}
    doubtful = _doubtful(mod, sizes)
    if not doubtful:
        return
    zero = torch.zeros_like(b)
    box = {"b": (b, b), "h": (zero, zero + (H - 1)), "q_idx": (q_first[b], last_q), "kv_idx": (zero, last_kv)}
    for slot, dim, arg in _still_doubtful(mod, doubtful, box, RangeTables(mod.tensors, b.device)):
        _settle_ragged(mod, slot, dim, arg, H, seqlens_q, seqlens_k, q_first)


def _doubtful(mod: TracedMod, sizes: dict[str, int]) -> list[_Load]:
    """(slot, dimension, index's node) of the loads that are not obviously inside, in the order of their nodes."""
    return [
        (node.attr, dim, arg)  # type: ignore[misc]
        for node in mod.expr.nodes
        if node.op == "load"
        for dim, arg in enumerate(node.args)
        if not _plainly_inside(mod, arg, sizes, mod.tensors[node.attr].shape[dim])  # type: ignore[index, call-overload]
    ]


def _apart(
    mod: TracedMod, loads: list[_Load], sizes: dict[str, int], first_q: int = 0, end_q: int | None = None
) -> tuple[list[_Load], list[_Load]]:
    """Those of ``loads`` whose index is computed from other loads, and inside for some of their contents only; and those whose index is
    computed from positions and numbers alone. first_q, end_q: as in ``unsettled``. No tensor is computed."""
    looked_up = [load for load in loads if any(node.op == "load" for node in _index(mod, load[2]).nodes)]
    if not looked_up:
        return [], loads
    ends = {name: Extent(0, n - 1) for name, n in sizes.items()}
    if end_q is not None:
        ends["q_idx"] = Extent(first_q, end_q - 1)
    box = Box(ends["b"], ends["h"], ends["q_idx"], ends["kv_idx"], Box.of_numbers(1, mod.scalars).scalars)

    def is_inside(slot: int, dim: int, arg: int) -> bool:
        index, size = _index(mod, arg), mod.tensors[slot].shape[dim]
        extent = extents(index, box)[index.outputs[0]]
        return extent is not None and -size <= extent.lo and extent.hi < size

    return [load for load in looked_up if not is_inside(*load)], [load for load in loads if load not in looked_up]


def _box(sizes: dict[str, int], device: torch.device | str) -> dict[str, tuple[Tensor, Tensor]]:
    """One box of all positions."""
    return {name: (torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), n - 1, device=device)) for name, n in sizes.items()}


def _still_doubtful(mod: TracedMod, doubtful: list[_Load], box: dict[str, tuple[Tensor, Tensor]], tables: Tables) -> Iterator[_Load]:
    """The loads that interval arithmetic over ``box``, by ``tables`` on its device, does not prove to be inside."""
    builder = Builder()
    indices = builder.build(*(builder.copy(mod.expr, arg) for _, _, arg in doubtful))
    found = spans(indices, box, mod.scalars, tables) if not indices.uses_score else None
    for at, (slot, dim, arg) in enumerate(doubtful):
        size = mod.tensors[slot].shape[dim]
        if found is None or not bool(((found[at].lo >= -size) & (found[at].hi < size)).all()):
            yield slot, dim, arg


def _index(mod: TracedMod, arg: int) -> Expr:
    return _part(mod.expr, arg)


@lru_cache(maxsize=1024)
def _part(expr: Expr, node: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(expr, node))


def _index_without_score(mod: TracedMod, slot: int, dim: int, arg: int) -> Expr:
    index = _index(mod, arg)
    if index.uses_score:
        raise ValueError(message(mod, slot, dim, "an index computed from the score, which has no known range"))
    return index


def _plainly_inside(mod: TracedMod, arg: int, sizes: dict[str, int], size: int) -> bool:
    node = mod.expr.nodes[arg]
    if node.op == "const":
        return -size <= node.attr < size  # type: ignore[operator]
    if bool_of(mod.expr, arg) is not None:
        return size >= 2
    return node.op == "index" and sizes[node.attr] <= size  # type: ignore[index, call-overload]


def _settle(mod: TracedMod, slot: int, dim: int, arg: int, dep: Dep, sizes: dict[str, int]) -> None:
    index = _index_without_score(mod, slot, dim, arg)
    size = mod.tensors[slot].shape[dim]
    device = mod.tensors[0].device
    if dep.q and dep.kv and not dep.diagonal:
        _settle_by_tiles(mod, slot, dim, arg, index, sizes)
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
        raise OutsideError(message(mod, slot, dim, f"index {int(value[tuple(at)])} (at {place})"), slot, dim, arg)


def _at(positions: Tensor, i: int) -> int:
    return int(positions[min(i, len(positions) - 1)])


def _run(index: Expr, leaves: dict[str, Any], mod: TracedMod) -> Tensor:
    value = run(index, leaves, mod.scalars, mod.tensors)[0]
    return value if isinstance(value, Tensor) else torch.tensor(value, device="cpu")


def _settle_by_tiles(mod: TracedMod, slot: int, dim: int, arg: int, index: Expr, sizes: dict[str, int]) -> None:
    """Checks by tile classes: the index stays inside exactly where the mask ``-size <= index < size`` is full."""
    classes = classify(inside(mod, slot, dim, index), sizes["q_idx"], sizes["kv_idx"], _TILE, _TILE, sizes["b"], sizes["h"])
    outside = (classes != FULL).nonzero()
    if len(outside):
        b, h, i, j = outside[0].tolist()
        rows, columns = range(i * _TILE, min((i + 1) * _TILE, sizes["q_idx"])), range(j * _TILE, min((j + 1) * _TILE, sizes["kv_idx"]))
        _raise_outside(mod, slot, dim, arg, index, b, h, rows, columns)


def _settle_ragged(mod: TracedMod, slot: int, dim: int, arg: int, H: int, seqlens_q: Tensor, seqlens_k: Tensor, q_first: Tensor) -> None:
    index = _index_without_score(mod, slot, dim, arg)
    classes = classify_ragged(inside(mod, slot, dim, index), seqlens_q, seqlens_k, _TILE, _TILE, H, q_first)
    outside = (classes != FULL).nonzero()
    if len(outside):
        h = int(outside[0, 0])
        b, i, j = (int(x) for x in RaggedTiles(seqlens_q, seqlens_k, (_TILE, _TILE)).locate(outside[0, 1]))
        first, most = int(q_first[b]), (int(seqlens_q[b]), int(seqlens_k[b]))
        rows = range(first + i * _TILE, first + min((i + 1) * _TILE, most[0]))
        _raise_outside(mod, slot, dim, arg, index, b, h, rows, range(j * _TILE, min((j + 1) * _TILE, most[1])))


def inside(mod: TracedMod, slot: int, dim: int, index: Expr) -> TracedMod:
    """The mask of the pairs at which the index stays inside."""
    size = mod.tensors[slot].shape[dim]
    builder = Builder()
    node = builder.copy(index)
    low = builder.add("ge", node, builder.const(-size, torch.int64))
    high = builder.add("lt", node, builder.const(size, torch.int64))
    return TracedMod("mask", builder.build(builder.add("and", low, high)), mod.scalars, mod.tensors, mod.name)


def _raise_outside(mod: TracedMod, slot: int, dim: int, arg: int, index: Expr, b: int, h: int, rows: range, columns: range) -> None:
    """Raises for the first of these pairs at which the index leaves its dimension; at least one does."""
    size, device = mod.tensors[slot].shape[dim], mod.tensors[0].device
    q, kv = (torch.arange(r.start, r.stop, device=device) for r in (rows, columns))
    value = _run(index, {"b": b, "h": h, "q_idx": q[:, None], "kv_idx": kv}, mod)
    value = value.broadcast_to(len(rows), len(columns))
    at = ((value < -size) | (value >= size)).nonzero()[0].tolist()
    place = f"b={b}, h={h}, q_idx={rows[at[0]]}, kv_idx={columns[at[1]]}"
    raise OutsideError(message(mod, slot, dim, f"index {int(value[tuple(at)])} (at {place})"), slot, dim, arg)


def message(mod: TracedMod, slot: int, dim: int, what: str) -> str:
    shape = tuple(mod.tensors[slot].shape)
    return (
        f"{mod.kind}_mod {mod.name!r} reads dimension {dim} of a captured tensor of shape {shape} at {what}; "
        f"wanted an index from {-shape[dim]} to {shape[dim] - 1}. Capture a tensor that covers every position of this call, "
        "keep the index inside with torch.clamp, or hide such pairs by the mask"
    )
