"""Rewriting of comparisons so that q_idx is on one side and kv_idx on the other: per pair only the comparison itself remains.

``(q // w - k // w).abs() <= r`` takes a difference, an absolute value and a comparison per pair. ``q // w - r <= k // w`` and
``k // w <= q // w + r`` take one comparison each; their sides are computed once per row and once per key.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import MIRRORED, Builder, Expr, category
from anyattn.mods.ir.extents import Box, extents, fits, unwrapped

__all__ = ["separated"]

_Sum = list[tuple[int, int]]  # terms of a sum: (sign, node)


class _NotSeparableError(Exception):
    """A term depends on both positions, or a number may wrap around."""


@lru_cache(maxsize=1024)
def separated(expr: Expr, box: Box, beside: str = "q_idx") -> Expr:
    """The same mask with separated comparisons. box: ranges of the leaves; the rewriting assumes that no number leaves its dtype's range,
    and values still fit 32 bits. beside: the side, that of q_idx or kv_idx, that gets the terms that depend on neither; the position of
    which a kernel holds fewer.

    >>> from anyattn.mods.tracing.trace import trace
    >>> box = Box.of_sizes(2**20, 2**20)
    >>> e = separated(trace(lambda b, h, q, k: (q // 9 - k // 9).abs() <= 2, "mask").expr, box)
    >>> [n.op for n, d in zip(e.nodes, dependence(e)) if d.q and d.kv]
    ['le', 'le', 'and']
    """
    return _Writer(expr, box, beside).written()


class _Writer:
    def __init__(self, expr: Expr, box: Box, beside: str) -> None:
        self.is_beside_q = beside == "q_idx"
        self.expr, self.nodes, self.deps, self.box = expr, expr.nodes, dependence(expr), box
        self.plain = unwrapped(expr, box)
        self.out = Builder()

    def written(self) -> Expr:
        """Rewrites each comparison that can be separated, independently of the others."""
        done: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            made = self._compared(i) if node.op in MIRRORED and self._mixes(i) else None
            done[i] = self.out.add(node.op, *(done[a] for a in node.args), dtype=node.dtype, attr=node.attr) if made is None else made
        return self.out.build(*(done[o] for o in self.expr.outputs))

    def _mixes(self, i: int) -> bool:
        """Whether a comparison of integers has a side that depends on both positions."""
        args = self.nodes[i].args
        return all(category(self.nodes[a].dtype) == "int" for a in args) and any(self.deps[a].q and self.deps[a].kv for a in args)

    def _compared(self, i: int) -> int | None:
        node = self.nodes[i]
        try:
            return self._sides(node.op, [(1, node.args[0])], [(1, node.args[1])])
        except _NotSeparableError:
            return None

    def _sides(self, op: str, left: _Sum, right: _Sum) -> int:
        """``sum(left) op sum(right)``. If a side is the maximum or minimum of two numbers, both numbers are compared."""
        for terms, others, own in ((left, right, op), (right, left, MIRRORED[op])):
            if len(terms) != 1 or not self._is_mixed(terms[0][1]):
                continue
            sign, at = terms[0]
            if self.nodes[at].op == "neg" and self.plain[at]:
                return self._sides(own, [(-sign, self.nodes[at].args[0])], others)
            if self.nodes[at].op in ("abs", "min", "max"):
                return self._opened(own, terms[0], others)
        return self._compare(op, self._terms(left) + self._terms(right, -1))

    def _is_mixed(self, i: int) -> bool:
        return self.deps[i].q and self.deps[i].kv

    def _opened(self, op: str, term: tuple[int, int], others: _Sum) -> int:
        sign, at = term
        node = self.nodes[at]
        if op in ("eq", "ne") or not self.plain[at]:
            raise _NotSeparableError
        parts = [(sign, node.args[0]), (-sign if node.op == "abs" else sign, node.args[-1])]
        is_larger = (node.op != "min") == (sign > 0)
        return self.out.add("and" if is_larger == (op in ("lt", "le")) else "or", *(self._sides(op, [part], others) for part in parts))

    def _terms(self, terms: _Sum, sign: int = 1) -> _Sum:
        """The sum as terms that depend on at most one position each."""
        found: _Sum = []
        for own, at in terms:
            node, dep, here = self.nodes[at], self.deps[at], own * sign
            if not self.plain[at]:
                raise _NotSeparableError
            if not (dep.q and dep.kv):
                found.append((here, at))
            elif node.op in ("add", "sub", "neg"):
                signs = (-1,) if node.op == "neg" else (1, -1 if node.op == "sub" else 1)
                found += self._terms([(s, a) for s, a in zip(signs, node.args, strict=True)], here)
            else:
                raise _NotSeparableError
        return found

    def _compare(self, op: str, terms: _Sum) -> int:
        """``sum(terms) op 0`` as a comparison of a sum over q_idx with a sum over kv_idx."""
        on_left = [not self.deps[at].kv if self.is_beside_q else self.deps[at].q for _, at in terms]
        rows = [term for term, is_left in zip(terms, on_left, strict=True) if is_left]
        keys = [(-sign, at) for (sign, at), is_left in zip(terms, on_left, strict=True) if not is_left]
        if not rows or not keys:
            raise _NotSeparableError
        sides = [self._total(side) for side in (rows, keys)]
        alone = [self._alone(side) for side in sides]
        if not all(unwrapped(e, self.box)[e.outputs[0]] and fits(extents(e, self.box)[e.outputs[0]]) for e in alone):
            raise _NotSeparableError
        return self.out.add(op, *sides)

    def _total(self, terms: _Sum) -> int:
        total = None
        for sign, at in sorted(terms, key=lambda term: -term[0]):
            value = self.out.cast(self.out.copy(self.expr, at), torch.int64)
            if total is None:
                total = value if sign > 0 else self.out.add("neg", value)
            else:
                total = self.out.add("add" if sign > 0 else "sub", total, value)
        assert total is not None
        return total

    def _alone(self, at: int) -> Expr:
        builder, whole = Builder(), self.out.build(at)
        return builder.build(builder.copy(whole))
