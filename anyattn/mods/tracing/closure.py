"""Closure analysis: the numbers and tensors that a mod captures, and copies of it with the numbers replaced.

``rebuild`` and ``walk`` visit the same places in the same order: closure cells, defaults, globals that the code names, functools.partial
arguments, bound methods, callable instances, and the items of tuples in them. ``walk`` also returns the mod's *structure*, by which a later
function of the same code with other numbers and tensors is recognised without calling it. It returns None where a captured object could
change the mod's meaning undetected (a user's module, class, list, dict, object or function attribute), and where the body may read
something other than its captures (grad mode, the clock; ``pure_names.py``): such a mod is traced on every call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn.mods.tracing.pure_names import STABLE_MODULES, global_names, has_pure_name, names_of
from anyattn.mods.tracing.random_numbers import is_loaded, refusing

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


def is_number(item: Any) -> bool:
    """Whether a captured item becomes a run-time scalar. An int of more than 64 bits does not: only Python can compute with it."""
    return type(item) is float or (type(item) is int and -(2**63) <= item < 2**63)


def _from_stable_module(item: Any) -> bool:
    """Whether ``item`` belongs to Python, torch or anyattn. Without a module a method of C code is Python's."""
    return _module_of(item).split(".")[0] in STABLE_MODULES


def _module_of(item: Any) -> str:
    """The module in which ``item`` is defined. ``functools.wraps`` gives a function the ``__module__`` of another one."""
    if isinstance(item, types.FunctionType):
        return str(item.__globals__.get("__name__", ""))
    return getattr(item, "__module__", None) or "builtins"


def _instance_state(item: Any) -> dict | None:
    """The attributes of a callable instance, which the rebuilt copy replaces."""
    return vars(item) if callable(item) and not isinstance(item, type) and hasattr(item, "__dict__") else None


# ---- copies with other numbers


def rebuild(fn: Callable, lift: Callable[[int | float], Any]) -> Callable:
    """A copy of ``fn`` in which every captured int and float is ``lift(number)``; parts that contain none stay the objects they are."""
    return _rebuild(fn, lift, {})  # type: ignore[no-any-return]


def _rebuild(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    if is_number(item):
        return lift(item)
    if type(item) is tuple:
        return _rebuild_items(item, lift, done)
    if id(item) in done:
        return done[id(item)]
    if (instead := refusing(item)) is not None:
        return instead
    done[id(item)] = item  # a function that captures itself keeps the original in its copy
    copy: Any = item
    if isinstance(item, types.FunctionType):
        copy = item if _library_code(item) else _rebuild_function(item, lift, done)
    elif type(item) is functools.partial:
        old = (item.func, *item.args, *item.keywords.values())
        inner, *new = [_rebuild(part, lift, done) for part in old]  # in the order of _walk, which numbers the slots
        if _are_new(old, (inner, *new)):
            named = dict(zip(item.keywords, new[len(item.args) :], strict=True))
            copy = functools.partial(inner, *new[: len(item.args)], **named)
    elif isinstance(item, types.MethodType):
        parts = _rebuild(item.__func__, lift, done), _rebuild_instance(item.__self__, lift, done)
        copy = types.MethodType(*parts) if _are_new((item.__func__, item.__self__), parts) else item
    elif not isinstance(item, types.ModuleType) and _instance_state(item) is not None and (not _from_stable_module(item) or _is_own(item)):
        copy = _rebuild_instance(item, lift, done)
    done[id(item)] = copy
    return copy


def _are_new(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return any(a is not b for a, b in zip(old, new, strict=True))


def _library_code(fn: types.FunctionType) -> bool:
    """Whether ``fn`` is torch's or Python's own and captures nothing; closures over the user's values (torch's ``and_masks``) are
    excluded."""
    return fn.__closure__ is None and _from_stable_module(fn) and not _module_of(fn).startswith(_OWN)


def _is_own(item: Any) -> bool:
    return type(item).__module__.startswith(_OWN)


def _rebuild_function(fn: types.FunctionType, lift: Callable, done: dict[int, Any]) -> types.FunctionType:
    cells = []
    for cell in fn.__closure__ or ():
        try:
            contents = _rebuild_contents(cell.cell_contents, lift, done)
            cells.append(cell if contents is cell.cell_contents else types.CellType(contents))
        except ValueError:  # an empty cell
            cells.append(cell)
    names = fn.__globals__
    if not _from_stable_module(fn):
        replaced = {n: _rebuild(names[n], lift, done) for n in global_names(fn.__code__) if n in names}
        if any(names[n] is not item for n, item in replaced.items()):
            names = {**names, **replaced}
    defaults = fn.__defaults__ and tuple(_rebuild(d, lift, done) for d in fn.__defaults__)
    keywords = fn.__kwdefaults__ and {k: _rebuild(v, lift, done) for k, v in fn.__kwdefaults__.items()}
    old = (fn.__globals__, *(fn.__closure__ or ()), *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    if not _are_new(old, (names, *cells, *(defaults or ()), *(keywords or {}).values())):
        return fn
    copy = types.FunctionType(fn.__code__, names, fn.__name__, defaults, tuple(cells) or None)
    copy.__kwdefaults__ = keywords
    copy.__dict__.update(fn.__dict__)
    return copy


def _rebuild_items(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    parts = [_rebuild(i, lift, done) for i in item]
    return type(item)(parts) if _are_new(item, parts) else item


def _rebuild_contents(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    """The copy of a cell's contents; a list of functions is copied element by element."""
    if type(item) is list and any(callable(i) for i in item):
        return _rebuild_items(item, lift, done)
    return _rebuild(item, lift, done)


def _rebuild_instance(item: Any, lift: Callable, done: dict[int, Any]) -> Any:
    state = getattr(item, "__dict__", None)
    if state is None or isinstance(item, type) or any(vars(c).get("__slots__") for c in type(item).__mro__):
        return item
    try:
        copy = object.__new__(type(item))
    except TypeError:
        return item
    done[id(item)] = copy
    copy.__dict__.update({k: _rebuild_contents(v, lift, done) for k, v in state.items()})
    if _are_new(state.values(), vars(copy).values()):
        return copy
    done[id(item)] = item
    return item


# ---- structure and captures


def walk(fn: Callable) -> Found | None:
    """The structure and captures of ``fn``; None if they can only be determined by calling it."""
    numbers: list[int | float] = []
    tensors: list[torch.Tensor] = []
    seen = _Seen()
    try:
        structure = _walk(fn, numbers, tensors, seen)
    except _Unknown:
        return None
    if seen.is_recursive and numbers:
        return None  # a copy's own reference to itself is the original, whose numbers are not replaced
    return Found(structure, tuple(numbers), tuple(tensors))


class _Seen(dict[int, int]):
    """The place of each visited object, by its id. open: those that are being described. is_recursive: whether one contains itself."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()
        self.is_recursive = False


def _walk(item: Any, numbers: list, tensors: list, seen: _Seen) -> tuple:
    """The structure of ``item``; each tuple begins with a tag for the kind of the rest (``fingerprint.py`` reads the tags too)."""
    if is_number(item):
        numbers.append(item)
        return ("number", type(item))
    if isinstance(item, torch.Tensor):
        tensors.append(item)
        return ("tensor", type(item))
    if type(item) in _CONSTANTS or type(item) is int:
        return ("constant", type(item), item)
    if type(item) is tuple:
        return _walk_items(item, numbers, tensors, seen)
    if id(item) in seen:
        seen.is_recursive |= id(item) in seen.open
        return ("again", seen[id(item)])
    seen[id(item)] = len(seen)
    seen.open.add(id(item))
    structure = _walk_object(item, numbers, tensors, seen)
    seen.open.discard(id(item))
    return structure


def _walk_object(item: Any, numbers: list, tensors: list, seen: _Seen) -> tuple:
    if isinstance(item, types.FunctionType) and not _library_code(item):
        return _walk_function(item, numbers, tensors, seen)
    if type(item) is functools.partial:
        parts = [item.func, *item.args, *item.keywords.values()]
        return ("partial", tuple(item.keywords), tuple(_walk(p, numbers, tensors, seen) for p in parts))
    if isinstance(item, types.ModuleType) and item.__name__.split(".")[0] in STABLE_MODULES and is_loaded(item):
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


def _walk_items(item: Any, numbers: list, tensors: list, seen: _Seen) -> tuple:
    return ("sequence", type(item), tuple(_walk(i, numbers, tensors, seen) for i in item))


def _walk_contents(item: Any, numbers: list, tensors: list, seen: _Seen) -> tuple:
    if type(item) is list and any(callable(i) for i in item):
        return _walk_items(item, numbers, tensors, seen)
    return _walk(item, numbers, tensors, seen)


def _is_trusted(fn: types.FunctionType) -> bool:
    """Whether ``fn`` reads only its cells: anyattn's closures, and those by which torch joins masks."""
    return _module_of(fn).startswith((_OWN, "torch.nn.attention."))


def _reads_unknown(fn: types.FunctionType) -> bool:
    """Whether the body uses a name that could give it more than its captures."""
    is_pure, read = names_of(fn.__code__)
    return not is_pure or not read <= fn.__globals__.keys()


def _walk_function(fn: types.FunctionType, numbers: list, tensors: list, seen: _Seen) -> tuple:
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
        names = tuple((n, _walk(known[n], numbers, tensors, seen) if n in known else ("empty",)) for n in global_names(fn.__code__))
    defaults = tuple(_walk(d, numbers, tensors, seen) for d in fn.__defaults__ or ())
    keywords = tuple((k, _walk(d, numbers, tensors, seen)) for k, d in (fn.__kwdefaults__ or {}).items())
    return ("function", fn.__code__, fn.__module__, tuple(cells), names, defaults, keywords)
