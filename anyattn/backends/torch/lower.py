"""Lowering of expressions to torch's CPU operations: folds constants, replaces tanh by faster functions, and loads at a bool by a choice.

torch.tanh takes 1.04 ns per element, expm1 0.35, sigmoid 0.11, and a whole float32 attention score 1.4. ``tanh(x) = t / (t + 2)`` with
``t = expm1(2 x)`` is as accurate (2 x is kept below 40, where the quotient is 1); ``2 sigmoid(2 x) - 1`` loses relative accuracy near 0,
which does not show for 16-bit inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from anyattn.arithmetic import LN2
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, Node, bool_of

__all__ = ["lowered", "steady", "with_choices"]

_UNSTEADY = frozenset(("pow", "sinh", "cosh", "atan2", "hypot"))


@lru_cache(maxsize=1024)
def lowered(expr: Expr, factors: tuple[float, ...], is_half: bool) -> Expr:
    """``expr`` with output i multiplied by ``factors[i]``; is_half: the inputs have 16 bits."""
    scaled = Builder()
    outputs = []
    for position, factor in zip(expr.outputs, factors, strict=True):
        copied = scaled.copy(expr, position)
        dtype = scaled.nodes[copied].dtype
        outputs.append(copied if factor == 1.0 else scaled.add("mul", copied, scaled.const(factor, dtype)))
    return _Lowering(scaled.build(*outputs), is_half).run()


@lru_cache(maxsize=1024)
def steady(expr: Expr) -> Expr:
    """``expr`` with operations whose result for an element does not depend on its place in memory.

    torch's exp2, sigmoid and the operations of ``_UNSTEADY`` round the last elements,
    which do not fill a vector, differently from the others.
    """
    builder = Builder()
    new: list[int] = []
    for node in expr.nodes:
        args = [new[a] for a in node.args]

        def number(value: float, dtype: object = node.dtype) -> int:
            return builder.const(value, dtype)  # type: ignore[arg-type]

        if node.op == "exp2":
            new.append(builder.add("exp", builder.add("mul", args[0], number(LN2))))
        elif node.op == "sigmoid":
            power = builder.add("exp", builder.add("neg", args[0]))
            new.append(builder.add("reciprocal", builder.add("add", power, number(1.0))))
        elif node.op in _UNSTEADY and node.dtype is torch.float32:
            wide = (builder.cast(a, torch.float64) for a in args)
            new.append(builder.cast(builder.add(node.op, *wide), torch.float32))
        else:
            new.append(builder.add(node.op, *args, dtype=node.dtype, attr=node.attr))
    return builder.build(*(new[o] for o in expr.outputs))


def with_choices(expr: Expr, tensors: Sequence[Tensor]) -> Expr:
    """``expr`` with ``where(x, t[1], t[0])`` for ``t[x.to(int)]`` of a bool x: two loads that depend on less, and no gather."""
    return _with_choices(expr, tuple([tuple([n >= 2 for n in t.shape]) for t in tensors])) if tensors else expr


@lru_cache(maxsize=1024)
def _with_choices(expr: Expr, has_two: tuple[tuple[bool, ...], ...]) -> Expr:
    """has_two: of each tensor and dimension, whether it has an entry for False and one for True."""
    builder = Builder()
    new: list[int] = []

    def load(node: Node, args: list[int], dim: int) -> int:
        if dim == len(args):
            return builder.add("load", *args, dtype=node.dtype, attr=node.attr)
        condition = bool_of(expr, node.args[dim]) if has_two[node.attr][dim] else None  # type: ignore[call-overload]
        if condition is None:
            return load(node, args, dim + 1)
        no, yes = (load(node, [*args[:dim], builder.const(at, torch.int64), *args[dim + 1 :]], dim + 1) for at in (0, 1))
        return builder.add("where", new[condition], yes, no)

    for node in expr.nodes:
        args = [new[a] for a in node.args]
        new.append(load(node, args, 0) if node.op == "load" else builder.add(node.op, *args, dtype=node.dtype, attr=node.attr))
    return builder.build(*(new[o] for o in expr.outputs))


class _Lowering:
    def __init__(self, expr: Expr, is_half: bool):
        self.expr, self.is_half = expr, is_half
        self.sees_score = [d.score for d in dependence(expr)]
        self.builder = Builder()
        self.new: list[int] = []
        self._scaled: set[int] = set()  # products made by _times: a value, then a factor that does not depend on the score

    def run(self) -> Expr:
        for i, node in enumerate(self.expr.nodes):
            args = [self.new[a] for a in node.args]
            if self.sees_score[i] and node.op == "tanh":
                self.new.append(self._tanh(args[0], node))
            elif self.sees_score[i] and node.op in ("mul", "div"):
                self.new.append(self._product(node, args))
            else:
                self.new.append(self.builder.add(node.op, *args, dtype=node.dtype, attr=node.attr))
        return self.builder.build(*(self.new[o] for o in self.expr.outputs))

    def _tanh(self, x: int, node: Node) -> int:
        b = self.builder

        def number(value: float) -> int:
            return b.const(value, node.dtype)

        doubled = self._times(x, number(2.0))
        if self.is_half:
            return b.add("sub", b.add("mul", b.add("sigmoid", doubled), number(2.0)), number(1.0))
        t = b.add("expm1", b.add("min", doubled, number(40.0)))
        return b.add("div", t, b.add("add", t, number(2.0)))

    def _product(self, node: Node, args: list[int]) -> int:
        left, right = node.args
        if not self.sees_score[right]:
            factor = args[1] if node.op == "mul" else self.builder.add("reciprocal", args[1])
            return self._times(args[0], factor)
        if not self.sees_score[left] and node.op == "mul":
            return self._times(args[1], args[0])
        return self.builder.add(node.op, *args)

    def _times(self, x: int, factor: int) -> int:
        """``x * factor`` for a factor that does not depend on the score; products of such factors are computed once, not per score."""
        inner = self.builder.nodes[x]
        if inner.op == "mul" and x in self._scaled:
            return self._remember(self.builder.add("mul", inner.args[0], self.builder.add("mul", inner.args[1], factor)))
        return self._remember(self.builder.add("mul", x, factor))

    def _remember(self, product: int) -> int:
        self._scaled.add(product)
        return product
