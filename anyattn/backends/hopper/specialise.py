"""From a problem to the kernel's ``Config`` and to the values that its expressions capture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anyattn.backends.hopper.config import TILE_M, Ask, Config, padded, sides, slots, tiles_for
from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Builder, Expr
from anyattn.mods.rows import RowRanges, row_ranges
from anyattn.mods.trace import TracedMod
from anyattn.problem import Problem

__all__ = ["Parts", "list_tile_misfit", "ranges_unread", "specialised", "split"]

_FAR = 2**30  # further than any position; twice that is still a number of 32 bits
_MOST_RANGES = 2  # of a row, that the kernel keeps in registers


@dataclass(frozen=True)
class Parts:
    """What a problem's predicates become: bands from which tiles follow, or one that lists of tiles belong to, and the rest."""

    bands: tuple[RowRanges, ...] = ()
    listed: TracedMod | None = None
    always: tuple[TracedMod, ...] = ()


def split(problem: Problem) -> Parts:
    """Bands alone need no lists. Else the first predicate that is none has lists, which ``problem`` may bring along."""
    bands = [_band(p) for p in problem.predicates]
    may_go_by_mask = problem.blocks is None or problem.blocks_follow
    if may_go_by_mask and all(b is not None for b in bands):
        return Parts(bands=tuple(b for b in bands if b is not None))
    at = 0 if problem.blocks is not None else next(i for i, b in enumerate(bands) if b is None)
    return Parts(listed=problem.predicates[at], always=tuple(p for i, p in enumerate(problem.predicates) if i != at))


def list_tile_misfit(tile: tuple[int, int]) -> bool:
    """Whether lists in such tiles cannot be read by a kernel whose own are smaller parts of them."""
    return bool(tile[0] % TILE_M or tile[1] % 16)


def ranges_unread(mask: TracedMod) -> RowRanges | None:
    """The row ranges of a mask where finding them takes no look at what captured tensors hold, which on a GPU would wait for them."""
    if any(n.op == "load" and d.kv for n, d in zip(mask.expr.nodes, dependence(mask.expr), strict=True)):
        return None
    return row_ranges(mask)


def _band(mask: TracedMod) -> RowRanges | None:
    ranges = ranges_unread(mask)
    return ranges if ranges is not None and sides(ranges.expr) is not None else None


def specialised(problem: Problem, parts: Parts, list_tile: tuple[int, int] | None, **flags: Any) -> tuple[Config, tuple, tuple]:
    """The config, and the captured numbers and tensors of its expressions, one after the other. flags: further fields of the config."""
    d, dv = padded(problem.q.shape[3], problem.v.shape[3])
    score = problem.score if problem.score is not None or problem.scale > 0 else _IDENTITY
    expr = None if score is None else score.expr
    page = problem.k.shape[2] if flags.get("is_paged") else None
    divides = page if list_tile is None else list_tile[1]
    is_masked = bool(problem.predicates) or flags.get("has_entries", False)
    tiles = tiles_for(d, dv, expr, is_masked, divides)
    partial = None if parts.listed is None or _shows_all(parts.listed) else _ask(parts.listed)
    always = [_ask(p) for p in parts.always]
    cut = (1, 1) if list_tile is None else (list_tile[0] // tiles.tile_m, list_tile[1] // tiles.tile_n)
    config = Config(
        d, dv, str(problem.q.dtype) == "torch.bfloat16", tiles, expr, tuple(b.expr for b in parts.bands), list_cut=cut,
        partial=None if partial is None else partial[0], always=tuple(a[0] for a in always), has_sink=problem.sink is not None,
        has_lse=problem.wants_lse, has_max=problem.wants_max, **flags,
    )  # fmt: skip
    captured = [score] if score is not None else []
    captured += [*parts.bands, *(a[1] for a in ([partial] if partial else []) + always)]
    return config, *_captured(config, captured)


def _ask(mask: TracedMod) -> tuple[Ask, TracedMod | RowRanges]:
    ranges = ranges_unread(mask)
    if ranges is not None and ranges.count <= _MOST_RANGES:
        return Ask(ranges.expr, True), ranges
    return Ask(mask.expr, False), mask


def _shows_all(mask: TracedMod) -> bool:
    return mask.expr.output.op == "const" and bool(mask.expr.output.attr)


def _captured(config: Config, mods: list[TracedMod | RowRanges]) -> tuple[tuple, tuple]:
    numbers: list[int | float] = []
    tensors: list[Tensor] = []
    for expr, mod in zip(config.exprs, mods, strict=True):
        count = slots(expr)
        numbers += [max(-_FAR, min(x, _FAR)) if isinstance(x, int) else x for x in mod.scalars[: count[0]]]
        tensors += mod.tensors[: count[1]]
    return tuple(numbers), tuple(tensors)


def _identity() -> TracedMod:
    """The score mod that changes nothing: with it the scale is applied before a row's maximum is sought, as a negative one needs."""
    import torch

    builder = Builder()
    expr: Expr = builder.build(builder.add("score", dtype=torch.float32))
    return TracedMod("score", expr, (), (), "identity")


_IDENTITY = _identity()
