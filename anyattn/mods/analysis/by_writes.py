"""Memoisation by the identity and the write counters of tensors: results that depend on contents, without reading them again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor

__all__ = ["ByWrites"]

_MOST = 256


class ByWrites:
    """Results by the tensors that they were computed from, until torch counts a write to one of them. Keeps no tensor.

    Writes to tensors that were made in inference mode are not counted, nor are writes by other libraries.

    >>> import torch
    >>> results, ids = ByWrites(), torch.zeros(3)
    >>> results.put([ids], "checked")
    >>> results.get([ids]), results.get([ids.clone()]), results.get([ids.add_(1)])
    ('checked', None, None)
    """

    def __init__(self) -> None:
        self._results: dict[tuple, tuple[tuple[ref[Tensor], ...], Any]] = {}

    def get(self, tensors: Sequence[Tensor]) -> Any:
        found = self._results.get(_state(tensors))
        if found is None or not all(known() is t for known, t in zip(found[0], tensors)):  # an id is reused after a tensor is freed
            return None
        return found[1]

    def put(self, tensors: Sequence[Tensor], result: Any) -> None:
        if len(self._results) >= _MOST:
            self._results.clear()
        self._results[_state(tensors)] = tuple([ref(t) for t in tensors]), result


def _state(tensors: Sequence[Tensor]) -> tuple:
    return tuple([(id(t), -1 if t.is_inference() else t._version) for t in tensors])
