"""Pure names: attributes, built-ins and imports in a mod's code that have the same meaning at every trace.

Traces are memoised by the mod's captures. The body reaches everything else it reads (grad mode, autocast, ``table.requires_grad``, the
clock, a global looked up by text) through a name: an attribute, a built-in function, an import. Code that uses a name outside these lists
is traced on every call. A missing name costs time; a wrong one gives wrong results.
"""

from __future__ import annotations

import dis
import functools
import math
import operator
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch

from anyattn.mods.tracing.functions import FUNCTIONS

__all__ = ["STABLE_MODULES", "add_pure_names", "compares_identity", "global_names", "handles_errors", "has_pure_name", "names_of"]

STABLE_MODULES = ("torch", "math", "operator", "functools", "numpy", "anyattn", "builtins")

_BUILTINS = frozenset(
    (
        "abs", "all", "any", "bool", "complex", "dict", "divmod", "enumerate", "filter", "float", "frozenset", "int", "isinstance", "len",
        "list", "map", "max", "min", "pow", "print", "range", "reversed", "round", "set", "slice", "sorted", "str", "sum", "tuple", "zip",
        "AssertionError", "Exception", "IndexError", "KeyError", "NotImplementedError", "RuntimeError", "TypeError", "ValueError",
    )
)  # fmt: skip
_METADATA = ("shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "is_floating_point")
_LIMITS = ("finfo", "iinfo", "eps", "tiny", "smallest_normal", "bits")
_FOLDERS = ("nn", "functional", "special", "attention", "flex_attention", "masks", "scores", "mods")
_OF_TENSORS = (
    "all", "amax", "amin", "any", "arange", "argmax", "argmin", "cat", "cumsum", "detach", "dot", "full", "inner", "item", "mean", "narrow",
    "norm", "ones", "prod", "roll", "select", "stack", "std", "sum", "tolist", "unsqueeze", "var", "zeros", "T", "mT",
)  # fmt: skip
_OTHERS = ("inf", "nan", "pi", "e", "Tensor", "Size", "partial", "reduce", "noop_mask", "and_masks", "or_masks", "mod", "then")
_IDENTITY = ("id", "is_", "is_not")
_OPENING = ("attrgetter", "methodcaller", "type", *_IDENTITY)  # `type` of a tensor may be a subclass, and `x.type()` is text

_PURE = (
    frozenset((*FUNCTIONS, *_METADATA, *_LIMITS, *_FOLDERS, *_OF_TENSORS, *_OTHERS, *STABLE_MODULES))
    | {name.removeprefix("special_") for name in FUNCTIONS}
    | {name for module in (math, operator) for name in vars(module) if not name.startswith("_")}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
) - frozenset(_OPENING)

_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"))
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"))
_HANDLERS = frozenset(("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH"))  # SETUP_FINALLY and SETUP_WITH: before Python 3.11
_WRITES = frozenset(("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS", "IMPORT_STAR"))


_library: set[str] = set()


def add_pure_names(names: Iterable[str]) -> None:
    """Adds names of functions that depend only on their arguments: a module of the library adds its own when it is imported."""
    _library.update(names)
    names_of.cache_clear()  # code that uses these names is pure now


def _is_pure(name: str) -> bool:
    return name in _PURE or name in _library


def has_pure_name(item: Any) -> bool:
    """Whether a captured function or class of a library depends only on its arguments."""
    name = getattr(item, "__name__", "")
    return name in _BUILTINS or _is_pure(name)


@functools.lru_cache(maxsize=4096)
def compares_identity(code: CodeType) -> bool:
    """Whether the body compares identity with anything but None, True or False; a symbolic number is not identical to the number."""
    last = None
    for instruction in dis.get_instructions(code):
        is_literal = last is not None and last.opname == "LOAD_CONST" and (last.argval is None or isinstance(last.argval, bool))
        if instruction.opname == "IS_OP" and not is_literal:
            return True
        last = instruction
    return any(name in _IDENTITY for name in code.co_names) or any(compares_identity(c) for c in code.co_consts if isinstance(c, CodeType))


@functools.lru_cache(maxsize=4096)
def handles_errors(code: CodeType) -> bool:
    """Whether the body handles exceptions: a symbolic number raises other exceptions than the number itself."""
    if any(instruction.opname in _HANDLERS for instruction in dis.get_instructions(code)):
        return True
    return any(handles_errors(c) for c in code.co_consts if isinstance(c, CodeType))


@functools.lru_cache(maxsize=4096)
def global_names(code: CodeType) -> tuple[str, ...]:
    """The names that the body, or a function inside it, may look up as globals."""
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, CodeType):
            names.extend(global_names(const))
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[bool, frozenset[str]]:
    """(whether all attributes and imports in the body are pure, the globals it reads other than pure built-ins)."""
    is_pure, read = not (compares_identity(code) or handles_errors(code)), set()
    for instruction in dis.get_instructions(code):
        kind, name = instruction.opname, instruction.argval
        is_import = kind == "IMPORT_NAME" and name.split(".")[0] not in STABLE_MODULES
        if is_import or kind in _WRITES or (kind in _ATTRIBUTES and not _is_pure(name)):
            is_pure = False
        elif kind in _GLOBALS and name not in _BUILTINS:
            read.add(name)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            also_pure, also_read = names_of(inner)
            is_pure, read = is_pure and also_pure, read | also_read
    return is_pure, frozenset(read)
