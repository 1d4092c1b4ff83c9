"""Mask plan: whether row ranges, block lists, or an evaluation in every visited tile apply each predicate of a call.

The rule is the same for all backends; ``MaskAbilities`` says how they differ, for example in the number of row ranges a kernel keeps.
A backend encodes the plan as kernel inputs and decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from anyattn.mods.analysis.row_ranges import RowRanges, ranges_unread
from anyattn.mods.compose import anded, conjuncts
from anyattn.mods.tracing.cute_mod import has_native
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem

__all__ = ["MaskAbilities", "MaskPart", "MaskPlan", "mask_plan"]


def _any_ranges(ranges: RowRanges) -> bool:
    return True


class MaskAbilities(NamedTuple):
    """The mask features of a backend.

    most_ranges: most row ranges that may replace a predicate; with more, the predicate itself is evaluated.
    tiles_follow: whether the backend finds the tiles to visit from given row ranges alone.
    joins: predicates that are applied in the same way are joined to one, their conjunction.
    reads_tensors: row ranges may be derived from the values of captured tensors (``Problem.row_ranges``), which synchronises.
    drops_blocks: block lists that follow from the mask are ignored if the tiles of every predicate follow from row ranges.
    most_lists: 1: the backend reads one set of block lists and evaluates the other predicates in every tile. None: any number of sets.
    lists_caches: lists are made for the few rows of a call with a KV cache; if False, its predicates are evaluated in every tile.
    lists_in_order: a batch-invariant call can visit lists of a varlen batch in the order of the keys; if False, the same.
    """

    most_ranges: int
    tiles_follow: Callable[[RowRanges], bool] = _any_ranges
    joins: bool = False
    reads_tensors: bool = False
    drops_blocks: bool = True
    most_lists: int | None = 1
    lists_caches: bool = True
    lists_in_order: bool = True


class MaskPart(NamedTuple):
    """One predicate, or several that a backend joins.

    mask: the (joined) mask. predicates: its places in ``Problem.predicates``. ranges: row ranges that replace the mask's evaluation by
    comparisons with their limits, None if the mask has none or too many.
    """

    mask: TracedMod
    predicates: tuple[int, ...]
    ranges: RowRanges | None

    @property
    def hides_nothing(self) -> bool:
        return self.ranges is not None and self.ranges.shows_all


@dataclass(frozen=True, eq=False)
class MaskPlan:
    """How each predicate of a call is applied. A tile is visited unless a part excludes it.

    ranged: row ranges select the tiles to visit, and mask inside them.
    uses_blocks: the call's block lists select the tiles to visit.
    of_blocks: the mask inside the partial tiles of the call's block lists; None without lists, and if it hides nothing.
    listed: block lists are made for each of these parts; the part masks inside its partial tiles.
    always: parts that are evaluated in every visited tile. Predicates that hide nothing are left out.
    """

    ranged: tuple[MaskPart, ...] = ()
    uses_blocks: bool = False
    of_blocks: MaskPart | None = None
    listed: tuple[MaskPart, ...] = ()
    always: tuple[MaskPart, ...] = ()

    @property
    def has_lists(self) -> bool:
        return self.uses_blocks or bool(self.listed)


def mask_plan(problem: Problem, abilities: MaskAbilities) -> MaskPlan:
    """The mask plan of a problem. It reads no tensor unless ``abilities.reads_tensors``.

    >>> import torch
    >>> from anyattn import masks
    >>> from anyattn.mods.tracing.trace import trace
    >>> q, mask = torch.zeros(1, 1, 8, 8), masks.prefix_lm(3)
    >>> plan = mask_plan(Problem(q, q, q, 1.0, predicates=(trace(mask, "mask"),)), MaskAbilities(2))
    >>> [part.ranges.count for part in plan.ranged], plan.listed
    ([1], ())
    """
    blocks, count = problem.blocks, len(problem.predicates)
    if blocks is not None and not (problem.blocks_follow and abilities.drops_blocks):
        return _beside_blocks(problem, abilities)
    parts = _parts(problem, 0, abilities)
    ranged, always, others = _sorted(parts, abilities)
    if blocks is not None and others:
        return _beside_blocks(problem, abilities, parts if count == 1 or not abilities.joins else None)
    if not others or abilities.most_lists is None:
        return MaskPlan(ranged, listed=others, always=always)
    has_no_lists = not abilities.lists_caches and problem.sequences is not None and problem.sequences.is_cache
    if has_no_lists or (not abilities.lists_in_order and problem.sequences is not None and problem.is_batch_invariant):
        return _without_lists(problem, abilities)
    return MaskPlan(listed=others[:1], always=_hiding([part for part in parts if part is not others[0]]))


def _without_lists(problem: Problem, abilities: MaskAbilities) -> MaskPlan:
    """The plan of a call with too few rows to make lists for: the conjuncts with row ranges select the tiles to visit, and the others are
    evaluated in each of those tiles."""
    limits: list[TracedMod] = []
    others: list[TracedMod] = []
    places = tuple(range(len(problem.predicates)))
    for mask in problem.predicates:
        for part in conjuncts(mask):
            (others if _few_ranges([part], abilities) is None else limits).append(part)
    while limits and (ranges := _few_ranges(limits, abilities)) is None:
        others.append(limits.pop())
    ranged = (MaskPart(_joint(limits), places, ranges),) if limits else ()
    always = (MaskPart(_joint(others), places, None),) if others else ()
    return MaskPlan(ranged, always=always)


def _few_ranges(masks: list[TracedMod], abilities: MaskAbilities) -> RowRanges | None:
    """The row ranges of a conjunction; None if it has none, more than ``most_ranges``, or ranges that do not give the tiles to visit."""
    ranges = ranges_unread(_joint(masks))
    return ranges if ranges is not None and ranges.count <= abilities.most_ranges and abilities.tiles_follow(ranges) else None


def _beside_blocks(problem: Problem, abilities: MaskAbilities, parts: tuple[MaskPart, ...] | None = None) -> MaskPlan:
    """The plan of a call that uses its block lists, which belong to the first predicate. parts: one per predicate, if they are known."""
    if not problem.predicates:
        return MaskPlan(uses_blocks=True)
    if parts is None:
        parts = (_part(problem, (0,), abilities), *_parts(problem, 1, abilities))
    of_blocks = None if parts[0].hides_nothing else parts[0]
    if abilities.most_lists is not None:
        return MaskPlan((), True, of_blocks, (), _hiding(parts[1:]))
    ranged, always, others = _sorted(parts[1:], abilities)
    return MaskPlan(ranged, True, of_blocks, others, always)


def _sorted(parts: tuple[MaskPart, ...], abilities: MaskAbilities) -> tuple[tuple[MaskPart, ...], ...]:
    """Three groups: parts whose tiles follow from their row ranges; opaque parts, for which no lists can be made; all other parts."""
    ranged, opaque, others = [], [], []
    for part in parts:
        if part.ranges is not None and abilities.tiles_follow(part.ranges):
            ranged.append(part)
        elif has_native([part.mask]) is not None:  # a CuTe function can only be evaluated inside its kernel
            opaque.append(part)
        else:
            others.append(part)
    return tuple(ranged), tuple(opaque), tuple(others)


def _hiding(parts: tuple[MaskPart, ...] | list[MaskPart]) -> tuple[MaskPart, ...]:
    return tuple(part for part in parts if not part.hides_nothing)


def _parts(problem: Problem, first: int, abilities: MaskAbilities) -> tuple[MaskPart, ...]:
    """The parts of the predicates from place ``first`` on: one part each, or one joined part."""
    places = range(first, len(problem.predicates))
    if not abilities.joins:
        return tuple([_part(problem, (at,), abilities) for at in places])
    return (_part(problem, tuple(places), abilities),) if places else ()


def _part(problem: Problem, places: tuple[int, ...], abilities: MaskAbilities) -> MaskPart:
    mask = _joint([problem.predicates[at] for at in places])
    if abilities.reads_tensors:
        assert len(places) == 1, "the row ranges of conjunctions are derived without reading tensors"
        ranges = problem.row_ranges[places[0]]
    else:
        ranges = ranges_unread(mask)
    return MaskPart(mask, places, ranges if ranges is not None and ranges.count <= abilities.most_ranges else None)


def _joint(masks: list[TracedMod]) -> TracedMod:
    """The conjunction of one or more masks."""
    found = anded(masks)
    assert found is not None
    return found
