"""Fast construction of objects from a dictionary of their fields, without ``__init__``: of frozen dataclasses and of block masks."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["OfFields"]

_T = TypeVar("_T", bound="OfFields")


class OfFields:
    """Base class of classes that can skip ``__init__``, which would take longer than all other checks of a warm call."""

    @classmethod
    def of_fields(cls: type[_T], fields: dict[str, Any]) -> _T:
        """An instance with these fields, by name; all fields are needed, and the dictionary becomes its ``__dict__``.

        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Pair(OfFields):
        ...     a: int
        ...     b: int
        >>> Pair.of_fields({"a": 1, "b": 2}) == Pair(1, 2)
        True
        """
        made: _T = _new(cls)
        _set_dict(made, fields)
        return made


_new, _set_dict = object.__new__, OfFields.__dict__["__dict__"].__set__  # looked up once: every warm call makes several objects
