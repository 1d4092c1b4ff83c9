"""Rebinding of mods in a cached call: the known programs with this call's captured values."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.fingerprint import Reading
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["Recipe", "Unfit"]


class Unfit(Exception):
    """This call cannot be remembered."""


@dataclass(frozen=True)
class Recipe:
    """How to make a traced mod of a later call: the program, and where in its reading the run-time values are.

    before: numbers that the call's facts settle and that come first. fixed: the mod itself, if it has no run-time values at all.
    """

    kind: str
    expr: Expr
    before: tuple[int | float, ...]
    scalars: tuple[int, ...]
    tensors: tuple[int, ...]
    name: str
    fixed: TracedMod | None = None

    @classmethod
    def of(cls, mod: TracedMod) -> Recipe:
        if mod.source is None:
            if mod.tensors:
                raise Unfit
            return cls(mod.kind, mod.expr, mod.scalars, (), (), mod.name, mod)
        return cls(mod.kind, mod.expr, (), mod.source.scalars, mod.source.tensors, mod.name, None if mod.scalars or mod.tensors else mod)

    def made(self, reading: Reading | None, aux: tuple[Tensor, ...], leading: tuple[Tensor, ...] = ()) -> TracedMod:
        """The mod of a call that was read so; leading: tensors that come before those of the reading."""
        if self.fixed is not None:
            return self.fixed
        scalars, tensors = self.before, leading
        if reading is not None:
            numbers, found = reading.numbers, (*reading.tensors, *aux)
            if self.scalars:
                scalars += tuple([numbers[s] for s in self.scalars])
            if self.tensors:
                tensors += tuple([found[t] for t in self.tensors])
        return TracedMod.of_fields(
            {"kind": self.kind, "expr": self.expr, "scalars": scalars, "tensors": tensors, "name": self.name, "source": None}
        )
