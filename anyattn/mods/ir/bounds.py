"""Interval arithmetic, IR in and IR out: bounds of an expression while its leaves run over ranges, as expressions of the leaves' bounds.

Bounds are inclusive and sound. A bool's are "certainly true" and "may be true", so three-valued logic is the same arithmetic. Those of
integers are int64, and unknown is ``+-WILD``, in narrower dtypes the least or greatest number. Those of floats have the value's own dtype,
where rounding is monotone, so they hold for the rounded values and not only for real numbers, and unknown is NaN at both ends. A comparison
with an unknown is undecided. Checks that the leaves' extents (``extents.py``) decide, such as those for overflow, are left out.

The leaves are ``bound`` nodes, whose attribute ends with 0 for the least and 1 for the greatest value: ``(name of an index, end)``,
``("load", slot, end)`` with the bounds of the indices, (least, greatest) per dimension, as arguments, and ``(number of a node, end)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import MIRRORED, Builder, DType, Expr, Node, category, is_weak
from anyattn.mods.ir.extents import Box, Extent, extent_of, extents, fits

__all__ = ["WILD", "bounds"]

WILD = 2**61  # the sum of two such numbers fits int64


@lru_cache(maxsize=1024)
def bounds(expr: Expr, box: Box, hulls: frozenset[int] | None = None) -> Expr:
    """An expression with the outputs (lower bound, upper bound) of every output of ``expr``, which reads no score.

    box: the extents of the leaves. hulls: for one tile of one head, the nodes whose least and greatest values are leaves. b and h are then
    single numbers, a load at both positions is known if it reads one entry, and floats are unknown. None: b, h and loads have bounds too.

    >>> from anyattn.mods.tracing.trace import trace
    >>> print(bounds(trace(lambda b, h, q, k: q >= k, "mask").expr, Box.of_sizes(2**20, None)))
    %0: int64 = bound ('kv_idx', 1)
    %1: int64 = bound ('q_idx', 0)
    %2: bool = le %0 %1
    %3: int64 = bound ('kv_idx', 0)
    %4: int64 = bound ('q_idx', 1)
    %5: bool = gt %3 %4
    %6: bool = not %5
    -> %2, %6
    """
    return _Writer(expr, box, hulls).bounds()


def _operator(op: str) -> Callable[..., _Value]:
    return lambda self, *others: self.writer.op(op, self, *others)


@dataclass(frozen=True, eq=False)
class _Value:
    """A node of the bounds with Python's operators; a number takes the dtype of the other operand."""

    writer: _Writer
    at: int

    __add__, __sub__, __mul__, __floordiv__, __rshift__ = map(_operator, ("add", "sub", "mul", "floordiv", "shr"))
    __lt__, __le__, __gt__, __ge__, __and__, __or__ = map(_operator, ("lt", "le", "gt", "ge", "and", "or"))
    __neg__, __abs__, __invert__, equals, min, max, where = map(_operator, ("neg", "abs", "not", "eq", "min", "max", "where"))

    def to(self, dtype: DType) -> _Value:
        return self.writer.added(self.writer.builder.cast(self.at, dtype))

    def rounded(self, dtype: DType) -> _Value:
        """As an entry of a tensor of this dtype, which a number is not, whatever dtype its node has."""
        return self.writer.node("cast", self.writer.node("cast", self, dtype=float), dtype=dtype, attr="rounded")

    @property
    def dtype(self) -> DType:
        return self.writer.builder.nodes[self.at].dtype

    @property
    def is_finite(self) -> _Value:
        return abs(self) < math.inf


class _Span(NamedTuple):
    lo: _Value
    hi: _Value

    def to(self, dtype: DType) -> _Span:
        return _Span(self.lo.to(dtype), self.hi.to(dtype))

    @property
    def is_point(self) -> _Value:
        return self.lo.equals(self.hi)

    @property
    def is_unknown(self) -> _Value:
        """Whether int64 bounds are unknown."""
        return (self.lo <= -WILD) | (self.hi >= WILD)


class _Writer:
    """Writes the bounds of nodes, arguments first."""

    def __init__(self, expr: Expr, box: Box, hulls: frozenset[int] | None) -> None:
        self.expr, self.nodes, self.box, self.hulls, self.builder = expr, expr.nodes, box, hulls, Builder()
        self.dependence, self.node_extents = dependence(expr), extents(expr, box)
        self.extents: list[Extent | None] = []  # of the builder's nodes
        self.copies: dict[int, _Value] = {}  # the values of nodes that depend on neither position
        self.spans: list[_Span] = []

    def bounds(self) -> Expr:
        for at in range(len(self.nodes)):
            self.spans.append(self.span(at))
        return self.builder.build(*(end.at for o in self.expr.outputs for end in self.spans[o]))

    # -- nodes of the bounds
    def added(self, at: int) -> _Value:
        for node in self.builder.nodes[len(self.extents) :]:
            dtypes = [self.builder.nodes[a].dtype for a in node.args]
            self.extents.append(extent_of(node, dtypes, [self.extents[a] for a in node.args], self.box)[0])
        return _Value(self, at)

    def node(self, op: str, *args: _Value, dtype: DType | None = None, attr: Hashable = None) -> _Value:
        return self.added(self.builder.add(op, *(a.at for a in args), dtype=dtype, attr=attr))

    def number(self, value: float, dtype: DType) -> _Value:
        return self.added(self.builder.const(float(value) if category(dtype) == "float" else value, dtype))

    def op(self, op: str, *operands: _Value | float) -> _Value:
        """An operation, or its result if the extents of integers decide it."""
        dtype = next(a.dtype for a in reversed(operands) if isinstance(a, _Value))
        args = [a if isinstance(a, _Value) else self.number(a, dtype) for a in operands]
        if op in (*MIRRORED, "min", "max") and category(dtype) == "int":
            a, b = (self.extents[x.at] for x in args)
            result = _decided(op, a, b, args[0].at == args[1].at)  # type: ignore[arg-type]
            if result is not None:
                return self.number(result, torch.bool) if op in MIRRORED else args[not result]
        return self.node(op, *args)

    def within(self, value: _Value, least: int, most: int) -> _Value:
        """An int64 value that is known to be between two numbers."""
        extent = self.extents[value.at]
        assert extent is not None
        self.extents[value.at] = Extent(max(extent.lo, least), min(extent.hi, most))
        return value

    # -- spans
    def span(self, at: int) -> _Span:
        node = self.nodes[at]
        span = self.of_tile(at) if self.hulls is not None else None
        if span is not None:
            return span
        if node.op == "index":
            return _Span(*(self.node("bound", dtype=torch.int64, attr=(node.attr, end)) for end in (0, 1)))
        if node.op in ("const", "scalar"):
            return self.point(node, self.node(node.op, dtype=node.dtype, attr=node.attr))
        args = [self.spans[a] for a in node.args]
        return self.load(node, args) if node.op == "load" else _RULES[node.op](self, node, *args)

    def of_tile(self, at: int) -> _Span | None:
        """The bounds of a single number, a leaf or a float; None for other nodes."""
        node, dep = self.nodes[at], self.dependence[at]
        kinds = [category(dtype) for dtype in (node.dtype, *(self.nodes[a].dtype for a in node.args[-1:]))]
        if is_single := not (dep.q or dep.kv):
            self.copies[at] = self.node(node.op, *(self.copies[a] for a in node.args), dtype=node.dtype, attr=node.attr)
        if is_single and kinds[0] != "float":
            return self.point(node, self.copies[at])
        if at in self.hulls and (extent := self.node_extents[at]):  # type: ignore[operator]
            lo, hi = (self.within(self.node("bound", dtype=torch.int64, attr=(at, end)), *extent) for end in (0, 1))
            return _Span(lo, hi).to(torch.bool) if kinds[0] == "bool" else self.fit(node, lo, hi)
        return self.unknown(node) if "float" in kinds else None

    def point(self, node: Node, value: _Value) -> _Span:
        if category(node.dtype) == "int" and (extent := self.extents[value.at]) and (extent.lo >= WILD or extent.hi <= -WILD):
            return self.unknown(node)
        value = value.to(_dtype(node.dtype))
        return self.fit(node, value, value) if category(node.dtype) == "int" else _Span(value, value)

    def unknown(self, node: Node) -> _Span:
        least, most = (self.number(end, _dtype(node.dtype)) for end in _limits(node.dtype))
        return _Span(least, most)

    def load(self, node: Node, args: list[_Span]) -> _Span:
        kind = category(node.dtype)
        if self.hulls is None:
            dtype = torch.uint8 if kind == "bool" else _dtype(node.dtype)
            indices = [end for a in args for end in a]
            lo, hi = (self.node("bound", *indices, dtype=dtype, attr=("load", node.attr, end)) for end in (0, 1))
            if kind != "int":
                return _Span(lo, hi).to(_dtype(node.dtype))
            least, most = _range(node.dtype)
            return self.fit(node, self.within(lo, least, most), self.within(hi, least, most))
        is_one = self.all(a.is_point for a in args)
        value = self.node("load", *(a.lo for a in args), dtype=node.dtype, attr=node.attr)
        if kind == "bool":
            return _Span(is_one & value, ~is_one | value)
        return self.fit(node, value.to(torch.int64), value.to(torch.int64), ~is_one)

    def all(self, values: Iterable[_Value]) -> _Value:
        return reduce(lambda a, b: a & b, values, self.number(True, torch.bool))

    # -- results
    def fit(self, node: Node, lo: _Value, hi: _Value, bad: _Value | None = None) -> _Span:
        """The span of an integer result; unknown where it may leave its dtype's range, since torch wraps around there."""
        least, most = map(int, _limits(node.dtype))
        outside = (lo <= least) | (hi >= most) if most == WILD else (lo < least) | (hi > most)
        outside = outside if bad is None else outside | bad
        return _Span(*(self.within(outside.where(end, value), least, most) for end, value in ((least, lo), (most, hi))))

    def finite(self, lo: _Value, hi: _Value, bad: _Value | None = None, slack: bool = False) -> _Span:
        """The span of a float result; infinities count as unknown, since the next operation on them may be undefined."""
        if slack:  # exp and similar functions may be off by a few ulp, and differently in vectorised and scalar code
            info = torch.finfo(lo.dtype)  # type: ignore[arg-type]
            lo, hi = lo - abs(lo) * (8 * info.eps) - 8 * info.tiny, hi + abs(hi) * (8 * info.eps) + 8 * info.tiny
        known = lo.is_finite & hi.is_finite
        known = known if bad is None else known & ~bad
        return _Span(known.where(lo, math.nan), known.where(hi, math.nan))

    def result(self, node: Node, args: Iterable[_Span], lo: _Value, hi: _Value, bad: _Value | None = None) -> _Span:
        """The span of an arithmetic result; unknown if an operand is unknown."""
        if category(node.dtype) == "float":
            return self.finite(lo, hi, bad)
        for a in args:
            bad = a.is_unknown if bad is None else bad | a.is_unknown
        return self.fit(node, lo, hi, bad)


def _limits(dtype: DType) -> tuple[float, float]:
    """The bounds that mean unknown."""
    if category(dtype) == "float":
        return math.nan, math.nan
    return (-WILD, WILD) if is_weak(dtype) or dtype is torch.int64 else _range(dtype)


def _range(dtype: DType) -> tuple[int, int]:
    if dtype is torch.bool:
        return False, True
    info = torch.iinfo(dtype)  # type: ignore[arg-type]
    return info.min, info.max


def _dtype(dtype: DType) -> torch.dtype:
    """The dtype of the bounds."""
    return torch.int64 if category(dtype) == "int" else torch.float64 if dtype is float else dtype  # type: ignore[return-value]


def _decided(op: str, a: Extent, b: Extent, is_same: bool) -> bool | None:
    """Whether a comparison of integers is true; of a minimum or maximum whether it is the first. None: it depends on their values."""
    a, b = (b, a) if op in ("gt", "ge", "max") else (a, b)
    if op in ("lt", "gt"):
        return False if is_same or a.lo >= b.hi else True if a.hi < b.lo else None
    if op in ("eq", "ne"):
        return (op == "eq") if is_same else (op == "ne") if a.hi < b.lo or b.hi < a.lo else None
    return True if is_same or a.hi <= b.lo else False if a.lo > b.hi else None


# ---- rules


def _hull(values: Sequence[_Value]) -> tuple[_Value, _Value]:
    return reduce(_Value.min, values), reduce(_Value.max, values)


def _abs(w: _Writer, node: Node, a: _Span) -> _Span:
    low, high = _hull([abs(a.lo), abs(a.hi)])
    return w.result(node, [a], ((a.lo <= 0) & (a.hi >= 0)).where(0, low), high)


def _mul(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    corners, bad = [x * y for x in a for y in b], None
    if category(node.dtype) == "int" and not all(fits(w.extents[c.at], 63) for c in corners):
        sizes = [_hull([abs(end) for end in s])[1].to(torch.float64) for s in (a, b)]
        bad = sizes[0] * sizes[1] >= WILD / 2
    return w.result(node, [a, b], *_hull(corners), bad)


def _over(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    """True and floor division: monotone in each operand while the divisor keeps its sign, so the corners are the bounds."""
    is_int = category(node.dtype) == "int"
    if node.op == "floordiv" and not is_int:
        return _at_points(w, node, a, b)
    zero = ~((b.lo > 0) | (b.hi < 0))
    # a float divides by 0 without harm, and a number stays a number: torch does not round it to the dividend's 16 bits
    corners = [w.op(node.op, x, zero.where(1, y) if is_int else y) for x in a for y in b]
    if is_int:  # no larger than the dividend
        most = max(abs(n) for end in a for n in w.extents[end.at] or ())
        corners = [w.within(c, -most, most) for c in corners]
    return w.result(node, [a, b], *_hull(corners), zero)


def _mod(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    if category(node.dtype) == "float":
        return _at_points(w, node, a, b)
    positive = (b.lo > 0) & (b.hi < WILD)
    if node.op == "fmod":  # has C's sign: equal to Python's remainder for a dividend that is not negative
        positive = positive & (a.lo >= 0)
    low, high = b.lo.max(1), b.hi.max(1)
    turns = a.lo // low
    exact = low.equals(high) & turns.equals(a.hi // low) & ~a.is_unknown
    return w.fit(node, exact.where(a.lo - turns * low, 0), exact.where(a.hi - turns * low, high - 1), ~positive)


def _extreme(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    return _Span(w.op(node.op, a.lo, b.lo), w.op(node.op, a.hi, b.hi))


def _rising(w: _Writer, node: Node, a: _Span) -> _Span:
    return w.finite(w.op(node.op, a.lo), w.op(node.op, a.hi), slack=node.op not in ("floor", "ceil", "trunc", "round"))


def _sign(w: _Writer, node: Node, a: _Span) -> _Span:
    lo, hi = w.op("sign", a.lo), w.op("sign", a.hi)
    known = a.lo.equals(a.lo)  # the sign of NaN is 0 in torch, but an unknown number may have any
    return _Span(known.where(lo, -1), known.where(hi, 1))


def _falling(w: _Writer, node: Node, a: _Span) -> _Span:
    inside = (a.lo > 0) | (a.hi < 0) if node.op == "reciprocal" else a.lo > 0
    return w.finite(w.op(node.op, a.hi), w.op(node.op, a.lo), ~inside, slack=True)


def _wave(w: _Writer, node: Node, a: _Span) -> _Span:
    one = w.number(1.0, a.lo.dtype)
    return w.finite(-one, one, ~(a.lo.is_finite & a.hi.is_finite), slack=True)


def _hyperbolic(w: _Writer, node: Node, a: _Span) -> _Span:
    """sinh and cosh, which may be infinite in vectorised code only, as that computes exp first."""
    size = _abs(w, node, a)
    lo, hi = (w.op(node.op, end) for end in (size if node.op == "cosh" else a))
    return w.finite(lo, hi, ~w.op("exp", size.hi).is_finite, slack=True)


def _hypot(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    a, b = _abs(w, node, a), _abs(w, node, b)
    return w.finite(w.op("hypot", a.lo, b.lo), w.op("hypot", a.hi, b.hi), slack=True)


def _at_points(w: _Writer, node: Node, *args: _Span) -> _Span:
    """Any operation where every operand is a single number; unknown elsewhere."""
    points = w.all(a.is_point for a in args)
    if node.op == "atan2":
        points = points & ~args[0].lo.equals(0)  # the zeros of both signs are one point, at which it has two values
    dtype = _dtype(node.dtype) if is_weak(node.dtype) else node.dtype
    value = w.op(node.op, *(a.lo.to(dtype) for a in args)).to(_dtype(node.dtype))
    if category(node.dtype) == "float":
        return w.finite(value, value, ~points, slack=node.op in ("pow", "tan", "atan2"))
    return w.fit(node, value, value, ~points)


def _shift_right(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    known = (b.lo >= 0) & (b.hi < 63)
    return w.result(node, [a, b], *_hull([x >> y.max(0).min(62) for x in a for y in b]), ~known)


def _bits(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    if node.dtype is torch.bool and node.op == "xor":
        return _Span((a.lo & ~b.hi) | (~a.hi & b.lo), (a.hi & ~b.lo) | (~a.lo & b.hi))
    if node.dtype is torch.bool:
        return _extreme(w, node, a, b)
    exact = _at_points(w, node, a, b)
    if node.op != "and":
        return exact
    # if x or y is not negative, x & y is between 0 and it
    most = (a.lo >= 0).where(a.hi, WILD).min((b.lo >= 0).where(b.hi, WILD))
    known = ~(a.is_point & b.is_point) & (most < WILD)
    return _Span(known.where(0, exact.lo), known.where(most, exact.hi))


def _not(w: _Writer, node: Node, a: _Span) -> _Span:
    return _Span(~a.hi, ~a.lo) if node.dtype is torch.bool else w.result(node, [a], ~a.hi, ~a.lo)


def _compare(w: _Writer, node: Node, a: _Span, b: _Span) -> _Span:
    if a.lo.dtype is torch.bool:
        a, b = a.to(torch.int64), b.to(torch.int64)
    if node.op in ("gt", "ge"):
        a, b = b, a
    # in this form NaN leaves the comparison undecided: "may be true" is "not certainly false"
    if node.op in ("lt", "gt"):
        return _Span(a.hi < b.lo, ~(a.lo >= b.hi))
    if node.op in ("le", "ge"):
        return _Span(a.hi <= b.lo, ~(a.lo > b.hi))
    must, may_not = a.is_point & b.is_point & a.lo.equals(b.lo), (a.lo > b.hi) | (a.hi < b.lo)
    return _Span(may_not, ~must) if node.op == "ne" else _Span(must, ~may_not)


def _where(w: _Writer, node: Node, c: _Span, a: _Span, b: _Span) -> _Span:
    least, most = ("and", "or") if node.dtype is torch.bool else ("min", "max")
    if category(node.dtype) == "float" and not is_weak(node.dtype):  # a number that is chosen is an entry of a tensor
        a, b = (_Span(*(end.rounded(node.dtype) for end in s)) for s in (a, b))
    return _Span(
        c.lo.where(a.lo, c.hi.where(w.op(least, a.lo, b.lo), b.lo)),
        c.lo.where(a.hi, c.hi.where(w.op(most, a.hi, b.hi), b.hi)),
    )


def _cast(w: _Writer, node: Node, a: _Span) -> _Span:
    target, source = category(node.dtype), category(a.lo.dtype)
    if target == "bool":
        return a if source == "bool" else _Span((a.lo > 0) | (a.hi < 0), ~(a.lo.equals(0) & a.hi.equals(0)))
    if target == "int" and source == "float":
        bad = ~((abs(a.lo) < WILD / 2) & (abs(a.hi) < WILD / 2))
        return w.fit(node, bad.where(0, a.lo).to(torch.int64), bad.where(0, a.hi).to(torch.int64), bad)
    unknown = a.is_unknown if source == "int" else None
    a = a.to(torch.int64 if target == "int" else _dtype(node.dtype))
    if target == "int":
        return w.fit(node, a.lo, a.hi)
    # torch takes a number as it is to 16-bit floats, without rounding, so it stays a number
    return a if source == "float" and a.lo.at == a.hi.at else w.finite(a.lo, a.hi, unknown)


_RULES: dict[str, Callable[..., _Span]] = {
    "add": lambda w, node, a, b: w.result(node, [a, b], a.lo + b.lo, a.hi + b.hi),
    "sub": lambda w, node, a, b: w.result(node, [a, b], a.lo - b.hi, a.hi - b.lo),
    "neg": lambda w, node, a: w.result(node, [a], -a.hi, -a.lo),
    "abs": _abs, "mul": _mul, "sinh": _hyperbolic, "cosh": _hyperbolic, "hypot": _hypot, "shr": _shift_right, "not": _not, "where": _where,
    "cast": _cast, "sign": _sign, "detach": lambda w, node, a: a,
    **dict.fromkeys(("div", "floordiv"), _over),
    **dict.fromkeys(("mod", "fmod"), _mod),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("pow", "tan", "atan2", "shl", "fold"), _at_points),
    **dict.fromkeys(("and", "or", "xor"), _bits),
    **dict.fromkeys(MIRRORED, _compare),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid", "atan", "erf", "erfinv"), _rising),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), _rising),
    **dict.fromkeys(("rsqrt", "reciprocal"), _falling),
    **dict.fromkeys(("sin", "cos"), _wave),
}  # fmt: skip
