"""CuTe mods: ``@cute.jit`` functions over TensorSSA as mods, with the signatures of FlashAttention's CuTe interface.

Such a function is opaque, and only the Hopper kernel can run it: in the IR it is one operation, ``native``, of all arguments of a mod and
of its whole ``aux_tensors``. It composes with traced mods (softcap, ALiBi, bands, block lists); analyses that need its body refuse it.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyattn.errors import ModError
from anyattn.mods.ir.expr import INDICES, Builder, Expr
from anyattn.mods.tracing.fingerprint import Pattern, Reading
from anyattn.mods.tracing.trace import Source, TracedMod, is_native, name_of

__all__ = ["NativeFunction", "has_native", "native_mod", "native_reading"]

_INPUTS = {"mask": INDICES, "score": ("score", *INDICES)}
_LIBRARIES = (
    "cutlass",
    "cuda",
    "torch",
    "math",
    "operator",
    "functools",
    "builtins",
    "_operator",
)  # a key contains only their names; the versions are in every key
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_counter = itertools.count()
_MOST_PATTERNS = 1024
_patterns: dict[str, Pattern] = {}


class NativeFunction(str):
    """A jitted function with its content key, which decides equality.

    has_content: the key is the same in every process and covers closure and globals. Otherwise it identifies this one object; its captures
    are read once, and kernels with it are cached in memory only.
    """

    function: Callable
    has_content: bool

    @classmethod
    def of(cls, function: Callable) -> NativeFunction:
        """The ``NativeFunction`` of ``function``; raises ``ModError`` if it captures a tensor."""
        try:
            name, has_content = hashlib.sha256(_content(function, ()).encode()).hexdigest()[:32], True
        except _CapturesTensor:
            raise ModError(
                f"the CuTe function {name_of(function)!r} captures a tensor; pass it as aux_tensors=[...] and read it from the argument of "
                f"that name"
            ) from None
        except _NoContent:
            name, has_content = f"object {_numbers.setdefault(function, next(_counter))}", False
        made = cls(name)
        made.function, made.has_content = function, has_content
        return made

    def __reduce__(self) -> Any:
        raise TypeError(f"the CuTe function {str(self)!r} cannot be pickled: import it in the other process, and make the call there")


class _NoContent(Exception):
    """Raised for a captured object that has no content as text that could be hashed."""


class _CapturesTensor(Exception):
    pass


def _content(item: Any, within: tuple) -> str:
    """The content of ``item`` as text that is the same in every process. within: the functions whose text is being written, for
    recursion."""
    if item is None or type(item) in (bool, int, float, str, bytes, torch.dtype):
        return repr(item)
    if type(item) in (tuple, list):
        return f"{type(item).__name__}({','.join(_content(x, within) for x in item)})"
    if isinstance(item, Tensor):
        raise _CapturesTensor
    if isinstance(item, types.ModuleType):
        if item.__name__.split(".")[0] in _LIBRARIES:
            return f"module {item.__name__}"
        raise _NoContent
    if (getattr(item, "__module__", None) or "").split(".")[0] in _LIBRARIES and hasattr(item, "__qualname__"):
        return f"{item.__module__}.{item.__qualname__}"
    if not isinstance(item, types.FunctionType):
        raise _NoContent
    raw = item.__wrapped__ if is_native(item) else item  # type: ignore[attr-defined]
    if hasattr(raw, "__wrapped__"):  # a decorator of the user's, whose behaviour is unknown
        raise _NoContent
    return f"function {within.index(raw)}" if raw in within else _function_content(raw, (*within, raw))


def _function_content(fn: types.FunctionType, within: tuple) -> str:
    """The content of a function: its code, and the current values of its closure, defaults and globals, which CuTe reads when it
    compiles."""
    cells = []
    for cell in fn.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError as error:  # an empty cell
            raise _NoContent from error
        cells.append(_content(held, within))
    code, read = _code(getattr(fn, "_original_code", fn.__code__))  # CuTe gives a function that it has compiled another ``__code__``
    names = [f"{n}={_content(fn.__globals__[n], within)}" for n in read if n in fn.__globals__]
    defaults = _content(fn.__defaults__, within) + "".join(f"{k}={_content(v, within)}" for k, v in (fn.__kwdefaults__ or {}).items())
    return f"({code};{';'.join(cells)};{';'.join(names)};{defaults})"


@lru_cache(maxsize=1024)
def _code(code: types.CodeType) -> tuple[str, tuple[str, ...]]:
    """A hash of the code, and the names it may look up as globals, both including inner functions."""
    inner = [_code(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    steps = list(dis.get_instructions(code))
    if any(i.opname == "IMPORT_NAME" and i.argval.split(".")[0] not in _LIBRARIES for i in steps):
        raise _NoContent
    constants = [repr(c) for c in code.co_consts if not isinstance(c, types.CodeType)]
    said = (code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, [text for text, _ in inner])
    names = [i.argval for i in steps if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")] + [n for _, found in inner for n in found]
    return hashlib.sha256(repr(said).encode()).hexdigest(), tuple(dict.fromkeys(names))


def native_mod(fn: Any, kind: str, aux_tensors: Sequence[Tensor] | None) -> TracedMod | None:
    """A CuTe function as a mod; None if ``fn`` is not a CuTe function.

    Raises ``TypeError`` for a wrong number of parameters, ``ModError`` if it captures a tensor.
    """
    if not is_native(fn):
        return None
    wanted = (*_INPUTS[kind], "aux_tensors")
    have = [
        p
        for p in inspect.signature(fn).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if len(have) != len(wanted):
        hint = (
            "; sequence lengths are not handed over: pass what it needs of them in aux_tensors"
            if "seqlen_info" in [p.name for p in have]
            else ""
        )
        raise TypeError(
            f"{kind}_mod {name_of(fn)!r} is a CuTe function of {len(have)} parameters ({', '.join(p.name for p in have)}); wanted "
            f"{len(wanted)}: ({', '.join(wanted)}){hint}"
        )
    if kind == "mask" and getattr(fn, "__vec_size__", 1) != 1:
        raise TypeError(
            f"mask_mod {name_of(fn)!r} has __vec_size__={fn.__vec_size__}: it packs bits; wanted one Boolean for each (q_idx, kv_idx)"
        )
    tensors = tuple(aux_tensors or ())
    function = NativeFunction.of(fn)
    source = Source(_pattern(function), (), tuple(range(len(tensors)))) if function.has_content else None
    return TracedMod(kind, _expression(function, kind, len(tensors)), (), tensors, name_of(fn), source)


def native_reading(fn: Any) -> Reading | None:
    """``fingerprint.recognise`` for a CuTe function, whose key covers all of its captures. None if it has no content key."""
    function = NativeFunction.of(fn)
    return Reading(_pattern(function), [], []) if function.has_content else None


def _pattern(function: NativeFunction) -> Pattern:
    name = str(function)
    if len(_patterns) >= _MOST_PATTERNS:
        _patterns.clear()
    return _patterns.setdefault(name, Pattern(("native", name)))


def _expression(function: NativeFunction, kind: str, tensors: int) -> Expr:
    builder = Builder()
    args = [builder.add("score", dtype=torch.float32)] if kind == "score" else []
    args += [builder.add("index", dtype=torch.int64, attr=name) for name in INDICES]
    args += [builder.add("tensor", dtype=torch.float32, attr=slot) for slot in range(tensors)]
    return builder.build(builder.add("native", *args, dtype=torch.bool if kind == "mask" else torch.float32, attr=function))


def has_native(mods: Iterable[TracedMod | None]) -> str | None:
    """The name, as in "score_mod 'f'", of the first mod that is or contains a CuTe function; None if there is none."""
    return next((f"{m.kind}_mod {m.name!r}" for m in mods if m is not None and any(n.op == "native" for n in m.expr.nodes)), None)
