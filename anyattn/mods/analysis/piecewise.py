"""Piecewise expressions: splits ``abs``, ``min``, ``max`` and comparisons of integers of the positions into linear pieces.

``abs(q_idx - kv_idx)`` is linear on either side of the diagonal, and all but a few tiles lie on one side. A kernel that tests a tile's
corners can compute the piece for that side alone, in which a distance grows linearly and a clamped distance is constant.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, category
from anyattn.mods.ir.extents import Box, extents, fits, unwrapped
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER

__all__ = ["Piece", "pieces"]


_NEAR = Box.of_sizes(2**24, NEAR_NUMBER)  # numbers outside these ranges are not split
_MOST_SLOPE = 2**16


class Piece(NamedTuple):
    """An expression that is valid where all ``conditions`` hold. Each condition is an integer that is linear in the positions (its ``Dep``
    has a slope) and holds where it is >= 0, so it holds in a whole rectangle of positions if it holds at two of its corners."""

    expr: Expr
    conditions: tuple[Expr, ...]


@lru_cache(maxsize=256)
def pieces(expr: Expr, most: int = 4) -> tuple[Piece, ...]:
    """The pieces of an expression with one output, at most ``most``; they cover all positions and agree where they overlap.

    An expression is split where an integer that changes from key to key changes sign. One without such a node is returned as one piece.

    >>> from anyattn.mods.tracing.trace import trace
    >>> for piece in pieces(trace(lambda s, b, h, q, k: s - (q - k).abs(), "score").expr):
    ...     print([n.op for n in piece.expr.nodes], [[n.op for n in c.nodes] for c in piece.conditions])
    ['score', 'index', 'index', 'sub', 'cast', 'sub'] [['index', 'index', 'sub']]
    ['score', 'index', 'index', 'sub', 'neg', 'cast', 'sub'] [['index', 'index', 'sub', 'neg']]
    """
    found = [Piece(expr, ())]
    at = 0
    while at < len(found) and len(found) < most:
        split = _split(found[at])
        if split is None:
            at += 1
        else:
            found[at : at + 1] = split
    return tuple(found)


def _split(piece: Piece) -> list[Piece] | None:
    expr = piece.expr
    for i in range(len(expr.nodes)):
        sides = _sides(expr, i)
        if sides is not None:
            made = []
            for builder, value, condition in sides:
                replaced = builder.build(builder.copy(expr, replace={i: value}))
                made.append(Piece(replaced, (*piece.conditions, builder.build(condition))))
            return made
    return None


def _sides(expr: Expr, i: int) -> list[tuple[Builder, int, int]] | None:
    """(builder, the node's value, the number that is >= 0) for each side of the sign change at node ``i``; None if it is not split."""
    node = expr.nodes[i]
    if node.op not in ("abs", "min", "max", "lt", "le", "gt", "ge") or not _grows(expr, node.args):
        return None
    return [_side(expr, i, upper) for upper in (True, False)]


def _grows(expr: Expr, args: tuple[int, ...]) -> bool:
    """Whether the argument, or the difference of two arguments, is an integer that changes by a constant from key to key."""
    slopes, plain = [dependence(expr)[a].slope for a in args], unwrapped(expr, _NEAR)
    if any(s is None or max(map(abs, s)) > _MOST_SLOPE for s in slopes) or any(category(expr.nodes[a].dtype) != "int" for a in args):
        return False
    if not all(plain[a] and fits(extents(expr, _NEAR)[a], 62) for a in args):
        return False
    by_key = [s[1] for s in slopes]  # type: ignore[index]
    return by_key[0] != (by_key[1] if len(args) == 2 else 0)


def _side(expr: Expr, i: int, upper: bool) -> tuple[Builder, int, int]:
    builder, node = Builder(), expr.nodes[i]
    args = [builder.copy(expr, a) for a in node.args]
    if node.op == "abs":
        value = args[0] if upper else builder.add("neg", args[0])
        return builder, value, value
    a, b = args
    if node.op in ("min", "max"):
        more = (a, b) if upper else (b, a)  # more[0] >= more[1] on this side
        return builder, more[0] if node.op == "max" else more[1], builder.add("sub", *more)
    # a comparison, true if upper: a < b is b - a - 1 >= 0, and its negation is a - b >= 0
    high, low = (b, a) if node.op in ("lt", "le") else (a, b)
    more, is_strict = ((high, low), node.op in ("lt", "gt")) if upper else ((low, high), node.op in ("le", "ge"))
    condition = builder.add("sub", *more)
    if is_strict:
        condition = builder.add("sub", condition, builder.const(1, builder.nodes[condition].dtype))
    return builder, builder.const(upper), condition
