"""Prepared launches: a warm call substitutes pointers, the scale and captured scalars.

The key of a launch contains everything that its other arguments, its kernel and its grid depend on: sizes, strides and alignment, the mods'
expressions and the masks' numbers. It is compared at every call, independent of the call that the plan was made for. It is not a
``call_cache`` signature: it describes a checked problem and its tables, after planning, with one alignment for all pointers together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from anyattn.backends.triton.codegen.entry import Signature, entry_of, run_entry, sizes_of_captured
from anyattn.backends.triton.codegen.programs import Chosen, Program, Read
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import padded
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.triton_tools.fast_launch import Handle

__all__ = ["First", "Kept", "facts_of", "kept_of", "prepare"]

_MOST = 64  # most launches of a plan, and most descriptors of a launch
_UNKNOWN = object()


class Kept:
    """The launches of one kernel for the calls of a plan, by key. lists: ``Chosen.lists``, unless that is a
    mask whose lists are made anew."""

    def __init__(self) -> None:
        self.lists: Any = _UNKNOWN
        self.ready: dict[tuple, Ready] = {}

    @property
    def knows_lists(self) -> bool:
        return self.lists is not _UNKNOWN

    def put(self, key: tuple, ready: Ready | None, chosen: Chosen) -> None:
        """Stores a launch, if it can be repeated."""
        if ready is None or not (chosen.lists is None or isinstance(chosen.lists, str)):
            return
        if len(self.ready) >= _MOST:
            self.ready.clear()
        self.lists = chosen.lists
        self.ready[key] = ready


def kept_of(plan: Plan, name: str) -> Kept:
    """The stored launches of a plan called ``name``."""
    found = plan.prepared.get(name)
    if found is None:
        found = plan.prepared[name] = Kept()
    return found  # type: ignore[no-any-return]


class Sources(NamedTuple):
    """The sources of a call's captured values, for each part that a kernel uses.

    masks: for each part except the score and dropout the numbers, which are the same in all calls of one key, and the places of its tensors
    in the list of all masks' tensors.
    """

    has_score: bool
    has_dropout: bool
    masks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def read(self, problem: Problem, totals: tuple[Tensor, ...] = ()) -> list[Read]:
        """The captured values of a call. totals: for the score mod's tensors."""
        found, score = [], problem.score
        if self.has_score and score is not None:
            found.append(Read(bits_of_numbers(score.scalars), score.tensors, totals))
        if self.masks:
            tensors = _of_masks(problem)
            found += [Read(numbers, tuple([tensors[i] for i in places])) for numbers, places in self.masks]
        if self.has_dropout and problem.dropout is not None:
            numbers, seed = problem.dropout.captured
            found.append(Read(bits_of_numbers(numbers), seed))
        return found


def _sources_of(problem: Problem, chosen: Chosen, program: Program) -> Sources | None:
    """program: some of the parts of ``chosen.program``, those that are used. None if a part reads a tensor that
    no mask of the call captured."""
    tensors, masks = _of_masks(problem), []
    names = [part.name for part in program.parts]
    for part, mod in zip(chosen.program.parts, chosen.mods, strict=True):
        if part.name in ("score", "dropout") or part.name not in names:
            continue
        places = [next((i for i, t in enumerate(tensors) if t is own), -1) for own in mod.tensors]
        if -1 in places:
            return None
        masks.append((bits_of_numbers(mod.scalars), tuple(places)))
    return Sources("score" in names, "dropout" in names, tuple(masks))


def _of_masks(problem: Problem) -> list[Tensor]:
    return [t for p in problem.predicates for t in p.tensors]


class Ready(NamedTuple):
    """A prepared launch.

    numbers: the arguments between the pointers and the lists. described: the pointers that are tensor descriptors, by place, with the rows
    of each. sizes: of each part's captured tensors. maps: encoded descriptors, by number and address.
    """

    handle: Handle
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    sources: Sources
    sizes: tuple[tuple[int, ...], ...]
    described: tuple[tuple[int, int], ...]
    maps: dict[tuple[int, int], list[Any]]

    def launch(
        self,
        pointers: Sequence[Tensor | None],
        lists: Sequence[Tensor | None],
        scale: float,
        captured: Sequence[Read],
    ) -> None:
        """Launches with these arguments; for a pointer or list of None any pointer is passed."""
        handle = self.handle
        if not handle.takes_addresses:
            self._plainly(pointers, lists, scale, captured)
            return
        anywhere = pointers[0].data_ptr()  # type: ignore[union-attr]
        given = [anywhere if t is None else t.data_ptr() for t in pointers]
        for number in range(len(self.described) - 1, -1, -1):  # last first, because later places shift
            at, rows = self.described[number]
            given[at : at + 1] = self._map(number, given[at], pointers[at], rows)
        given += self.numbers
        given += [anywhere if t is None else t.data_ptr() for t in lists]
        given.append(scale)  # type: ignore[arg-type]
        for read, sizes in zip(captured, self.sizes, strict=True):
            given += read.scalars
            given += sizes
            given += [t.data_ptr() for t in read.tensors]
            given += [t.data_ptr() for t in read.totals]
        handle.send(self.grid, given)

    def _map(self, number: int, address: int, x: Any, rows: int) -> list[Any]:
        """The encoded descriptor of an address; memoised, since it depends only on the address and the launch's sizes."""
        found = self.maps.get((number, address))
        if found is None:
            if len(self.maps) >= _MOST:
                self.maps.clear()
            assert self.handle.spread is not None
            found = self.maps[number, address] = self.handle.spread(_descriptor(x, rows), number)
        return found

    def _plainly(self, pointers: Sequence[Tensor | None], lists: Sequence[Tensor | None], scale: float, captured: Sequence[Read]) -> None:
        given = _values(pointers, self.numbers, lists, scale, self.described)
        for read, sizes in zip(captured, self.sizes, strict=True):
            given += (*read.scalars, *sizes, *read.tensors, *read.totals)
        self.handle.send(self.grid, given)


class First(NamedTuple):
    """The arguments of a kernel's first launch besides its tensors, its lists and the scale.

    program: some of the parts of ``chosen.program``, those that the kernel uses. captured: of each of these parts. options: constants,
    warps and stages. numbers, described: see ``Ready``.
    """

    signature: Signature
    chosen: Chosen
    program: Program
    captured: Sequence[Read]
    is_aligned: bool
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]
    described: tuple[tuple[int, int], ...] = ()


def prepare(
    kept: Kept,
    key: tuple,
    problem: Problem,
    tensors: Sequence[Tensor | None],
    lists: Sequence[Tensor | None],
    first: Callable[..., First],
    about: tuple,
    totals: tuple[Tensor, ...] = (),
) -> None:
    """Launches a kernel: by the prepared launch of this key if there is one, else for the first time, and stores the prepared launch.

    tensors: the first pointers, None for absent ones. about: arguments of ``first``. totals: buffers for the gradients of the score mod's
    tensors.
    """
    ready = kept.ready.get(key)
    if ready is not None:
        ready.launch(tensors, lists, problem.scale, ready.sources.read(problem, totals))
        return
    made = first(*about)
    kept.put(key, _launched(made, problem, tensors, lists), made.chosen)


def _launched(first: First, problem: Problem, tensors: Sequence[Tensor | None], lists: Sequence[Tensor | None]) -> Ready | None:
    """Launches a kernel for the first time; None if the launch cannot be repeated."""
    pointers = [None if t is None else t.detach() for t in tensors]
    values = _values(pointers, first.numbers, lists, problem.scale, first.described)
    entry = entry_of(first.signature, first.program, first.is_aligned)
    handle = run_entry(entry, first.grid, values, first.captured, problem.q.device, first.options)
    sources = _sources_of(problem, first.chosen, first.program)
    if handle is None or sources is None or (first.described and handle.takes_addresses and handle.spread is None):
        return None
    sizes = tuple(map(sizes_of_captured, first.captured))
    return Ready(handle, tuple(first.grid), first.numbers, sources, sizes, first.described, {})


def _values(
    pointers: Sequence[Tensor | None],
    numbers: tuple[int, ...],
    lists: Sequence[Tensor | None],
    scale: float,
    described: tuple[tuple[int, int], ...],
) -> list[Any]:
    """The arguments of an entry before the captured values. For an absent tensor any pointer is passed."""
    given: list[Any] = [pointers[0] if t is None else t for t in pointers]
    for at, rows in described:
        given[at] = _descriptor(given[at], rows)
    return [*given, *numbers, *(pointers[0] if t is None else t for t in lists), scale]


def _descriptor(x: Tensor, rows: int) -> Any:
    """The TMA tensor descriptor of x, in boxes of [1, 1, rows, width]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [8 if n == 1 else s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x.detach(), list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


# ---- keys


def facts_of(problem: Problem, found: Tables, *tensors: Tensor) -> list[Any]:
    """The properties of a problem, its tables and the ``tensors`` with rows (besides q, k and v) on which a launch depends."""
    q, k, v = problem.q, problem.k, problem.v
    address = q.data_ptr() | k.data_ptr() | v.data_ptr()
    facts: list[Any] = [q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()]
    for t in tensors:
        address |= t.data_ptr()
        facts.append(t.stride())
    facts += (
        not address & 15, problem.sink is None, found.row_tiles, found.list_tile, found.strides, found.guard is None, found.entries is None,
        found.lists[2] is None, problem.dropout is None,
    )  # fmt: skip
    if problem.score is not None:
        facts += _facts_of_mod(problem.score, True)
    for mask in problem.predicates:
        facts += _facts_of_mod(mask, False)
    if problem.sequences is not None:
        facts += (problem.batch, problem.bound_q, problem.bound_k, problem.sequences.is_cache)
        if found.pages is not None:
            facts += (found.pages.stride(), found.pages.dtype)
        if found.cache is not None:
            facts += (found.cache.sizes, *[None if t is None else t.dtype for t in found.cache.tables])
    return facts


def _facts_of_mod(mod: TracedMod, is_score: bool) -> list[Any]:
    """The properties of a mod on which a launch depends. The size of a score mod's integers selects its text; its floats are arguments."""
    numbers = tuple([n if type(n) is int else None for n in mod.scalars]) if is_score else mod.scalars
    return [mod.expr.key, numbers, *[(t.shape, t.stride(), t.dtype) for t in mod.tensors]]
