"""Bounds checks of loads at visible pairs: an index may leave its captured tensor at a pair that a mask or tile lists hide.

Kernels compute whole tiles, including hidden pairs. If the index of a hidden pair lies outside, the mod's program is changed: the index is
clamped before the load. This changes nothing at visible pairs, and no backend reads outside the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from anyattn.mods.analysis.by_writes import ByWrites
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.load_bounds import OutsideError, Unsettled, check_loads, check_loads_ragged, doubt, inside, message, unsettled
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL, classify
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.compose import anded
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["Dense", "Listed", "Ragged", "check_call", "clamped", "held", "is_captured", "reading_waits"]

_TILE = (128, 128)


class Place(NamedTuple):
    """A range of rows and a range of keys, of one batch entry and head."""

    b: int
    h: int
    rows: range
    columns: range


class Pairs(Protocol):
    """All pairs (b, h, q_idx, kv_idx) of a call."""

    def check(self, mod: TracedMod, reads_values: bool) -> None:
        """Raises ``OutsideError`` for a load that leaves its tensor at any of these pairs."""

    def shown(self, mask: TracedMod, tile: tuple[int, int], classes: Tensor | None, wanted: int) -> Iterator[Place]:
        """The first tile of class ``wanted`` in which the mask has a visible pair; yields nothing if there is none."""


@dataclass(frozen=True)
class Dense:
    """The pairs of sequences of equal lengths."""

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int

    def check(self, mod: TracedMod, reads_values: bool) -> None:
        check_loads(mod, self.batch, self.heads, self.seqlen_q, self.seqlen_k, reads_values=reads_values)

    def shown(self, mask: TracedMod, tile: tuple[int, int], classes: Tensor | None, wanted: int) -> Iterator[Place]:
        found = classify(mask, self.seqlen_q, self.seqlen_k, *tile, self.batch, self.heads) != EMPTY
        for b, h, i, j in (found if classes is None else found & (classes == wanted)).nonzero()[:1].tolist():
            yield Place(b, h, _part(i, tile[0], self.seqlen_q), _part(j, tile[1], self.seqlen_k))


@dataclass(frozen=True)
class Ragged:
    """The pairs of sequences of different lengths, int64 (B,); q_first: the ``q_idx`` of each sequence's first row."""

    heads: int
    seqlens_q: Tensor
    seqlens_k: Tensor
    q_first: Tensor

    def check(self, mod: TracedMod, reads_values: bool) -> None:
        check_loads_ragged(mod, self.heads, self.seqlens_q, self.seqlens_k, self.q_first)

    def shown(self, mask: TracedMod, tile: tuple[int, int], classes: Tensor | None, wanted: int) -> Iterator[Place]:
        found = classify_ragged(mask, self.seqlens_q, self.seqlens_k, *tile, self.heads, self.q_first) != EMPTY
        is_of_these = classes is not None and classes.shape[1] == found.shape[1]  # lists on a GPU may have been made for other lengths
        for h, at in (found & (classes == wanted) if is_of_these else found).nonzero()[:1]:
            b, i, j = (int(x) for x in RaggedTiles(self.seqlens_q, self.seqlens_k, tile).locate(at))
            first, (rows, keys) = int(self.q_first[b]), (int(self.seqlens_q[b]), int(self.seqlens_k[b]))
            part = _part(i, tile[0], rows)
            yield Place(b, int(h), range(first + part.start, first + part.stop), _part(j, tile[1], keys))


def _part(i: int, size: int, length: int) -> range:
    return range(i * size, min((i + 1) * size, length))


class Listed(NamedTuple):
    """Tile classes according to a call's block lists, numbered as in ``Pairs``; the first mask applies inside partial tiles."""

    classes: Tensor
    tile: tuple[int, int]


class _Examined(NamedTuple):
    """mod: the mod with every index clamped that may leave its tensor. outside: for each of those indices the mask of the pairs at which it
    does, the index's program, and the error that describes it."""

    mod: TracedMod
    outside: tuple[tuple[TracedMod, Expr, OutsideError], ...]


def check_call(
    pairs: Pairs,
    masks: Sequence[TracedMod],
    scores: Sequence[TracedMod] = (),
    lists: Callable[[], Listed] | None = None,
    *,
    reads_values: bool = True,
    list_tensors: Sequence[Tensor] = (),
) -> tuple[list[TracedMod], list[TracedMod]]:
    """The masks and scores, with every load inside its tensor at all pairs. Raises ``ValueError`` if a load leaves it at a visible pair.

    A pair is visible if all masks show it. With ``lists``, which are read only if they decide, the first mask applies only in partial
    tiles; full tiles do not need it, and all other tiles are hidden. A mask's own load counts if the mask may show the pair for some loaded
    value.
    reads_values: as in ``check_loads``; if False, the values of captured tensors do not decide visibility either, and an index that is
    computed from them is clamped. The contents of tensors on another device than the CPU are read once for each tensor and state of its
    write counter, and not while a CUDA graph is captured; there too such an index is clamped, because a graph's replay may find other
    contents. list_tensors: the tensors that ``lists`` reads.

    >>> from anyattn.mods.tracing.trace import trace
    >>> table = torch.zeros(4)
    >>> window = trace(lambda b, h, q, k: (q - k < 4) & (q >= k), "mask")
    >>> bias = trace(lambda s, b, h, q, k: s + table[q - k], "score")
    >>> _, (held_bias,) = check_call(Dense(1, 1, 64, 64), [window], [bias])
    >>> [node.op for node in held_bias.expr.nodes if node.op in ("min", "max", "load")]
    ['min', 'max', 'load']
    """
    if not isinstance(pairs, Dense):
        return _checked(pairs, masks, scores, lists)
    sizes = (pairs.batch, pairs.heads, pairs.seqlen_q, pairs.seqlen_k)
    if not reads_values:
        masks, scores = ([_held_by_contents(m, sizes) for m in mods] for mods in (masks, scores))
        return _checked(pairs, masks, scores, lists, reads_values=False)
    if not reading_waits((*masks, *scores)):
        return _checked(pairs, masks, scores, lists)
    return _checked_once(pairs, sizes, masks, scores, lists, list_tensors)


def reading_waits(mods: Sequence[TracedMod]) -> bool:
    """Whether the host waits for a device when it reads the mods' captured tensors."""
    return any(t.device.type != "cpu" for m in mods for t in m.tensors)


def is_captured() -> bool:
    """Whether a CUDA graph is being captured, in which the host can read no tensor."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_results: dict[tuple, ByWrites] = {}  # of ``_checked_once``, by everything but contents


def _checked_once(
    pairs: Dense,
    sizes: tuple[int, int, int, int],
    masks: Sequence[TracedMod],
    scores: Sequence[TracedMod],
    lists: Callable[[], Listed] | None,
    list_tensors: Sequence[Tensor],
) -> tuple[list[TracedMod], list[TracedMod]]:
    """``check_call`` of tensors on a device. Remembers for each mod its new program, numbers, and whether it keeps its source; None for an
    unchanged mod."""
    mods = (*masks, *scores)
    facts = (pairs, len(masks), lists is None, *((m.expr, m.scalars, tuple([t.shape for t in m.tensors])) for m in mods))
    if len(_results) > 1024:
        _results.clear()
    results = _results.setdefault(facts, ByWrites())
    decisive = [m.tensors[slot] for m in mods for slot in doubt(m, *sizes).slots]
    all_read = [*decisive, *(t for m in masks for t in m.tensors), *list_tensors]
    known = results.get(decisive) or results.get(all_read)
    if known is None:
        if is_captured():
            return [held(m, *sizes) for m in masks], [held(m, *sizes) for m in scores]
        new_masks, new_scores = _checked(pairs, masks, scores, lists)
        new = [*new_masks, *new_scores]
        are_inside = all(a is b for a, b in zip(mods, new, strict=True))
        new = [_held_by_contents(m, sizes) for m in new]
        known = [None if n is m else (n.expr, n.scalars, n.source is not None) for m, n in zip(mods, new, strict=True)]
        results.put(decisive if are_inside else all_read, known)
    made = [
        m if n is None else replace(m, expr=n[0], scalars=n[1], source=m.source if n[2] else None) for m, n in zip(mods, known, strict=True)
    ]
    return made[: len(masks)], made[len(masks) :]


def _held_by_contents(mod: TracedMod, sizes: tuple[int, int, int, int]) -> TracedMod:
    """The mod with every index clamped that is computed from contents."""
    return clamped(mod, unsettled(mod, *sizes)._replace(by_positions=[])) if doubt(mod, *sizes).slots else mod


def _checked(
    pairs: Pairs,
    masks: Sequence[TracedMod],
    scores: Sequence[TracedMod],
    lists: Callable[[], Listed] | None,
    *,
    reads_values: bool = True,
) -> tuple[list[TracedMod], list[TracedMod]]:
    hangs = lists is not None or isinstance(pairs, Ragged)  # the result depends on the contents of lists, or on lengths
    examined = [_examine(m, pairs, reads_values) for m in masks]
    if any(e.outside for e in examined):
        possible = [_possible(e, reads_values) for e in examined]
        for number, e in enumerate(examined):
            _refuse_seen(e, pairs, possible, lists, wants_full=number > 0)
        values = hangs or any(m.tensors and m.expr.tensor_slots for m in possible)
        examined = [e._replace(mod=_settled(e, values)) for e in examined]
    held_masks = [replace(e.mod, tensors=m.tensors) if e.outside else m for m, e in zip(masks, examined, strict=True)]
    found = []
    for score in scores:
        e = _examine(score, pairs, reads_values)
        if e.outside:
            _refuse_seen(e, pairs, held_masks, lists, wants_full=True)
            e = e._replace(mod=_settled(e, hangs or any(m.tensors for m in held_masks)))
        found.append(e.mod)
    return held_masks, found


def _settled(e: _Examined, hangs_on_values: bool) -> TracedMod:
    """A clamped mod; if visibility depends on values, it has no source, so that other values are checked again."""
    return replace(e.mod, source=None) if e.outside and hangs_on_values else e.mod


def _examine(mod: TracedMod, pairs: Pairs, reads_values: bool) -> _Examined:
    found = []
    while True:
        try:
            pairs.check(mod, reads_values)
        except OutsideError as error:
            size = mod.tensors[error.slot].shape[error.dim]
            if size == 0:
                raise ValueError(str(error)) from None
            builder = Builder()
            index = builder.build(builder.copy(mod.expr, error.arg))
            shown = inside(mod, error.slot, error.dim, index)
            found.append((replace(shown, expr=_negated(shown.expr)), index, error))
            mod = _with_limits(mod, ((error.slot, error.dim, error.arg, size),))
        else:
            if found and not reads_values:
                mod = _without_values(mod)
            return _Examined(mod, tuple(found))


def _without_values(mod: TracedMod) -> TracedMod:
    """The mod with CPU tensors of the same shapes and without contents."""
    return replace(mod, tensors=tuple(torch.empty((), dtype=t.dtype, device="cpu").expand(t.shape) for t in mod.tensors))


def _refuse_seen(e: _Examined, pairs: Pairs, masks: Sequence[TracedMod], lists: Callable[[], Listed] | None, wants_full: bool) -> None:
    """Raises for an index that leaves its tensor at a visible pair. wants_full:
    full tiles count too; the first mask does not apply there."""
    if not e.outside:
        return
    if not masks and lists is None:
        raise ValueError(str(e.outside[0][2])) from None
    listed = None if lists is None else lists()
    kinds = [(masks, PARTIAL), (masks[1:], FULL)] if listed is not None and wants_full else [(masks, PARTIAL)]
    for outside, index, error in e.outside:
        outside = replace(outside, tensors=e.mod.tensors)
        for asked, wanted in kinds:
            known = [m for m in asked if not any(node.op == "native" for node in m.expr.nodes)]  # CuTe masks are opaque
            bad = anded([outside, *known])
            assert bad is not None
            tile, classes = (_TILE, None) if listed is None else (listed.tile, listed.classes)
            for place in pairs.shown(bad, tile, classes, wanted):
                raise ValueError(_where(replace(e.mod, scalars=outside.scalars), bad, index, error, place)) from None


def _where(mod: TracedMod, bad: TracedMod, index: Expr, error: OutsideError, place: Place) -> str:
    device = bad.tensors[0].device
    q, kv = (torch.arange(r.start, r.stop, device=device) for r in (place.rows, place.columns))
    shape = (len(q), len(kv))
    at = evaluate(bad, place.b, place.h, q[:, None], kv).broadcast_to(shape).nonzero()[0].tolist()
    value = evaluate(replace(mod, expr=index), place.b, place.h, q[:, None], kv).broadcast_to(shape)
    found = f"index {int(value[tuple(at)])} (at b={place.b}, h={place.h}, q_idx={place.rows[at[0]]}, kv_idx={place.columns[at[1]]})"
    return message(mod, error.slot, error.dim, found)


def held(mod: TracedMod, B: int, H: int, seqlen_q: int, seqlen_k: int) -> TracedMod:
    """The mod with every index clamped that is not proved to be inside its tensor, for calls that must not read captured tensors."""
    return clamped(mod, unsettled(mod, B, H, seqlen_q, seqlen_k))


def clamped(mod: TracedMod, loads: Unsettled) -> TracedMod:
    """The mod with the indices of these loads clamped to their tensors."""
    doubtful = [(slot, dim, arg, mod.tensors[slot].shape[dim]) for slot, dim, arg in (*loads.by_contents, *loads.by_positions)]
    return _with_limits(mod, tuple(doubtful)) if doubtful else mod


def _with_limits(mod: TracedMod, loads: tuple[tuple[int, int, int, int], ...]) -> TracedMod:
    """``_clamped`` of the mod. The limits come before the mod's own numbers, so that tensors of all sizes share one program."""
    sizes = tuple(dict.fromkeys(size for *_, size in loads))
    numbered = tuple((slot, dim, arg, sizes.index(size)) for slot, dim, arg, size in loads)
    limits = tuple(n for size in sizes for n in (-size, size - 1))
    return replace(mod, expr=_clamped(mod.expr, numbered, len(limits)), scalars=limits + mod.scalars)


# ---- expressions


@lru_cache(maxsize=1024)
def _clamped(expr: Expr, loads: tuple[tuple[int, int, int, int], ...], count: int) -> Expr:
    """``expr`` with indices clamped between two scalars. loads: (slot, dimension, index's node, number of the pair of scalars). count: of
    the scalars, which come before the others."""
    builder = Builder()
    new: list[int] = []
    for node in expr.nodes:
        args = [new[a] for a in node.args]
        if node.op == "load":
            for slot, dim, arg, pair in loads:
                if node.attr == slot and node.args[dim : dim + 1] == (arg,):
                    least, most = (builder.cast(builder.add("scalar", dtype=int, attr=2 * pair + i), torch.int64) for i in range(2))
                    args[dim] = builder.add("max", builder.add("min", args[dim], most), least)
        attr = node.attr + count if node.op == "scalar" else node.attr  # type: ignore[operator]
        new.append(builder.add(node.op, *args, dtype=node.dtype, attr=attr))
    return builder.build(*(new[o] for o in expr.outputs))


@lru_cache(maxsize=1024)
def _negated(expr: Expr) -> Expr:
    builder = Builder()
    return builder.build(builder.add("not", builder.copy(expr)))


def _possible(e: _Examined, reads_values: bool) -> TracedMod:
    """The mask of the pairs that ``e.mod`` may show, for any result of the loads that leave their
    tensors (of all loads without reads_values)."""
    if not e.outside and reads_values:
        return e.mod
    slots = frozenset(error.slot for *_, error in e.outside) if reads_values else None
    mod = e.mod if reads_values else _without_values(e.mod)
    return replace(mod, expr=_possible_expr(mod.expr, slots))


@lru_cache(maxsize=256)
def _possible_expr(expr: Expr, slots: frozenset[Any] | None) -> Expr:
    """The mask of the pairs that ``expr`` may show. slots: of the tensors whose entries are unknown, None for all."""
    builder = Builder()
    unknown: list[bool] = []
    limits: list[tuple[int, int]] = []  # per bool: (must be true, can be true)
    false, true = builder.const(False), builder.const(True)

    def negated(x: int) -> int:
        return builder.add("not", x)

    for at, node in enumerate(expr.nodes):
        is_load = node.op == "load" and (slots is None or node.attr in slots)
        unknown.append(is_load or node.op == "native" or any(unknown[a] for a in node.args))
        a = [limits[i] for i in node.args]
        if not unknown[at]:
            known = builder.copy(expr, at) if node.dtype is torch.bool else false
            limits.append((known, known))
        elif node.op in ("and", "or") and node.dtype is torch.bool:
            limits.append((builder.add(node.op, a[0][0], a[1][0]), builder.add(node.op, a[0][1], a[1][1])))
        elif node.op == "not" and node.dtype is torch.bool:
            limits.append((negated(a[0][1]), negated(a[0][0])))
        elif node.op == "where" and node.dtype is torch.bool:
            (is_sure, may_be), yes, no = a
            must = builder.add("and", builder.add("or", negated(may_be), yes[0]), builder.add("or", is_sure, no[0]))
            can = builder.add("or", builder.add("and", may_be, yes[1]), builder.add("and", negated(is_sure), no[1]))
            limits.append((must, can))
        else:
            limits.append((false, true))
    return builder.build(limits[expr.outputs[0]][1])
