"""Interval arithmetic on the IR: bounds of an expression while each index runs over a range, for many boxes at once.

A ``Span`` holds sound bounds per box. For a bool, ``lo`` is "certainly true" and ``hi`` is "may be true", so three-valued logic is the same
arithmetic. A value that cannot be bounded is unknown: NaN for floats, ``+-WILD`` for integers (then ``wild`` is set); a comparison with an
unknown is undecided. Float endpoints are computed in the value's own dtype, where rounding is monotone, so the bounds hold for the rounded
values and not only for real numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import TORCH_OPS
from anyattn.mods.analysis.range_tables import RangeTables
from anyattn.mods.ir.expr import Expr, Node, category, is_weak

__all__ = ["WILD", "Box", "Span", "spans"]

WILD = 2**61  # the sum of two such numbers fits int64
Box = Mapping[str, tuple[Tensor, Tensor]]  # index name -> first and last value per box, inclusive


class Span(NamedTuple):
    """Bounds per box, inclusive. wild: some integer entries may be unknown (a bound at +-WILD)."""

    lo: Tensor
    hi: Tensor
    wild: bool = False


def spans(expr: Expr, box: Box, scalars: Sequence[int | float], tables: RangeTables) -> list[Span]:
    """One ``Span`` per node of ``expr``; the spans of its outputs are at ``expr.outputs``."""
    found: list[Span] = []
    device = next(iter(box.values()))[0].device
    for node in expr.nodes:
        args = [found[a] for a in node.args]
        if node.op == "index":
            found.append(Span(*box[node.attr]))  # type: ignore[index, call-overload]
        elif node.op in ("const", "scalar"):
            number = node.attr if node.op == "const" else scalars[node.attr]  # type: ignore[index, call-overload]
            found.append(_point(number, node, device))  # type: ignore[arg-type]
        elif node.op == "load":
            found.append(_load(node, args, tables))
        elif node.op in ("score",):
            raise AssertionError("a mask has no score")
        else:
            found.append(_RULES[node.op](node, args))
    return found


def _dtype(node: Node) -> torch.dtype:
    """The dtype of this node's spans."""
    kind = category(node.dtype)
    if kind == "bool":
        return torch.bool
    if kind == "int":
        return torch.int64
    return torch.float64 if is_weak(node.dtype) else node.dtype  # type: ignore[return-value]


def _point(number: int | float | bool, node: Node, device: torch.device) -> Span:
    if category(node.dtype) == "int" and not -WILD < number < WILD:
        return _unknown(node, device)
    value = torch.full((), number, dtype=_dtype(node), device=device)
    return Span(value, value)


def _unknown(node: Node, device: torch.device) -> Span:
    kind = category(node.dtype)
    if kind == "bool":
        return Span(torch.tensor(False, device=device), torch.tensor(True, device=device))
    if kind == "float":
        nan = torch.full((), float("nan"), dtype=_dtype(node), device=device)
        return Span(nan, nan)
    return Span(torch.tensor(-WILD, device=device), torch.tensor(WILD, device=device), True)


def _load(node: Node, indices: list[Span], tables: RangeTables) -> Span:
    lo, hi = tables.lookup(node.attr, [(i.lo, i.hi) for i in indices])  # type: ignore[arg-type]
    if category(node.dtype) != "int":
        return Span(lo.to(_dtype(node)), hi.to(_dtype(node)))
    return _fit(node, lo, hi)


# ---- results


def _fit(node: Node, lo: Tensor, hi: Tensor, bad: Tensor | None = None, wild: bool = False) -> Span:
    """The span of an integer result; unknown where it may leave its dtype's range, since torch wraps around there."""
    info = None if is_weak(node.dtype) or node.dtype is torch.int64 else torch.iinfo(node.dtype)  # type: ignore[arg-type]
    least, most = (-WILD, WILD) if info is None else (info.min, info.max)
    outside = (lo < least) | (hi > most)
    if info is None:
        outside = (lo <= least) | (hi >= most)
    if bad is not None:
        outside = outside | bad
    if not bool(outside.any()):
        return Span(lo, hi)
    return Span(torch.where(outside, least, lo), torch.where(outside, most, hi), wild or info is None)


def _finite(node: Node, lo: Tensor, hi: Tensor, bad: Tensor | None = None, slack: bool = False) -> Span:
    """The span of a float result; infinities count as unknown, since the next operation on them may be undefined."""
    if slack:  # exp and similar functions may be off by a few ulp, and differently in vectorised and scalar code
        ulp = 8 * torch.finfo(lo.dtype).eps
        tiny = torch.finfo(lo.dtype).tiny * 8
        lo, hi = lo - lo.abs() * ulp - tiny, hi + hi.abs() * ulp + tiny
    unknown = ~(torch.isfinite(lo) & torch.isfinite(hi))
    if bad is not None:
        unknown = unknown | bad
    return Span(lo.masked_fill(unknown, float("nan")), hi.masked_fill(unknown, float("nan")))


def _result(node: Node, args: list[Span], lo: Tensor, hi: Tensor, bad: Tensor | None = None) -> Span:
    """The span of an arithmetic result; unknown if an operand is unknown."""
    if category(node.dtype) == "float":
        return _finite(node, lo, hi, bad)
    for a in args:
        if a.wild:
            unknown = (a.lo <= -WILD) | (a.hi >= WILD)
            bad = unknown if bad is None else bad | unknown
    return _fit(node, lo, hi, bad)


def _hull(*values: Tensor) -> tuple[Tensor, Tensor]:
    lo = hi = values[0]
    for v in values[1:]:
        lo, hi = torch.minimum(lo, v), torch.maximum(hi, v)
    return lo, hi


# ---- rules


def _add(node: Node, args: list[Span]) -> Span:
    a, b = args
    return _result(node, args, a.lo + b.lo, a.hi + b.hi)


def _sub(node: Node, args: list[Span]) -> Span:
    a, b = args
    return _result(node, args, a.lo - b.hi, a.hi - b.lo)


def _neg(node: Node, args: list[Span]) -> Span:
    return _result(node, args, -args[0].hi, -args[0].lo)


def _abs(node: Node, args: list[Span]) -> Span:
    a = args[0]
    low, high = _hull(a.lo.abs(), a.hi.abs())
    return _result(node, args, torch.where((a.lo <= 0) & (a.hi >= 0), torch.zeros_like(low), low), high)


def _mul(node: Node, args: list[Span]) -> Span:
    a, b = args
    bad = None
    if category(node.dtype) == "int":
        size = torch.maximum(a.lo.abs(), a.hi.abs()).double() * torch.maximum(b.lo.abs(), b.hi.abs()).double()
        bad = size >= WILD / 2
    return _result(node, args, *_hull(a.lo * b.lo, a.lo * b.hi, a.hi * b.lo, a.hi * b.hi), bad)


def _over(divide: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Node, list[Span]], Span]:
    """True and floor division: monotone in each operand while the divisor keeps its sign, so the corners are the bounds."""

    def rule(node: Node, args: list[Span]) -> Span:
        a, b = args
        if category(node.dtype) == "float" and node.op == "floordiv":
            return _where_points(node, args)
        zero = ~((b.lo > 0) | (b.hi < 0))
        low, high = (t.masked_fill(zero, 1) for t in (b.lo, b.hi))
        return _result(node, args, *_hull(divide(a.lo, low), divide(a.lo, high), divide(a.hi, low), divide(a.hi, high)), zero)

    return rule


def _mod(node: Node, args: list[Span]) -> Span:
    if category(node.dtype) == "float":
        return _where_points(node, args)
    a, b = args
    positive = (b.lo > 0) & (b.hi < WILD)
    if node.op == "fmod":  # has C's sign: equal to Python's remainder for a dividend that is not negative
        positive = positive & (a.lo >= 0)
    low, high = b.lo.clamp(min=1), b.hi.clamp(min=1)
    turns = torch.div(a.lo, low, rounding_mode="floor")
    exact = (low == high) & (turns == torch.div(a.hi, low, rounding_mode="floor")) & (a.lo > -WILD) & (a.hi < WILD)
    lo = torch.where(exact, a.lo - turns * low, 0)
    hi = torch.where(exact, a.hi - turns * low, high - 1)
    return _fit(node, lo, hi, ~positive)


def _least(node: Node, args: list[Span]) -> Span:
    pick = torch.minimum if node.op == "min" else torch.maximum
    return Span(pick(args[0].lo, args[1].lo), pick(args[0].hi, args[1].hi), args[0].wild or args[1].wild)


def _rising(node: Node, args: list[Span]) -> Span:
    f = TORCH_OPS[node.op]
    exact = node.op in ("floor", "ceil", "trunc", "round")
    if category(node.dtype) == "int":
        return Span(f(args[0].lo), f(args[0].hi), args[0].wild)
    return _finite(node, f(args[0].lo), f(args[0].hi), slack=not exact)


def _sign(node: Node, args: list[Span]) -> Span:
    a = args[0]
    unknown = torch.isnan(a.lo)  # torch's sign of NaN is 0, but the value may be any
    return Span(torch.sign(a.lo).masked_fill(unknown, -1), torch.sign(a.hi).masked_fill(unknown, 1))


def _falling(node: Node, args: list[Span]) -> Span:
    f, a = TORCH_OPS[node.op], args[0]
    is_inside = (a.lo > 0) | (a.hi < 0) if node.op == "reciprocal" else a.lo > 0
    return _finite(node, f(a.hi), f(a.lo), bad=~is_inside, slack=True)


def _wave(node: Node, args: list[Span]) -> Span:
    a = args[0]
    one = torch.ones_like(a.lo)
    return _finite(node, -one, one, bad=~(torch.isfinite(a.lo) & torch.isfinite(a.hi)), slack=True)


def _overflows(a: Span) -> Tensor:
    """Where ``sinh`` and ``cosh`` may be infinite in vectorised code only, which computes exp first."""
    return torch.isinf(torch.exp(torch.maximum(a.lo.abs(), a.hi.abs())))


def _sinh(node: Node, args: list[Span]) -> Span:
    a = args[0]
    return _finite(node, torch.sinh(a.lo), torch.sinh(a.hi), _overflows(a), slack=True)


def _cosh(node: Node, args: list[Span]) -> Span:
    size = _abs(node, args)
    return _finite(node, torch.cosh(size.lo), torch.cosh(size.hi), _overflows(size), slack=True)


def _hypot(node: Node, args: list[Span]) -> Span:
    a, b = (_abs(node, [x]) for x in args)
    return _finite(node, torch.hypot(a.lo, b.lo), torch.hypot(a.hi, b.hi), slack=True)


def _where_points(node: Node, args: list[Span]) -> Span:
    """Any operation in boxes where every operand is a single number; unknown elsewhere."""
    points = torch.ones((), dtype=torch.bool, device=args[0].lo.device)
    for a in args:
        points = points & (a.lo == a.hi)
        if a.wild:
            points = points & (a.lo.abs() < WILD)
    values = [torch.where(points, a.lo, torch.ones_like(a.lo)) for a in args]  # 1 is a legal operand of every operation
    if node.op in ("floordiv", "mod", "fmod", "div"):
        values[1] = torch.where(values[1] == 0, torch.ones_like(values[1]), values[1])
        points = points & (args[1].lo != 0)
    if node.op == "atan2":
        points = points & (args[0].lo != 0)  # the zeros of both signs are one point, at which it has two values
    result = TORCH_OPS[node.op](*values).to(_dtype(node))
    if category(node.dtype) == "float":
        return _finite(node, result, result, ~points, slack=node.op in ("pow", "tan", "atan2"))
    return _fit(node, result, result, ~points)


def _shift_right(node: Node, args: list[Span]) -> Span:
    a, b = args
    known = (b.lo >= 0) & (b.hi < 63)
    low, high = b.lo.clamp(0, 62), b.hi.clamp(0, 62)
    return _result(node, args, *_hull(a.lo >> low, a.lo >> high, a.hi >> low, a.hi >> high), ~known)


def _bits(node: Node, args: list[Span]) -> Span:
    if node.dtype is torch.bool:
        a, b = args
        if node.op == "and":
            return Span(a.lo & b.lo, a.hi & b.hi)
        if node.op == "or":
            return Span(a.lo | b.lo, a.hi | b.hi)
        return Span((a.lo & ~b.hi) | (~a.hi & b.lo), (a.hi & ~b.lo) | (~a.lo & b.hi))
    exact = _where_points(node, args)
    if node.op != "and":
        return exact
    a, b = args
    one_number = (a.lo == a.hi) & (b.lo == b.hi)  # if x or y is not negative, x & y is between 0 and it
    most = torch.minimum(torch.where(a.lo >= 0, a.hi, WILD), torch.where(b.lo >= 0, b.hi, WILD))
    known = ~one_number & (most < WILD)
    return Span(torch.where(known, 0, exact.lo), torch.where(known, most, exact.hi), exact.wild)


def _not(node: Node, args: list[Span]) -> Span:
    a = args[0]
    return Span(~a.hi, ~a.lo) if node.dtype is torch.bool else _result(node, args, ~a.hi, ~a.lo)


def _as_number(a: Span) -> Span:
    return Span(a.lo.to(torch.int64), a.hi.to(torch.int64)) if a.lo.dtype is torch.bool else a


def _compare(node: Node, args: list[Span]) -> Span:
    a, b = (_as_number(s) for s in args)
    if node.op in ("gt", "ge"):
        a, b = b, a
    # in this form NaN leaves the comparison undecided: "may be true" is "not certainly false"
    if node.op in ("lt", "gt"):
        must, may = a.hi < b.lo, ~(a.lo >= b.hi)
    elif node.op in ("le", "ge"):
        must, may = a.hi <= b.lo, ~(a.lo > b.hi)
    else:
        must = (a.lo == a.hi) & (b.lo == b.hi) & (a.lo == b.lo)
        may = ~((a.lo > b.hi) | (a.hi < b.lo))
    if a.wild or b.wild:
        open_ = (a.lo <= -WILD) | (a.hi >= WILD) | (b.lo <= -WILD) | (b.hi >= WILD)
        must, may = must & ~open_, may | open_
    return Span(~may, ~must) if node.op == "ne" else Span(must, may)


def _where(node: Node, args: list[Span]) -> Span:
    c, a, b = args
    if node.dtype is torch.bool:
        both_lo, both_hi = a.lo & b.lo, a.hi | b.hi
    else:
        both_lo, both_hi = torch.minimum(a.lo, b.lo), torch.maximum(a.hi, b.hi)
    lo = torch.where(c.lo, a.lo, torch.where(c.hi, both_lo, b.lo))
    hi = torch.where(c.lo, a.hi, torch.where(c.hi, both_hi, b.hi))
    return Span(lo, hi, a.wild or b.wild)


def _cast(node: Node, args: list[Span]) -> Span:
    (a,) = args
    target, source = category(node.dtype), "bool" if a.lo.dtype is torch.bool else "float" if a.lo.is_floating_point() else "int"
    if target == source == "bool":
        return a
    if target == "bool":
        must, may = (a.lo > 0) | (a.hi < 0), ~((a.lo == 0) & (a.hi == 0))
        if a.wild:
            must = must & ~((a.lo <= -WILD) | (a.hi >= WILD))
        return Span(must, may)
    if target == "int":
        if source != "float":
            a = _as_number(a)
            return _fit(node, a.lo, a.hi, wild=a.wild)
        bad = ~((a.lo.abs() < WILD / 2) & (a.hi.abs() < WILD / 2))
        return _fit(node, a.lo.masked_fill(bad, 0).to(torch.int64), a.hi.masked_fill(bad, 0).to(torch.int64), bad)
    unknown = (a.lo <= -WILD) | (a.hi >= WILD) if a.wild else None
    a = _as_number(a)
    return _finite(node, a.lo.to(_dtype(node)), a.hi.to(_dtype(node)), unknown)


_Rule = Callable[[Node, list[Span]], Span]
_RULES: dict[str, _Rule] = {
    "add": _add,
    "sub": _sub,
    "neg": _neg,
    "abs": _abs,
    "mul": _mul,
    "div": _over(torch.div),
    "floordiv": _over(torch.floor_divide),
    "mod": _mod,
    "fmod": _mod,
    "min": _least,
    "max": _least,
    "pow": _where_points,
    "tan": _where_points,
    "atan2": _where_points,
    "sinh": _sinh,
    "cosh": _cosh,
    "hypot": _hypot,
    "shl": _where_points,
    "fold": _where_points,
    "shr": _shift_right,
    "not": _not,
    "where": _where,
    "cast": _cast,
    "detach": lambda node, args: args[0],
    **dict.fromkeys(("and", "or", "xor"), _bits),
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _compare),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "tanh", "sigmoid", "atan", "erf", "erfinv"), _rising),
    **dict.fromkeys(("floor", "ceil", "trunc", "round"), _rising),
    "sign": _sign,
    **dict.fromkeys(("rsqrt", "reciprocal"), _falling),
    **dict.fromkeys(("sin", "cos"), _wave),
}
