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
        made = object.__new__(cls)
        object.__setattr__(made, "__dict__", fields)
        return made
