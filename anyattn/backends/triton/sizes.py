"""How large the whole numbers of a mod can be: the least and the greatest value of every node, from the sizes of what it is made of.

Python integers, no tensors: what an emitter asks to know where 32 bits are enough, and what shows that an index stays inside of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from anyattn.mods.ir import DType, Expr, Node, category, is_weak

__all__ = ["MOST_INDEX_BITS", "Box", "Extent", "bits_of", "extents", "fits"]

MOST_INDEX_BITS = 30  # sequences are shorter than 2 ** this: the caller checks
_SHIFTS = 64


class Extent(NamedTuple):
    """Both inclusive."""

    lo: int
    hi: int


class Box(NamedTuple):
    """What is known of the leaves. scalars: one extent for all captured whole numbers (None: nothing is known), or one for each."""

    b: Extent
    h: Extent
    q_idx: Extent
    kv_idx: Extent
    scalars: Extent | tuple[Extent, ...] | None = None

    @classmethod
    def of_sizes(cls, positions: int, scalars: int | None) -> Box:
        """Positions, batch entries and heads below ``positions``, a row's possibly below 0; captured whole numbers below ``scalars``."""
        most = Extent(0, positions - 1)
        return cls(most, most, Extent(1 - positions, positions - 1), most, None if scalars is None else Extent(1 - scalars, scalars - 1))


def fits(extent: Extent | None, bits: int = 32) -> bool:
    """Whether a signed integer of so many bits holds it."""
    return extent is not None and -(2 ** (bits - 1)) <= extent.lo and extent.hi < 2 ** (bits - 1)


def bits_of(extent: Extent) -> int:
    """The least n with all sizes at most 2 ** n."""
    return max(abs(extent.lo), abs(extent.hi)).bit_length()


@lru_cache(maxsize=4096)
def extents(expr: Expr, box: Box) -> tuple[Extent | None, ...]:
    """Of every node; None of floats. What may leave its dtype's range wraps around in torch, so nothing but the dtype is known of it.

    >>> from anyattn.mods.trace import trace
    >>> e = trace(lambda b, h, q, k: q - k <= 4, "mask").expr
    >>> extents(e, Box.of_sizes(2**20, None))[e.nodes[e.outputs[0]].args[0]]
    Extent(lo=-2097150, hi=1048575)
    """
    found: list[Extent | None] = []
    for node in expr.nodes:
        found.append(_of(node, expr, [found[a] for a in node.args], box))
    return tuple(found)


def _range(dtype: DType) -> Extent:
    if dtype is torch.bool:
        return Extent(0, 1)
    info = torch.iinfo(torch.int64 if is_weak(dtype) else dtype)  # type: ignore[arg-type]
    return Extent(info.min, info.max)


def _of(node: Node, expr: Expr, args: Sequence[Extent | None], box: Box) -> Extent | None:
    if category(node.dtype) == "float":
        return None
    whole = _range(node.dtype)
    if node.op == "index":
        return getattr(box, node.attr)  # type: ignore[call-overload, no-any-return]
    if node.op == "const":
        return Extent(int(node.attr), int(node.attr))  # type: ignore[call-overload]
    if node.op == "scalar":
        given = box.scalars
        return given if isinstance(given, Extent) else given[node.attr] if given else whole  # type: ignore[call-overload, no-any-return]
    rule = _RULES.get(node.op)
    operand = expr.nodes[node.args[-1]].dtype if node.args else node.dtype
    if rule is None or category(operand) == "float" or any(a is None for a in args):
        return whole
    made = rule(*args)
    return whole if made is None or made.lo < whole.lo or made.hi > whole.hi else made


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


def _shifted(a: Extent, b: Extent) -> Extent | None:
    """To the right."""
    return _corners(lambda x, y: x >> y)(a, b) if b.lo >= 0 and b.hi < _SHIFTS else None


_RULES: dict[str, Callable[..., Any]] = {
    "add": _corners(lambda x, y: x + y), "mul": _corners(lambda x, y: x * y), "sub": _corners(lambda x, y: x - y),
    "min": _corners(min), "max": _corners(max), "neg": _negated, "abs": _absolute, "floordiv": _quotient, "mod": _remainder,
    "fmod": _rest, "and": _bits, "or": _bits, "xor": _bits, "not": lambda a: Extent(~a.hi, ~a.lo), "shr": _shifted,
    "sign": lambda a: Extent(-1, 1), "cast": lambda a: a, "where": lambda c, x, y: Extent(min(x.lo, y.lo), max(x.hi, y.hi)),
}  # fmt: skip
