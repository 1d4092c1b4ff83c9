"""Captured sums: how the backward kernel sums gradients of captured tensors, by the indices with which a score mod loads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.captured_loads import contends, moves_along_diagonals
from anyattn.mods.ir.dependence import Dep, dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import Gradients, LoadGradient, score_gradients

__all__ = ["CapturedSum", "diagonals_of", "scratch_of_warp", "with_derivatives"]


_FINITE = frozenset(("index", "const", "cast", "add", "sub", "mul", "neg", "abs", "min", "max"))


@dataclass(frozen=True)
class CapturedSum:
    """The contribution of one load to the gradient of its tensor.

    total: which of the launch's totals. place: the load's indices, None for a single number. factor: the derivative of the modified score
    by the loaded value over that by the score, None for 1. late: instead of factor, the output of the score's expression that is the
    derivative by the loaded value, if this reads the score or the derivative by the score is no literal or 0. has_copies: the total is one
    of ``privatized_sum``.
    kind: which pairs share an entry and are summed before memory additions.
        head      all pairs of a head, per warp
        key       all rows of a key, per warp
        row       all keys of a row, per warp
        diagonal  all pairs at one distance, per warp
        pair      none; the indices are positions, the key is the last
        alone     none, and each entry belongs to one pair: it is stored rather than added
        any       neighbours in a thread that have the same entry
    """

    total: int
    kind: str
    place: Expr | None
    factor: Expr | None = None
    late: int | None = None
    has_copies: bool = False

    @property
    def is_guarded(self) -> bool:
        """Whether the factor may be infinite, so that pairs where a row does not see a key must be masked out."""
        return self.factor is not None and any(n.op not in _FINITE for n in self.factor.nodes)

    @property
    def is_running(self) -> bool:
        """Whether a thread sums its pairs while their gradients are computed: then it keeps few values of a factor that reads the score."""
        return self.late is not None and self.kind in ("head", "key")

    def __post_init__(self) -> None:
        if self.kind not in ("head", "key", "row", "diagonal", "pair", "alone", "any"):
            raise ValueError(f"kind={self.kind!r}; wanted a kind of sum that the kernel knows")
        if self.factor is not None and self.late is not None:
            raise ValueError("factor and late are both given; wanted one of them")


def diagonals_of(tile_m: int) -> tuple[int, int]:
    """(diagonals of a warp's tile, ``tile_m`` rows by 16 keys; stride of the warp's 8 lines of them in shared memory). The stride avoids
    bank conflicts between the lanes of a store."""
    count = tile_m + 15
    return count, count + (9 - count) % 16


def scratch_of_warp(tile_m: int) -> int:
    """Floats of shared memory in which a warp sums diagonals."""
    return ceil_div(8 * diagonals_of(tile_m)[1] + 16, 32) * 32


@lru_cache(maxsize=256)
def with_derivatives(expr: Expr, wanted: tuple[int, ...] = (), alone: tuple[int, ...] = ()) -> tuple[Expr, tuple[CapturedSum, ...]]:
    """A score mod's value and its derivative by the score, as the first two outputs, with the sums of the ``wanted`` slots' gradients.

    alone: those of the wanted slots whose entries each belong to one pair. Slots are numbered as in the mod.

    >>> from anyattn.mods.tracing.trace import trace
    >>> import torch
    >>> bias = torch.zeros(4)
    >>> found, sums = with_derivatives(trace(lambda s, b, h, q, k: s * s + bias[h], "score").expr, (0,), ())
    >>> [found.nodes[o].op for o in found.outputs], [s.kind for s in sums]
    (['mul', 'add', 'const'], ['head'])
    """
    builder, gradients = Builder(), score_gradients(expr)
    source = gradients.expr
    outputs = [builder.copy(expr, expr.outputs[0]), builder.copy(source, source.outputs[0])]
    deps, copied, sums = dependence(source), _copied(gradients, wanted, alone), []
    slope = _literal(source, source.outputs[0])  # the scores' gradients contain this factor already
    for load in gradients.loads:
        if load.slot not in wanted:
            continue
        factor, late = source.outputs[load.output], None
        of_factor: Expr | None = None
        if slope in (None, 0.0) or deps[factor].score:
            late = len(outputs)
            outputs.append(builder.copy(source, factor))
        elif _literal(source, factor) != slope:
            alone_builder = Builder()
            copy = alone_builder.copy(source, factor)
            if slope != 1.0:
                copy = alone_builder.add("div", copy, alone_builder.const(slope, alone_builder.nodes[copy].dtype))  # type: ignore[arg-type]
            of_factor = alone_builder.build(copy)
        kind = _kind(gradients, load, deps, load.slot in alone, load.slot in copied)
        sums.append(CapturedSum(wanted.index(load.slot), kind, _places(gradients, load), of_factor, late, load.slot in copied))
    return builder.build(*outputs), tuple(sums)


def _literal(expr: Expr, at: int) -> float | None:
    node = expr.nodes[at]
    return float(node.attr) if node.op == "const" else None  # type: ignore[arg-type]


def _indices(gradients: Gradients, load: LoadGradient) -> list[int]:
    return [gradients.expr.outputs[i] for i in load.indices]


def _places(gradients: Gradients, load: LoadGradient) -> Expr | None:
    builder = Builder()
    found = [builder.copy(gradients.expr, place) for place in _indices(gradients, load)]
    return builder.build(*found) if found else None


def _copied(gradients: Gradients, wanted: tuple[int, ...], alone: tuple[int, ...]) -> frozenset[int]:
    """The slots whose totals have copies, because many pairs may add to one entry at a time."""
    deps, found = dependence(gradients.expr), set()
    for load in gradients.loads:
        places = _indices(gradients, load)
        is_one = not any(deps[p].q or deps[p].kv for p in places)  # all warps add to the same entry in every tile
        if is_one or contends(gradients.expr, places, deps, moves_along_diagonals(deps, places)):
            found.add(load.slot)
    return frozenset(found & set(wanted) - set(alone))


def _kind(gradients: Gradients, load: LoadGradient, deps: Sequence[Dep], is_alone: bool, has_copies: bool) -> str:
    expr, places = gradients.expr, _indices(gradients, load)
    by_row, by_key = any(deps[p].q for p in places), any(deps[p].kv for p in places)
    if not by_row or not by_key:
        return "row" if by_row else "key" if by_key else "head"
    if moves_along_diagonals(deps, places):
        return "diagonal"
    moving = [p for p in places if deps[p].q or deps[p].kv]
    names = [expr.nodes[p].attr if expr.nodes[p].op == "index" else None for p in moving]
    if names == ["q_idx", "kv_idx"] and moving[-1] == places[-1] and not has_copies:
        return "alone" if is_alone else "pair"
    return "any"
