"""Composition of traced mods as expressions, without tracing a function again: chained scores, conjunctions, transposed masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod, compact

__all__ = ["anded", "chained", "conjuncts", "turned"]


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


def turned(mask: TracedMod) -> TracedMod:
    """The transposed mask, with queries and keys exchanged: (q, kv) is visible where (kv, q) is visible in ``mask``."""
    return TracedMod("mask", _turned(mask.expr), mask.scalars, mask.tensors, f"{mask.name} turned")


_OTHER = {"q_idx": "kv_idx", "kv_idx": "q_idx"}


@lru_cache(maxsize=256)
def _turned(expr: Expr) -> Expr:
    is_position = [node.op == "index" and node.attr in _OTHER for node in expr.nodes]
    nodes = (n._replace(attr=_OTHER[str(n.attr)]) if found else n for n, found in zip(expr.nodes, is_position, strict=True))
    return replace(expr, nodes=tuple(nodes))
