"""Type checks inside a mod: ``isinstance``, ``type``, ``hasattr`` and ``getattr`` answer for what a symbolic value stands for.

A captured number is traced as a symbolic value, which is no ``int``; a mod that asks ``isinstance(window, int)`` has to hear of the number.
Copies of the mod's functions look these built-ins up here (``closure.py``). The methods of a class are not copied: where they ask, the
instance's numbers stay numbers.
"""

from __future__ import annotations

import functools
import types
from typing import Any

from anyattn.mods.ir.expr import is_weak
from anyattn.mods.tracing.symbolic import Value

__all__ = ["TYPE_CHECKS", "has_type_checks"]


def _meant(item: Any) -> Any:
    """A number of the captured number's type; ``item`` itself where it is anything else."""
    return item.kind() if type(item) is Value and is_weak(item.kind) else item


def _isinstance(item: Any, classes: Any) -> bool:
    return isinstance(_meant(item), classes)


def _type(*args: Any, **kwargs: Any) -> Any:
    if len(args) != 1 or kwargs:
        return type(*args, **kwargs)
    meant = _meant(args[0])
    return meant.__class__ if type(meant) is Value else type(meant)


def _hasattr(item: Any, name: str) -> bool:
    return hasattr(_meant(item), name)


def _getattr(item: Any, name: str, *default: Any) -> Any:
    meant = _meant(item)
    return getattr(item if hasattr(meant, name) else meant, name, *default)


TYPE_CHECKS = types.MappingProxyType({"isinstance": _isinstance, "type": _type, "hasattr": _hasattr, "getattr": _getattr})


@functools.lru_cache(maxsize=256)
def has_type_checks(cls: type) -> bool:
    """Whether a method of ``cls``, or of a class that it inherits from, names one of ``TYPE_CHECKS``."""
    return any(_names_one(item) for c in cls.__mro__ for item in vars(c).values())


def _names_one(item: Any) -> bool:
    inner = getattr(item, "__func__", None) or getattr(item, "fget", None) or item
    code = item if isinstance(item, types.CodeType) else getattr(inner, "__code__", None)
    if not isinstance(code, types.CodeType):
        return False
    return not TYPE_CHECKS.keys().isdisjoint(code.co_names) or any(map(_names_one, code.co_consts))
