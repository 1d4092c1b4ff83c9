"""Differentiation of score mods, IR in and IR out: by the score, and by each value loaded from a captured float tensor.

Reverse accumulation over the expression's nodes, in the score's dtype. Subgradients are those of torch's autograd: ``abs`` and ``sign``
have 0 at 0, steps such as ``floor`` have derivative 0, and ``detach`` has derivative 0. At a tie ``minimum`` and ``maximum`` give half of
the derivative to each argument, unless an attribute names the argument that gets all of it: ``relu`` gives it to its 0, and for ``clamp``
see ``tracing/clamps.py``. The branch that ``where`` does not take contributes 0 even where its own derivative is infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from anyattn.arithmetic import LN2
from anyattn.mods.ir.expr import Builder, Expr, category

__all__ = ["Gradients", "LoadGradient", "score_gradients"]


@dataclass(frozen=True)
class LoadGradient:
    """One load of a captured float tensor. slot: of the tensor. output, indices: outputs of the gradient expression, which are
    d mod / d (loaded value) and the load's index arguments, one per dimension of the tensor."""

    slot: int
    output: int
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Gradients:
    """expr: output 0 is d mod / d score; ``loads`` describes the other outputs. Scalar and tensor slots are those of the mod."""

    expr: Expr
    loads: tuple[LoadGradient, ...]


def score_gradients(expr: Expr, is_exact: bool = False) -> Gradients:
    """The derivatives of a traced score mod's expression.

    is_exact: derivatives of saturating functions avoid the difference of two numbers near 1, which would cancel all digits; this costs one
    more exponential. Not needed where results are rounded to 16 bits.

    >>> from anyattn.mods.tracing.trace import trace
    >>> import torch
    >>> bias = torch.zeros(4)
    >>> g = score_gradients(trace(lambda s, b, h, q, k: 2.0 * s + bias[h], "score").expr)
    >>> [g.expr.nodes[o].attr for o in g.expr.outputs[:2]]
    [2.0, 1.0]
    """
    return _Reverse(expr, is_exact).gradients()


class _Reverse:
    def __init__(self, expr: Expr, is_exact: bool):
        self.expr, self.builder, self.is_exact = expr, Builder(), is_exact
        self.dtype = expr.output.dtype
        self.primal: list[int] = []
        for node in expr.nodes:
            args = [self.primal[a] for a in node.args]
            is_plain = node.op != "detach"  # derivatives of derivatives are not taken
            attr = None if node.op in ("min", "max") else node.attr
            self.primal.append(self.builder.add(node.op, *args, dtype=node.dtype, attr=attr) if is_plain else args[0])
        self.needed = [False] * len(expr.nodes)
        for i, node in enumerate(expr.nodes):
            leaf = node.op == "score" or (node.op == "load" and category(node.dtype) == "float")
            passes = category(node.dtype) == "float" and node.op not in ("load", "detach")
            self.needed[i] = leaf or (passes and any(self.needed[a] for a in node.args))
        self.cotangent: dict[int, int] = {}
        self.conditional: set[int] = set()  # cotangents that passed a `where`: 0 in the branch not taken

    # -- arithmetic in the score's dtype; literals, which derivatives are full of, are folded
    def number(self, value: float) -> int:
        return self.builder.const(float(value), self.dtype)

    def literal(self, position: int) -> float | None:
        node = self.builder.nodes[position]
        return float(node.attr) if node.op == "const" else None  # type: ignore[arg-type]

    def value(self, position: int) -> int:
        return self.builder.cast(self.primal[position], self.dtype)

    def op(self, name: str, *args: int) -> int:
        return self.builder.add(name, *args)

    def mul(self, a: int, b: int) -> int:
        x, y = self.literal(a), self.literal(b)
        if x is not None and y is not None:
            return self.number(x * y)
        if x == 0 or y == 0:
            return self.number(0.0)
        return self.op("mul", a, b)

    def add(self, a: int, b: int) -> int:
        x, y = self.literal(a), self.literal(b)
        if x is not None and y is not None:
            return self.number(x + y)
        return b if x == 0 else a if y == 0 else self.op("add", a, b)

    def sum(self, a: int, b: int) -> int:
        """The sum of two cotangents of one node."""
        total = self.add(a, b)
        if a in self.conditional or b in self.conditional:
            self.conditional.add(total)
        return total

    def neg(self, a: int) -> int:
        x = self.literal(a)
        return self.number(-x) if x is not None else self.op("neg", a)

    def div(self, a: int, b: int) -> int:
        return a if self.literal(b) == 1 else self.op("div", a, b)

    def guarded(self, g: int, factor: Callable[[], int]) -> int:
        """``g * factor``, and 0 where g is 0: an infinite factor in a branch not taken would give NaN."""
        product = self.mul(g, factor())
        if g not in self.conditional or self.literal(g) is not None:
            return product
        return self.op("where", self.op("eq", g, self.number(0.0)), self.number(0.0), product)

    def bell(self, x: int) -> int:
        """The derivative of the sigmoid, computed from its lower half, where no digits cancel."""
        lower = self.op("sigmoid", self.neg(self.op("abs", x)))
        return self.mul(lower, self.op("sub", self.number(1.0), lower))

    def by_tanh(self, x: int, out: int) -> int:
        if self.is_exact:
            return self.mul(self.number(4.0), self.bell(self.mul(self.number(2.0), x)))
        return self.op("sub", self.number(1.0), self.mul(out, out))

    def by_sigmoid(self, x: int, out: int) -> int:
        return self.bell(x) if self.is_exact else self.mul(out, self.op("sub", self.number(1.0), out))

    def gradients(self) -> Gradients:
        self.cotangent[self.expr.outputs[0]] = self.number(1.0)
        score, loads = self.number(0.0), []
        for i in range(len(self.expr.nodes) - 1, -1, -1):
            g, node = self.cotangent.get(i), self.expr.nodes[i]
            if g is None or not self.needed[i]:
                continue
            if node.op == "score":
                score = g
            elif node.op == "load":
                loads.append((node.attr, g, [self.primal[a] for a in node.args]))
            else:
                parts = self.parts(i, g)
                if node.op == "where" or g in self.conditional:
                    self.conditional.update(p for p in parts if p is not None)
                for a, part in zip(node.args, parts, strict=True):
                    if self.needed[a] and part is not None:
                        self.cotangent[a] = self.sum(self.cotangent[a], part) if a in self.cotangent else part
        outputs, described = [score], []
        for slot, g, indices in reversed(loads):
            described.append(LoadGradient(slot, len(outputs), tuple(range(len(outputs) + 1, len(outputs) + 1 + len(indices)))))  # type: ignore[arg-type]
            outputs += [g, *indices]
        return Gradients(self.builder.build(*outputs), tuple(described))

    def parts(self, i: int, g: int) -> list[int | None]:
        """The cotangents of node ``i``'s arguments, given its own cotangent ``g``."""
        node = self.expr.nodes[i]
        if node.op in _UNARY:
            return [_UNARY[node.op](self, g, self.value(node.args[0]), self.value(i))]
        if node.op in _BINARY:
            x, y = (self.value(a) for a in node.args)
            if node.attr is not None:
                return list(_decided(self, g, x, y, _WINS[node.op], node.attr == "first"))
            return list(_BINARY[node.op](self, g, x, y, self.value(i)))
        if node.op == "cast":
            return [g]
        if node.op == "where":
            condition, zero = self.primal[node.args[0]], self.number(0.0)
            return [None, self.op("where", condition, g, zero), self.op("where", condition, zero, g)]
        assert node.op in _STEPS, f"no derivative rule for {node.op}"
        return [None] * len(node.args)


_STEPS = frozenset(("floor", "ceil", "trunc", "round", "sign", "floordiv"))
_Unary = Callable[[_Reverse, int, int, int], int]
_UNARY: dict[str, _Unary] = {
    "neg": lambda r, g, x, out: r.neg(g),
    "abs": lambda r, g, x, out: r.guarded(g, lambda: r.op("sign", x)),
    "exp": lambda r, g, x, out: r.guarded(g, lambda: out),
    "exp2": lambda r, g, x, out: r.guarded(g, lambda: r.mul(out, r.number(LN2))),
    "expm1": lambda r, g, x, out: r.guarded(g, lambda: r.add(out, r.number(1.0))),
    "log": lambda r, g, x, out: r.guarded(g, lambda: r.op("reciprocal", x)),
    "log2": lambda r, g, x, out: r.guarded(g, lambda: r.op("reciprocal", r.mul(x, r.number(LN2)))),
    "log1p": lambda r, g, x, out: r.guarded(g, lambda: r.op("reciprocal", r.add(x, r.number(1.0)))),
    "sqrt": lambda r, g, x, out: r.guarded(g, lambda: r.op("div", r.number(0.5), out)),
    "rsqrt": lambda r, g, x, out: r.guarded(g, lambda: r.mul(r.number(-0.5), r.op("div", out, x))),
    "reciprocal": lambda r, g, x, out: r.guarded(g, lambda: r.neg(r.mul(out, out))),
    "sin": lambda r, g, x, out: r.guarded(g, lambda: r.op("cos", x)),
    "cos": lambda r, g, x, out: r.guarded(g, lambda: r.neg(r.op("sin", x))),
    "tan": lambda r, g, x, out: r.guarded(g, lambda: r.add(r.mul(out, out), r.number(1.0))),
    "atan": lambda r, g, x, out: r.guarded(g, lambda: r.op("reciprocal", r.add(r.mul(x, x), r.number(1.0)))),
    "sinh": lambda r, g, x, out: r.guarded(g, lambda: r.op("cosh", x)),
    "cosh": lambda r, g, x, out: r.guarded(g, lambda: r.op("sinh", x)),
    "tanh": lambda r, g, x, out: r.guarded(g, lambda: r.by_tanh(x, out)),
    "sigmoid": lambda r, g, x, out: r.guarded(g, lambda: r.by_sigmoid(x, out)),
    "erf": lambda r, g, x, out: r.guarded(g, lambda: r.mul(r.number(2.0 / math.sqrt(math.pi)), r.op("exp", r.neg(r.mul(x, x))))),
    "erfinv": lambda r, g, x, out: r.guarded(g, lambda: r.mul(r.number(math.sqrt(math.pi) / 2.0), r.op("exp", r.mul(out, out)))),
}


_WINS = {"min": "lt", "max": "gt"}


def _decided(r: _Reverse, g: int, x: int, y: int, wins: str, is_first: bool) -> tuple[int, int]:
    """The derivatives of a minimum or maximum that gives a tie to one argument."""
    zero = r.number(0.0)
    other_wins = r.op(wins, y, x) if is_first else r.op(wins, x, y)
    tied, other = r.op("where", other_wins, zero, g), r.op("where", other_wins, g, zero)
    return (tied, other) if is_first else (other, tied)


def _extreme(r: _Reverse, g: int, x: int, y: int, wins: str) -> tuple[int, int]:
    half, zero = r.mul(g, r.number(0.5)), r.number(0.0)

    def side(a: int, b: int) -> int:
        return r.op("where", r.op(wins, a, b), g, r.op("where", r.op("eq", a, b), half, zero))

    return side(x, y), side(y, x)


def _pow(r: _Reverse, g: int, x: int, y: int, out: int) -> tuple[int, int]:
    lower = r.op("pow", x, r.op("sub", y, r.number(1.0)))
    # x ** 0 is 1 for every x, and d/dy at x = 0 is 0, as in torch
    by_x = r.guarded(g, lambda: r.op("where", r.op("eq", y, r.number(0.0)), r.number(0.0), r.mul(y, lower)))
    by_y = r.guarded(g, lambda: r.op("where", r.op("eq", x, r.number(0.0)), r.number(0.0), r.mul(out, r.op("log", x))))
    return by_x, by_y


def _atan2(r: _Reverse, g: int, x: int, y: int, out: int) -> tuple[int, int]:
    """Derivatives of torch's ``atan2(x, y)``, the angle of the point with ordinate ``x`` and abscissa ``y``."""

    def over(a: int) -> int:
        return r.op("div", a, r.op("add", r.mul(x, x), r.mul(y, y)))

    return r.guarded(g, lambda: over(y)), r.guarded(g, lambda: r.neg(over(x)))


_BINARY: dict[str, Callable[[_Reverse, int, int, int, int], tuple[int, int]]] = {
    "add": lambda r, g, x, y, out: (g, g),
    "sub": lambda r, g, x, y, out: (g, r.neg(g)),
    "mul": lambda r, g, x, y, out: (r.guarded(g, lambda: y), r.guarded(g, lambda: x)),
    "div": lambda r, g, x, y, out: (r.guarded(g, lambda: r.op("reciprocal", y)), r.guarded(g, lambda: r.neg(r.div(out, y)))),
    "mod": lambda r, g, x, y, out: (g, r.guarded(g, lambda: r.neg(r.op("floordiv", x, y)))),
    "fmod": lambda r, g, x, y, out: (g, r.guarded(g, lambda: r.neg(r.op("trunc", r.op("div", x, y))))),
    "min": lambda r, g, x, y, out: _extreme(r, g, x, y, _WINS["min"]),
    "max": lambda r, g, x, y, out: _extreme(r, g, x, y, _WINS["max"]),
    "pow": _pow,
    "atan2": _atan2,
    "hypot": lambda r, g, x, y, out: (r.guarded(g, lambda: r.op("div", x, out)), r.guarded(g, lambda: r.op("div", y, out))),
}
