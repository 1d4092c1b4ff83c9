"""Additive bias: recognises score mods of the form ``score + bias(b, h, q_idx, kv_idx)``."""

from __future__ import annotations

from functools import lru_cache

from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr

__all__ = ["additive_bias"]


@lru_cache(maxsize=1024)
def additive_bias(expr: Expr, factor: float = 1.0) -> Expr | None:
    """``factor * bias`` if ``expr`` is ``score + bias`` and the bias does not depend on the score; None otherwise.

    >>> from anyattn.mods.tracing.trace import trace
    >>> print(additive_bias(trace(lambda s, b, h, q, k: s + 2.0 - 0.5, "score").expr))
    %0: float32 = const 2.0
    %1: float32 = const 0.5
    %2: float32 = sub %0 %1
    -> %2
    """
    deps = dependence(expr)
    terms: list[tuple[bool, int]] = []  # (is subtracted, position)
    position = expr.outputs[0]
    while expr.nodes[position].op != "score":
        node = expr.nodes[position]
        if node.op not in ("add", "sub"):
            return None
        left, right = node.args
        if not deps[right].score:
            terms.append((node.op == "sub", right))
            position = left
        elif not deps[left].score and node.op == "add":
            terms.append((False, left))
            position = right
        else:
            return None
    builder = Builder()
    total: int | None = None
    for subtracted, term in reversed(terms):
        copied = builder.copy(expr, term)
        if total is None:
            total = builder.add("neg", copied) if subtracted else copied
        else:
            total = builder.add("sub" if subtracted else "add", total, copied)
    if total is None:
        return None
    if factor != 1.0:
        total = builder.add("mul", total, builder.const(factor, builder.nodes[total].dtype))
    return builder.build(total)
