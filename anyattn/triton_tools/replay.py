"""Replays of a recorded call's launches: its allocations are made and its launches repeated with other addresses.

A launch selects its arguments from a pool of values by ``operator.itemgetter``: 60 arguments in 0.3 us. Tensors that only launches see, and
see by their addresses, are parts of one allocation, the workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.tensors.strides import Allocator, Layout
from anyattn.triton_tools.packed_params import Launcher, Pack

__all__ = ["SCALE", "Address", "Launch", "Number", "Replay", "Source", "View", "copied", "layout_of", "replay_of"]

_ALIGNMENT = 256  # bytes: of the parts of a workspace

Make = Callable[[Sequence[Tensor]], Tensor]  # of a call's tensors


class Number(NamedTuple):
    """An argument of a launch that the signature does not determine: a captured number of the score mod, by its place, or ``SCALE``."""

    place: int


SCALE = Number(-1)


class Source:
    """A tensor of the recorded call, kept until the recording ends, so that no other gets its address.

    number: among the call's tensors; None for one that the call made. make: for one that outlives calls, or is a copy of one of the call's,
    returns it, given the call's tensors. fill: of its contents, None if they were left uninitialised. is_used: by a launch. is_passed: as a
    tensor, not only by its address.
    """

    def __init__(self, tensor: Tensor, number: int | None = None, make: Make | None = None, fill: float | None = None):
        self.tensor, self.number, self.make, self.fill = tensor, number, make, fill
        self.is_used = self.is_passed = False
        memory = tensor.untyped_storage()
        self.start, self.end = tensor.data_ptr(), memory.data_ptr() + memory.nbytes()

    @property
    def is_allocation(self) -> bool:
        return self.number is None and self.make is None


class Address(NamedTuple):
    """An argument of a launch: the address of a tensor of the call, ``offset`` bytes behind its first element."""

    of: Source
    offset: int


class View(NamedTuple):
    """An argument of a launch: a tensor, of which shapes and strides are read too. offset: in elements."""

    of: Source
    offset: int
    layout: Layout


class Launch(NamedTuple):
    """arguments: ``Address``, ``View``, ``Number`` and constants. pack: as ``fast_launch.Handle.pack``."""

    launcher: Launcher
    grid: tuple[int, ...]
    arguments: list[Any]
    pack: Pack | None = None

    def packed(self) -> Launch:
        """The launch with the arguments that vary only, if it can be packed."""
        varies = [isinstance(x, (Address, Number)) for x in self.arguments]
        found = None if self.pack is None else self.pack(self.grid, self.arguments, varies)
        return self if found is None else Launch(found[0], self.grid, [self.arguments[i] for i in found[1]])


class _Kept(NamedTuple):
    """An allocation that a replay makes as a tensor."""

    layout: Layout
    dtype: torch.dtype
    fill: float | None


class Replay(NamedTuple):
    """The launches of a recorded call.

    equal: pairs of the call's tensors that have to be at one address, as they were. makes: see ``Source``. kept: allocated as tensors, the
    results first. workspace: bytes. results: whether each result is a tensor. derived: (number of an address, bytes behind it). views:
    (number of a tensor, offset in elements, layout, None for the tensor itself). launches: launcher, grid, and the selection of the
    arguments.

    The pool: addresses of the call's tensors, of those of ``makes``, of allocations and of the workspace; the scale; the score mod's
    numbers; constants; derived addresses; views.
    """

    equal: tuple[tuple[int, int], ...]
    makes: tuple[Make, ...]
    empty: Allocator
    kept: tuple[_Kept, ...]
    workspace: int
    results: tuple[bool, ...]
    constants: tuple[Any, ...]
    derived: tuple[tuple[int, int], ...]
    views: tuple[tuple[int, int, Layout | None], ...]
    launches: tuple[tuple[Launcher, tuple[int, ...], Callable[[list[Any]], tuple]], ...]

    def run(
        self,
        tensors: Sequence[Tensor],
        scale: float,
        numbers: Sequence[int] = (),
        addresses: list[int] | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor | None, ...] | None:
        """The results of a call with these arguments, of the recorded call's signature; None if it cannot be a replay. numbers: those that
        the score mod captures, as ``bits_of_numbers``. addresses: of the tensors, if the caller has read them. out: memory for the
        first result, laid out as it is."""
        pool: list[Any] = [t.data_ptr() for t in tensors] if addresses is None else addresses
        for i, j in self.equal:
            if pool[i] != pool[j]:
                return None
        own, empty = [make(tensors) for make in self.makes] if self.makes else [], self.empty
        for (shape, strides), dtype, fill in self.kept:
            if out is None:
                made = empty(shape, strides, dtype)
            else:
                made, out = out, None
                _count_write(made)
            own.append(made)
            if fill is not None:
                made.fill_(fill)
        pool += [t.data_ptr() for t in own]
        if self.workspace:
            workspace = empty((self.workspace,), (1,), torch.uint8)  # has a name, so that it is kept until all is launched
            pool.append(workspace.data_ptr())
        pool.append(scale)
        pool += numbers
        pool += self.constants
        pool += [pool[base] + offset for base, offset in self.derived]
        if self.views:
            sources = [*tensors, *own]
            pool += [sources[i] if layout is None else _view(sources[i], *layout, offset) for i, offset, layout in self.views]
        for launcher, grid, select in self.launches:
            launcher(grid, select(pool))
        made_results = iter(own[len(self.makes) :])
        return tuple([next(made_results) if is_tensor else None for is_tensor in self.results])


def copied(func: Any, number: int, offset: int, layout: Layout, more: tuple[Any, ...], options: dict[str, Any]) -> Make:
    """Makes a copy of a view of one of a call's tensors, by an operation of torch."""
    return lambda tensors: func(_view(tensors[number], *layout, offset), *more, **options)  # type: ignore[no-any-return]


def _as_strided(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    return torch.as_strided(x, shape, strides, x.storage_offset() + offset)


_count_write = torch.autograd.graph.increment_version
# the function that Inductor's code makes views with, if torch has it, takes half the time
_view = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _as_strided)  # type: ignore[attr-defined]


def layout_of(x: Tensor) -> Layout:
    return tuple(x.shape), x.stride()


def replay_of(
    count: int, numbers: int, makes: Sequence[Source], allocations: Sequence[Source], results: Sequence[tuple[Source, Layout] | None],
    launches: Sequence[Launch], empty: Allocator, equal: tuple[tuple[int, int], ...],
) -> Replay:  # fmt: skip
    """The replay of a call. count, numbers: of the call's tensors, and of those that its score mod captures. makes, allocations: of the
    call. results: each one's allocation and final layout. equal: see ``Replay``."""
    kept = {result[0]: _kept(*result) for result in results if result is not None}
    parts: dict[Source, int] = {}
    workspace = 0
    for x in allocations:
        if x in kept or not x.is_used:
            continue
        if x.is_passed or x.fill is not None:
            kept[x] = _kept(x, layout_of(x.tensor))
        else:
            parts[x] = workspace
            workspace += ceil_div(x.end - x.start, _ALIGNMENT) * _ALIGNMENT
    layouts = {x: own.layout for x, own in kept.items()}
    launches = [launch.packed() for launch in launches]
    pool = _Pool(count, [*makes, *kept], parts, numbers, layouts)
    places = [[pool.place(x) for x in launch.arguments] for launch in launches]
    selections = [_selection([pool.index(place) for place in of_launch]) for of_launch in places]
    return Replay(
        equal, tuple(x.make for x in makes if x.make is not None), empty, tuple(kept.values()), workspace,
        tuple(result is not None for result in results), tuple(pool.constants), tuple(pool.derived), tuple(pool.views),
        tuple((launch.launcher, launch.grid, select) for launch, select in zip(launches, selections, strict=True)),
    )  # fmt: skip


def _selection(places: list[int]) -> Callable[[list[Any]], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda pool: tuple([pool[i] for i in places])


def _kept(source: Source, layout: Layout) -> _Kept:
    return _Kept(layout, source.tensor.dtype, source.fill)


class _Pool:
    """Places of launches' arguments in a replay's pool. own: the tensors behind the call's. parts: offsets in the workspace. layouts: of
    allocations in a replay."""

    def __init__(self, count: int, own: Sequence[Source], parts: dict[Source, int], numbers: int, layouts: dict[Source, Layout]) -> None:
        self._layouts = layouts
        self._count, self._own, self._parts = count, {source: count + i for i, source in enumerate(own)}, parts
        self._workspace = count + len(own)
        self._scale = self._workspace + bool(parts)
        self._first_constant = self._scale + 1 + numbers
        self.constants: list[Any] = []
        self.derived: dict[tuple[int, int], int] = {}
        self.views: dict[tuple[int, int, Layout | None], int] = {}

    def place(self, x: Any) -> tuple[str, int]:
        """Where an argument is: a part of the pool, and a number in it."""
        if isinstance(x, Number):
            return "", self._scale + 1 + x.place
        if isinstance(x, View):
            is_whole = x.offset == 0 and x.layout == (self._layouts.get(x.of) or layout_of(x.of.tensor))
            return "views", self.views.setdefault((self._number(x.of), x.offset, None if is_whole else x.layout), len(self.views))
        if not isinstance(x, Address):
            self.constants.append(x)
            return "", self._first_constant + len(self.constants) - 1
        base, offset = (self._workspace, self._parts[x.of] + x.offset) if x.of in self._parts else (self._number(x.of), x.offset)
        return ("derived", self.derived.setdefault((base, offset), len(self.derived))) if offset else ("", base)

    def _number(self, source: Source) -> int:
        return self._own[source] if source.number is None else source.number

    def index(self, place: tuple[str, int]) -> int:
        """The index of a place, once all arguments have theirs."""
        part, at = place
        if part == "":
            return at
        derived = self._first_constant + len(self.constants)
        return derived + at + (len(self.derived) if part == "views" else 0)
