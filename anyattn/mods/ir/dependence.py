"""Dependence analysis: the indices that each subexpression of a mod depends on; emitters use it to hoist subexpressions out of loops.

``diagonal`` marks values that depend on the two positions only through their difference q_idx - kv_idx: such a value is the same along
every diagonal, so one vector of S_q + S_k values holds all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from anyattn.mods.ir.expr import Expr, Node, category
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box, unwrapped

__all__ = ["FAR_NUMBER", "Dep", "dependence", "relies_on_near_numbers"]


@dataclass(frozen=True)
class Dep:
    """b, h, q, kv, score: whether the value changes with each. diagonal: it changes with q and kv only through q_idx - kv_idx.

    slope: (dq, dkv) when the value is ``dq * q_idx + dkv * kv_idx + (a function of b, h)``, with integer literals dq, dkv, in integer
    arithmetic that wraps around at 64 bits (``extents.unwrapped`` says where it cannot wrap).
    """

    b: bool = False
    h: bool = False
    q: bool = False
    kv: bool = False
    score: bool = False
    diagonal: bool = False
    slope: tuple[int, int] | None = None

    @property
    def per_head(self) -> bool:
        """Independent of both positions and the score: one value per (b, h)."""
        return not (self.q or self.kv or self.score)

    def __str__(self) -> str:
        if self.score:
            return "score"
        places = "q - kv" if self.diagonal else ", ".join(n for n, on in (("q", self.q), ("kv", self.kv)) if on)
        return ", ".join(filter(None, [*(n for n in ("b", "h") if getattr(self, n)), places])) or "nothing"


_LEAF = {
    "b": Dep(b=True, slope=(0, 0)),
    "h": Dep(h=True, slope=(0, 0)),
    "q_idx": Dep(q=True, slope=(1, 0)),
    "kv_idx": Dep(kv=True, slope=(0, 1)),
}
FAR_NUMBER = 2**62  # captured integers are assumed to be smaller; ``relies_on_near_numbers`` says whether a mod depends on that
_COMPARISONS = frozenset(("eq", "ne", "lt", "le", "gt", "ge"))


@lru_cache(maxsize=4096)
def dependence(expr: Expr) -> tuple[Dep, ...]:
    """One ``Dep`` per node of ``expr``.

    >>> from anyattn.mods.tracing.trace import trace
    >>> e = trace(lambda b, h, q, k: q - k <= 4, "mask").expr
    >>> str(dependence(e)[e.outputs[0]])
    'q - kv'
    """
    return _dependence(expr, FAR_NUMBER)


@lru_cache(maxsize=4096)
def relies_on_near_numbers(expr: Expr) -> bool:
    """Whether ``dependence`` holds only while captured integers are less than ``FAR_NUMBER``: a sum with a larger one may wrap around."""
    has_numbers = any(node.op == "scalar" and node.dtype is int for node in expr.nodes)
    return has_numbers and _dependence(expr, None) != dependence(expr)


def _dependence(expr: Expr, scalars: int | None) -> tuple[Dep, ...]:
    deps: list[Dep] = []
    plain = unwrapped(expr, Box.of_sizes(2**MOST_INDEX_BITS, scalars))
    for node in expr.nodes:
        deps.append(_of(node, expr, [deps[a] for a in node.args], all(plain[a] for a in node.args)))
    return tuple(deps)


def _of(node: Node, expr: Expr, args: list[Dep], are_plain: bool) -> Dep:
    if node.op == "index":
        return _LEAF[node.attr]  # type: ignore[index]
    if node.op == "score":
        return Dep(score=True)
    union = Dep(
        b=any(a.b for a in args),
        h=any(a.h for a in args),
        q=any(a.q for a in args),
        kv=any(a.kv for a in args),
        score=any(a.score for a in args),
    )
    slope = _slope(node, expr, args, union)
    return replace(union, slope=slope, diagonal=_diagonal(node, args, union, slope, are_plain))


def _diagonal(node: Node, args: list[Dep], union: Dep, slope: tuple[int, int] | None, are_plain: bool) -> bool:
    if not (union.q and union.kv) or union.score:
        return False
    if slope is not None:
        return slope[0] == -slope[1]
    if all(a.diagonal or a.per_head for a in args):
        return True
    left, right = (args[0].slope, args[1].slope) if node.op in _COMPARISONS and are_plain else (None, None)
    # q + c >= kv compares q - kv with -c, whichever side each is on, if neither side wraps around
    return left is not None and right is not None and left[0] - right[0] == right[1] - left[1]


def _slope(node: Node, expr: Expr, args: list[Dep], union: Dep) -> tuple[int, int] | None:
    if union.per_head:
        return (0, 0)
    slopes = [a.slope for a in args]
    if any(s is None for s in slopes) or node.op not in ("add", "sub", "neg", "mul", "cast"):
        return None
    if category(node.dtype) == "float":  # float sums are rounded: (q + 0.1) - (kv + 0.1) depends on more than q - kv
        return None
    if node.op == "cast":
        whole = expr.nodes[node.args[0]].dtype
        return slopes[0] if node.dtype is whole or str(node.dtype) == "torch.int64" else None
    if node.op == "neg":
        return (-slopes[0][0], -slopes[0][1])  # type: ignore[index]
    (a, b), (c, d) = slopes  # type: ignore[misc]
    if node.op == "mul":
        for factor, (x, y) in ((node.args[1], (a, b)), (node.args[0], (c, d))):
            literal = expr.nodes[factor].attr if expr.nodes[factor].op == "const" else None
            if isinstance(literal, int):
                return (x * literal, y * literal)
        return None
    sign = 1 if node.op == "add" else -1
    return (a + sign * c, b + sign * d)
