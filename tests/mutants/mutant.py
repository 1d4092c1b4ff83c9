"""A mutant: one small edit of one named function of the package, under which some check must fail."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
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
    """The source of the module with its bug, for what reads a kernel from a file. Comments and layout of the function are lost."""
    return _with_scope(mutant, mutant.edited)


def unchanged(mutant: Mutant) -> str:
    """The source of the module as ``changed`` writes it, without a bug."""
    return _with_scope(mutant, lambda tree: tree)


def _with_scope(mutant: Mutant, edit: Callable[[ast.Module], ast.Module]) -> str:
    """The module's text, in which the function or class at its top that holds the mutant is written anew; the whole module if none does."""
    lines, places = _lines_of(mutant.file)
    first, last = places.get(mutant.scope.partition(".")[0], (0, len(lines)))
    return "".join((*lines[:first], ast.unparse(edit(ast.parse("".join(lines[first:last])))), "\n", *lines[last:]))


@functools.cache
def _lines_of(file: str) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """A module's lines, and from which to which each function or class at its top takes them, unless another has its name."""
    text = (package() / file).read_text()
    nodes = [node for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names = [node.name for node in nodes]
    firsts = [min(node.lineno, *(decorator.lineno for decorator in node.decorator_list), node.lineno) - 1 for node in nodes]
    places = {node.name: (first, int(node.end_lineno or 0)) for node, first in zip(nodes, firsts) if names.count(node.name) == 1}
    return text.splitlines(keepends=True), places
