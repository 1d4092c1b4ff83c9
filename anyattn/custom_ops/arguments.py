"""Argument declarations of the operators, as NamedTuples: schema, records and positions of tensors are derived from them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

__all__ = ["Arguments", "Mask", "Masks", "Results", "Score"]


class Score(NamedTuple):
    """A score mod as operator arguments: program text, captured numbers as integers (floats by their bits), captured tensors."""

    score_program: str
    score_numbers: list[int]
    score_tensors: list[Tensor]


class Mask(NamedTuple):
    """A mask, in the form of ``Score``."""

    mask_program: str
    mask_numbers: list[int]
    mask_tensors: list[Tensor]


class Masks(NamedTuple):
    """Masks, in the form of ``Score``; the programs are one text (``codec.joined``), since an operator takes no list of strings."""

    mask_programs: str
    mask_numbers: list[int]
    mask_tensors: list[Tensor]


class Results(NamedTuple):
    """A backward operator's arguments besides the forward operator's. wants: which gradients, in the order of ``Arguments``."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    wants: list[bool]


class Arguments:
    """The arguments of an operator: the fields of ``records``, in order; a field of a NamedTuple type is replaced by that type's fields.

    left_out: fields that the operator does not take, with their values in a record.

    >>> class Rows(NamedTuple):
    ...     q: Tensor
    ...     score: Score
    ...     backend: str
    >>> arguments = Arguments(Rows)
    >>> arguments.names
    ('q', 'score_program', 'score_numbers', 'score_tensors', 'backend')
    >>> q = torch.zeros(2)
    >>> rows = Rows(q, Score("", [0], []), "torch")
    >>> arguments.records(arguments.flat(rows)) == [rows]
    True
    """

    def __init__(self, *records: type, left_out: dict[str, Any] | None = None) -> None:
        self._left_out = left_out or {}
        kinds = [pair for record in records for pair in _fields_of(record) if pair[0] not in self._left_out]
        self.names = tuple(name for name, _ in kinds)
        self._kinds = tuple(kind for _, kind in kinds)
        self.are_plain: Callable[..., bool] = self._check_of_tensors()
        scope: dict[str, Any] = {"construct": tuple.__new__, "left_out": self._left_out}
        records_source = ", ".join([_constructed(record, self._left_out, scope) for record in records])
        self._records: Callable[..., list[Any]] = eval(f"lambda {', '.join(self.names)}: [{records_source}]", scope)

    def _check_of_tensors(self) -> Callable[..., bool]:
        """Generates the check that all tensors of a call are plain CPU or GPU memory: of no subclass and without the negative bit."""
        first = self.names[self._kinds.index(Tensor)]
        checks = [f"({first}.is_cuda or {first}.is_cpu)"]
        for i, kind in enumerate(self._kinds):
            plain = "type({0}) in plain and not {0}.is_neg()"
            if kind == Tensor:
                checks.append(plain.format(self.names[i]))
            elif kind == Tensor | None:
                checks.append(f"({self.names[i]} is None or {plain.format(self.names[i])})")
            elif kind == list[Tensor]:
                checks.append(f"plain.issuperset(map(type, {self.names[i]}))")
        if "dout" in self.names:  # autograd may pass zeros without memory
            checks.append("not dout._is_zerotensor()")
        scope = {"plain": frozenset((Tensor, torch.nn.Parameter))}
        return eval(f"lambda {', '.join(self.names)}: {' and '.join(checks)}", scope)  # type: ignore[no-any-return]

    def schema(self, implementation: Callable, changed: Sequence[str] = ()) -> str:
        """The operator's schema after its name; the results are those annotated in
        ``implementation``. changed: the tensors it writes to."""

        def prototype(*_: Any) -> None: ...

        place = inspect.Parameter.POSITIONAL_OR_KEYWORD
        listed = [inspect.Parameter(name, place, annotation=kind) for name, kind in zip(self.names, self._kinds, strict=True)]
        prototype.__signature__ = inspect.Signature(listed, return_annotation=get_type_hints(implementation)["return"])  # type: ignore[attr-defined]
        return torch.library.infer_schema(prototype, mutates_args=changed)

    def records(self, values: tuple) -> list[Any]:
        """The records of a call's flat arguments."""
        return self._records(*values)

    def flat(self, *records: tuple) -> tuple:
        """The flat arguments of a call, from records."""
        values: list[Any] = []
        for record in records:
            _flatten(record, self._left_out, values)
        return tuple(values)

    def of(self, names: Sequence[str], values: tuple) -> list[Tensor | None]:
        """The tensors of the named arguments, with lists of tensors flattened."""
        tensors: list[Tensor | None] = []
        for name in names:
            value = values[self.names.index(name)]
            tensors += value if isinstance(value, (list, tuple)) else [value]
        return tensors


def _fields_of(record: type) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(record)
    for name in record._fields:  # type: ignore[attr-defined]
        if _is_record(hints[name]):
            yield from _fields_of(hints[name])
        else:
            yield name, hints[name]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _constructed(record: type, left_out: dict[str, Any], scope: dict[str, Any]) -> str:
    """The expression that constructs a record from variables named like its fields; names that it uses are added to ``scope``."""
    hints = get_type_hints(record)
    scope[record.__name__] = record
    values = [
        f"left_out[{name!r}]" if name in left_out else _constructed(hints[name], left_out, scope) if _is_record(hints[name]) else name
        for name in record._fields  # type: ignore[attr-defined]
    ]
    return f"construct({record.__name__}, ({', '.join(values)},))"


def _flatten(record: tuple, left_out: dict[str, Any], values: list[Any]) -> None:
    for name, value in zip(record._fields, record, strict=True):  # type: ignore[attr-defined]
        if name in left_out:
            continue
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            _flatten(value, left_out, values)
        else:
            values.append(value)
