"""Mods on a shard: a program over local rows and keys is rewritten into one over global positions.

A shard's rows are a few intervals of the sequence and its keys are one interval, so a global position is a local one plus an offset that
depends on the row alone. The offsets are run-time numbers of the program: shards of other documents run the same kernel.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.fingerprint import Pattern
from anyattn.mods.tracing.trace import Source, TracedMod, compact
from anyattn.tensors.kinds import are_fake

__all__ = ["Place", "placed", "reads", "tensor_slots"]

Intervals = tuple[tuple[int, int], ...]
_INVARIANT = frozenset(("sub", "eq", "ne", "lt", "le", "gt", "ge"))  # of two positions
_MOST_COMPARED = 4  # intervals of rows that are told apart by comparisons; more take a table


class Place(NamedTuple):
    """Where a local attention call lies in the global one.

    rows: global intervals of its query rows, ascending; local row 0 is the first one's start. keys: the global interval of its keys.
    first_head: global query head of its head 0. device: of the table of rows, for many intervals. first: where its rows begin among those
    of its rank.
    """

    rows: Intervals
    keys: tuple[int, int]
    first_head: int
    device: torch.device
    first: int


def placed(mod: TracedMod, place: Place) -> TracedMod:
    """The mod of a local call whose ``mod`` is written for global b, h, q_idx and kv_idx.

    >>> from anyattn.mods.tracing.trace import trace
    >>> window = trace(lambda b, h, q, k: q - k < 8, "mask")
    >>> placed(window, Place(((64, 128),), (32, 128), 0, torch.device("cpu"), 0)).scalars
    (64, 32)
    """
    numbers = (*mod.scalars, *_numbers(place))
    form = _form(mod, place, True)
    if any(_is_short(mod.tensors[part.slot], part, place) for part in _parts_of(mod.expr, form).values()):
        form = _form(mod, place, False)
    expr, scalars, slots, parts, pattern = _rewritten(mod.expr, len(mod.scalars), len(mod.tensors), form)
    tensors = [*mod.tensors, *[_part(mod.tensors[part.slot], part, place) for part in parts]]
    if len(place.rows) > _MOST_COMPARED:
        table = _table.__wrapped__ if are_fake(()) else _table  # a fake tensor is of its mode alone
        tensors.append(table(place.rows, place.device))
    if mod.source is not None and mod.source.pattern.fixed:
        pattern.fix(tuple([i for i, s in enumerate(scalars) if s < len(mod.scalars) and mod.source.scalars[s] in mod.source.pattern.fixed]))
    source = Source(pattern, tuple(range(len(scalars))), tuple(range(len(slots))))
    return TracedMod(mod.kind, expr, tuple([numbers[s] for s in scalars]), tuple([tensors[s] for s in slots]), mod.name, source)


def tensor_slots(score: TracedMod, tensors: int, place: Place) -> list[int]:
    """Which of the ``tensors`` that a score mod captures each tensor of ``placed(score, place)`` is; a number beyond them for the table of
    rows."""
    return _rewritten(score.expr, len(score.scalars), tensors, _form(score, place, True)).slots


def reads(expr: Expr, index: str) -> bool:
    """Whether a program depends on an index, such as "h"."""
    return any(node.op == "index" and node.attr == index for node in expr.nodes)


class _Form(NamedTuple):
    """What the text of a rewritten program depends on. intervals: of rows, or one more than are compared. has_one_offset, has_same: rows
    and keys begin at the same position, and are the same. has_parts: whether views of captured tensors replace them. local_dims: of the
    mod. has_first: whether rows that these dimensions hold come before the call's."""

    intervals: int
    has_first_row: bool
    has_first_key: bool
    has_first_head: bool
    has_one_offset: bool
    has_same: bool
    has_parts: bool
    kind: str
    local_dims: tuple[tuple[int, int], ...]
    has_first: bool


def _form(mod: TracedMod, place: Place, has_parts: bool) -> _Form:
    first_row, first_key = place.rows[0][0], place.keys[0]
    intervals, is_one = min(len(place.rows), _MOST_COMPARED + 1), len(place.rows) == 1
    has_one_offset, has_same = is_one and first_row == first_key, place.rows == (place.keys,)
    has_firsts = first_row != 0, first_key != 0, place.first_head != 0
    has_first = bool(mod.local_dims) and place.first != 0
    return _Form(intervals, *has_firsts, has_one_offset, has_same, has_parts, mod.kind, mod.local_dims, has_first)


class _Part(NamedTuple):
    """A view of a captured tensor that a mask indexes by the local q_idx or kv_idx: the tensor's slot, and the dimensions that are cut to
    the call's rows and keys. Of sorted ids such a view is sorted, so a mask of documents keeps its row ranges."""

    slot: int
    by_row: tuple[int, ...]
    by_key: tuple[int, ...]


def _numbers(place: Place) -> list[int]:
    """The run-time numbers of a place in the order in which ``_rewritten`` reads them."""
    numbers: list[int] = []
    if len(place.rows) <= _MOST_COMPARED:
        begin = 0
        for i, (start, stop) in enumerate(place.rows):
            if i:
                numbers.append(begin)
            if i or start:
                numbers.append(start - begin)
            begin += stop - start
    return [*numbers, *[n for n in (place.keys[0], place.first_head, place.first) if n]]


@lru_cache(maxsize=64)
def _table(rows: Intervals, device: torch.device) -> Tensor:
    """int32: the global position of each local row."""
    return torch.cat([torch.arange(a, b, dtype=torch.int32, device=device) for a, b in rows])


def _is_short(tensor: Tensor, part: _Part, place: Place) -> bool:
    """Whether a tensor ends before the rows or keys do: the mask hides positions beyond it."""
    ends = dict.fromkeys(part.by_row, place.rows[0][1]) | dict.fromkeys(part.by_key, place.keys[1])
    return any(tensor.shape[dim] < end for dim, end in ends.items())


def _part(tensor: Tensor, part: _Part, place: Place) -> Tensor:
    """The view of a captured tensor; reading it counts the tensor's writes."""
    tensor = tensor.detach()
    (first_row, stop_row), (first_key, stop_key) = place.rows[0], place.keys
    for dim in part.by_row:
        tensor = tensor.narrow(dim, first_row, stop_row - first_row)
    for dim in part.by_key:
        tensor = tensor.narrow(dim, first_key, stop_key - first_key)
    return tensor


class _Rewritten(NamedTuple):
    """A program with global positions. scalars, slots: which of the mod's numbers, followed by the place's, and which of its tensors,
    followed by ``parts`` and the table of rows, are its own, in order. pattern: by which call caches know it."""

    expr: Expr
    scalars: list[int]
    slots: list[int]
    parts: tuple[_Part, ...]
    pattern: Pattern


@lru_cache(maxsize=1024)
def _rewritten(expr: Expr, scalars: int, tensors: int, form: _Form) -> _Rewritten:
    builder, numbers = Builder(), itertools.count(scalars)

    def number() -> int:
        return builder.cast(builder.add("scalar", dtype=int, attr=next(numbers)), torch.int64)

    def index(name: str) -> int:
        return builder.add("index", dtype=torch.int64, attr=name)

    parts = _parts_of(expr, form)
    slots = {part: tensors + i for i, part in enumerate(dict.fromkeys(parts.values()))}
    row = index("q_idx")
    if form.intervals > _MOST_COMPARED:
        position = builder.cast(builder.add("load", row, dtype=torch.int32, attr=tensors + len(slots)), torch.int64)
    else:
        position = builder.add("add", row, number()) if form.has_first_row else row
        for _ in range(form.intervals - 1):
            is_behind = builder.add("ge", row, number())
            position = builder.add("where", is_behind, builder.add("add", row, number()), position)
    key = builder.add("add", index("kv_idx"), number()) if form.has_first_key else index("kv_idx")
    head = builder.add("add", index("h"), number()) if form.has_first_head else index("h")
    new = {"q_idx": position, "kv_idx": key, "h": head}
    replaced = {at: new[node.attr] for at, node in enumerate(expr.nodes) if node.op == "index" and node.attr in new}  # type: ignore[index]
    if form.has_one_offset:  # distances, and which of the two is ahead, are the same for local positions
        for at, node in enumerate(expr.nodes):
            if node.op in _INVARIANT and {expr.nodes[a].attr for a in node.args if expr.nodes[a].op == "index"} == {"q_idx", "kv_idx"}:
                replaced[at] = builder.add(node.op, *[index(expr.nodes[a].attr) for a in node.args], dtype=node.dtype)  # type: ignore[arg-type]
    local = builder.add("add", row, number()) if form.has_first else row
    for at, node in enumerate(expr.nodes):  # ascending, so that an index that is itself a load is there already
        part, local_dims = parts.get(at), [dim for slot, dim in form.local_dims if node.op == "load" and slot == node.attr]
        if part is None and not local_dims:
            continue
        cut = () if part is None else (*part.by_row, *part.by_key)
        args = [
            local if dim in local_dims else index(expr.nodes[a].attr) if dim in cut else builder.copy(expr, a, replaced)  # type: ignore[arg-type]
            for dim, a in enumerate(node.args)
        ]
        replaced[at] = builder.add("load", *args, dtype=node.dtype, attr=node.attr if part is None else slots[part])
    copied = builder.build(builder.copy(expr, replace=replaced))
    rewritten, used, order = compact(copied, range(tensors + len(slots) + 1))  # type: ignore[arg-type]
    return _Rewritten(rewritten, used, order, tuple(slots), Pattern(("placed", rewritten.key)))  # type: ignore[arg-type]


def _parts_of(expr: Expr, form: _Form) -> dict[int, _Part]:
    """The loads of a mask, by position, that views of captured tensors replace."""
    parts = {}
    for at, node in enumerate(expr.nodes):
        if node.op != "load" or form.kind != "mask" or not form.has_parts or node.attr in [slot for slot, _ in form.local_dims]:
            continue
        by = {dim: expr.nodes[a].attr for dim, a in enumerate(node.args) if expr.nodes[a].op == "index"}
        by_row = tuple([d for d, name in by.items() if name == "q_idx" and form.has_first_row and form.intervals == 1])
        by_key = tuple([d for d, name in by.items() if name == "kv_idx" and form.has_first_key])
        if form.has_same:  # one view for both: the ids of documents are those of queries and keys
            by_row, by_key = (), tuple(sorted((*by_row, *by_key)))
        if by_row or by_key:
            parts[at] = _Part(node.attr, by_row, by_key)  # type: ignore[arg-type]
    return parts
