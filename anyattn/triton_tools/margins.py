"""Conjunctions of comparisons as one comparison: of the least margin, the difference of a comparison's sides.

A pair that must satisfy six comparisons takes six additions with a minimum, which are one instruction each on Hopper, and one predicate.
As six predicates a pair the compiler computes them before the scores' product, has no room for them, and packs them bit by bit: the loop
over partial tiles of a video's neighbourhood mask at head dimension 64 has 2,963 instructions so, and 1,966 with margins.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, category
from anyattn.mods.ir.extents import Box, extents, fits

__all__ = ["with_margins"]

_LEAST_COUNT = 3  # two predicates are two instructions
_SIDES = {"le": (1, 0, 0), "lt": (1, 0, 1), "ge": (0, 1, 0), "gt": (0, 1, 1)}  # (greater side, smaller side, least difference)


@lru_cache(maxsize=1024)
def with_margins(expr: Expr, box: Box) -> Expr:
    """The same expression, in which conjunctions of several comparisons of integers by pair compare their least margin with 0.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: (q >= k) & (q - k < 9) & (q // 9 <= k), "mask").expr
    >>> [sum(node.op == op for node in with_margins(e, Box.of_sizes(2**20, 2**20)).nodes) for op in ("min", "ge", "and")]
    [2, 1, 0]
    """
    return _Writer(expr, box).written()


class _Writer:
    def __init__(self, expr: Expr, box: Box) -> None:
        self.expr, self.deps, self.sizes, self.out = expr, dependence(expr), extents(expr, box), Builder()

    def written(self) -> Expr:
        done: dict[int, int] = {}
        inner = {a for node in self.expr.nodes if node.op == "and" for a in node.args}
        for i, node in enumerate(self.expr.nodes):
            made = None
            if node.op == "and" and node.dtype is torch.bool and i not in inner:
                made = self._joined(i, done)
            done[i] = self.out.add(node.op, *(done[a] for a in node.args), dtype=node.dtype, attr=node.attr) if made is None else made
        return self.out.build(*(done[o] for o in self.expr.outputs))

    def _joined(self, i: int, done: dict[int, int]) -> int | None:
        parts = self._conjuncts(i)
        near = [a for a in parts if self._has_margin(a)]
        if len(near) < _LEAST_COUNT:
            return None
        least = None
        for at in near:
            margin = self._margin(at, done)
            least = margin if least is None else self.out.add("min", least, margin)
        assert least is not None
        total = self.out.add("ge", least, self.out.const(0, torch.int64))
        for at in parts:
            if at not in near:
                total = self.out.add("and", total, done[at])
        return total

    def _conjuncts(self, i: int) -> list[int]:
        node = self.expr.nodes[i]
        if node.op != "and":
            return [i]
        return [part for a in node.args for part in self._conjuncts(a)]

    def _has_margin(self, i: int) -> bool:
        """Whether node ``i`` compares integers by pair whose difference fits 32 bits."""
        node = self.expr.nodes[i]
        if node.op not in _SIDES or not (self.deps[i].q and self.deps[i].kv):
            return False
        sizes = [self.sizes[a] for a in node.args]
        return all(category(self.expr.nodes[a].dtype) == "int" for a in node.args) and all(fits(size, 31) for size in sizes)

    def _margin(self, i: int, done: dict[int, int]) -> int:
        node, out = self.expr.nodes[i], self.out
        greater, smaller, least = _SIDES[node.op]
        high, low = (out.cast(done[node.args[side]], torch.int64) for side in (greater, smaller))
        if least:
            high = out.add("sub", high, out.const(1, torch.int64))
        return out.add("sub", high, low)
