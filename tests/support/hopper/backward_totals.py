"""Stand-ins for the sums of captured tensors' gradients in the backward roles: totals in global memory, a warp's shared memory, lanes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tests.support.hopper.backward_machine import LANES
from tests.support.hopper.schedule import Broken

__all__ = ["Scratch", "Total", "across", "add_to", "always_add_to", "index_of", "moved", "store_to"]


class Total:
    """A total in global memory."""

    def __init__(self, shape: tuple[int, ...]):
        self.values, self.written = np.zeros(shape, dtype=np.float64), np.zeros(shape, dtype=bool)
        self.shape, self.layout, self.element_type = shape, shape, SimpleNamespace(width=8)
        self.iterator, self.stride = self, tuple(_Step(dim) for dim in range(len(shape)))

    def __add__(self, place: tuple) -> Entry:
        return Entry(self, place)


class Entry(NamedTuple):
    """Where each thread's entry of a total lies."""

    total: Total
    place: tuple[np.ndarray, ...]

    def toint(self) -> Entry:
        return self


class _Step(NamedTuple):
    """The way to an entry ``count`` further on along a dimension."""

    dim: int
    count: int = 1

    def __mul__(self, by: Any) -> _Step:
        return _Step(self.dim, self.count * by)


def moved(entry: Entry, step: _Step, at: Any, end: Any) -> Entry:
    place = list(entry.place)
    place[step.dim] = place[step.dim] + np.where(at < end, step.count, 0)
    return Entry(entry.total, tuple(place))


def index_of(place: Any, shape: tuple[int, ...]) -> tuple:
    """``cute.crd2idx`` of a total's layout."""
    whole = place if isinstance(place, tuple) else (place,)
    if len(whole) != len(shape):
        raise Broken(f"an entry of {shape} at {len(whole)} indices")
    return tuple(np.broadcast_to(np.asarray(i, dtype=np.int64), LANES.shape) for i in whole)


def add_to(target: Entry, value: Any) -> None:
    total, place, value = _reached(target, value, 0)
    np.add.at(total.values, place, value)


def always_add_to(target: Entry, value: Any) -> None:
    """All threads' entries are in the total, whatever they add."""
    _reached(target, np.ones(LANES.shape, dtype=np.float32), 0)
    add_to(target, value)


def _reached(target: Entry, value: Any, offset: int) -> tuple[Total, tuple, np.ndarray]:
    total, place = target
    value = np.broadcast_to(np.asarray(value, dtype=np.float32), LANES.shape)
    sent = ~(value == 0.0)
    place = (*(i[sent] for i in place[:-1]), place[-1][sent] + offset)
    if any((i < 0).any() or (i >= n).any() for i, n in zip(place, total.shape, strict=True)):
        raise Broken(f"an entry outside of a total of {total.shape}")
    return total, place, value[sent]


def store_to(target: Entry, value: Any, dtype: Any, offset: int = 0) -> None:
    total, place, value = _reached(target, value, offset)
    if total.written[place].any():
        raise Broken("an entry is stored twice")
    total.written[place], total.values[place] = True, value


def across(value: Any, bit: int) -> np.ndarray:
    """``shuffle_sync_bfly``."""
    return np.broadcast_to(np.asarray(value), LANES.shape)[LANES ^ bit]


_NOBODY, _SEVERAL = -1, -2  # in place of a lane's number


class Scratch:
    """Shared memory of warps: between two meetings of a warp no lane may touch what another one writes, nor ever another warp's."""

    def __init__(self, size: int, group_now: Callable[[], int]):
        self.values, self.owner = np.full(size, np.nan, dtype=np.float32), np.full(size, -1)
        self.group_now = group_now  # the number of the warp group that runs
        # the lane that has touched each place since the last meeting of its warp
        self.reader, self.writer = (np.full(size, _NOBODY) for _ in range(2))

    def met(self) -> None:
        """``sync_warp`` of all warps of a group."""
        mine = self.owner // 4 == self.group_now()
        self.reader[mine] = self.writer[mine] = _NOBODY

    def __getitem__(self, place: Any) -> np.ndarray:
        place = self._noted(place)
        self._meets(place, self.writer)
        self.reader[place] = np.where(_is_other(self.reader[place]), _SEVERAL, LANES)
        self.reader[: place.max() + 1][np.bincount(place) > 1] = _SEVERAL
        return self.values[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        place = self._noted(place)
        self._meets(place, self.writer)
        self._meets(place, self.reader)
        self.writer[place] = LANES
        self._meets(place, self.writer)  # of lanes that write to one place the last has left its number
        self.values[place] = value

    def _noted(self, place: Any) -> np.ndarray:
        place = np.broadcast_to(np.asarray(place), LANES.shape)
        if (place < 0).any() or (place >= len(self.values)).any():
            raise Broken("outside of the memory for diagonals")
        warps = self.group_now() * 4 + LANES // 32
        if ((self.owner[place] != -1) & (self.owner[place] != warps)).any():
            raise Broken("the memory of another warp")
        self.owner[place] = warps
        return place

    def _meets(self, place: np.ndarray, touched: np.ndarray) -> None:
        if _is_other(touched[place]).any():
            raise Broken("lanes meet in shared memory before their warp does")


def _is_other(lane: np.ndarray) -> np.ndarray:
    return (lane != _NOBODY) & (lane != LANES)
