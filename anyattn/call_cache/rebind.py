"""Rebinding of a warm call's mods: combines their known programs with this call's captured numbers and tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from anyattn.call_cache.signature import NotCacheable, Signature
from anyattn.mods.analysis.load_bounds import depends_on_masks, doubt, unsettled
from anyattn.mods.analysis.visible_loads import reading_waits
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem

__all__ = ["Recipe", "checks_hold", "decisive_tensors"]


@dataclass(frozen=True)
class Recipe:
    """How to make a mod of a warm call: the program, and the places of its run-time values in the call.

    A mod is the user's, or one of the library's own (softcap, ALiBi, the band of causal and window_size), possibly followed by the user's.

    reading: the number of the ``Signature.readings`` entry that provides scalars and tensors, at these slots.
    own_scalars: the numbers of the library's own mods, which the key determines; they come first. own_tensors: places of their tensors in
    the call's arguments; they come first too. fixed: the mod itself, if it has no run-time values.
    """

    kind: str
    expr: Expr
    name: str
    reading: int
    scalars: tuple[int, ...]
    tensors: tuple[int, ...]
    own_scalars: tuple[int | float, ...]
    own_tensors: tuple[int, ...]
    fixed: TracedMod | None = field(default=None, compare=False)

    @classmethod
    def of(cls, mod: TracedMod, user: TracedMod | None, reading: int, arguments: tuple[Any, ...]) -> Recipe:
        """user: the user's part of ``mod``, its end or all of it. arguments: tensors that the library's own part may read."""
        scalars: tuple[int, ...] = ()
        tensors: tuple[int, ...] = ()
        if user is not None:
            if user.source is None:
                raise NotCacheable
            scalars, tensors = user.source.scalars, user.source.tensors
        own_scalars = mod.scalars[: len(mod.scalars) - len(scalars)]
        places = [_place(t, arguments) for t in mod.tensors[: len(mod.tensors) - len(tensors)]]
        fixed = mod if not scalars and not tensors and not places else None
        return cls(mod.kind, mod.expr, mod.name, reading, scalars, tensors, own_scalars, tuple(places), fixed)

    def mod(self, signature: Signature, arguments: tuple[Any, ...]) -> TracedMod:
        """The mod for a call with this signature and these ``arguments`` (as in ``of``)."""
        if self.fixed is not None:
            return self.fixed
        scalars, tensors = self.captured(signature, arguments)
        return TracedMod.of_fields(
            {"kind": self.kind, "expr": self.expr, "scalars": scalars, "tensors": tensors, "name": self.name, "source": None}
        )

    def captured(self, signature: Signature, arguments: tuple[Any, ...] = ()) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
        """The run-time values of ``mod``: its scalars and its tensors."""
        scalars: tuple[int | float, ...] = self.own_scalars
        tensors: tuple[Tensor, ...] = tuple([arguments[i] for i in self.own_tensors]) if self.own_tensors else ()
        if self.scalars:
            numbers = signature.readings[self.reading].numbers
            scalars += tuple([numbers[s] for s in self.scalars])
        if self.tensors:
            captured = (*signature.readings[self.reading].tensors, *signature.aux)
            tensors += tuple([captured[t] for t in self.tensors])
        return scalars, tensors


def decisive_tensors(mods: list[TracedMod | None], problem: Problem) -> tuple[tuple[int, int], ...]:
    """The captured tensors whose contents decide whether the user's mods read inside their tensors: numbers of the ``Signature.readings``
    entry and of the tensor in it (aux_tensors last). Indices are computed from them, or they decide which pairs a mask hides."""
    if problem.sequences is not None:
        return ()
    sizes, decisive, decide = (problem.batch, problem.heads_q, problem.bound_q, problem.bound_k), [], False
    for reading, mod in enumerate(m for m in mods if m is not None):
        slots, source = doubt(mod, *sizes).slots, mod.source
        decide = decide or bool(slots and reading_waits([mod]))
        if source is not None:
            own = len(mod.tensors) - len(source.tensors)
            places = source.tensors if mod.kind == "mask" else [source.tensors[slot - own] for slot in slots]
            decisive += [(reading, place) for place in places]
    return tuple(decisive) if decide else ()


def _place(tensor: Tensor, arguments: tuple[Any, ...]) -> int:
    for i, x in enumerate(arguments):
        if x is tensor:
            return i
    raise NotCacheable  # a tensor computed from the arguments


def checks_hold(mods: list[TracedMod], problem: Problem) -> bool:
    """Whether the checks of the user's mods hold for all calls of one key; numbers that they depend on become part of the key."""
    for mod in mods:
        if mod.source is None:
            return False
        depends_on_numbers = _checks_depend_on_numbers(mod, problem)
        if depends_on_numbers is None:
            return False
        if depends_on_numbers:
            mod.source.pattern.fix(mod.source.scalars)
    return True


def _checks_depend_on_numbers(mod: TracedMod, problem: Problem) -> bool | None:
    """Whether the checks of a mod depend on its numbers; None if they depend on the contents of tensors."""
    s, entries = problem.sequences, (problem.batch, problem.heads_q)
    if s is not None:
        if not s.is_unread:
            return None
        # no contents are read: an index that depends on them is clamped, one computed from positions is checked against sizes or lengths
        first, end = s.position_bounds
        if unsettled(mod, *entries, end, problem.bound_k, first).by_positions:
            return None
        return doubt(mod, *entries, max(end, -first), problem.bound_k).of_numbers
    sizes = (*entries, problem.bound_q, problem.bound_k)
    dependent = doubt(mod, *sizes)
    if dependent.of_score:
        return None
    if dependent.slots:  # for tensors on a device ``RememberedCall.checked`` has those whose contents were read
        has_other_lists = problem.blocks is not None and not problem.blocks_follow
        return dependent.of_numbers if reading_waits([mod]) and not has_other_lists else None
    if depends_on_masks(mod, *sizes) and (problem.blocks is not None or any(p.tensors for p in problem.predicates)):
        return None
    return dependent.of_numbers
