"""A mutant: one small edit of one named function of the package, under which some check must fail."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

import anyattn
from tests.mutants.syntax import edited

__all__ = ["Mutant", "by_name", "changed", "package", "unchanged"]


@dataclass(frozen=True)
class Mutant:
    """The fragment ``old`` of the function ``where``, ``module:function`` or ``module:Class.method`` below ``anyattn``, becomes ``new``.

    Fragments are compared by syntax (``syntax.py`` says what they may hold). ``killer`` is the name of a check that fails under the mutant.
    """

    name: str
    where: str
    old: str
    new: str
    killer: str

    @property
    def module(self) -> str:
        return f"anyattn.{self.where.partition(':')[0]}"

    @property
    def scope(self) -> str:
        return self.where.partition(":")[2]

    @property
    def file(self) -> str:
        """Of the module, below the package's folder."""
        return self.where.partition(":")[0].replace(".", "/") + ".py"

    def edited(self, tree: ast.Module) -> ast.Module:
        """The module, changed in place, with its bug. Raises LookupError if the function no longer has the fragment exactly once."""
        try:
            found: ast.Module = edited(tree, self.scope, self.old, self.new)
        except LookupError as error:
            raise LookupError(f"mutant {self.name} of {self.where}: {error}") from None
        return found


def by_name(*mutants: Mutant) -> dict[str, Mutant]:
    found = {m.name: m for m in mutants}
    assert len(found) == len(mutants), "two mutants of one name"
    return found


def package() -> Path:
    assert anyattn.__file__ is not None
    return Path(anyattn.__file__).parent


def changed(mutant: Mutant) -> str:
    """The source of the module with its bug, for what reads a kernel from a file. Comments and layout are lost."""
    return ast.unparse(mutant.edited(ast.parse((package() / mutant.file).read_text()))) + "\n"


@functools.cache
def unchanged(file: str) -> str:
    """The source of a module of the package as ``changed`` writes it, without a bug."""
    return ast.unparse(ast.parse((package() / file).read_text())) + "\n"
