"""Assumptions of generated mod code (``emit.Style``): the properties of a call that select a variant; no run-time value is in the code."""

from __future__ import annotations

from functools import lru_cache

import torch

from anyattn.backends.triton.tile_config import Shape, most_keys_of, most_wrap
from anyattn.backends.triton.wide_tiles import blocks_of, is_wide, padded
from anyattn.mods.analysis.captured_loads import even_slots
from anyattn.mods.analysis.row_ranges import RowRanges
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.extents import Box, Extent, extents
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import alike
from anyattn.triton_tools.emit import NEAR, SMALL, Style
from anyattn.triton_tools.interpreter import is_interpreting
from anyattn.triton_tools.launch import row_bytes, wrap_bytes

__all__ = ["has_one_tile", "has_pairs", "is_nvidia", "shape_of", "style_of"]

_NARROW = 2**31
# The plain formula rounds a score to the inputs' dtype; errors well below that rounding do not matter.
_FUNCTIONS = {torch.float16: "fast", torch.bfloat16: "coarse"}


def style_of(mod: TracedMod | RowRanges, expr: Expr, problem: Problem) -> Style:
    """The style of an expression with a mod's captured values in this call; a mask's comparisons are always exact."""
    is_score = isinstance(mod, TracedMod) and mod.kind == "score"
    functions = _FUNCTIONS.get(problem.q.dtype, "exact") if is_score else "exact"
    places = tuple([(t.shape, t.stride()) for t in mod.tensors])
    even = even_slots(expr, mod.tensors)
    numbers = tuple([n if type(n) is int else None for n in mod.scalars])

    def style(keys: int) -> Style:
        lengths = (problem.batch, problem.heads_q, problem.bound_q, keys, problem.sequences is not None)
        return _style(expr, numbers, places, lengths, functions, is_nvidia(problem.q.device.type), even)

    keys = problem.bound_k
    if problem.sequences is not None and problem.sequences.is_cache:
        # fewer keys allow every assumption that more keys allow: if the first and the last agree, so do all between
        known = alike(keys)
        if (of_first := style(known[0])) == style(known[-1]):
            return of_first
    return style(keys)


def shape_of(problem: Problem) -> Shape:
    """The properties that the tiles of a problem are chosen for."""
    mods = [m for m in (problem.score, *problem.predicates) if m is not None]
    columns = sum(_columns(m.expr) for m in mods)
    d, dv, asks_pairs = padded(problem.q.shape[3]), padded(problem.v.shape[3]), problem.score is not None and has_pairs(problem.score.expr)
    pair_bytes = sum(m.tensors[slot].element_size() for m in mods for slot in style_of(m, m.expr, problem).even)
    most_keys = most_keys_of(problem.bound_k) if asks_pairs and problem.sequences is None else 0
    has_score = problem.score is not None
    has_8_bits = problem.k.dtype is not problem.q.dtype
    has_tail = blocks_of(problem.k.shape[3])[1] > 0  # whose columns have an address of their own
    wrap = wrap_bytes(most_wrap(d, dv), problem.k, problem.v) if has_8_bits and not has_tail else 0
    return Shape(
        d, dv, problem.q.dtype, has_score, columns, has_pairs=asks_pairs, pair_bytes=pair_bytes, most_keys=most_keys,
        has_8_bits=has_8_bits, wrap=wrap, is_narrow=has_8_bits and not wrap and row_bytes(problem.k, problem.v) < 8,
        has_one_kv=is_wide(d, dv) and has_one_tile(problem),
    )  # fmt: skip


def has_one_tile(problem: Problem) -> bool:
    """Whether a tile of keys, in its first block, has all of the values, and is loaded once for both. In float32, where products take
    longer than loads, and with 8 bits, whose two products convert a tile in two ways, values are loaded apart."""
    q, k, v = problem.q, problem.k, problem.v
    is_one_block = q.dtype.itemsize == 2 and k.dtype is q.dtype and blocks_of(k.shape[3])[0] == padded(v.shape[3])
    return is_one_block and problem.has_one_kv


@lru_cache(maxsize=4096)
def _columns(expr: Expr) -> int:
    """The number of values loaded per key, or per row in a kernel whose rows are keys."""
    return sum(node.op == "load" and dep.q != dep.kv for node, dep in zip(expr.nodes, dependence(expr), strict=True))


@lru_cache(maxsize=4096)
def has_pairs(expr: Expr) -> bool:
    """Whether a value is loaded for every (row, key) pair."""
    return any(node.op == "load" and dep.q and dep.kv for node, dep in zip(expr.nodes, dependence(expr), strict=True))


@lru_cache(maxsize=4096)
def reads_keys(expr: Expr) -> bool:
    """Whether values are loaded at every key that a row visits."""
    return any(node.op == "load" and dep.kv for node, dep in zip(expr.nodes, dependence(expr), strict=True))


@lru_cache(maxsize=8)
def is_nvidia(device_type: str) -> bool:
    """Whether kernels may use NVIDIA's own instructions."""
    return device_type == "cuda" and torch.version.hip is None and not is_interpreting()


@lru_cache(maxsize=4096)
def _style(
    expr: Expr,
    numbers: tuple[int | None, ...],
    places: tuple[tuple[torch.Size, tuple[int, ...]], ...],
    lengths: tuple[int, int, int, int, bool],
    functions: str,
    has_nvidia: bool,
    even: tuple[int, ...],
) -> Style:
    batch, heads, rows, keys, is_ragged = lengths
    least_row = -rows if is_ragged else 0  # rows before all keys, in a cache with fewer keys than queries
    b, h, q, kv = (Extent(0, max(n, 1) - 1) for n in (batch, heads, rows + keys * is_ragged, keys))
    q = q._replace(lo=least_row)
    captured = tuple(Extent(n or 0, n or 0) for n in numbers)
    is_small, is_near = (all(e.lo > -most and e.hi < most for e in (b, h, q, kv, *captured)) for most in (SMALL, NEAR))
    is_small = is_small and all(abs(n) < _NARROW for shape, strides in places for n in (*shape, *strides))
    bounds = extents(expr, Box(b, h, q, kv, captured or None))
    loads = [(places[n.attr][0][i], bounds[a]) for n in expr.nodes if n.op == "load" for i, a in enumerate(n.args)]  # type: ignore[call-overload]
    is_inside = all(e is not None and e.lo >= 0 and e.hi < size for size, e in loads)
    dense = tuple(slot for slot, (shape, strides) in enumerate(places) if shape and strides[-1] == 1)
    return Style(is_small, is_inside, dense, functions, has_nvidia, is_near, even)
