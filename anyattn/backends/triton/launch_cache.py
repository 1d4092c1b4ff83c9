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
from anyattn.backends.triton.codegen.programs import CallProgram, CapturedValues, Program
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.wide_tiles import padded
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.problem import Problem
from anyattn.triton_tools.fast_launch import Handle
from anyattn.triton_tools.recording import Recorder, active_recorder
from anyattn.triton_tools.replay import SCALE, Number

__all__ = ["LaunchCache", "LaunchSpec", "launch_cached", "launch_key"]

_MOST = 64  # most launches of a cache, and most descriptors of a launch
_UNKNOWN = object()


class LaunchCache:
    """Prepared launches of one kernel for the calls of a plan, by key. lists: ``CallProgram.lists`` of these calls; unset before the first
    launch, and if lists are made for a mask at every call."""

    def __init__(self) -> None:
        self.lists: Any = _UNKNOWN
        self.by_key: dict[tuple, PreparedLaunch] = {}

    @property
    def knows_lists(self) -> bool:
        return self.lists is not _UNKNOWN

    def put(self, key: tuple, launch: PreparedLaunch | None, lists: Any) -> None:
        """Stores a launch, if it can be repeated. lists: ``CallProgram.lists``."""
        if launch is None or not (lists is None or isinstance(lists, str)):
            return
        if len(self.by_key) >= _MOST:
            self.by_key.clear()
        self.lists = lists
        self.by_key[key] = launch


class Sources(NamedTuple):
    """The sources of a call's captured values, for each part that a kernel uses.

    masks: for each part except the score and dropout the numbers, which are the same in all calls of one key, and the indices of its
    tensors in the list of all masks' tensors.
    """

    has_score: bool
    has_dropout: bool
    masks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    def read(self, problem: Problem, totals: tuple[Tensor, ...] = ()) -> list[CapturedValues]:
        """The captured values of a call. totals: for the score mod's tensors."""
        captured, score = [], problem.score
        if self.has_score and score is not None:
            captured.append(CapturedValues(bits_of_numbers(score.scalars), score.tensors, totals))
        if self.masks:
            tensors = _of_masks(problem)
            captured += [CapturedValues(numbers, tuple([tensors[i] for i in indices])) for numbers, indices in self.masks]
        if self.has_dropout and problem.dropout is not None:
            numbers, seed = problem.dropout.captured
            captured.append(CapturedValues(bits_of_numbers(numbers), seed))
        return captured


def _sources_of(problem: Problem, call_program: CallProgram, program: Program) -> Sources | None:
    """program: those parts of ``call_program.program`` that the kernel uses. None if a part reads a tensor that no mask of the call
    captured."""
    tensors, masks = _of_masks(problem), []
    names = [part.name for part in program.parts]
    for part, mod in zip(call_program.program.parts, call_program.mods, strict=True):
        if part.name in ("score", "dropout") or part.name not in names:
            continue
        indices = [next((i for i, t in enumerate(tensors) if t is own), -1) for own in mod.tensors]
        if -1 in indices:
            return None
        masks.append((bits_of_numbers(mod.scalars), tuple(indices)))
    return Sources("score" in names, "dropout" in names, tuple(masks))


def _of_masks(problem: Problem) -> list[Tensor]:
    return [t for p in problem.predicates for t in p.tensors]


class PreparedLaunch(NamedTuple):
    """A launch with everything but its pointers, lists, scale and captured values.

    numbers: the arguments between the pointers and the lists. described: (index of a pointer, rows of its box) for each pointer that is
    passed as a tensor descriptor. sizes: of each part's captured tensors. encoded: encoded descriptors, by index in ``described`` and
    address.
    """

    handle: Handle
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    sources: Sources
    sizes: tuple[tuple[int, ...], ...]
    described: tuple[tuple[int, int], ...]
    encoded: dict[tuple[int, int], list[Any]]

    def launch(
        self,
        pointers: Sequence[Tensor | None],
        lists: Sequence[Tensor | None],
        scale: float,
        captured: Sequence[CapturedValues],
    ) -> None:
        """Launches with these arguments; for a pointer or list of None any pointer is passed."""
        handle, recorder = self.handle, active_recorder()
        if recorder is not None:
            self._record(recorder, pointers, lists, captured)
        if not handle.takes_addresses:
            self._launch_with_tensors(pointers, lists, scale, captured)
            return
        anywhere = pointers[0].data_ptr()  # type: ignore[union-attr]
        values = [anywhere if t is None else t.data_ptr() for t in pointers]
        for number in range(len(self.described) - 1, -1, -1):  # last first: a descriptor is several values, which shift those behind it
            at, rows = self.described[number]
            values[at : at + 1] = self._encoded(number, values[at], pointers[at], rows)
        values += self.numbers
        values += [anywhere if t is None else t.data_ptr() for t in lists]
        values.append(scale)  # type: ignore[arg-type]
        for part, sizes in zip(captured, self.sizes, strict=True):
            values += part.scalars
            values += sizes
            values += [t.data_ptr() for t in part.tensors]
            values += [t.data_ptr() for t in part.totals]
        handle.send(self.grid, values)

    def _record(
        self, recorder: Recorder, pointers: Sequence[Tensor | None], lists: Sequence[Tensor | None], captured: Sequence[CapturedValues]
    ) -> None:
        values = [
            *(pointers[0] if t is None else t for t in pointers),
            *self.numbers,
            *(pointers[0] if t is None else t for t in lists),
            SCALE,
        ]
        for i, (part, sizes) in enumerate(zip(captured, self.sizes, strict=True)):
            is_score = i == 0 and self.sources.has_score
            values += map(Number, range(len(part.scalars))) if is_score else part.scalars
            values += (*sizes, *part.tensors, *part.totals)
        if self.described or self.sources.has_dropout:
            recorder.refuse("a launch is passed tensor descriptors or a seed")
        recorder.launched(self.handle.send, self.grid, values, self.handle.takes_addresses, self.handle.pack)

    def _encoded(self, number: int, address: int, x: Any, rows: int) -> list[Any]:
        """The encoded descriptor of an address; memoised, since it depends only on the address and the launch's sizes."""
        descriptor = self.encoded.get((number, address))
        if descriptor is None:
            if len(self.encoded) >= _MOST:
                self.encoded.clear()
            assert self.handle.spread is not None
            descriptor = self.encoded[number, address] = self.handle.spread(_descriptor(x, rows), number)
        return descriptor

    def _launch_with_tensors(
        self, pointers: Sequence[Tensor | None], lists: Sequence[Tensor | None], scale: float, captured: Sequence[CapturedValues]
    ) -> None:
        values = _values(pointers, self.numbers, lists, scale, self.described)
        for part, sizes in zip(captured, self.sizes, strict=True):
            values += (*part.scalars, *sizes, *part.tensors, *part.totals)
        self.handle.send(self.grid, values)


class LaunchSpec(NamedTuple):
    """The arguments of a kernel's first launch besides its tensors, its lists and the scale.

    program: those parts of ``call_program.program`` that the kernel uses. captured: the values of each of these parts. options: constants,
    warps and stages. numbers, described: see ``PreparedLaunch``.
    """

    signature: Signature
    call_program: CallProgram
    program: Program
    captured: Sequence[CapturedValues]
    is_aligned: bool
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    options: dict[str, Any]
    described: tuple[tuple[int, int], ...] = ()


def launch_cached(
    launches: LaunchCache,
    key: tuple,
    problem: Problem,
    tensors: Sequence[Tensor | None],
    lists: Sequence[Tensor | None],
    make_spec: Callable[..., LaunchSpec],
    spec_arguments: tuple,
    totals: tuple[Tensor, ...] = (),
) -> None:
    """Launches a kernel: by the prepared launch of this key if there is one, else for the first time, and stores the prepared launch.

    tensors: the first pointers, None for absent ones. make_spec: called with ``spec_arguments`` before a first launch. totals: buffers for
    the gradients of the score mod's tensors.
    """
    launch = launches.by_key.get(key)
    if launch is not None:
        launch.launch(tensors, lists, problem.scale, launch.sources.read(problem, totals))
        return
    spec = make_spec(*spec_arguments)
    launches.put(key, _launch_first(spec, problem, tensors, lists), spec.call_program.lists)


def _launch_first(
    spec: LaunchSpec, problem: Problem, tensors: Sequence[Tensor | None], lists: Sequence[Tensor | None]
) -> PreparedLaunch | None:
    """Launches a kernel for the first time; None if the launch cannot be repeated."""
    if (recorder := active_recorder()) is not None:
        recorder.refuse("a kernel's first launch, of whose numbers it is not known which are the call's")
    pointers = [None if t is None else t.detach() for t in tensors]
    values = _values(pointers, spec.numbers, lists, problem.scale, spec.described)
    entry = entry_of(spec.signature, spec.program, spec.is_aligned)
    handle = run_entry(entry, spec.grid, values, spec.captured, problem.q.device, spec.options)
    sources = _sources_of(problem, spec.call_program, spec.program)
    if handle is None or sources is None or (spec.described and handle.takes_addresses and handle.spread is None):
        return None
    sizes = tuple(map(sizes_of_captured, spec.captured))
    return PreparedLaunch(handle, tuple(spec.grid), spec.numbers, sources, sizes, spec.described, {})


def _values(
    pointers: Sequence[Tensor | None],
    numbers: tuple[int, ...],
    lists: Sequence[Tensor | None],
    scale: float,
    described: tuple[tuple[int, int], ...],
) -> list[Any]:
    """The arguments of an entry before the captured values. For an absent tensor any pointer is passed."""
    values: list[Any] = [pointers[0] if t is None else t for t in pointers]
    for at, rows in described:
        values[at] = _descriptor(values[at], rows)
    return [*values, *numbers, *(pointers[0] if t is None else t for t in lists), scale]


def _descriptor(x: Tensor, rows: int) -> Any:
    """The TMA tensor descriptor of x, in boxes of [1, 1, rows, width]."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    strides = [8 if n == 1 else s for s, n in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return TensorDescriptor(x.detach(), list(x.shape), [*strides, 1], [1, 1, rows, padded(x.shape[3])])


# ---- keys


def launch_key(problem: Problem, tables: Tables, *tensors: Tensor) -> list[Any]:
    """The properties of a problem, its tables and the ``tensors`` with rows (besides q, k and v) on which a launch depends."""
    q, k, v = problem.q, problem.k, problem.v
    address = q.data_ptr() | k.data_ptr() | v.data_ptr()
    key: list[Any] = [q.device, q.dtype, q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride()]
    for t in tensors:
        address |= t.data_ptr()
        key.append(t.stride())
    key += (
        not address & 15, k.data_ptr() == v.data_ptr(), problem.sink is None, tables.row_tiles, tables.list_tile, tables.strides,
        tables.guard is None, tables.entries is None, tables.lists[2] is None, problem.dropout is None,
    )  # fmt: skip
    if problem.score is not None:
        key += _key_of_mod(problem.score, True)
    for mask in problem.predicates:
        key += _key_of_mod(mask, False)
    if problem.sequences is not None:
        key += (problem.batch, problem.bound_q, problem.bound_k, problem.sequences.is_cache)
        if tables.pages is not None:
            key += (tables.pages.stride(), tables.pages.dtype)
        if tables.cache is not None:
            key += (tables.cache.sizes, *[None if t is None else t.dtype for t in tables.cache.tables])
    return key


def _key_of_mod(mod: TracedMod, is_score: bool) -> list[Any]:
    """The properties of a mod on which a launch depends. The size of a score mod's integers selects its text; its floats are arguments."""
    numbers = tuple([n if type(n) is int else None for n in mod.scalars]) if is_score else mod.scalars
    return [mod.expr.key, numbers, *[(t.shape, t.stride(), t.dtype, t.ndim > 1 and not t.data_ptr() & 15) for t in mod.tensors]]
