"""Closure analysis: the numbers and tensors that a mod captures, and copies of it with the numbers replaced.

``rebuild`` and ``walk`` visit the same places in the same order: closure cells, defaults, globals that the code names, functools.partial
arguments, bound methods, callable instances. ``walk`` also returns the mod's *structure*, by which a later function of the same code with
other numbers and tensors is recognised without calling it. It returns None where a captured object could change the mod's meaning
undetected (a user's module, class, container, object or function attribute), and where the body may read something other than its captures
(grad mode, the clock; ``pure_names.py``): such a mod is traced on every call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.mods.tracing.pure_names import STABLE_MODULES, compares_identity, handles_errors, has_pure_name, names_of
from anyattn.mods.tracing.random_numbers import refusing
from anyattn.mods.tracing.type_checks import TYPE_CHECKS, aware, has_type_checks

__all__ = ["Found", "is_number", "rebuild", "walk"]

_CONSTANTS = (bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(Ellipsis))
_OWN = "anyattn.mods."


@dataclass(frozen=True)
class Found:
    """The structure (hashable; equal for equal code and kinds of captures), and the captured numbers and tensors in visiting order."""

    structure: tuple
    numbers: tuple[int | float, ...]
    tensors: tuple[torch.Tensor, ...]


class _Unknown(Exception):
    pass


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    names = list(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            names.extend(_global_names(const))
    return tuple(dict.fromkeys(names))


def is_number(item: Any) -> bool:
    """Whether a captured item becomes a run-time scalar. An int of more than 64 bits does not: only Python can compute with it."""
    return type(item) is float or (type(item) is int and -(2**63) <= item < 2**63)


def _from_stable_module(item: Any) -> bool:
    """Whether ``item`` belongs to Python, torch or anyattn. Without a module a method of C code is Python's, a function is the user's."""
    default = "" if isinstance(item, types.FunctionType) else "builtins"
    return (getattr(item, "__module__", None) or default).split(".")[0] in STABLE_MODULES


def _instance_state(item: Any) -> dict | None:
    """The attributes of a callable instance, which the rebuilt copy replaces."""
    return vars(item) if callable(item) and not isinstance(item, type) and hasattr(item, "__dict__") else None


# ---- copies with other numbers


def rebuild(fn: Callable, lift: Callable[[int | float], Any]) -> tuple[Callable, bool]:
    """A copy of ``fn`` in which every captured int and float is ``lift(number)``; and whether its code needs real numbers instead, because
    it compares objects by ``is`` or handles exceptions."""
    done: dict[int, Any] = {}
    copy = _rebuild(fn, lift, done)
    codes = (f.__code__ for f in done.values() if isinstance(f, types.FunctionType) and not _from_stable_module(f))
    return copy, any(compares_identity(code) or handles_errors(code) for code in codes)


def _rebuild(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    if is_number(item):
        return lift(item)
    if id(item) in done:
        return done[id(item)]
    if (instead := refusing(item)) is not None:
        return instead
    done[id(item)] = item  # a function that captures itself keeps the original in its copy
    if isinstance(item, types.FunctionType):
        copy: Any = item if _library_code(item) else _rebuild_function(item, lift, done)
    elif isinstance(item, functools.partial):
        inner = _rebuild(item.func, lift, done)  # before its arguments, as in _walk: the order of the visits numbers the slots
        args = [_rebuild(a, lift, done) for a in item.args]
        copy = functools.partial(inner, *args, **{k: _rebuild(v, lift, done) for k, v in item.keywords.items()})
    elif isinstance(item, types.MethodType):
        copy = types.MethodType(_rebuild(item.__func__, lift, done), _rebuild_instance(item.__self__, lift, done))
    elif isinstance(item, types.ModuleType) or _instance_state(item) is None or (_from_stable_module(item) and not _is_own(item)):
        copy = item
    else:
        copy = _rebuild_instance(item, lift, done)
    done[id(item)] = copy
    return copy


def _library_code(fn: types.FunctionType) -> bool:
    """Whether ``fn`` is torch's or Python's own and captures nothing; closures over the user's values (torch's ``and_masks``) are
    excluded."""
    return fn.__closure__ is None and _from_stable_module(fn) and not (fn.__module__ or "").startswith(_OWN)


def _is_own(item: Any) -> bool:
    return type(item).__module__.startswith(_OWN)


def _rebuild_function(fn: types.FunctionType, lift: Callable, done: dict[int, Any]) -> types.FunctionType:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(types.CellType(_rebuild_contents(cell.cell_contents, lift, done)))
        except ValueError:  # an empty cell
            cells.append(cell)
    names = fn.__globals__
    if not _from_stable_module(fn):
        named = _global_names(fn.__code__)
        replaced = {n: _rebuild(aware(names[n], named), lift, done) for n in named if n in names}
        names = {**TYPE_CHECKS, **names, **replaced}
    defaults = fn.__defaults__ and tuple(_rebuild(d, lift, done) for d in fn.__defaults__)
    copy = types.FunctionType(fn.__code__, names, fn.__name__, defaults, tuple(cells) or None)
    copy.__kwdefaults__ = fn.__kwdefaults__ and {k: _rebuild(v, lift, done) for k, v in fn.__kwdefaults__.items()}
    copy.__dict__.update(fn.__dict__)
    return copy


def _rebuild_contents(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    """The copy of a cell's contents; a tuple or list of functions (torch's ``and_masks``) is copied element by element."""
    if type(item) in (tuple, list) and any(callable(i) for i in item):
        return type(item)(_rebuild(i, lift, done) for i in item)
    return _rebuild(item, lift, done)


def _rebuild_instance(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    state = getattr(item, "__dict__", None)
    if state is None or isinstance(item, type):
        return item
    try:
        copy = object.__new__(type(item))
    except TypeError:
        return item
    done[id(item)] = copy
    if not _is_own(item) and has_type_checks(type(item)):  # type: ignore[arg-type]
        lift = _unlifted
    copy.__dict__.update({k: _rebuild_contents(v, lift, done) for k, v in state.items()})
    return copy


def _unlifted(number: int | float) -> int | float:
    return number


# ---- structure and captures


def walk(fn: Callable) -> Found | None:
    """The structure and captures of ``fn``; None if they can only be determined by calling it."""
    numbers: list[int | float] = []
    tensors: list[torch.Tensor] = []
    try:
        structure = _walk(fn, numbers, tensors, {})
    except _Unknown:
        return None
    return Found(structure, tuple(numbers), tuple(tensors))


def _walk(item: Any, numbers: list, tensors: list, seen: dict[int, int]) -> tuple:
    """The structure of ``item``; each tuple begins with a tag for the kind of the rest (``fingerprint.py`` reads the tags too)."""
    if is_number(item):
        numbers.append(item)
        return ("number", type(item))
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return ("tensor",)
    if isinstance(item, _CONSTANTS) or type(item) is int:
        return ("constant", type(item), item)
    if id(item) in seen:
        return ("again", seen[id(item)])
    seen[id(item)] = len(seen)
    if isinstance(item, types.FunctionType) and not _library_code(item):
        return _walk_function(item, numbers, tensors, seen)
    if isinstance(item, functools.partial):
        parts = [item.func, *item.args, *item.keywords.values()]
        return ("partial", tuple(item.keywords), tuple(_walk(p, numbers, tensors, seen) for p in parts))
    if isinstance(item, types.ModuleType) and item.__name__.split(".")[0] in STABLE_MODULES:
        return ("same", item)
    is_library = isinstance(item, (types.FunctionType, types.BuiltinFunctionType, type)) and _from_stable_module(item)
    if is_library and not _has_state(item) and has_pure_name(item):
        return ("same", item)
    if _is_own(item) and callable(getattr(item, "fn", None)):
        return ("wrapped", type(item), _walk(item.fn, numbers, tensors, seen))  # its other attributes follow from fn
    raise _Unknown


def _has_state(item: Any) -> bool:
    """Whether a built-in function is a method bound to an object, such as ``some_dict.get``."""
    return not isinstance(getattr(item, "__self__", None), (types.NoneType, types.ModuleType, type))


def _walk_contents(item: Any, numbers: list, tensors: list, seen: dict[int, int]) -> tuple:
    if type(item) in (tuple, list) and any(callable(i) for i in item):
        return ("sequence", type(item), tuple(_walk(i, numbers, tensors, seen) for i in item))
    return _walk(item, numbers, tensors, seen)


def _is_trusted(fn: types.FunctionType) -> bool:
    """Whether ``fn`` reads only its cells: anyattn's closures, and those by which torch joins masks."""
    return (fn.__module__ or "").startswith((_OWN, "torch.nn.attention."))


def _reads_unknown(fn: types.FunctionType) -> bool:
    """Whether the body uses a name that could give it more than its captures."""
    is_pure, read = names_of(fn.__code__)
    return not is_pure or not read <= fn.__globals__.keys()


def _walk_function(fn: types.FunctionType, numbers: list, tensors: list, seen: dict[int, int]) -> tuple:
    if fn.__dict__ or (not _is_trusted(fn) and _reads_unknown(fn)):
        raise _Unknown  # the body may read the function's attributes, or state outside its captures
    cells = []
    for cell in fn.__closure__ or ():
        try:
            cells.append(_walk_contents(cell.cell_contents, numbers, tensors, seen))
        except ValueError:
            cells.append(("empty",))
    names: tuple[tuple[str, tuple], ...] = ()
    if not _from_stable_module(fn):
        known = fn.__globals__
        names = tuple((n, _walk(known[n], numbers, tensors, seen) if n in known else ("empty",)) for n in _global_names(fn.__code__))
    defaults = tuple(_walk(d, numbers, tensors, seen) for d in fn.__defaults__ or ())
    keywords = tuple((k, _walk(d, numbers, tensors, seen)) for k, d in (fn.__kwdefaults__ or {}).items())
    return ("function", fn.__code__, fn.__module__, tuple(cells), names, defaults, keywords)
