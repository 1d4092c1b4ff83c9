"""Sharp nodes: numbers whose last bit can change a mod's result by a lot, so that kernels must round them exactly as torch does."""

from __future__ import annotations

from functools import lru_cache

from anyattn.mods.ir.expr import Expr, category

__all__ = ["sharp"]

_CUTS = frozenset(("floor", "ceil", "trunc", "round", "sign", "floordiv", "mod", "fmod", "eq", "ne", "lt", "le", "gt", "ge"))


@lru_cache(maxsize=1024)
def sharp(expr: Expr) -> frozenset[int]:
    """Comparisons, conversions and roundings to integers, divisions with remainder, and all nodes that these are computed from.

    >>> from anyattn.mods.tracing.trace import trace
    >>> mask = trace(lambda b, h, q, k: q * 0.3 < k, "mask").expr
    >>> [mask.nodes[at].op for at in sorted(sharp(mask))]
    ['index', 'cast', 'const', 'mul', 'index', 'cast', 'lt']
    >>> sharp(trace(lambda s, b, h, q, k: s * 0.3, "score").expr)
    frozenset()
    """
    found: set[int] = set()
    for at in range(len(expr.nodes) - 1, -1, -1):
        node = expr.nodes[at]
        is_cut = node.op == "cast" and category(node.dtype) != "float"
        if at in found or is_cut or node.op in _CUTS:
            found.update(node.args)
            found.add(at)
    return frozenset(found)
