"""Forward passes of models in progress: the positions that each was called with, and the masks that a layer is to receive in it."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["expect", "followed", "forget", "note_replaced", "positions_of_call", "unused_masks"]


class _Mask(Protocol):
    def refuse_if_unused(self) -> None: ...


class _Progress(threading.local):
    """Of this thread. position_ids: of the innermost model in progress. unused: the masks that no layer has received, by the pass that made
    them, outer passes first; the first entry is for masks that are made outside of all passes. replaced: those of them in whose place a
    layer has received another."""

    def __init__(self) -> None:
        self.position_ids: Tensor | None = None
        self.unused: list[weakref.WeakSet[_Mask]] = [weakref.WeakSet()]
        self.replaced: list[_Mask] = []


_progress = _Progress()


def positions_of_call() -> Tensor | None:
    """The ``position_ids`` that the innermost model in progress was called with; None if it was called without."""
    return _progress.position_ids


def expect(mask: _Mask) -> None:
    """Notes that a layer is to receive the mask before the innermost pass ends."""
    _progress.unused[-1].add(mask)


def forget(mask: _Mask) -> None:
    """Notes that a layer has received the mask."""
    for masks in _progress.unused:
        masks.discard(mask)


def note_replaced(mask: _Mask) -> None:
    """Notes that a layer has received another mask: if none has received this one when the pass that made it ends, it is refused."""
    _progress.replaced.append(mask)


def unused_masks() -> Iterator[tuple[Any, bool]]:
    """The masks that no layer has received, each with whether the innermost pass made it, so that no other model's layer may receive it."""
    for masks in _progress.unused:
        for mask in list(masks):
            yield mask, masks is _progress.unused[-1]


def followed(forward: Callable) -> Callable:
    """A model's ``forward`` that notes its positions and, outside compiled graphs, the masks made in it. One that a call has replaced and
    that no layer has received is refused at the end; a pass that fails leaves none behind."""
    names = list(inspect.signature(forward).parameters)
    place = names.index("position_ids") - 1 if "position_ids" in names else None

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _progress.position_ids
        positions = kwargs.get("position_ids") if place is None or place >= len(args) else args[place]
        _progress.position_ids = positions if place is not None and isinstance(positions, Tensor) else None
        try:
            if torch.compiler.is_compiling():
                return forward(self, *args, **kwargs)
            return _with_masks(lambda: forward(self, *args, **kwargs), (args, kwargs))
        finally:
            _progress.position_ids = before

    return noting


def _with_masks(forward: Callable[[], Any], arguments: Any) -> Any:
    unused = _progress.unused
    if len(unused) == 1:  # of passes that have failed, or of models that are not called with them
        unused[0] = weakref.WeakSet(mask for mask in unused[0] if _contains(arguments, mask))
    unused.append(weakref.WeakSet())
    try:
        out = forward()
        ending = unused[-1:] if len(unused) > 2 else unused
        for mask in _progress.replaced:
            if any(mask in masks for masks in ending):
                mask.refuse_if_unused()
        return out
    finally:
        unused.pop()
        if len(unused) == 1:
            _progress.replaced.clear()


def _contains(values: Any, mask: _Mask) -> bool:
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return values is mask
    return any(_contains(value, mask) for value in values)
