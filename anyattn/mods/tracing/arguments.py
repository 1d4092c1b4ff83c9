"""Argument checks of torch functions inside a mod: an argument has torch's meaning, or is refused by name.

The parameters of the functions in ``FUNCTIONS`` have torch's names, so a function's signature lists the arguments it supports.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from anyattn.mods.ir.expr import category, overflows
from anyattn.mods.tracing.diagnostics import mod_error

__all__ = [
    "check_call",
    "check_device",
    "check_flags",
    "check_memory_format",
    "dtype_of",
    "fitting",
    "misfit",
    "options_of",
    "refuse_bare",
]

_PYTHON_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # the dtypes that torch reads from Python types
_BARE = (torch.uint16, torch.uint32, torch.uint64)  # dtypes in which torch supports almost no operation
_OPTIONS = ("dtype", "device", "layout", "requires_grad", "pin_memory", "memory_format")


class _Taken(NamedTuple):
    """A function's parameters: their names, how many arguments it takes by position (None: any number), and how many it requires."""

    names: tuple[str, ...]
    most: int | None
    least: int
    takes_any_name: bool


@functools.lru_cache(maxsize=1024)
def _taken(function: Callable) -> _Taken:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    most = None if any(p.kind is p.VAR_POSITIONAL for p in parameters) else len(positional)
    least = sum(p.default is p.empty for p in positional)
    return _Taken(tuple(named), most, least, any(p.kind is p.VAR_KEYWORD for p in parameters))


def check_call(name: str, function: Callable, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Checks a call of torch's function ``name`` that ``function`` implements, and returns its keyword arguments; ``ModError`` for
    arguments that ``function`` does not support."""
    taken = _taken(function)
    given = {key: value for key, value in kwargs.items() if not (key == "out" and value is None)}
    takes = f"inside a mod {name} takes ({', '.join(taken.names)})"
    for key in given:
        if key == "out":
            raise mod_error(f"{name} is given out=, and a mod has no tensor to write to", "use what the function returns")
        if key not in taken.names and not taken.takes_any_name:
            raise mod_error(f"{name} is given {key}=, which is not supported inside a mod", takes)
    if taken.most is not None and len(args) > taken.most:
        raise mod_error(f"{name} is given {len(args)} arguments where {taken.most} are understood", takes)
    twice = [key for key in taken.names[: len(args)] if key in given] if taken.most is not None else []
    missing = [key for key in taken.names[: taken.least][len(args) :] if key not in given]
    if twice or missing:
        raise mod_error(f"{name} is given {twice[0]!r} twice" if twice else f"{name} is called without {missing[0]!r}", takes)
    return given


def dtype_of(item: Any) -> torch.dtype | None:
    """``item`` as a real dtype; None if it is not a dtype. ``ModError`` for a dtype that a mod cannot compute in."""
    dtype = _PYTHON_DTYPES.get(item) if isinstance(item, type) else item
    if not isinstance(dtype, torch.dtype):
        return None
    if dtype.is_complex or str(dtype).startswith(("torch.q", "torch.bits")):
        raise mod_error(f"a mod cannot compute in {dtype}", "use a real dtype, such as torch.float32")
    if dtype is torch.uint64:
        raise mod_error("a mod cannot compute with torch.uint64", "use torch.int64, whose sums and products have the same bits")
    return dtype


def check_device(device: Any) -> None:
    """Accepts any device, since it does not change a number; refuses values that are not a device."""
    if device is None:
        return
    try:
        is_place = not isinstance(device, bool) and torch.device(device).type != "meta"
    except (TypeError, RuntimeError):
        is_place = isinstance(device, int) and not isinstance(device, bool)  # an accelerator's index, on a machine without accelerators
    if not is_place:
        raise mod_error(f"device={device!r} is not a device for a mod's values", "leave device out: a mod runs where its tensors are")


def check_memory_format(memory_format: Any) -> None:
    """Accepts the memory formats that a single number can have; the image formats need four dimensions."""
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise mod_error(f"memory_format={memory_format} needs a tensor of more dimensions", "leave it out: a mod's value is one number")


def check_flags(**flags: Any) -> None:
    """Checks that flags such as copy and non_blocking, which affect no value, are bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise mod_error(f"{name} is a {type(value).__name__} {value!r}; wanted a bool", f"leave {name} out")


def options_of(name: str, options: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype among the options of a function that makes a tensor; ``ModError`` for options that a single number cannot have."""
    for key, value in options.items():
        if key not in _OPTIONS:
            raise mod_error(f"{name} is given {key}=, which is not supported inside a mod", f"leave {key} out")
        if key in ("requires_grad", "pin_memory") and value not in (None, False):
            raise mod_error(f"{name} is given {key}={value!r}, but it makes a constant", "capture a tensor made outside the mod instead")
        if key == "layout" and value not in (None, torch.strided):
            raise mod_error(f"{name} is given layout={value}", "leave layout out: a mod's value is one number")
    check_device(options.get("device"))
    check_memory_format(options.get("memory_format"))
    given = options.get("dtype")
    dtype = dtype_of(given)
    if given is not None and dtype is None:
        raise mod_error(f"{name} is given dtype={given!r}", "use a torch.dtype, such as torch.float32")
    return dtype


def refuse_bare(*values: Any) -> None:
    """Raises ``ModError`` for values whose dtypes torch cannot compute in."""
    for value in values:
        if value.kind in _BARE:
            raise mod_error(f"a mod cannot compute with a {value.kind} value", "convert it first: x.to(torch.int64)")


def fitting(value: Any, dtype: Any, use: str) -> Any:
    """``value`` for a function in which torch converts numbers to ``dtype`` and raises for one that does not fit: ``ModError`` for such a
    literal; a captured number is marked, to be checked at every call."""
    node, strong = value.builder.nodes[value.node], torch.int64 if dtype is int else dtype
    if not category(node.dtype) == category(strong) == "int":
        return value
    if node.op == "const":
        if overflows(node.attr, strong):
            raise mod_error(*misfit(use, node.attr, strong))
    elif node.dtype is int and strong is not torch.int64:
        return type(value)(value.builder, value.builder.add("cast", value.node, dtype=strong, attr=use))
    return value


def misfit(use: str, number: int, dtype: Any) -> tuple[str, str]:
    """The problem and the cure for a number that ``dtype`` does not hold."""
    return f"{use} is given {number}, which does not fit into {dtype}", "use a number that fits, or convert the other side"
