"""Type checks inside a mod: ``isinstance``, ``type``, ``hasattr``, ``getattr``, ``torch.is_tensor`` with the answers for the real object.

A captured number is traced as a symbolic value, which is not an ``int``, but ``isinstance(window, int)`` must still be True in a mod.
Copies of the mod's functions look up these built-ins here (``closure.py``). Methods of a class are not copied: if they use one of these
built-ins, the instance's numbers stay Python numbers.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from anyattn.mods.ir.expr import is_weak
from anyattn.mods.tracing.pure_names import compares_identity, handles_errors
from anyattn.mods.tracing.symbolic import Value, View
from anyattn.mods.tracing.vectors import Vector

__all__ = ["TYPE_CHECKS", "aware", "has_type_checks"]


def _meant(item: Any) -> Any:
    """A number or tensor of the type and dtype that the symbol ``item`` represents; ``item`` itself if it is not symbolic."""
    if type(item) is Value:
        return item.kind() if is_weak(item.kind) else torch.empty((), dtype=item.dtype)  # type: ignore[operator]
    return torch.empty((), dtype=item.dtype) if isinstance(item, (View, Vector)) else item


def _isinstance(item: Any, classes: Any) -> bool:
    return isinstance(_meant(item), classes)


def _type(*args: Any, **kwargs: Any) -> Any:
    return type(_meant(args[0])) if len(args) == 1 and not kwargs else type(*args, **kwargs)


def _hasattr(item: Any, name: str) -> bool:
    return hasattr(_meant(item), name)


def _getattr(item: Any, name: str, *default: Any) -> Any:
    meant = _meant(item)
    return getattr(item if hasattr(meant, name) else meant, name, *default)


TYPE_CHECKS = types.MappingProxyType({"isinstance": _isinstance, "type": _type, "hasattr": _hasattr, "getattr": _getattr})


@functools.lru_cache(maxsize=1)
def _torch() -> types.ModuleType:
    """torch with an ``is_tensor`` that accepts symbols. They cannot be tensors themselves: C code would read their memory."""
    copy = types.ModuleType("torch")
    vars(copy).update(vars(torch), is_tensor=lambda item: _isinstance(item, torch.Tensor))
    return copy


def aware(item: Any, names: tuple[str, ...]) -> Any:
    """The replacement of ``item`` in code that uses ``names``, or ``item``."""
    if "is_tensor" in names and (item is torch or item is torch.is_tensor):
        return _torch() if item is torch else _torch().is_tensor
    return item


@functools.lru_cache(maxsize=256)
def has_type_checks(cls: type) -> bool:
    """Whether a method of ``cls``, or of a class that it inherits from, names one of ``TYPE_CHECKS``, compares objects by ``is`` or handles
    exceptions."""
    return any(_names_one(item) for c in cls.__mro__ for item in vars(c).values())


def _names_one(item: Any) -> bool:
    inner = getattr(item, "__func__", None) or getattr(item, "fget", None) or item
    code = item if isinstance(item, types.CodeType) else getattr(inner, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    if compares_identity(code) or handles_errors(code):
        return True
    return not TYPE_CHECKS.keys().isdisjoint(code.co_names) or any(map(_names_one, code.co_consts))
