"""Extents: the least and greatest value of every integer node of a mod, from the sizes of its leaves.

In Python integers, without tensors. Emitters learn where 32 bits are enough; other analyses that an index stays inside its tensor, or that
no number wraps around, so that the rules of unbounded integers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from anyattn.mods.ir.expr import DType, Expr, Node, category, is_weak

__all__ = ["MOST_INDEX_BITS", "Box", "Extent", "bits_of", "exact", "extent_of", "extents", "fits", "unwrapped"]

MOST_INDEX_BITS = 30  # sequences are shorter than 2 ** this: the caller checks
_SHIFTS = 64


class Extent(NamedTuple):
    """Both inclusive."""

    lo: int
    hi: int


class Box(NamedTuple):
    """What is known of the leaves. scalars: one extent for all captured whole numbers (None: nothing is known), or one for each.
    tensors: one for each captured tensor, None of those of which only the dtype is known; no entries, and that holds for all.
    by_zero: something may be divided by 0, of which nothing is known then; False where no one relies on what a division by 0 gives."""

    b: Extent
    h: Extent
    q_idx: Extent
    kv_idx: Extent
    scalars: Extent | tuple[Extent, ...] | None = None
    tensors: tuple[Extent | None, ...] = ()
    by_zero: bool = True

    @classmethod
    def of_sizes(cls, positions: int, scalars: int | None) -> Box:
        """Positions, batch entries and heads below ``positions``, a row's possibly below 0; captured whole numbers below ``scalars``."""
        most = Extent(0, positions - 1)
        return cls(most, most, Extent(1 - positions, positions - 1), most, None if scalars is None else Extent(1 - scalars, scalars - 1))

    @classmethod
    def of_numbers(cls, positions: int, numbers: Sequence[int | float]) -> Box:
        """``of_sizes`` for captured numbers that are known; of floats nothing is."""
        return cls.of_sizes(positions, None)._replace(scalars=tuple(Extent(n, n) if type(n) is int else Extent(0, 0) for n in numbers))


def fits(extent: Extent | None, bits: int = 32) -> bool:
    """Whether a signed integer of so many bits holds it."""
    return extent is not None and -(2 ** (bits - 1)) <= extent.lo and extent.hi < 2 ** (bits - 1)


def bits_of(extent: Extent) -> int:
    """The least n with all sizes at most 2 ** n."""
    return max(abs(extent.lo), abs(extent.hi)).bit_length()


@lru_cache(maxsize=4096)
def extents(expr: Expr, box: Box) -> tuple[Extent | None, ...]:
    """Of every node; None of floats. What may leave its dtype's range wraps around in torch, so nothing but the dtype is known of it.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: q - k <= 4, "mask").expr
    >>> extents(e, Box.of_sizes(2**20, None))[e.nodes[e.outputs[0]].args[0]]
    Extent(lo=-2097150, hi=1048575)
    """
    return tuple(extent for extent, _ in _walked(expr, box))


def exact(expr: Expr, box: Box) -> tuple[bool, ...]:
    """For every node whether it equals the operation on unbounded integers: it cannot leave its dtype's range."""
    return tuple(is_exact for _, is_exact in _walked(expr, box))


@lru_cache(maxsize=4096)
def unwrapped(expr: Expr, box: Box) -> tuple[bool, ...]:
    """``exact`` of a node and of all numbers that it is computed from. Loaded values and conditions count as exact.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: (q * 2**40 - k).to(torch.int32) + k.to(torch.int32) > 4, "mask").expr
    >>> [node.op for node, is_plain in zip(e.nodes, unwrapped(e, Box.of_sizes(2**20, None))) if not is_plain]
    ['cast', 'add', 'gt']
    """
    found: list[bool] = []
    for node, (_, is_exact) in zip(expr.nodes, _walked(expr, box), strict=True):
        read = () if node.op in ("load", "tensor", "native") else node.args[1:] if node.op == "where" else node.args
        found.append(is_exact and all(found[a] for a in read))
    return tuple(found)


@lru_cache(maxsize=4096)
def _walked(expr: Expr, box: Box) -> tuple[tuple[Extent | None, bool], ...]:
    found: list[tuple[Extent | None, bool]] = []
    for node in expr.nodes:
        found.append(extent_of(node, [expr.nodes[a].dtype for a in node.args], [found[a][0] for a in node.args], box))
    return tuple(found)


def _range(dtype: DType) -> Extent:
    if dtype is torch.bool:
        return Extent(0, 1)
    info = torch.iinfo(torch.int64 if is_weak(dtype) else dtype)  # type: ignore[arg-type]
    return Extent(info.min, info.max)


def extent_of(node: Node, dtypes: Sequence[DType], args: Sequence[Extent | None], box: Box) -> tuple[Extent | None, bool]:
    """A node's extent (None of floats), and whether its value is sure to be the operation's result in whole numbers without end.

    dtypes, args: those of its arguments, and their extents.
    """
    if category(node.dtype) == "float":
        return None, True
    whole = _range(node.dtype)
    if node.op == "index":
        return getattr(box, node.attr), True  # type: ignore[call-overload]
    if node.op == "const":
        return Extent(int(node.attr), int(node.attr)), True  # type: ignore[call-overload]
    if node.op == "scalar":
        given = box.scalars
        return given if isinstance(given, Extent) else given[node.attr] if given else whole, True  # type: ignore[call-overload]
    if node.op == "load" and box.tensors:
        return box.tensors[node.attr] or whole, True  # type: ignore[call-overload]
    rule = _RULES.get(node.op)
    stays = node.dtype is torch.bool or node.op in _INSIDE
    if rule is None or category(dtypes[-1]) == "float" or any(a is None for a in args):
        return whole, stays
    made = rule(*args) if box.by_zero or node.op not in _DIVISIONS else _divided(rule, *args)  # type: ignore[arg-type]
    is_inside = made is not None and whole.lo <= made.lo and made.hi <= whole.hi
    return made if is_inside else whole, stays or is_inside


def _divided(rule: Callable[[Extent, Extent], Extent | None], a: Extent, b: Extent) -> Extent | None:
    """By all divisors but 0: those below and those above."""
    sides = [side for side in (Extent(b.lo, min(b.hi, -1)), Extent(max(b.lo, 1), b.hi)) if side.lo <= side.hi]
    found = [made for side in sides if (made := rule(a, side)) is not None]
    return Extent(min(e.lo for e in found), max(e.hi for e in found)) if found else None


def _corners(rule: Callable[[int, int], int]) -> Callable[..., Extent]:
    """Of operations that are monotone in each operand."""

    def of(a: Extent, b: Extent) -> Extent:
        values = [rule(x, y) for x in a for y in b]
        return Extent(min(values), max(values))

    return of


def _negated(a: Extent) -> Extent:
    return Extent(-a.hi, -a.lo)


def _absolute(a: Extent) -> Extent:
    return a if a.lo >= 0 else _negated(a) if a.hi <= 0 else Extent(0, max(-a.lo, a.hi))


def _quotient(a: Extent, b: Extent) -> Extent | None:
    """Divided down; unknown where the divisor can be 0."""
    if b.lo <= 0 <= b.hi:
        return None
    return _corners(lambda x, y: x // y)(a, b)


def _remainder(a: Extent, b: Extent) -> Extent | None:
    """Python's, with the divisor's sign."""
    if b.lo <= 0 <= b.hi:
        return None
    if b.lo == b.hi and a.lo // b.lo == a.hi // b.lo:
        return Extent(a.lo % b.lo, a.hi % b.lo)
    return Extent(0, b.hi - 1) if b.lo > 0 else Extent(b.lo + 1, 0)


def _rest(a: Extent, b: Extent) -> Extent | None:
    """C's, with the dividend's sign."""
    if b.lo <= 0 <= b.hi:
        return None
    most = max(abs(b.lo), abs(b.hi)) - 1
    return Extent(-min(most, max(-a.lo, 0)), min(most, max(a.hi, 0)))


def _bits(a: Extent, b: Extent) -> Extent:
    """Of and, or, xor: no wider than the wider operand; without a sign where neither has one."""
    most = 2 ** max(e.bit_length() for e in (*a, *b))
    return Extent(0 if min(a.lo, b.lo) >= 0 else -most, most - 1)


def _common_bits(a: Extent, b: Extent) -> Extent:
    """Of and: between 0 and an operand that is not negative."""
    most = [e.hi for e in (a, b) if e.lo >= 0]
    return Extent(0, min(most)) if most else _bits(a, b)


def _raised(a: Extent, b: Extent) -> Extent | None:
    """Shifted to the left; by less than 0 or by too many bits the result is 0."""
    return _corners(lambda x, y: x << y)(a, b) if b.lo >= 0 and b.hi < _SHIFTS else None


def _shifted(a: Extent, b: Extent) -> Extent | None:
    """To the right."""
    return _corners(lambda x, y: x >> y)(a, b) if b.lo >= 0 and b.hi < _SHIFTS else None


_RULES: dict[str, Callable[..., Any]] = {
    "add": _corners(lambda x, y: x + y), "mul": _corners(lambda x, y: x * y), "sub": _corners(lambda x, y: x - y),
    "min": _corners(min), "max": _corners(max), "neg": _negated, "abs": _absolute, "floordiv": _quotient, "mod": _remainder,
    "fmod": _rest, "shl": _raised, "and": _common_bits, "or": _bits, "xor": _bits, "not": lambda a: Extent(~a.hi, ~a.lo), "shr": _shifted,
    "sign": lambda a: Extent(-1, 1), "cast": lambda a: a, "where": lambda c, x, y: Extent(min(x.lo, y.lo), max(x.hi, y.hi)),
}  # fmt: skip
_DIVISIONS = frozenset(("floordiv", "mod", "fmod"))
_INSIDE = frozenset(("load", "min", "max", "and", "or", "xor", "shr", "sign", "mod", "fmod", "where"))  # never leave their operands' dtype
