"""Symbols: the objects that a mod's body holds while it is traced, and the mode that records torch's functions of them.

An index, the score, a load and all that is computed from them are of type ``torch.Tensor`` exactly, so that ``isinstance``, ``type``,
``is_tensor``, ``match`` and ``singledispatch`` answer as for the tensors of eager mode, whatever code they stand in. A symbol has a shape,
a dtype and a device, but no memory: a function that bypasses the mode fails in torch's dispatcher. What it represents (``symbolic.py``,
``vectors.py``) is an attribute of it. A captured number is a ``Number``, for which ``isinstance`` answers as for the int, float or bool;
``trace.py`` checks code that may look closer.

After its trace a symbol raises ``ModError`` wherever it is used, and one that the mod has stored anywhere is an error of the trace.
"""

from __future__ import annotations

import collections
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anyattn.mods.ir.expr import category, is_weak
from anyattn.mods.tracing.diagnostics import defined_at, mod_error
from anyattn.mods.tracing.functions import FUNCTIONS
from anyattn.mods.tracing.pure_names import STABLE_MODULES, global_names
from anyattn.mods.tracing.random_numbers import is_random, refuse_random
from anyattn.mods.tracing.symbolic import Value, View, _call, cast
from anyattn.mods.tracing.vectors import Vector
from anyattn.mods.tracing.weak_captures import scalar_slots

__all__ = ["InterceptTorch", "Number", "payload", "refuse_kept", "surfaced"]

_OPERANDS = (Value, View, Vector)
_MOST_OBJECTS = 10000  # bounds the search for the name of a place
_ATTRIBUTE_CURE = "use .shape, .dtype, .device, Python's operators and torch's functions of single numbers"
_KEPT_CURE = "a mod's values exist for one trace: compute the value again where it is needed, and return what the mod is for"
# Attributes that are part of the memo's key in captured tensors, and that a symbol has too.
_METADATA = frozenset(("size", "dim", "ndimension", "numel", "nelement", "__len__", "is_floating_point", "element_size", "get_device"))
_PROPERTIES = frozenset(("shape", "dtype", "device", "ndim", "itemsize", "nbytes", "is_cuda", "is_cpu", "is_meta"))


class _Kept(torch.Tensor):
    """The type of a symbol whose trace has ended."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") == "__repr__":  # such as the text of a KeyError
            return repr(payload(args[0]))
        _refuse_foreign()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:  # type: ignore[override]
        _refuse_foreign()


def _refuse_foreign() -> Any:
    raise mod_error("a value of one mod's trace is used outside of that trace", _KEPT_CURE)


class Number:
    """A captured number, or one computed from captured numbers alone."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: Value):
        self._value = value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return bool if self._value.kind is torch.bool else self._value.kind  # type: ignore[return-value]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        _refuse_foreign()  # within the trace the mode is called instead

    __array_ufunc__ = None  # NumPy's numbers leave arithmetic with this to the methods below

    def __getattr__(self, name: str) -> Any:
        if hasattr(self.__class__, name):
            return getattr(payload(self).python_number(f".{name}"), name)
        raise AttributeError(f"{self.__class__.__name__!r} object has no attribute {name!r}")

    def __hash__(self) -> int:
        return hash(payload(self).python_number("hash()"))

    def __repr__(self) -> str:
        return repr(payload(self).python_number("text"))


def _operation(name: str) -> Callable[..., Any]:
    """A method of ``Number``. The result of numbers alone is a number again: a comparison of them is a bool, not a tensor."""

    def apply(*args: Any) -> Any:
        result = getattr(Value, name)(*payload(args))
        is_number = type(result) is Value and all(isinstance(a, (int, float)) for a in args)
        return _registered(Number(result), result) if is_number else surfaced(result)

    return apply


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(Number, _form, _operation(_form))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "pos", "bool", "int", "index", "float", "round"):
    setattr(Number, f"__{_name}__", _operation(f"__{_name}__"))


# ---- between symbols and what they represent


def surfaced(item: Any) -> Any:
    """The symbol of a value, a row or a partly indexed tensor, also inside tuples and lists; anything else unchanged."""
    kind = type(item)
    if kind in _OPERANDS:
        if kind is Value and is_weak(item.kind):
            return _registered(Number(item), item)
        symbol = torch.Tensor._make_wrapper_subclass(_Kept, tuple(item.shape), dtype=item.dtype, device=item.device)  # type: ignore
        symbol.__class__ = torch.Tensor  # type: ignore[assignment]
        symbol._represents = item  # type: ignore[attr-defined]
        return _registered(symbol, item)
    if isinstance(item, (tuple, list)):
        parts = map(surfaced, item)
        return kind(*parts) if hasattr(item, "_fields") else kind(parts)
    return item


def _registered(symbol: Any, operand: Any) -> Any:
    operand.builder.symbols.append(weakref.ref(symbol))
    return symbol


def payload(item: Any) -> Any:
    """What a symbol represents, also inside tuples, lists, dicts and slices; anything else unchanged."""
    kind = type(item)
    if kind is Number:
        if not item._value.builder.is_open:
            _refuse_foreign()
        return item._value
    if isinstance(item, torch.Tensor):
        return getattr(item, "_represents", item)
    if kind is tuple:
        return tuple([payload(i) for i in item])
    if kind is list:
        return [payload(i) for i in item]
    if kind is slice:
        return slice(payload(item.start), payload(item.stop), payload(item.step))
    return {key: payload(value) for key, value in item.items()} if kind is dict else item


def _operands(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        if type(item) in _OPERANDS:
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _operands(item)


class InterceptTorch(TorchFunctionMode):
    """Redirects torch's functions of symbols to the table of functions. Symbols cannot be used after it ends."""

    def __init__(self, tracer: Any) -> None:
        super().__init__()
        self.tracer = tracer

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.tracer.is_open = False
        for reference in self.tracer.symbols:
            if type(symbol := reference()) is torch.Tensor:
                symbol.__class__ = _Kept

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if is_random(name):
            refuse_random(f"torch.{name}")
        if any(_operands((*args, *kwargs.values()))):  # of a trace inside of which another one runs
            return Value.__torch_function__(func, types, args, kwargs)
        operands, options = payload(args), payload(kwargs)
        symbolic = list(_operands((*operands, *options.values())))
        if not symbolic:
            return self._of_tensors(func, args, kwargs)
        if any(s.builder is not self.tracer for s in symbolic):
            _refuse_foreign()
        self.tracer.check_modes()
        if type(operands[0]) in _OPERANDS if operands else False:
            if _is_metadata(func):
                with torch._C.DisableTorchFunction():
                    return func(*args, **kwargs)
            if name in _PROTOCOL:
                return _PROTOCOL[name](*operands)
            if name in ("__get__", "__set__"):
                raise mod_error(f"tensor attribute .{func.__self__.__name__} has no meaning inside a mod", _ATTRIBUTE_CURE)
            if (pure := _without_writing(name)) is not None:
                return _written(args[0], pure, operands, options)
        result = Value.__torch_function__(func, types, operands, options)
        _note_shared(symbolic, result, name)
        return surfaced(result)

    def _of_tensors(self, func: Any, args: tuple, kwargs: dict) -> Any:
        result = func(*args, **kwargs)
        of_a_tensor = any(isinstance(a, torch.Tensor) for a in args)
        if of_a_tensor and not isinstance(result, torch.Tensor) and not _is_metadata(func):
            self.tracer.reads_values = True
        return result


def _is_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", "") in _PROPERTIES if name == "__get__" else name in _METADATA


# What Python's built-in functions call on a tensor; of these ``symbolic.py`` and ``vectors.py`` have methods.
_PROTOCOL: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__int__": int,
    "__index__": operator.index,
    "__float__": float,
    "__contains__": lambda x, item: item in x,
    "__array__": lambda x, *_: x.__array__(),
    "__repr__": repr,
    "__format__": lambda x, spec: format(repr(x), spec),
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
}


# ---- functions that write into a symbol


def _without_writing(name: str) -> str | None:
    """The name of the function whose result ``name`` writes into its first argument, as ``add_`` and ``__iand__`` do; None for others."""
    pure = name[3:-2] if name.startswith("__i") else name[:-1] if name.endswith("_") and not name.startswith("_") else ""
    return pure if pure in FUNCTIONS else None


def _written(symbol: Any, name: str, operands: tuple, options: dict) -> Any:
    """``symbol`` with the result in its place, as ``x += 1`` has it in torch: other names of the same tensor see it too."""
    old = operands[0]
    is_copy = type(old) is Value and not old.is_shared and _differs(old)
    if not is_copy:
        raise mod_error(f"torch.{name}_ writes into a tensor that has other uses", f"use what {name} returns: x = x + y instead of x += y")
    result = _call(name, *operands, **options)
    wanted = [category(old.kind), category(result.kind)]
    if wanted != sorted(wanted, key=("float", "int", "bool").index):
        raise mod_error(f"torch.{name}_ would write a {result.kind} result into a {old.kind} value", f"use what {name} returns")
    symbol._represents = cast(result, old.dtype)
    return symbol


def _differs(value: Value) -> bool:
    """Whether the value is not an element of a captured tensor at one place for all pairs, which is a view of the tensor in torch."""
    nodes = value.builder.nodes
    node = nodes[value.node]
    return node.op != "load" or any(scalar_slots(nodes, a) is None for a in node.args)


def _note_shared(symbolic: list[Any], result: Any, name: str) -> None:
    """Marks the values of which ``result`` may be a view in torch: writing into one would have to change the other."""
    held = result.items.flat if type(result) is Vector else (result,)
    for value in symbolic:
        if name == "detach" or any(value is item for item in held):
            for item in (value, result):
                if type(item) is Value:
                    item.is_shared = True


# ---- symbols that a mod has stored


def refuse_kept(symbols: list[Any], fn: Any, root: Any, what: str) -> None:
    """Raises ``ModError`` if one of the symbols of a trace of ``fn``, weak references, still exists.

    root: the function that was called, which may be a copy of ``fn``. what: the mod's kind and name."""
    kept: list[Any] = []
    for oldest in (None, 0, 2):  # cycles of the mod's own objects are no containers; collecting the young ones takes microseconds
        if kept:
            kept.clear()
            gc.collect(oldest)  # type: ignore[arg-type]
        kept += [symbol for symbol in [reference() for reference in symbols] if symbol is not None]
        if not kept:
            return
    path = _path(root, kept)
    word = next((part for part in reversed(path) if not part.startswith("[")), "")
    place = "".join(path) or "an object that its code does not name"
    raise mod_error(f"{what} keeps a value of its trace in {place}", _KEPT_CURE, defined_at(fn, word))


def _path(root: Any, kept: list[Any]) -> tuple[str, ...]:
    """The names and indices by which the code of ``root`` reaches one of the objects ``kept``; empty if the search does not find them."""
    waiting: collections.deque[tuple[Any, tuple[str, ...]]] = collections.deque([(root, ())])
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        item, path = waiting.popleft()
        if any(item is k for k in kept):
            return path
        if id(item) not in seen and not isinstance(item, torch.Tensor):
            seen.add(id(item))
            waiting.extend((part, (*path, *([name] if name else []))) for name, part in _parts(item))
    return ()


def _parts(item: Any) -> Iterable[tuple[str, Any]]:
    """The objects that ``item`` holds, each with its name or index in code."""
    if isinstance(item, types.FunctionType):
        cells = zip(item.__code__.co_freevars, item.__closure__ or (), strict=True)
        yield from ((name, c.cell_contents) for name, c in cells if c != types.CellType())
        yield from ((name, item.__globals__[name]) for name in global_names(item.__code__) if name in item.__globals__)
        yield from (("", default) for default in (*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()))
    elif isinstance(item, types.MethodType):
        yield from (("self", item.__self__), ("", item.__func__))
    elif isinstance(item, dict):
        yield from ((f"[{key!r}]", value) for key, value in list(item.items()))
    elif isinstance(item, (list, tuple, set, collections.deque)):
        yield from ((f"[{i}]", part) for i, part in enumerate(item))
    elif isinstance(item, functools._lru_cache_wrapper):
        yield from ((" (functools.lru_cache)", part) for key in gc.get_referents(item) for part in (key if type(key) is tuple else (key,)))
    elif not isinstance(item, types.ModuleType) or item.__name__.split(".")[0] not in STABLE_MODULES:
        yield from ((f".{key}", value) for key, value in list(getattr(item, "__dict__", {}).items()))
        yield from (("self", type(item).__call__),) if callable(item) and not isinstance(item, type) else ()
