"""Keys that a mask surely shows: a range per query row that follows from one operand of a disjunction, whatever the others are.

``(kv_idx < prefix[b]) | drafts[q_idx, kv_idx]`` shows all keys of the prefix: a kernel need not evaluate the mask in tiles of such keys.
"""

from __future__ import annotations

from functools import reduce

import torch

from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["sure_range"]


def sure_range(mask: TracedMod) -> Expr | None:
    """Limits (lo, hi) of keys that every row sees, with the mask's own slots, derived without reading captured tensors; None if none are
    found. They are functions of b, h and q_idx as in ``RowRanges``: not clipped, and lo >= hi is an empty range.

    Of a mask that is one range it is that range, of a disjunction the first that an operand has, of a conjunction the common part of the
    operands' ranges.

    >>> from anyattn.mods.tracing.trace import trace
    >>> bits = torch.zeros(8, 8, dtype=torch.bool)
    >>> sure_range(trace(lambda b, h, q_idx, kv_idx: (kv_idx < 100) | bits[q_idx, kv_idx % 8], "mask")) is None
    False
    >>> sure_range(trace(lambda b, h, q_idx, kv_idx: (kv_idx < 100) & bits[q_idx, kv_idx % 8], "mask")) is None
    True
    """
    return _sure_range(mask, mask.expr.outputs[0])


def _sure_range(mask: TracedMod, at: int) -> Expr | None:
    builder = Builder()
    ranges = ranges_unread(TracedMod("mask", builder.build(builder.copy(mask.expr, at)), mask.scalars, mask.tensors, mask.name))
    if ranges is not None and ranges.count == 1:
        return ranges.expr
    node = mask.expr.nodes[at]
    if node.dtype is not torch.bool or node.op not in ("and", "or"):
        return None
    found = [_sure_range(mask, operand) for operand in node.args]
    if node.op == "or":
        return next((limits for limits in found if limits is not None), None)
    limits = [x for x in found if x is not None]
    return reduce(_common, limits) if len(limits) == len(found) else None


def _common(first: Expr, second: Expr) -> Expr:
    builder = Builder()
    (lo, hi), (other_lo, other_hi) = ([builder.copy(e, at) for at in e.outputs] for e in (first, second))
    return builder.build(builder.add("max", lo, other_lo), builder.add("min", hi, other_hi))
