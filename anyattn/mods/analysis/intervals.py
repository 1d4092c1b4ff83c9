"""Bounds of an expression while each index runs over a range, for many boxes at once: torch evaluates ``ir/bounds.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.range_tables import Extremes, RangeTables
from anyattn.mods.ir.bounds import WILD, bounds
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.extents import MOST_INDEX_BITS
from anyattn.mods.ir.extents import Box as Extents

__all__ = ["Box", "Span", "Tables", "spans"]

Box = Mapping[str, tuple[Tensor, Tensor]]  # index name -> first and last value per box, inclusive
Tables = Extremes | RangeTables
_NEAR, _FAR = (Extents.of_sizes(2 ** (MOST_INDEX_BITS + 1), scalars) for scalars in (WILD, None))


class Span(NamedTuple):
    """Bounds per box, inclusive, in the form of ``ir/bounds.py``."""

    lo: Tensor
    hi: Tensor


def spans(expr: Expr, box: Box, scalars: Sequence[int | float], tables: Tables) -> list[Span]:
    """The ``Span`` of each output of ``expr``."""
    device = next(iter(box.values()))[0].device
    found: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def extremes(slot: int, end: int, *indices: Any) -> Tensor:
        key = slot, *map(id, indices)  # numbers that ``run`` keeps
        if key not in found:
            ends = [torch.as_tensor(i, device=device) for i in indices]
            found[key] = tables.lookup(slot, list(zip(ends[::2], ends[1::2], strict=True)))
        return found[key][end]

    leaves: dict[Any, Any] = {(name, end): edges[end] for name, edges in box.items() for end in (0, 1)}
    leaves |= {("load", slot, end): partial(extremes, slot, end) for slot in expr.tensor_slots for end in (0, 1)}
    is_near = all(isinstance(n, float) or -WILD < n < WILD for n in scalars)
    wanted = bounds(expr, _NEAR if is_near else _FAR)
    numbers = [n if isinstance(n, float) else max(-WILD, min(n, WILD)) for n in scalars]
    ends = [torch.as_tensor(end, device=device) for end in run(wanted, leaves, numbers, tables.tensors)]
    return [Span(*pair) for pair in zip(ends[::2], ends[1::2], strict=True)]
