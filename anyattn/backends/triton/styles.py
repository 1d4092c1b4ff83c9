"""What the text of a call's mods may take for granted: facts of the call that choose between a few texts, no value that enters one."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from anyattn.backends.triton.emit import SMALL, Style
from anyattn.backends.triton.interpreter import is_interpreting
from anyattn.backends.triton.sizes import Box, Extent, extents
from anyattn.mods.ir import Expr
from anyattn.problem import Problem

__all__ = ["functions_for", "style_of"]

_NARROW = 2**31


def style_of(
    expr: Expr, scalars: tuple[int | float, ...], tensors: tuple[Tensor, ...], problem: Problem, functions: str = "exact"
) -> Style:
    """The style of a mod's text in this call. functions: ``functions_for`` of a score mod; a mask's comparisons are always exact."""
    if not scalars and not tensors and functions == "exact" and max(problem.bound_q, problem.bound_k) < SMALL // 2:
        return _SMALL_PLAIN
    places = tuple([(t.shape, t.stride()) for t in tensors])
    lengths = (problem.batch, problem.heads_q, problem.bound_q, problem.bound_k, problem.sequences is not None)
    return _style(expr, tuple([n if type(n) is int else None for n in scalars]), places, lengths, functions)


_SMALL_PLAIN = Style(is_small=True, is_inside=True)


@lru_cache(maxsize=4096)
def _style(
    expr: Expr,
    numbers: tuple[int | None, ...],
    places: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    lengths: tuple[int, int, int, int, bool],
    functions: str,
) -> Style:
    batch, heads, rows, keys, is_ragged = lengths
    least_row = -rows if is_ragged else 0  # a row of a cache shorter than its queries
    b, h, q, kv = (Extent(0, max(n, 1) - 1) for n in (batch, heads, rows + keys * is_ragged, keys))
    q = q._replace(lo=least_row)
    given = tuple(Extent(n or 0, n or 0) for n in numbers)
    is_small = all(e.lo > -SMALL and e.hi < SMALL for e in (b, h, q, kv, *given))
    is_small = is_small and all(abs(n) < _NARROW for shape, strides in places for n in (*shape, *strides))
    found = extents(expr, Box(b, h, q, kv, given or None))
    loads = [(places[n.attr][0][i], found[a]) for n in expr.nodes if n.op == "load" for i, a in enumerate(n.args)]  # type: ignore[call-overload]
    is_inside = all(e is not None and e.lo >= 0 and e.hi < size for size, e in loads)
    dense = tuple(slot for slot, (shape, strides) in enumerate(places) if shape and strides[-1] == 1)
    return Style(is_small, is_inside, dense, functions)


@lru_cache(maxsize=16)
def functions_for(dtype: torch.dtype, device_type: str) -> str:
    """How a score mod's functions may be computed for inputs of ``dtype``: exactly for float32, for what is rounded to 16 bits as fast as
    possible."""
    if dtype.itemsize != 2:
        return "exact"
    is_nvidia = device_type == "cuda" and torch.version.hip is None and not is_interpreting()
    return "nvidia" if is_nvidia else "fast"
