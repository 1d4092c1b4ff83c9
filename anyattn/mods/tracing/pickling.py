"""Pickling and copying of mods: a function that closes over its settings is pickled as the call that makes it.

Python pickles a function by its qualified name, and a function made inside another one cannot be found by it. So the library's masks and
scores, and the results of ``&``, ``|``, ``~``, ``then`` and slices, store their ``Recipe``. A mod made from its recipe has the same code
over equal captures, so traces and compiled kernels of the original serve it too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

__all__ = ["Recipe", "attribute", "place_of", "refuse_nameless", "remade_by_call"]

P = ParamSpec("P")
M = TypeVar("M")


class Recipe(NamedTuple):
    """The call ``make(*args)`` that makes an equal mod. make: a function at the top level of a module."""

    make: Callable[..., Any]
    args: tuple


def remade_by_call(factory: Callable[P, M]) -> Callable[P, M]:
    """Decorates a function that makes mods: a returned mod without a recipe gets this call as its recipe."""
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def made(*args: P.args, **options: P.kwargs) -> M:
        mod: Any = factory(*args, **options)
        if mod.recipe is None and not torch.compiler.is_dynamo_compiling():
            bound = signature.bind(*args, **options)
            bound.apply_defaults()
            mod.recipe = Recipe(made, bound.args)
        return mod

    return made


def attribute(module: str, name: str) -> Any:
    """The attribute ``name`` of ``module``; the name has dots for attributes of classes."""
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def place_of(fn: Any) -> tuple[str, str, Any] | None:
    """(module, name, object at that name) for a function, by the name it was defined under; None if there is no such object."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module not in sys.modules or name is None:
        return None
    try:
        return module, name, attribute(module, name)
    except AttributeError:
        return None


def refuse_nameless(fn: Any, what: str) -> None:
    """Raises ``pickle.PicklingError`` for a function that another process could not find by name, also inside ``functools.partial``."""
    if isinstance(fn, functools.partial):
        for part in (fn.func, *fn.args, *fn.keywords.values()):
            refuse_nameless(part, what)
    elif isinstance(fn, types.FunctionType):
        place = place_of(fn)
        if place is None or place[2] is not fn:
            raise pickle.PicklingError(
                f"{what} cannot be pickled: {fn.__qualname__!r} of module {fn.__module__!r} is a lambda or was made inside a function, and "
                "another process could not find it; wanted a function at a module's top level (functools.partial of one takes settings), "
                "or anyattn.masks and anyattn.scores joined by &, |, ~, then, anyattn.and_masks, anyattn.or_masks"
            )
