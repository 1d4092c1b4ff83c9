"""Composition of traced mods as expressions, without tracing a function again: chained scores, conjunctions, transposed masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod, compact

__all__ = ["anded", "behind", "chained", "conjuncts", "turned"]


def chained(first: TracedMod, second: TracedMod) -> TracedMod:
    """The score mod that applies ``second`` to the result of ``first``. Both are score mods of one score dtype."""
    assert first.kind == second.kind == "score"
    expr = _chained(first.expr, second.expr, len(first.scalars), len(first.tensors))
    return TracedMod("score", expr, first.scalars + second.scalars, first.tensors + second.tensors, f"{first.name} then {second.name}")


@lru_cache(maxsize=256)
def _chained(first: Expr, second: Expr, scalars: int, tensors: int) -> Expr:
    builder = Builder()
    score = builder.copy(first)
    shifted = _renumbered(second, {"scalar": scalars, "load": tensors, "tensor": tensors})
    inputs = {i: score for i, node in enumerate(shifted.nodes) if node.op == "score"}
    return builder.build(builder.copy(shifted, replace=inputs))


def _renumbered(expr: Expr, shift: dict[str, int]) -> Expr:
    """``expr`` with the numbers of its scalar and tensor slots raised."""
    return replace(expr, nodes=tuple(n._replace(attr=n.attr + shift[n.op]) if n.op in shift else n for n in expr.nodes))  # type: ignore[operator]


def anded(masks: Sequence[TracedMod]) -> TracedMod | None:
    """The conjunction of ``masks``; None if there are none."""
    if not masks:
        return None
    joint = masks[0]
    for other in masks[1:]:
        expr = _anded(joint.expr, other.expr, len(joint.scalars), len(joint.tensors))
        joint = TracedMod("mask", expr, joint.scalars + other.scalars, joint.tensors + other.tensors, f"{joint.name} & {other.name}")
    return joint


@lru_cache(maxsize=256)
def _anded(first: Expr, second: Expr, scalars: int, tensors: int) -> Expr:
    builder = Builder()
    shifted = _renumbered(second, {"scalar": scalars, "load": tensors, "tensor": tensors})
    return builder.build(builder.add("and", builder.copy(first), builder.copy(shifted)))


def conjuncts(mask: TracedMod) -> list[TracedMod]:
    """The masks whose conjunction ``mask`` is, each with the numbers and tensors that it reads; ``[mask]`` if it is not a conjunction."""
    places = mask.expr.conjuncts()
    if len(places) == 1:
        return [mask]
    found = []
    for at in places:
        builder = Builder()
        expr, scalars, tensors = compact(builder.build(builder.copy(mask.expr, at)), mask.tensors)
        found.append(TracedMod("mask", expr, tuple([mask.scalars[s] for s in scalars]), tuple(tensors), mask.name))
    return found


def behind(mod: TracedMod, keys: Tensor, queries: Tensor | int) -> TracedMod:
    """The mod for rows that count from an entry's first query, where ``mod`` is written for an entry's last query at its last key.

    keys: int32 (B,), lengths of the entries. queries: of each of them, or int32 or int64 (B + 1,), the ends of packed ones.

    >>> from anyattn.mods.tracing.trace import trace
    >>> found = behind(trace(lambda b, h, q, k: q >= k, "mask"), torch.tensor([7], dtype=torch.int32), 2)
    >>> [node.op for node in found.expr.nodes], found.scalars
    (['index', 'index', 'load', 'cast', 'add', 'scalar', 'cast', 'sub', 'index', 'ge'], (2,))
    """
    if not any(node.op == "index" and node.attr == "q_idx" for node in mod.expr.nodes):
        return mod
    ends = queries if isinstance(queries, Tensor) else None
    scalars = mod.scalars if isinstance(queries, Tensor) else (*mod.scalars, queries)
    expr = _behind(mod.expr, len(mod.scalars), len(mod.tensors), None if ends is None else ends.dtype)
    return TracedMod(mod.kind, expr, scalars, (*mod.tensors, keys, *([] if ends is None else [ends])), mod.name)


_FAR = 2**31 - 1  # upper bound of all lengths, for any table contents


@lru_cache(maxsize=256)
def _behind(expr: Expr, scalars: int, tensors: int, ends: torch.dtype | None) -> Expr:
    builder = Builder()
    b, q_idx = (builder.add("index", dtype=torch.int64, attr=name) for name in ("b", "q_idx"))

    def entry(at: int, slot: int, dtype: torch.dtype) -> int:
        loaded = builder.cast(builder.add("load", at, dtype=dtype, attr=slot), torch.int64)
        if dtype is torch.int64:
            loaded = builder.add("min", builder.add("max", loaded, builder.const(-_FAR, torch.int64)), builder.const(_FAR, torch.int64))
        return loaded

    place = builder.add("add", q_idx, entry(b, tensors, torch.int32))
    if ends is None:
        queries = builder.cast(builder.add("scalar", dtype=int, attr=scalars), torch.int64)
    else:
        after = builder.add("add", b, builder.const(1, torch.int64))
        queries = builder.add("sub", entry(after, tensors + 1, ends), entry(b, tensors + 1, ends))
    place = builder.add("sub", place, queries)
    inputs = {i: place for i, node in enumerate(expr.nodes) if node.op == "index" and node.attr == "q_idx"}
    return builder.build(*[builder.copy(expr, output, inputs) for output in expr.outputs])


def turned(mask: TracedMod) -> TracedMod:
    """The transposed mask, with queries and keys exchanged: (q, kv) is visible where (kv, q) is visible in ``mask``."""
    return TracedMod("mask", _turned(mask.expr), mask.scalars, mask.tensors, f"{mask.name} turned")


_OTHER = {"q_idx": "kv_idx", "kv_idx": "q_idx"}


@lru_cache(maxsize=256)
def _turned(expr: Expr) -> Expr:
    is_position = [node.op == "index" and node.attr in _OTHER for node in expr.nodes]
    nodes = (n._replace(attr=_OTHER[str(n.attr)]) if found else n for n, found in zip(expr.nodes, is_position, strict=True))
    return replace(expr, nodes=tuple(nodes))
