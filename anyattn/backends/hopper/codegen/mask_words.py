"""Masks as words of bits: for each of a thread's few rows (or keys), one bit for each of its many keys (or rows).

A comparison with a limit fills a word in six instructions, however many positions there are; a condition that is the same at all of them
takes one. A pair of positions then costs one bit test. Parts of a mask that cannot be words (``tile_lines.split``) are evaluated per pair.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.backends.hopper.codegen.device_math import divided, select
from anyattn.backends.hopper.codegen.emit import emit, needed_for, run_stage
from anyattn.backends.hopper.codegen.score_analysis import NEAR_BOX
from anyattn.mods.analysis.row_ranges import NO_LIMIT
from anyattn.mods.analysis.separated import separated
from anyattn.mods.analysis.tile_lines import (  # fmt: skip
    MOST_DIVISOR,
    All,
    Bits,
    Cut,
    Each,
    Limit,
    Not,
    Pieces,
    Same,
    Sides,
    Some,
    Term,
    bits,
    demanded,
    least_divisor,
)
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr

__all__ = [
    "Line", "Words", "alike", "are_wide", "at_least", "below", "bit_of", "both", "emit_each", "emit_words", "holds_at", "in_ranges",
    "within",
]  # fmt: skip

_BITS = 32
_FAR = 2**30  # from any position of a tile

Words = tuple[Any, ...]  # bit c % 32 of word c // 32: the condition at a thread's c-th position


class Line(NamedTuple):
    """The index along which a thread has many positions.

    along: "q_idx" or "kv_idx". origin: the tile's first position. first: the distance of the thread's first position from it. positions:
    the thread's number of positions: pairs of neighbours, 8 apart. extent: the tile's number of positions; ``origin`` is a multiple of it.
    """

    along: str
    origin: Any
    first: Any
    positions: int
    extent: int

    @property
    def words(self) -> int:
        return -(-self.positions // _BITS)


@dsl_user_op
def _ones_from(place: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """A word of ones from bit ``place`` >= 0 on; 0 if ``place`` is 32 or more (the device's shift accepts any count)."""
    operands = [Int32(place).ir_value(loc=loc, ip=ip)]
    text, dialect = "shl.b32 $0, -1, $1;", llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r", has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


@dsl_user_op
def _opaque(word: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The word itself; the compiler cannot take it apart into the conditions that it is made of."""
    operands = [Int32(word).ir_value(loc=loc, ip=ip)]
    text, dialect = "mov.b32 $0, $1;", llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r", has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


# ---- words


def alike(condition: Any, line: Line) -> Words:
    """Words that are all ones if ``condition`` holds, else zeros."""
    if isinstance(condition, bool):
        return (Int32(-1 if condition else 0),) * line.words
    return (select(condition, -1, 0, "int"),) * line.words


def at_least(limit: Any, line: Line) -> Words:
    """The positions that are ``limit`` or more after the tile's first."""
    after = Int32(limit) - line.first
    # positions before the limit: two per full eight; of the last eight up to two, those that lie before it
    before = (after >> 3) * 2 + _least(after & 7, 2)
    return tuple(_ones_from(_most(before - _BITS * i, 0)) for i in range(line.words))


def below(limit: Any, line: Line) -> Words:
    return tuple(~word for word in at_least(limit, line))


def within(low: Any, high: Any, line: Line) -> Words:
    """The positions p with low <= p < high, both counted from the tile's first position."""
    return both(at_least(low, line), below(high, line))


def in_ranges(limits: Sequence[Any], line: Line) -> Words:
    """The positions in one of the ranges lo, hi, lo, hi, ...; literal limits that exclude no position cost nothing."""
    found: Words | None = None
    for low, high in zip(limits[::2], limits[1::2], strict=True):
        words = alike(True, line)
        if not (isinstance(low, int) and low <= 0):
            words = both(words, at_least(low - line.origin, line))
        if not (isinstance(high, int) and high >= NO_LIMIT):
            words = both(words, below(high - line.origin, line))
        found = words if found is None else tuple(a | b for a, b in zip(found, words, strict=True))
    assert found is not None, "row ranges of no range"
    return found


def both(a: Words, b: Words) -> Words:
    return tuple(x & y for x, y in zip(a, b, strict=True))


def holds_at(words: Words, c: int) -> Any:
    """Whether the bit of a thread's ``c``-th position is set."""
    return (words[c // _BITS] & Int32(bit_of(c))) != 0


def bit_of(c: int) -> int:
    """The bit of position ``c`` in its word, as a signed 32-bit integer."""
    at = c % _BITS
    return (1 << at) - (1 << _BITS) * (at == _BITS - 1)


def _set_where(condition: Any, words: list[Any], c: int) -> None:
    """Sets the bit of a thread's ``c``-th position if ``condition`` holds."""
    words[c // _BITS] = words[c // _BITS] | select(condition, bit_of(c), 0, "int")


def _least(a: Any, b: Any) -> Any:
    return select(a < b, a, b, "int")


def _most(a: Any, b: int) -> Any:
    return select(a > b, a, b, "int")


# ---- masks


def emit_words(
    expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any], line: Line, level: int = 0
) -> list[Words]:
    """The words of a mask that ``tile_lines.bits`` covers as a whole: one ``Words`` for each position of the other index.

    places: as for ``emit``; positions along the line are used for parts of the mask that are evaluated at each position. level: captured
    divisors are at least ``least_divisor`` of the extent and level.
    """
    tree = bits(expr, line.along, line.extent, NEAR_BOX, least_divisor(line.extent, level))
    assert tree is not None, "a mask that is no word of bits"
    writer = _Writer(expr, scalars, tensors, places, line)
    return [tuple(_opaque(word) for word in writer.words(tree, y)) for y in range(len(writer.others))]


def emit_each(expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any], line: Line, c: Any) -> list[Any]:
    """A mask evaluated at a thread's ``c``-th position, a run-time number: 1 or 0 for each position of the other index."""
    is_by_key = line.along == "kv_idx"
    place = line.origin + line.first + ((c >> 1) * 8 + (c & 1))
    places = {**places, line.along: [_least(place, places[line.along][-1])], "steps" if is_by_key else "apart": [0]}
    found: list[Any] = []
    other = "q_idx" if is_by_key else "kv_idx"
    emit(
        separated(expr, NEAR_BOX, other), scalars, tensors, places, None,
        lambda r, column, value: found.append(select(_condition(value), 1, 0, "int")),
    )  # fmt: skip
    return found


def are_wide(parts: Sequence[Expr], scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any], line: Line, level: int) -> Any:
    """Whether the captured divisors of masks are large enough for the masks to be words (``score_analysis.parts_if_wide``)."""
    least, found = least_divisor(line.extent, level), None
    for expr in parts:
        divisor = demanded(expr, line.along, line.extent, NEAR_BOX, least)
        if divisor is not None:
            leaves, needed = {name: places[name] for name in ("b", "h")}, needed_for(expr, divisor)
            value = run_stage(expr, scalars, tensors, "once", {}, leaves, needed)[divisor]
            found = value >= least if found is None else found & (value >= least)
    assert found is not None, "masks that are words whatever is captured"
    return found


class _Writer:
    def __init__(self, expr: Expr, scalars: Sequence[Any], tensors: Sequence[Any], places: dict[str, Any], line: Line) -> None:
        self.expr, self.given, self.line = expr, (scalars, tensors), line
        self.leaves = {name: places[name] for name in ("b", "h")}
        self.along, other = places[line.along], "q_idx" if line.along == "kv_idx" else "kv_idx"
        self.others: list[Any] = places[other]
        self.known: list[dict[int, Any]] = [{} for _ in self.others]  # values at the tile's first position
        self.alone: dict[int, Words] = {}  # words of nodes that do not depend on the other index
        self.cuts: dict[tuple[Cut, int | None], _Cuts] = {}  # by the other index if it matters
        self.deps = dependence(expr)
        self.positions = [{**self.leaves, line.along: line.origin, other: y} for y in self.others]

    def words(self, tree: Bits, y: int) -> Words:
        found = self._made(tree, y)
        return alike(found.holds, self.line) if isinstance(found, _Alike) else found

    def _made(self, tree: Bits, y: int) -> Any:
        """Words, or one condition for all positions."""
        if isinstance(tree, Same):
            return _Alike(_condition(self._value(tree.node, y)))
        if isinstance(tree, Limit):
            return self._limited(tree, y)
        if isinstance(tree, Each):
            return self._each(tree.node)
        if isinstance(tree, Not):
            part = self._made(tree.part, y)
            return _Alike(_not(part.holds)) if isinstance(part, _Alike) else tuple(~word for word in part)
        if isinstance(tree, Pieces):
            return self._in_pieces(tree, y)
        if isinstance(tree, Sides):
            condition, yes, no = (self.words(part, y) for part in tree)
            return tuple((c & a) | (~c & b) for c, a, b in zip(condition, yes, no, strict=True))
        return self._joined(tree, y)

    def _joined(self, tree: All | Some, y: int) -> Any:
        """The words of a conjunction or disjunction; conditions are combined first, without words."""
        parts = [self._made(part, y) for part in tree.parts]
        words = [p for p in parts if not isinstance(p, _Alike)]
        is_all, condition = isinstance(tree, All), None
        for part in parts:
            if not isinstance(part, _Alike):
                continue
            condition = part.holds if condition is None else condition & part.holds if is_all else condition | part.holds
        if condition is not None:
            if not words:
                return _Alike(condition)
            words.append(alike(condition, self.line))
        total = words[0]
        for more in words[1:]:
            total = tuple(a & b if is_all else a | b for a, b in zip(total, more, strict=True))
        return total

    def _in_pieces(self, tree: Pieces, y: int) -> Words:
        """The words piece by piece, each with the quotient and remainder that the tile's first position would have in that piece."""
        (divisor, quotient, rest, pieces), outside, total = self._cut(tree, y), self.known[y], None
        for n, piece in enumerate(pieces):
            shifted = {"floordiv": quotient + n, "mod": rest - divisor * n}
            self.known[y] = {i: shifted[node.op] for i, node in enumerate(self.expr.nodes) if node.op in shifted and node.args == tree.cut}
            words = both(self.words(tree.part, y), piece)
            total = words if total is None else tuple(a | b for a, b in zip(total, words, strict=True))
        self.known[y] = outside
        assert total is not None, "a tile of no pieces"
        return total

    def _cut(self, tree: Pieces, y: int) -> _Cuts:
        depends = self.deps[tree.cut.dividend].q if self.line.along == "kv_idx" else self.deps[tree.cut.dividend].kv
        key = (tree.cut, y if depends else None)
        if key not in self.cuts:
            dividend, divisor = (self._value(node, y) for node in tree.cut)
            dividend, divisor = Int32(dividend), divisor if isinstance(divisor, int) else Int32(cutlass.min(divisor, MOST_DIVISOR))
            quotient = divided("floordiv", dividend, divisor, "int", True)
            rest = dividend - quotient * divisor
            begins, at = [alike(True, self.line)], divisor - rest
            for n in range(1, tree.most):
                begins.append(at_least(at, self.line))
                at = _least(at, _FAR) + divisor if n + 1 < tree.most else at
            ends = [*(tuple(~word for word in words) for words in begins[1:]), alike(True, self.line)]
            self.cuts[key] = _Cuts(divisor, quotient, rest, [both(*limits) for limits in zip(begins, ends, strict=True)])
        return self.cuts[key]

    def _limited(self, tree: Limit, y: int) -> Any:
        apart = self._term(tree.left, y) - self._term(tree.right, y)  # difference at the tile's first position
        if tree.slope == 0:
            return _Alike(getattr(operator, tree.op)(apart, 0))
        op, line, next_one = tree.op, self.line, int(tree.op in (("gt", "le") if tree.slope > 0 else ("ge", "lt")))
        if op in ("eq", "ne"):
            place = -apart if tree.slope > 0 else apart
            one = within(place, place + 1, line)
            return one if op == "eq" else tuple(~word for word in one)
        if tree.slope > 0:  # apart + x >= 0
            return (at_least if op in ("gt", "ge") else below)(next_one - apart, line)
        return (below if op in ("gt", "ge") else at_least)(apart + next_one, line)

    def _term(self, term: Term, y: int) -> Any:
        value = Int32(self._value(term.node, y))
        return value if term.sign > 0 else -value

    def _each(self, node: int) -> Words:
        if node not in self.alone:
            words = [Int32(0)] * self.line.words
            needed = needed_for(self.expr, node)
            for c, place in enumerate(self.along):
                values = self._run({}, {**self.leaves, self.line.along: place}, needed)
                _set_where(_condition(values[node]), words, c)
            self.alone[node] = tuple(_opaque(word) for word in words)
        return self.alone[node]

    def _value(self, node: int, y: int) -> Any:
        """The node's value at the tile's first position."""
        if node not in self.known[y]:
            self._run(self.known[y], self.positions[y], needed_for(self.expr, node))
        return self.known[y][node]

    def _run(self, values: dict[int, Any], leaves: dict[str, Any], needed: set[int]) -> dict[int, Any]:
        for stage in ("once", "row", "col", "tile"):
            run_stage(self.expr, *self.given, stage, values, leaves, needed)
        return values


class _Cuts(NamedTuple):
    """The pieces of a tile: the divisor, quotient and remainder at the tile's first position, and the positions of each piece."""

    divisor: Any
    quotient: Any
    rest: Any
    pieces: list[Words]


class _Alike(NamedTuple):
    """One condition that applies to all positions."""

    holds: Any


def _condition(value: Any) -> Any:
    return value if isinstance(value, bool) else Boolean(value)


def _not(condition: Any) -> Any:
    return select(condition, False, True, "bool")
