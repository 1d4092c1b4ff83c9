"""Interval arithmetic on masks as generated Triton source: whether a tile is certainly or possibly visible, without evaluating its pairs.

Kernels do here what ``mods.analysis.intervals`` does with torch, with two differences. A part of the mask that depends on one position only
and has no useful bounds (a captured tensor, a remainder, a float) is a *leaf*: it is evaluated at all positions of every tile, and its
least and greatest values are stored beforehand. And if operand sizes exclude overflow, a bound is int64 arithmetic without overflow checks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, category, is_weak
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box, bits_of, extents
from anyattn.triton_tools.emit import emit, function

__all__ = ["MOST_INDEX_BITS", "MOST_SCALAR_BITS", "MaskSource", "mask_source"]

MOST_SCALAR_BITS = 40  # captured integers are of magnitude less than 2 ** 40: the caller checks
_WILD_BITS = 61
_WILD = 2**_WILD_BITS  # a bound of this magnitude means unknown; the sum of two still fits int64
_COMPARE = {"lt": ("<", False), "le": ("<=", False), "gt": ("<", True), "ge": ("<=", True)}  # operator, and whether to swap the operands
_EASY = frozenset(("add", "sub", "neg", "abs", "min", "max", "eq", "ne", "and", "or", "xor", "not", "where", "cast", *_COMPARE))


class MaskSource(NamedTuple):
    """Functions of one mask in Triton: ``value``, ``verdict``, ``verdict_at_once``, ``store_row_hulls`` and ``store_column_hulls``.

    row_leaves, column_leaves: the number of pairs of bounds that the last two store for each tile. ``verdict`` loads them;
    ``verdict_at_once``, with the same arguments, computes them itself, which for few tiles takes less time than a separate kernel.
    """

    text: str
    row_leaves: int
    column_leaves: int


class _Span(NamedTuple):
    """The variables that hold two inclusive bounds (of a bool: certainly true, possibly true), of magnitude at most 2 ** bits.

    If bits is 61, a bound of +-2 ** 61 means unknown.
    """

    lo: str
    hi: str
    bits: int = 0


@lru_cache(maxsize=1024)
def mask_source(expr: Expr) -> MaskSource:
    """The source of a mask's functions; equal masks have equal text."""
    writer = _Writer(expr, at_once=False)
    parts = [
        function("value", expr),
        writer.verdict("verdict"),
        _Writer(expr, at_once=True).verdict("verdict_at_once"),
        _store_hulls("store_row_hulls", "q_idx", expr, writer.leaves["q"]),
        _store_hulls("store_column_hulls", "kv_idx", expr, writer.leaves["kv"]),
    ]
    return MaskSource("\n\n".join(parts), len(writer.leaves["q"]), len(writer.leaves["kv"]))


def _part(expr: Expr, node: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(expr, node))


def _store_hulls(name: str, index: str, expr: Expr, leaves: list[int]) -> str:
    """The function that stores the least and the greatest value of every leaf over the positions first to last."""
    head = f"@triton.jit\ndef {name}(b, h, first, last, place, step, scalars, tensors, BLOCK: tl.constexpr):\n"
    if not leaves:
        return head + "    return\n"
    lines = [f"least{i} = tl.full((), {2**62}, tl.int64)\n    most{i} = tl.full((), {-(2**62)}, tl.int64)" for i in range(len(leaves))]
    lines += ["at = first", "while at <= last:", f"    {index} = tl.minimum(at + tl.arange(0, BLOCK), last)"]
    for i, leaf in enumerate(leaves):
        part_lines = emit(_part(expr, leaf), prefix=f"x{i}_")
        lines += [f"    {line}" for line in [*part_lines.all(), f"y{i} = {part_lines.outputs[0]}.to(tl.int64)"]]
        lines += [f"    least{i} = tl.minimum(least{i}, tl.min(y{i}, 0))", f"    most{i} = tl.maximum(most{i}, tl.max(y{i}, 0))"]
    lines.append("    at += BLOCK")
    for i in range(len(leaves)):
        lines += [f"tl.store(place + {2 * i} * step, least{i})", f"tl.store(place + {2 * i + 1} * step, most{i})"]
    return head + "\n".join(f"    {line}" for line in lines) + "\n"


class _Writer:
    """Writes the bounds of nodes, arguments first, each node once."""

    def __init__(self, expr: Expr, at_once: bool) -> None:
        self.expr, self.nodes, self.deps, self.at_once = expr, expr.nodes, dependence(expr), at_once
        self.extents = extents(expr, Box.of_sizes(2**MOST_INDEX_BITS, 2**MOST_SCALAR_BITS))
        self.lines: list[str] = []
        self.known: dict[int, _Span] = {}
        self.leaves: dict[str, list[int]] = {"q": [], "kv": []}
        self.is_hard: list[bool] = []
        for at in range(len(self.nodes)):
            self.is_hard.append(self._looks_hard(at))

    def verdict(self, name: str) -> str:
        for at in self._needed():
            self.known[at] = self._of(at)
        lo, hi, _ = self.known[self.expr.outputs[0]]
        head = (
            "@triton.jit\n"
            f"def {name}(\n    b, h, q_first, q_last, kv_first, kv_last, row_hulls, row_step, column_hulls, column_step,\n"
            "    scalars, tensors, TILE_M: tl.constexpr, TILE_N: tl.constexpr,\n):\n"
        )
        return head + "\n".join(f"    {line}" for line in [*self.lines, f"return {lo}, {hi}"]) + "\n"

    def _needed(self) -> list[int]:
        """The nodes whose bounds the output's bounds depend on, arguments first."""
        needed, stack = set(), [self.expr.outputs[0]]
        while stack:
            at = stack.pop()
            if at not in needed:
                needed.add(at)
                if not self._is_free(at) and not self._is_leaf(at):
                    stack.extend(self.nodes[at].args)
        return sorted(needed)

    def _is_leaf(self, at: int) -> bool:
        return self.deps[at].q != self.deps[at].kv and self.is_hard[at]

    def _of(self, at: int) -> _Span:
        node, dep = self.nodes[at], self.deps[at]
        kind = category(node.dtype)
        if self._is_free(at):
            return self._point(at)
        if node.op == "index":
            side = "q" if node.attr == "q_idx" else "kv"
            return self._named(at, f"tl.cast({side}_first, tl.int64)", f"tl.cast({side}_last, tl.int64)", MOST_INDEX_BITS)
        if self._is_leaf(at):
            return self._leaf(at, "q" if dep.q else "kv")
        rule = getattr(self, f"_{node.op}", None)
        operands = category(self.nodes[node.args[-1]].dtype) if node.args else kind
        if rule is None or operands == "float" or kind == "float":
            return self._unknown(at)
        return rule(at, *(self.known[a] for a in node.args))

    def _looks_hard(self, at: int) -> bool:
        """Whether this node has no useful bounds. If it depends on one position only, it becomes a leaf, whose values are evaluated."""
        node = self.nodes[at]
        if self._is_free(at) or node.op == "index":
            return False
        operand = self.nodes[node.args[-1]].dtype if node.args else node.dtype
        if category(node.dtype) == "float" or category(operand) == "float":
            return True
        by_number = self._is_free(node.args[1]) if len(node.args) == 2 else False
        is_easy = node.op in _EASY or (node.op == "floordiv" and by_number)
        if node.op == "mul":
            is_easy = any(self.nodes[a].op == "const" for a in node.args)
        return not is_easy or any(self.is_hard[a] for a in node.args)

    def _is_free(self, at: int) -> bool:
        return not (self.deps[at].q or self.deps[at].kv)

    # -- leaves
    def _named(self, at: int, lo: str, hi: str, bits: int = 0) -> _Span:
        self.lines += [f"lo{at} = {lo}", f"hi{at} = {hi}"]
        return _Span(f"lo{at}", f"hi{at}", bits)

    def _unknown(self, at: int) -> _Span:
        kind = category(self.nodes[at].dtype)
        if kind == "bool":
            return self._named(at, "tl.full((), False, tl.int1)", "tl.full((), True, tl.int1)")
        return self._named(at, f"tl.full((), {-_WILD}, tl.int64)", f"tl.full((), {_WILD}, tl.int64)", _WILD_BITS)

    def _point(self, at: int) -> _Span:
        """A value that depends on neither position: it is both its lower and its upper bound."""
        part_lines = emit(_part(self.expr, at), prefix=f"p{at}_")
        kind = category(self.nodes[at].dtype)
        if kind == "float":
            return self._unknown(at)
        self.lines += part_lines.all()
        value = part_lines.outputs[0]
        return _Span(value, value) if kind == "bool" else self._bounded(at, f"{value}.to(tl.int64)", f"{value}.to(tl.int64)")

    def _leaf(self, at: int, side: str) -> _Span:
        kind = category(self.nodes[at].dtype)
        if kind == "float":
            return self._unknown(at)
        number = len(self.leaves[side])
        self.leaves[side].append(at)
        if self.at_once:
            self._look(at, side)
            lo, hi = f"tl.min(seen{at}, 1)", f"tl.max(seen{at}, 1)"
        else:
            where = ("row_hulls", "row_step") if side == "q" else ("column_hulls", "column_step")
            lo, hi = (f"tl.load({where[0]} + {2 * number + i} * {where[1]})" for i in (0, 1))
        return self._named(at, f"{lo} != 0", f"{hi} != 0") if kind == "bool" else self._bounded(at, lo, hi)

    def _look(self, at: int, side: str) -> None:
        """The leaf's values at all positions of every tile: [tiles, positions]."""
        index, size = ("q_idx", "TILE_M") if side == "q" else ("kv_idx", "TILE_N")
        if len(self.leaves[side]) == 1:
            inside = f"{side}_first[:, None] + tl.arange(0, triton.next_power_of_2({size}))[None, :]"
            self.lines.append(f"{index} = tl.minimum({inside}, {side}_last[:, None])")
        part_lines = emit(_part(self.expr, at), prefix=f"x{at}_")
        self.lines += [*part_lines.all(), f"seen{at} = {part_lines.outputs[0]}.to(tl.int64)"]

    def _bounded(self, at: int, lo: str, hi: str) -> _Span:
        """Bounds of an evaluated value, of the magnitude that ``extents`` gives it; unknown if they are too large to add."""
        bits = self._point_bits(at)
        if bits < _WILD_BITS:
            return self._named(at, lo, hi, bits)
        self._named(at, lo, hi)
        return self._wild_where(at, f"(lo{at} <= {-_WILD}) | (hi{at} >= {_WILD})")

    def _point_bits(self, at: int) -> int:
        extent = self.extents[at]
        return _WILD_BITS if extent is None else min(bits_of(extent), _WILD_BITS)

    def _wild_where(self, at: int, bad: str) -> _Span:
        self.lines += [f"bad{at} = {bad}", f"lo{at} = tl.where(bad{at}, {-_WILD}, lo{at})", f"hi{at} = tl.where(bad{at}, {_WILD}, hi{at})"]
        return _Span(f"lo{at}", f"hi{at}", _WILD_BITS)

    # -- results
    def _fit(self, at: int, lo: str, hi: str, bits: int, *args: _Span) -> _Span:
        """The span of an integer result: if it may leave its dtype's range, it may wrap around in torch, so its bounds are unknown."""
        dtype = self.nodes[at].dtype
        if is_weak(dtype) or dtype is torch.int64:
            wild = [a for a in args if a.bits >= _WILD_BITS]
            if not wild and bits < _WILD_BITS:
                return self._named(at, lo, hi, bits)
            self._named(at, lo, hi)
            tests = [f"({a.lo} <= {-_WILD}) | ({a.hi} >= {_WILD})" for a in wild]
            return self._wild_where(at, " | ".join([*tests, f"(lo{at} <= {-_WILD}) | (hi{at} >= {_WILD})"]))
        info = torch.iinfo(dtype)  # type: ignore[arg-type]
        span = self._named(at, lo, hi, min(bits, info.bits))
        if bits < info.bits - 1 and info.min < 0:
            return span
        self.lines += [f"bad{at} = (lo{at} < {info.min}) | (hi{at} > {info.max})"]
        self.lines += [f"lo{at} = tl.where(bad{at}, {info.min}, lo{at})", f"hi{at} = tl.where(bad{at}, {info.max}, hi{at})"]
        return span._replace(bits=info.bits)

    # -- rules
    def _add(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._fit(at, f"{a.lo} + {b.lo}", f"{a.hi} + {b.hi}", max(a.bits, b.bits) + 1, a, b)

    def _sub(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._fit(at, f"{a.lo} - {b.hi}", f"{a.hi} - {b.lo}", max(a.bits, b.bits) + 1, a, b)

    def _neg(self, at: int, a: _Span) -> _Span:
        return self._fit(at, f"-{a.hi}", f"-{a.lo}", a.bits, a)

    def _abs(self, at: int, a: _Span) -> _Span:
        around = f"({a.lo} <= 0) & ({a.hi} >= 0)"
        least = f"tl.minimum(tl.abs({a.lo}), tl.abs({a.hi}))"
        return self._fit(at, f"tl.where({around}, 0, {least})", f"tl.maximum(tl.abs({a.lo}), tl.abs({a.hi}))", a.bits, a)

    def _mul(self, at: int, a: _Span, b: _Span) -> _Span:
        bits = a.bits + b.bits
        if bits >= _WILD_BITS:
            return self._unknown(at)
        corners = [f"corner{at}_{i}" for i in range(4)]
        self.lines += [f"{c} = {x} * {y}" for c, (x, y) in zip(corners, [(x, y) for x in a[:2] for y in b[:2]], strict=True)]
        nest = "{f}({f}({0}, {1}), {f}({2}, {3}))"
        return self._fit(at, nest.format(*corners, f="tl.minimum"), nest.format(*corners, f="tl.maximum"), bits, a, b)

    def _floordiv(self, at: int, a: _Span, b: _Span) -> _Span:
        if not self._is_free(self.nodes[at].args[1]):
            return self._unknown(at)
        self.lines.append(f"by{at} = tl.where({b.lo} == 0, 1, {b.lo})")
        self.lines += [f"{end}{at} = device_math.floor_div({value}, by{at})" for end, value in (("low", a.lo), ("high", a.hi))]
        lo, hi = f"tl.minimum(low{at}, high{at})", f"tl.maximum(low{at}, high{at})"
        return self._fit(at, lo, hi, a.bits, a, b)

    def _mod(self, at: int, a: _Span, b: _Span) -> _Span:
        if not self._is_free(self.nodes[at].args[1]) or a.bits >= _WILD_BITS or b.bits >= _WILD_BITS:
            return self._unknown(at)
        self.lines += [f"by{at} = tl.where({b.lo} > 0, {b.lo}, 1)", f"from{at} = device_math.floor_div({a.lo}, by{at})"]
        same = f"from{at} == device_math.floor_div({a.hi}, by{at})"
        self.lines += [f"same{at} = {same}"]
        lo = f"tl.where({b.lo} > 0, tl.where(same{at}, {a.lo} - from{at} * by{at}, 0), {b.lo} + 1)"
        hi = f"tl.where({b.lo} > 0, tl.where(same{at}, {a.hi} - from{at} * by{at}, by{at} - 1), 0)"
        return self._fit(at, lo, hi, b.bits, a, b)

    def _load(self, at: int, *places: _Span) -> _Span:
        """A load indexed by both positions: known if the whole tile reads one entry, as in block-wise masks."""
        dtype, slot = self.nodes[at].dtype, f"tensors[{self.nodes[at].attr}]"
        offset = [f"device_math.inside({p.lo}, {slot}[{2 + 2 * i}]) * {slot}[{1 + 2 * i}]" for i, p in enumerate(places)]
        self.lines += [f"one{at} = {' & '.join(f'({p.lo} == {p.hi})' for p in places)}"]
        self.lines += [f"entry{at} = tl.load({' + '.join([f'{slot}[0]', *offset])})"]
        if dtype is torch.bool:
            return self._named(at, f"one{at} & entry{at}", f"(one{at} == 0) | entry{at}")
        self.lines.append(f"whole{at} = entry{at}.to(tl.int64)")
        least, most, bits = -_WILD, _WILD, _WILD_BITS
        if dtype is not torch.int64:
            info = torch.iinfo(dtype)  # type: ignore[arg-type]
            least, most, bits = info.min, info.max, info.bits
        span = self._named(at, f"tl.where(one{at}, whole{at}, {least})", f"tl.where(one{at}, whole{at}, {most})", bits)
        return span if bits < _WILD_BITS else self._wild_where(at, f"(lo{at} <= {-_WILD}) | (hi{at} >= {_WILD})")

    def _min(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._named(at, f"tl.minimum({a.lo}, {b.lo})", f"tl.minimum({a.hi}, {b.hi})", max(a.bits, b.bits))

    def _max(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._named(at, f"tl.maximum({a.lo}, {b.lo})", f"tl.maximum({a.hi}, {b.hi})", max(a.bits, b.bits))

    def _where(self, at: int, c: _Span, x: _Span, y: _Span) -> _Span:
        if category(self.nodes[at].dtype) == "bool":
            lo = f"({c.lo} & {x.lo}) | ({c.hi} == 0) & {y.lo} | ({x.lo} & {y.lo})"
            return self._named(at, lo, f"({c.hi} & {x.hi}) | (({c.lo} == 0) & {y.hi})")
        lo = f"tl.where({c.lo}, {x.lo}, tl.where({c.hi}, tl.minimum({x.lo}, {y.lo}), {y.lo}))"
        hi = f"tl.where({c.lo}, {x.hi}, tl.where({c.hi}, tl.maximum({x.hi}, {y.hi}), {y.hi}))"
        return self._named(at, lo, hi, max(x.bits, y.bits))

    def _cast(self, at: int, a: _Span) -> _Span:
        source, kind = category(self.nodes[self.nodes[at].args[0]].dtype), category(self.nodes[at].dtype)
        if kind == "bool":
            return self._named(at, f"({a.lo} > 0) | ({a.hi} < 0)", f"({a.lo} != 0) | ({a.hi} != 0)")
        if source == "bool":
            return self._named(at, f"{a.lo}.to(tl.int64)", f"{a.hi}.to(tl.int64)", 1)
        return self._fit(at, a.lo, a.hi, a.bits, a)

    def _compare(self, at: int, a: _Span, b: _Span) -> _Span:
        node = self.nodes[at]
        if category(self.nodes[node.args[0]].dtype) == "bool":
            return self._unknown(at)
        sign, is_swapped = _COMPARE[node.op]
        if is_swapped:
            a, b = b, a
        return self._named(at, f"{a.hi} {sign} {b.lo}", f"{a.lo} {sign} {b.hi}")

    _lt = _le = _gt = _ge = _compare

    def _eq(self, at: int, a: _Span, b: _Span) -> _Span:
        if category(self.nodes[self.nodes[at].args[0]].dtype) == "bool":
            certain, possible = _differ(a, b)
            return self._named(at, f"({possible}) == 0", f"({certain}) == 0")
        point = f"({a.lo} == {a.hi}) & ({b.lo} == {b.hi}) & ({a.lo} == {b.lo})"
        return self._named(at, point, f"({a.lo} <= {b.hi}) & ({b.lo} <= {a.hi})")

    def _ne(self, at: int, a: _Span, b: _Span) -> _Span:
        if category(self.nodes[self.nodes[at].args[0]].dtype) == "bool":
            return self._named(at, *_differ(a, b))
        point = f"({a.lo} == {a.hi}) & ({b.lo} == {b.hi}) & ({a.lo} == {b.lo})"
        return self._named(at, f"({a.lo} > {b.hi}) | ({b.lo} > {a.hi})", f"({point}) == 0")

    def _and(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._bits(at, f"{a.lo} & {b.lo}", f"{a.hi} & {b.hi}")

    def _or(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._bits(at, f"{a.lo} | {b.lo}", f"{a.hi} | {b.hi}")

    def _xor(self, at: int, a: _Span, b: _Span) -> _Span:
        return self._bits(at, *_differ(a, b))

    def _not(self, at: int, a: _Span) -> _Span:
        return self._bits(at, f"{a.hi} == 0", f"{a.lo} == 0")

    def _bits(self, at: int, lo: str, hi: str) -> _Span:
        """The bounds of a logical operation on bools; a bitwise operation on integers is unknown."""
        return self._named(at, lo, hi) if category(self.nodes[at].dtype) == "bool" else self._unknown(at)


def _differ(a: _Span, b: _Span) -> tuple[str, str]:
    """Whether two bools certainly differ, and whether they may."""
    certain = f"({a.lo} & ({b.hi} == 0)) | (({a.hi} == 0) & {b.lo})"
    possible = f"(({a.lo} & {b.lo}) | (({a.hi} == 0) & ({b.hi} == 0))) == 0"
    return certain, possible
