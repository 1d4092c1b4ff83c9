"""Which problems this backend computes, and why not the others."""

from __future__ import annotations

from typing import NamedTuple

import torch

from anyattn.backends.hopper.config import HEAD_DIMS
from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr
from anyattn.mods.rows import NO_LIMIT, row_ranges
from anyattn.mods.trace import TracedMod
from anyattn.problem import Problem

__all__ = ["Band", "band_of", "reason_against"]

_WRITTEN = frozenset(
    [
        "index", "score", "scalar", "const", "load", "cast", "where", "add", "sub", "mul", "div", "neg", "abs", "min", "max", "and", "or",
        "not", "eq", "ne", "lt", "le", "gt", "ge", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf",
        "floor", "reciprocal",
    ]
)  # fmt: skip


class Band(NamedTuple):
    """Row i sees keys ``i + left <= j < i + right``; None is no bound."""

    left: int | None
    right: int | None


def reason_against(problem: Problem) -> str | None:
    """None if the kernel can run ``problem``, else why not, for people."""
    q, k, v = problem.q, problem.k, problem.v
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] not in HEAD_DIMS or v.shape[3] != q.shape[3]:
        return f"head_dim is {q.shape[3]} and v's {v.shape[3]}; it has kernels for {', '.join(map(str, HEAD_DIMS))}, equal for v"
    if problem.sequences is not None or problem.num_splits != 1:
        return "sequences of several lengths, caches and split keys are not in this kernel yet"
    if problem.wants_max:
        return "max_scores is not in this kernel yet"
    if problem.blocks is not None or any(band_of(p) is None for p in problem.predicates):
        return "a mask that is not one band of keys around each row's place is not in this kernel yet"
    if problem.score is not None:
        missing = sorted({n.op for n in problem.score.expr.nodes} - _WRITTEN)
        if missing:
            return f"the score mod uses {', '.join(missing)}, which this kernel's emitter does not write yet"
    if not problem.has_pairs:
        return "there is nothing to multiply"
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.stride(3) != 1 or any(s * t.element_size() % 16 for s, n in zip(t.stride()[:3], t.shape[:3]) if n > 1) or t.data_ptr() % 16:
            return f"{name}'s strides or address are no multiples of 16 bytes, which the copy engine (TMA) wants"
    return None


def band_of(mask: TracedMod) -> Band | None:
    """The band that a mask is, if it is one and its bounds are plain numbers."""
    ranges = row_ranges(mask)
    if ranges is None or ranges.count != 1 or ranges.tensors:
        return None
    low, high = (_affine(ranges.expr, o, ranges.scalars) for o in ranges.expr.outputs)
    if low is None or high is None:
        return None
    (low_slope, low_at), (high_slope, high_at) = low, high
    has_no_low, has_no_high = low_slope == 0 and low_at <= 0, high_slope == 0 and high_at >= NO_LIMIT
    if (low_slope != 1 and not has_no_low) or (high_slope != 1 and not has_no_high):
        return None
    return Band(None if has_no_low else low_at, None if has_no_high else high_at)


def _affine(expr: Expr, output: int, scalars: tuple[int | float, ...]) -> tuple[int, int] | None:
    """(slope, value at q_idx = 0) of an output that is ``slope * q_idx + number``."""
    from anyattn.mods.evaluate import run

    dep = dependence(expr)[output]
    if dep.b or dep.h or dep.slope is None:
        return None
    leaves = {"b": 0, "h": 0, "q_idx": torch.zeros((), dtype=torch.int64), "kv_idx": 0, "score": None}
    return dep.slope[0], int(run(Expr(expr.nodes, (output,)), leaves, scalars, ())[0])
