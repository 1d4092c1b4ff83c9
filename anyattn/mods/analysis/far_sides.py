"""Far sides: what a mod is where query and key are so far apart that clamped distances, and comparisons of distances, no longer change.

``table[h, clamp(q_idx - kv_idx, -8, 8) + 8]`` is one number per head from a distance of 8 on, and another one up to -8. A tile of such
pairs needs no load per pair, and its pairs need not be told apart by the gradient of the table.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, category
from anyattn.mods.ir.extents import Box, bits_of, exact, extents

__all__ = ["MOST_POSITIONS", "Side", "far_sides"]

MOST_POSITIONS = 2**28  # positions and captured integers are assumed to be smaller in size
_MOST_BITS = 40  # of numbers that move with the distance: their differences and limits fit 64 bits
_COMPARED = {  # for a difference that grows and one that falls: (result, least size of the difference)
    "lt": ((False, 0), (True, 1)), "le": ((False, 1), (True, 0)), "gt": ((True, 1), (False, 0)), "ge": ((True, 0), (False, 1)),
    "eq": ((False, 1), (False, 1)), "ne": ((True, 1), (True, 1)),
}  # fmt: skip


class Side(NamedTuple):
    """expr: equal to the mod for all pairs at least as far apart as ``reach``. reach: int64, of captured numbers alone; a distance q_idx -
    kv_idx, or kv_idx - q_idx where the keys come after the queries."""

    expr: Expr
    reach: Expr


class _Line(NamedTuple):
    """The integer ``by_q * q_idx + by_kv * kv_idx + rest``. rest: a node of the limits' builder, int64."""

    by_q: int
    by_kv: int
    rest: int


@lru_cache(maxsize=1024)
def far_sides(expr: Expr) -> tuple[Side | None, Side | None]:
    """The sides of a score mod, its queries after their keys and its keys after their queries, each None unless fewer values are loaded
    per pair there than in general.

    >>> from anyattn.mods.tracing.trace import trace
    >>> table = torch.zeros(17)
    >>> mod = trace(lambda s, b, h, q, k: s + table[torch.clamp(q - k, -8, 6) + 8], "score").expr
    >>> [side.reach.output.attr for side in far_sides(mod)]
    [6, 8]
    """
    if not _pair_loads(expr):
        return None, None
    after, before = _Far(expr, 1).side(), _Far(expr, -1).side()
    return after, before


def _pair_loads(expr: Expr) -> int:
    return sum(node.op == "load" and dep.q and dep.kv for node, dep in zip(expr.nodes, dependence(expr), strict=True))


class _Far:
    """Rewrites an expression for distances that grow (``towards`` 1) or fall (-1) without end."""

    def __init__(self, expr: Expr, towards: int) -> None:
        self.expr, self.nodes, self.towards = expr, expr.nodes, towards
        box = Box.of_sizes(MOST_POSITIONS, MOST_POSITIONS)
        self.extents, self.exact = extents(expr, box), exact(expr, box)
        self.out, self.limits = Builder(), Builder()
        self.lines: list[_Line | None] = []
        self.new: list[int] = []
        self.reach: int | None = None  # a node of ``limits``

    def side(self) -> Side | None:
        for at in range(len(self.nodes)):
            new, line = self._rewritten(at)
            self.new.append(new)
            self.lines.append(line if self._is_plain(at) else None)
        if self.reach is None:
            return None
        made = self.out.build(self.new[self.expr.outputs[0]])
        if not dependence(made)[made.outputs[0]].score or _pair_loads(made) >= _pair_loads(self.expr):
            return None
        return Side(made, self.limits.build(self.reach))

    def _is_plain(self, at: int) -> bool:
        """Whether a node is an integer that does not wrap around, and is small."""
        extent = self.extents[at]
        return self.exact[at] and category(self.nodes[at].dtype) == "int" and extent is not None and bits_of(extent) <= _MOST_BITS

    def _rewritten(self, at: int) -> tuple[int, _Line | None]:
        """The position of a node's value in ``out``, and its line."""
        node, lines = self.nodes[at], [self.lines[a] for a in self.nodes[at].args]
        if lines and None not in lines:
            one, other = lines[0], lines[-1]
            assert one is not None and other is not None
            if node.op in ("min", "max") and (way := self._way(one, other)) is not None:
                winner = 0 if (way > 0) == (node.op == "max") else 1
                self._require(one, other, way, 0)
                return self.new[node.args[winner]], lines[winner]
            if node.op in _COMPARED and (way := self._way(one, other)) is not None:
                result, least = _COMPARED[node.op][way < 0]
                self._require(one, other, way, least)
                return self.out.const(result), None
            if node.op == "abs" and self._is_plain(at) and (way := self._way(one, self._constant(0))) is not None:
                self._require(one, self._constant(0), way, 0)
                own = self.new[node.args[0]]
                return (own, one) if way > 0 else (self.out.add("neg", own), self._times(one, -1))
        new = self.out.add(node.op, *(self.new[a] for a in node.args), dtype=node.dtype, attr=node.attr)
        return new, self._line(at, lines)

    def _line(self, at: int, lines: list[_Line | None]) -> _Line | None:
        node = self.nodes[at]
        if node.op == "index" and node.attr in ("q_idx", "kv_idx"):
            return self._constant(0)._replace(**{"by_q" if node.attr == "q_idx" else "by_kv": 1})
        if category(node.dtype) != "int":
            return None
        if node.op == "const":
            return self._constant(node.attr)  # type: ignore[arg-type]
        if node.op == "scalar":
            return _Line(0, 0, self.limits.cast(self.limits.add("scalar", dtype=node.dtype, attr=node.attr), torch.int64))
        if not lines or None in lines:
            return None
        one, other = lines[0], lines[-1]
        assert one is not None and other is not None
        if node.op == "cast":
            return one
        if node.op == "neg":
            return self._times(one, -1)
        if node.op in ("add", "sub"):
            return self._sum(one, other if node.op == "add" else self._times(other, -1))
        if node.op == "mul":
            for factor, line in ((node.args[1], one), (node.args[0], other)):
                if self.nodes[factor].op == "const":
                    return self._times(line, self.nodes[factor].attr)  # type: ignore[arg-type]
        return None

    # -- lines
    def _constant(self, value: int) -> _Line:
        return _Line(0, 0, self.limits.const(int(value), torch.int64))

    def _times(self, line: _Line, factor: int) -> _Line:
        rest = self.limits.add("mul", line.rest, self.limits.const(int(factor), torch.int64))
        return _Line(line.by_q * factor, line.by_kv * factor, rest)

    def _sum(self, one: _Line, other: _Line) -> _Line:
        return _Line(one.by_q + other.by_q, one.by_kv + other.by_kv, self.limits.add("add", one.rest, other.rest))

    def _way(self, one: _Line, other: _Line) -> int | None:
        """1 if ``one - other`` grows without end on this side, -1 if it falls; None if it depends on more than the distance."""
        slope = one.by_q - other.by_q
        if slope == 0 or slope != other.by_kv - one.by_kv:
            return None
        return self.towards if slope > 0 else -self.towards

    def _require(self, one: _Line, other: _Line, way: int, least: int) -> None:
        """Moves ``reach`` to where ``one - other`` is ``least`` or more, or for a way of -1 ``-least`` or less."""
        difference = self._times(self._sum(one, self._times(other, -1)), way)
        slope, add = abs(difference.by_q), self.limits.add
        # slope * distance + rest >= least
        short = add("sub", difference.rest, self.limits.const(least, torch.int64))
        reach = add("neg", add("floordiv", short, self.limits.const(slope, torch.int64)))
        self.reach = reach if self.reach is None else add("max", self.reach, reach)
