"""Making a ``BackwardConfig`` from a problem, and why the backward kernel cannot run one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward_config import HEAD_DIMS, BackwardConfig, BackwardTiles, backward_tiles_for
from anyattn.backends.hopper.codegen.operations import WRITTEN
from anyattn.backends.hopper.codegen.score_analysis import work_by_pair
from anyattn.backends.hopper.config import TILE_M, Ask, sides, slots
from anyattn.backends.hopper.make_config import tile_of
from anyattn.mask_plan import MaskAbilities, MaskPart, mask_plan
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import score_gradients
from anyattn.problem import Problem

__all__ = ["BackwardSpecial", "reason_against_backward", "specialised_backward", "with_derivative"]

_ABILITIES = MaskAbilities(most_ranges=2, tiles_follow=lambda ranges: sides(ranges.expr) is not None)
_MOST_WORK = 64  # operations per pair, of the mod and its derivative together; see ``plan``
_ROWS = 64  # what a list's rows are joined to a multiple of


@dataclass(frozen=True)
class BackwardSpecial:
    """What calls of the same signature share.

    sources: for each of ``config.exprs`` the predicate whose numbers and tensors it captures (-1: the score mod), and how many.
    listed: the predicate that the lists belong to, None without lists. list_tile: (query rows, keys) of the lists' tiles.
    """

    config: BackwardConfig
    sources: tuple[tuple[int, int, int], ...]
    listed: int | None
    list_tile: tuple[int, int] | None

    def captured(self, problem: Problem) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
        """The numbers and tensors of ``config.exprs``, one after the other."""
        numbers: list[int | float] = []
        tensors: list[Tensor] = []
        for at, count, tensor_count in self.sources:
            mod = problem.score if at < 0 else problem.predicates[at]
            assert mod is not None
            numbers += mod.scalars[:count]
            tensors += [t.detach() for t in mod.tensors[:tensor_count]]
        return tuple(numbers), tuple(tensors)


@lru_cache(maxsize=256)
def with_derivative(expr: Expr) -> Expr:
    """A score mod's value and its derivative by the score, as two outputs; captured slots are the mod's.

    >>> from anyattn.mods.tracing.trace import trace
    >>> found = with_derivative(trace(lambda s, b, h, q, k: s * s, "score").expr)
    >>> [found.nodes[o].op for o in found.outputs]
    ['mul', 'add']
    """
    builder, gradient = Builder(), score_gradients(expr).expr
    value = builder.copy(expr, expr.outputs[0])
    return builder.build(value, builder.copy(gradient, gradient.outputs[0]))


def specialised_backward(problem: Problem) -> BackwardSpecial:
    """What the backward kernel for ``problem`` is specialised for; reads no tensor."""
    plan = mask_plan(problem, _ABILITIES)
    listed = 0 if plan.uses_blocks else plan.listed[0].predicates[0] if plan.listed else None
    score = None if problem.score is None else with_derivative(problem.score.expr)
    partial = [part for part in (plan.of_blocks, *plan.listed) if part is not None]
    sources = [] if score is None else [(-1, *slots(score))]
    sources += [(part.predicates[0], *slots(_ask(part).expr)) for part in (*plan.ranged, *partial, *plan.always)]
    d, dv = _padded(problem)
    tiles = backward_tiles_for(d, dv, is_plain=score is None and listed is None and not plan.always)
    flags: dict[str, Any] = {"always": tuple(_ask(part) for part in plan.always)}
    list_tile = None
    if listed is None:
        flags["bands"] = tuple(_ask(part).expr for part in plan.ranged)
    else:
        list_tile = (TILE_M, TILE_M) if problem.blocks is None else _joined(tile_of(problem.blocks), tiles)
        cut = (list_tile[0] // tiles.tile_m, list_tile[1] // tiles.tile_n)
        flags |= {"partial": _ask(partial[0]) if partial else None, "lists": "dense", "list_cut": cut, **_differing(problem)}
    is_bf16 = problem.q.dtype is torch.bfloat16
    config = BackwardConfig(d, dv, is_bf16, tiles, score, **flags, is_deterministic=problem.deterministic)
    return BackwardSpecial(config, tuple(sources), listed, list_tile)


def _differing(problem: Problem) -> dict[str, bool]:
    """Whether lists differ from entry to entry and from head to head."""
    if problem.blocks is not None:
        batch, heads = problem.blocks.mask_block_cnt.shape[:2]
        return {"per_entry": batch > 1, "per_head": heads > 1}
    depends = [d for p in problem.predicates for d in dependence(p.expr)]
    return {"per_entry": problem.batch > 1 and any(d.b for d in depends), "per_head": problem.heads_q > 1 and any(d.h for d in depends)}


def _padded(problem: Problem) -> tuple[int, int]:
    d, dv = (next(n for n in HEAD_DIMS if given <= n) for given in (problem.q.shape[3], problem.v.shape[3]))
    return d, dv


def _joined(tile: tuple[int, int], tiles: BackwardTiles) -> tuple[int, int]:
    """The tile in which lists in tiles of ``tile`` are read."""
    return ceil_div(tile[0], _ROWS) * _ROWS, ceil_div(tile[1], tiles.tile_n) * tiles.tile_n


def _ask(part: MaskPart) -> Ask:
    return Ask(part.mask.expr, False) if part.ranges is None else Ask(part.ranges.expr, True)


def reason_against_backward(problem: Problem) -> str | None:
    """None if the backward kernel can run a ``problem`` whose forward pass this backend runs, else why not, for people."""
    if problem.sequences is not None:
        return "its backward kernel takes no packed, padded or paged sequences yet"
    score = problem.score
    if score is not None:
        if any(t.requires_grad for t in score.tensors):
            return "its backward kernel sums no gradients of captured tensors yet"
        against = _against_derivative(with_derivative(score.expr))
        if against:
            return against
    plan = mask_plan(problem, _ABILITIES)
    if problem.deterministic and plan.has_lists:
        return "its backward kernel adds in no fixed order where lists say which tiles are visited"
    blocks = problem.blocks
    if plan.uses_blocks and blocks is not None:
        tile = tile_of(blocks)
        tiles = backward_tiles_for(*_padded(problem))
        wanted = _joined(tile, tiles)
        joins = problem.blocks_follow and all(new % old == 0 for new, old in zip(wanted, tile, strict=True))
        if wanted != tile and not joins:
            own, given = f"{_ROWS} rows x {tiles.tile_n} keys", f"{tile[0]} x {tile[1]}"
            return f"its backward kernel has tiles of {own}, and these block lists are in tiles of {given}"
    return None


def _against_derivative(expr: Expr) -> str | None:
    missing = sorted({n.op for n in expr.nodes} - WRITTEN)
    if missing:
        return f"the score mod's derivative uses {', '.join(missing)}, which this backend's emitter does not write yet"
    if (work := work_by_pair(expr)) > _MOST_WORK:
        return f"the score mod and its derivative take {work} operations for every pair; its backward kernel has room for {_MOST_WORK}"
    return None
