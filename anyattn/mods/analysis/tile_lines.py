"""Lines of a tile: a mask along one index at all positions of an aligned tile, with the other index fixed, as a word of bits.

A thread of a matrix product has few rows and many keys of a tile, or few keys and many rows. Along the index with many positions, most
masks are a word of bits that a few comparisons with limits produce; ``bits`` finds those comparisons. Divisions vanish where the tile is
aligned: ``q // 128`` is one number in a tile of 64 rows that begins at a multiple of 64, and ``q % 128`` grows by 1. Elsewhere they vanish
within a few pieces of the tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import MIRRORED, Builder, Expr, Node, category
from anyattn.mods.ir.extents import Box, Extent, extents, fits, unwrapped

__all__ = [
    "LEVELS",
    "MOST_DIVISOR",
    "All",
    "Bits",
    "Cut",
    "Each",
    "Limit",
    "Not",
    "Pieces",
    "Same",
    "Sides",
    "Some",
    "Term",
    "asks_each",
    "bits",
    "demanded",
    "least_divisor",
    "slopes",
    "split",
]  # fmt: skip

_MOST_APART = 2**31 - 2**12  # bound on the sides of a comparison: limits relative to a position of the tile fit 32 bits
_MOST_PIECES = 2, 3, 5, 8  # by level: with captured divisors, each number of pieces is code of its own
LEVELS = range(len(_MOST_PIECES))
MOST_DIVISOR = 2**29  # small multiples of it fit 32 bits


class Term(NamedTuple):
    """``sign`` times the value of a node."""

    node: int
    sign: int


class Same(NamedTuple):
    """The same bit at all positions: the node's value at any of them."""

    node: int


class Limit(NamedTuple):
    """``left op right``; the difference of the sides changes by ``slope`` (1, -1 or 0) from position to position."""

    op: str
    left: Term
    right: Term
    slope: int


class Each(NamedTuple):
    """A bit evaluated at each position; it does not depend on the other index."""

    node: int


class All(NamedTuple):
    parts: tuple[Bits, ...]


class Some(NamedTuple):
    parts: tuple[Bits, ...]


class Not(NamedTuple):
    part: Bits


class Sides(NamedTuple):
    """``yes`` where ``condition``, else ``no``."""

    condition: Bits
    yes: Bits
    no: Bits


class Cut(NamedTuple):
    """A division of integers: ``dividend`` grows by 1 along the line, ``divisor`` is constant and positive."""

    dividend: int
    divisor: int


class Pieces(NamedTuple):
    """``part`` evaluated in up to ``most`` pieces of the tile; piece n begins at the n-th multiple of the divisor that the dividend
    reaches. There the quotient is n more than at the tile's first position,
    and the remainder is n divisors less than if it had kept growing."""

    cut: Cut
    most: int
    part: Bits


Bits: TypeAlias = Same | Limit | Each | All | Some | Not | Sides | Pieces


class _Even(NamedTuple):
    """How an integer changes along the line: by ``slope`` per position. rest: its value at the tile's first position modulo the tile's
    extent, None if unknown."""

    slope: int
    rest: int | None


@lru_cache(maxsize=1024)
def slopes(expr: Expr, index: str, extent: int, box: Box, cut: Cut | None = None) -> tuple[int | None, ...]:
    """How much each node grows per position of ``index``, in a tile of ``extent`` positions that begins at a multiple of ``extent``: 0 for
    a constant, None if unknown. cut: a division that is considered within one piece.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: q // 128 == k % 256, "mask").expr
    >>> box = Box.of_sizes(2**20, None)
    >>> [(n.op, s) for n, s in zip(e.nodes, slopes(e, "q_idx", 64, box)) if n.op in ("floordiv", "mod")]
    [('floordiv', 0), ('mod', 0)]
    >>> [(n.op, s) for n, s in zip(e.nodes, slopes(e, "kv_idx", 128, box)) if n.op in ("floordiv", "mod")]
    [('floordiv', 0), ('mod', 1)]
    """
    found: list[_Even | None] = []
    plain = unwrapped(expr, box)
    for i, node in enumerate(expr.nodes):
        even = _even(node, expr, [found[a] for a in node.args], plain[i], index, extent)
        found.append(_Even(int(node.op == "mod"), None) if even is None and _is_cut(node, cut) else even)
    return tuple(None if even is None else even.slope for even in found)


def _is_cut(node: Node, cut: Cut | None) -> bool:
    return cut is not None and node.op in ("floordiv", "mod") and node.args == cut


def _even(node: Node, expr: Expr, args: list[_Even | None], is_plain: bool, index: str, extent: int) -> _Even | None:
    if node.op == "index":
        return _Even(1, 0) if node.attr == index else _Even(0, None)
    if node.op == "const":
        return _Even(0, node.attr % extent if type(node.attr) is int else None)
    if node.op in ("native", "score"):
        return None
    if all(a is not None and a.slope == 0 for a in args):
        return _Even(0, _rest(node, args, extent) if is_plain else None)
    are_whole = category(node.dtype) == "int" and all(category(expr.nodes[a].dtype) == "int" for a in node.args)
    if not is_plain or any(a is None for a in args):
        return None
    if node.op in MIRRORED and all(category(expr.nodes[a].dtype) == "int" for a in node.args):
        return _Even(0, None) if args[0].slope == args[1].slope else None  # type: ignore[union-attr]
    if not are_whole:
        return None
    if node.op in ("add", "sub", "neg", "cast"):
        signs = (1, -1 if node.op == "sub" else 1) if len(args) == 2 else (-1 if node.op == "neg" else 1,)
        slope = sum(s * a.slope for s, a in zip(signs, args, strict=True) if a is not None)
        return _Even(slope, _rest(node, args, extent))
    literals = [expr.nodes[a].attr if expr.nodes[a].op == "const" else None for a in node.args]
    if node.op == "mul":
        for factor, other in ((literals[0], args[1]), (literals[1], args[0])):
            if type(factor) is int:
                return _Even(factor * other.slope, _rest(node, args, extent))  # type: ignore[union-attr]
        return None
    return _divided(node.op, args[0], literals[-1], extent)  # type: ignore[arg-type]


def _rest(node: Node, args: Sequence[_Even | None], extent: int) -> int | None:
    rests = [a.rest if a is not None else None for a in args]
    if node.op not in ("add", "sub", "neg", "mul", "cast") or any(r is None for r in rests) or category(node.dtype) != "int":
        return None
    first, last = rests[0], rests[-1]
    made = {"add": first + last, "sub": first - last, "neg": -first, "mul": first * last, "cast": first}[node.op]  # type: ignore[operator]
    return int(made % extent)  # type: ignore[operator]


def _divided(op: str, of: _Even, by: object, extent: int) -> _Even | None:
    """The quotient or remainder of a number that grows by 1 from a multiple of the tile's extent, by a literal multiple of the extent."""
    if type(by) is not int or of.slope != 1 or of.rest != 0:
        return None
    if op in ("shr", "and"):
        size = 1 << by if op == "shr" and 0 <= by < 32 else by + 1 if op == "and" and by > 0 and by & (by + 1) == 0 else 0
    else:
        size = by if op in ("floordiv", "mod") else 0
    if size <= 0 or size % extent:
        return None
    return _Even(0, None) if op in ("floordiv", "shr") else _Even(1, 0)


# ---- bits


@lru_cache(maxsize=1024)
def bits(expr: Expr, index: str, extent: int, box: Box, least: int = 0) -> Bits | None:
    """A mask along ``index`` as a tree of bits; None if some part must be evaluated per pair of positions.

    least: a lower bound on captured divisors (``demanded`` names the divisor), 0 if unknown.

    >>> from anyattn.mods.tracing.trace import trace
    >>> bits(trace(lambda b, h, q, k: (q >= k) & (k % 64 == 63), "mask").expr, "kv_idx", 128, Box.of_sizes(2**20, None))
    All(parts=(Limit(op='ge', left=Term(node=0, sign=1), right=Term(node=1, sign=1), slope=-1), Each(node=6)))
    """
    whole = _Reader(expr, index, extent, box, None).read(expr.outputs[0])
    if whole is not None:
        return whole
    for cut, count in _cuts(expr, index, extent, box, least):
        part = _Reader(expr, index, extent, box, cut).read(expr.outputs[0])
        if part is not None:
            return Pieces(cut, count, part)
    return None


def _cuts(expr: Expr, index: str, extent: int, box: Box, least: int) -> list[tuple[Cut, int]]:
    """The divisions along the line that cut a tile into few pieces, and the number of pieces."""
    known, deps, sizes, plain = slopes(expr, index, extent, box), dependence(expr), extents(expr, box), unwrapped(expr, box)
    found: dict[Cut, int] = {}
    for i, node in enumerate(expr.nodes):
        if node.op not in ("floordiv", "mod") or category(node.dtype) != "int" or not plain[i] or known[i] is not None:
            continue
        cut = Cut(*node.args)
        divisor, size, of, room = expr.nodes[cut.divisor], sizes[cut.divisor], deps[cut.divisor], sizes[cut.dividend]
        if known[cut.dividend] != 1 or of.q or of.kv or size is None or room is None or not fits(room, 31):
            continue
        if size.hi > MOST_DIVISOR and not _is_like_most(room, any(n.op == "mod" and n.args == cut for n in expr.nodes)):
            continue
        smallest = size.lo if divisor.op == "const" else least
        if smallest > 0 and (count := (extent - 2) // smallest + 2) <= _MOST_PIECES[-1]:
            found[cut] = count
    return list(found.items())


def _is_like_most(dividend: Extent, has_rest: bool) -> bool:
    """Whether every greater divisor cuts a line like ``MOST_DIVISOR``: the quotient is 0 or -1; remainders (has_rest) are the dividend."""
    return dividend.lo > -MOST_DIVISOR and dividend.hi < MOST_DIVISOR and not (has_rest and dividend.lo < 0)


def least_divisor(extent: int, level: int) -> int:
    """The least divisor that cuts a tile into at most as many pieces as this one of ``LEVELS`` allows.

    >>> [least_divisor(128, level) for level in LEVELS]
    [127, 64, 32, 19]
    """
    return (extent - 2) // (_MOST_PIECES[level] - 1) + 1


def demanded(expr: Expr, index: str, extent: int, box: Box, least: int) -> int | None:
    """The node that must be at least ``least`` for ``bits`` to be valid; None if there is none."""
    found = bits(expr, index, extent, box, least)
    divisor = found.cut.divisor if isinstance(found, Pieces) else None
    return None if divisor is None or expr.nodes[divisor].op == "const" else divisor


def asks_each(tree: Bits) -> bool:
    """Whether some part of the tree is evaluated at each position."""
    parts = getattr(tree, "parts", tree if isinstance(tree, Sides) else (getattr(tree, "part", None),))
    return isinstance(tree, Each) or any(asks_each(part) for part in parts if part is not None)


class _Reader:
    def __init__(self, expr: Expr, index: str, extent: int, box: Box, cut: Cut | None) -> None:
        self.nodes, self.slopes = expr.nodes, slopes(expr, index, extent, box, cut)
        self.reads_cut = _above(expr, [i for i, node in enumerate(expr.nodes) if _is_cut(node, cut)])
        self.sizes = tuple(None if e is None else max(abs(e.lo), abs(e.hi)) for e in extents(expr, box))
        self.plain = unwrapped(expr, box)
        other = "q" if index == "kv_idx" else "kv"
        self.is_own = tuple(not getattr(d, other) for d in dependence(expr))

    def read(self, at: int) -> Bits | None:
        node = self.nodes[at]
        if self.slopes[at] == 0:
            return Same(at)
        found = self._structured(at, node)
        if found is None and self.is_own[at] and node.op != "native" and at not in self.reads_cut:
            return Each(at)
        return found

    def _structured(self, at: int, node: Node) -> Bits | None:
        if node.op == "not":
            part = self.read(node.args[0])
            return None if part is None else Not(part)
        if node.op in ("and", "or"):
            parts = [self.read(a) for a in node.args]
            return None if None in parts else _joined(All if node.op == "and" else Some, parts)  # type: ignore[arg-type]
        are_bools = [self.nodes[a].dtype is torch.bool for a in node.args]
        if node.op == "where" and all(are_bools):
            parts = [self.read(a) for a in node.args]
            return None if None in parts else Sides(*parts)  # type: ignore[arg-type]
        if node.op in ("xor", "eq", "ne") and all(are_bools):
            a, b = (self.read(x) for x in node.args)
            if a is None or b is None:
                return None
            return Sides(a, Not(b), b) if node.op != "eq" else Sides(a, b, Not(b))
        if node.op in MIRRORED and all(category(self.nodes[a].dtype) == "int" for a in node.args):
            return self._compared(node.op, *(Term(a, 1) for a in node.args))
        return None

    def _compared(self, op: str, left: Term, right: Term) -> Bits | None:
        if self.slopes[left.node] is None:
            return self._opened(op, left, right)
        if self.slopes[right.node] is None:
            return self._opened(MIRRORED[op], right, left)
        sides = (left.node, right.node)
        slope = left.sign * self.slopes[left.node] - right.sign * self.slopes[right.node]  # type: ignore[operator]
        if slope not in (1, -1, 0) or not all(self.plain[at] and self.sizes[at] is not None for at in sides):
            return None
        is_near = sum(self.sizes[at] for at in sides) <= _MOST_APART  # type: ignore[misc]
        return Limit(op, left, right, slope) if is_near else None

    def _opened(self, op: str, left: Term, right: Term) -> Bits | None:
        """``left op right`` where the left side is the maximum or minimum of two numbers, such as a number and its negative (``abs``)."""
        node = self.nodes[left.node]
        if node.op not in ("abs", "min", "max") or op in ("eq", "ne"):
            return None
        parts = (left._replace(node=node.args[0]), left._replace(node=node.args[-1]))
        if node.op == "abs":
            parts = (parts[0], parts[1]._replace(sign=-left.sign))
        is_larger = (node.op != "min") == (left.sign > 0)
        found = [self._compared(op, part, right) for part in parts]
        return None if None in found else _joined(All if is_larger == (op in ("lt", "le")) else Some, found)  # type: ignore[arg-type]


def _above(expr: Expr, some: list[int]) -> set[int]:
    """These nodes and all nodes computed from them."""
    found = set(some)
    for i, node in enumerate(expr.nodes):
        if any(a in found for a in node.args):
            found.add(i)
    return found


def _joined(kind: type[All] | type[Some], parts: Sequence[Bits]) -> Bits:
    """``All`` or ``Some`` of the parts, with nested ones of the same kind flattened."""
    return kind(tuple([inner for part in parts for inner in (part.parts if isinstance(part, kind) else (part,))]))


# ---- a mask's conjuncts


@lru_cache(maxsize=1024)
def split(expr: Expr, index: str, extent: int, box: Box, least: int = 0) -> tuple[tuple[Expr, ...], Expr | None]:
    """A mask as (conjuncts that have ``bits``, the conjunction of the others or None); slots are those of the mask.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: (q >= k) & (q * k % 7 < 3), "mask").expr
    >>> known, rest = split(e, "q_idx", 64, Box.of_sizes(2**20, None))
    >>> [part.output.op for part in known], len(rest.nodes)
    (['ge'], 7)
    """
    whole: list[int] = []
    pieces: dict[Expr, list[int]] = {}  # by what is divided; conjuncts with the same pieces are a part together
    others: list[int] = []
    for at in expr.conjuncts():
        builder = Builder()
        alone = builder.build(builder.copy(expr, at))
        tree = bits(alone, index, extent, box, least)
        if isinstance(tree, Pieces):
            builder = Builder()
            pieces.setdefault(builder.build(*(builder.copy(alone, node) for node in tree.cut)), []).append(at)
        else:
            (others if tree is None else whole).append(at)
    known = [_anded(expr, whole), *(_anded(expr, together) for together in pieces.values())]
    return tuple([part for part in known if part is not None]), _anded(expr, others)


def _anded(expr: Expr, parts: list[int]) -> Expr | None:
    if not parts:
        return None
    builder = Builder()
    total = builder.copy(expr, parts[0])
    for at in parts[1:]:
        total = builder.add("and", total, builder.copy(expr, at))
    return builder.build(total)
