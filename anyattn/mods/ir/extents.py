"""Extents: the least and greatest value of every integer node of a mod, derived from the ranges of its leaves.

They are Python integers; no tensors are read. Emitters use them to choose 32-bit arithmetic. Other analyses prove by them that an index
stays inside its tensor, or that no number wraps around, so that the rules of unbounded integers apply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from anyattn.mods.ir.expr import DType, Expr, Node, category, is_weak

__all__ = ["MOST_INDEX_BITS", "Box", "Extent", "bits_of", "exact", "extent_of", "extents", "fits", "unwrapped"]

MOST_INDEX_BITS = 30  # sequences have at most 2 ** this positions, which callers check
_SHIFTS = 64


class Extent(NamedTuple):
    """The least and the greatest value, both inclusive."""

    lo: int
    hi: int


class Box(NamedTuple):
    """Ranges of the leaves. scalars: one extent for all captured integers (None: unknown), or one per number. tensors: one extent per
    captured tensor, None if only its dtype is known; empty if that is so for all. by_zero: divisors may be 0, and then the result is
    unknown; False if the result of a division by 0 is never used."""

    b: Extent
    h: Extent
    q_idx: Extent
    kv_idx: Extent
    scalars: Extent | tuple[Extent, ...] | None = None
    tensors: tuple[Extent | None, ...] = ()
    by_zero: bool = True

    @classmethod
    def of_sizes(cls, positions: int, scalars: int | None) -> Box:
        """Positions, batch entries and heads below ``positions``, q_idx possibly negative; captured integers below ``scalars`` in size."""
        most = Extent(0, positions - 1)
        return cls(most, most, Extent(1 - positions, positions - 1), most, None if scalars is None else Extent(1 - scalars, scalars - 1))

    @classmethod
    def of_numbers(cls, positions: int, numbers: Sequence[int | float]) -> Box:
        """``of_sizes`` for captured numbers with known values. Floats have no extent; a compiler's symbolic integer may be any."""
        return cls.of_sizes(positions, None)._replace(scalars=tuple(Extent(n, n) if type(n) is int else _range(int) for n in numbers))


def fits(extent: Extent | None, bits: int = 32) -> bool:
    """Whether the extent fits a signed integer of ``bits`` bits."""
    return extent is not None and -(2 ** (bits - 1)) <= extent.lo and extent.hi < 2 ** (bits - 1)


def bits_of(extent: Extent) -> int:
    """The least n such that no value's size exceeds 2 ** n."""
    return max(abs(extent.lo), abs(extent.hi)).bit_length()


@lru_cache(maxsize=4096)
def extents(expr: Expr, box: Box) -> tuple[Extent | None, ...]:
    """The extent of every node; None for floats. A value that may leave its dtype's range wraps around, so it has the dtype's whole range.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: q - k <= 4, "mask").expr
    >>> extents(e, Box.of_sizes(2**20, None))[e.nodes[e.outputs[0]].args[0]]
    Extent(lo=-2097150, hi=1048575)
    """
    return tuple(extent for extent, _ in _walked(expr, box))


def exact(expr: Expr, box: Box) -> tuple[bool, ...]:
    """For every node whether it equals the operation on unbounded integers, because the result cannot leave its dtype's range."""
    return tuple(is_exact for _, is_exact in _walked(expr, box))


@lru_cache(maxsize=4096)
def unwrapped(expr: Expr, box: Box) -> tuple[bool, ...]:
    """For every node whether it and all numbers it is computed from are ``exact``. Loaded values and conditions count as exact.

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
    """A node's extent (None for floats), and whether its value certainly equals the operation on unbounded integers.

    dtypes, args: the dtypes and the extents of its arguments.
    """
    if category(node.dtype) == "float":
        return None, True
    whole = _range(node.dtype)
    if node.op == "index":
        return getattr(box, node.attr), True  # type: ignore[call-overload]
    if node.op == "bound":
        return getattr(box, str(node.attr[0]), whole), True  # type: ignore[index]
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
    """``rule`` over all divisors but 0: the negative ones and the positive ones."""
    sides = [side for side in (Extent(b.lo, min(b.hi, -1)), Extent(max(b.lo, 1), b.hi)) if side.lo <= side.hi]
    found = [made for side in sides if (made := rule(a, side)) is not None]
    return Extent(min(e.lo for e in found), max(e.hi for e in found)) if found else None


def _corners(rule: Callable[[int, int], int]) -> Callable[..., Extent]:
    """The extent of an operation that is monotone in each operand."""

    def of(a: Extent, b: Extent) -> Extent:
        values = [rule(x, y) for x in a for y in b]
        return Extent(min(values), max(values))

    return of


def _negated(a: Extent) -> Extent:
    return Extent(-a.hi, -a.lo)


def _absolute(a: Extent) -> Extent:
    return a if a.lo >= 0 else _negated(a) if a.hi <= 0 else Extent(0, max(-a.lo, a.hi))


def _quotient(a: Extent, b: Extent) -> Extent | None:
    """Floor division; unknown if the divisor can be 0."""
    if b.lo <= 0 <= b.hi:
        return None
    return _corners(lambda x, y: x // y)(a, b)


def _remainder(a: Extent, b: Extent) -> Extent | None:
    """Python's remainder, which has the divisor's sign."""
    if b.lo <= 0 <= b.hi:
        return None
    if b.lo == b.hi and a.lo // b.lo == a.hi // b.lo:
        return Extent(a.lo % b.lo, a.hi % b.lo)
    return Extent(0, b.hi - 1) if b.lo > 0 else Extent(b.lo + 1, 0)


def _rest(a: Extent, b: Extent) -> Extent | None:
    """C's remainder, which has the dividend's sign."""
    if b.lo <= 0 <= b.hi:
        return None
    most = max(abs(b.lo), abs(b.hi)) - 1
    return Extent(-min(most, max(-a.lo, 0)), min(most, max(a.hi, 0)))


def _bits(a: Extent, b: Extent) -> Extent:
    """Bitwise and, or, xor: the result is no wider than the wider operand, and not negative if neither operand is."""
    most = 2 ** max(e.bit_length() for e in (*a, *b))
    return Extent(0 if min(a.lo, b.lo) >= 0 else -most, most - 1)


def _common_bits(a: Extent, b: Extent) -> Extent:
    """Bitwise and: the result is between 0 and any operand that is not negative."""
    most = [e.hi for e in (a, b) if e.lo >= 0]
    return Extent(0, min(most)) if most else _bits(a, b)


def _raised(a: Extent, b: Extent) -> Extent | None:
    """Left shift; unknown for negative shifts and for shifts by too many bits."""
    return _corners(lambda x, y: x << y)(a, b) if b.lo >= 0 and b.hi < _SHIFTS else None


def _shifted(a: Extent, b: Extent) -> Extent | None:
    """Right shift; unknown for negative shifts and for shifts by too many bits."""
    return _corners(lambda x, y: x >> y)(a, b) if b.lo >= 0 and b.hi < _SHIFTS else None


_RULES: dict[str, Callable[..., Any]] = {
    "add": _corners(lambda x, y: x + y), "mul": _corners(lambda x, y: x * y), "sub": _corners(lambda x, y: x - y),
    "min": _corners(min), "max": _corners(max), "neg": _negated, "abs": _absolute, "floordiv": _quotient, "mod": _remainder,
    "fmod": _rest, "shl": _raised, "and": _common_bits, "or": _bits, "xor": _bits, "not": lambda a: Extent(~a.hi, ~a.lo), "shr": _shifted,
    "sign": lambda a: Extent(-1, 1), "cast": lambda a: a, "where": lambda c, x, y: Extent(min(x.lo, y.lo), max(x.hi, y.hi)),
}  # fmt: skip
_DIVISIONS = frozenset(("floordiv", "mod", "fmod"))
_INSIDE = frozenset(("load", "min", "max", "and", "or", "xor", "shr", "sign", "mod", "fmod", "where"))  # results in the operands' range
