"""The launches of the Hopper backend's forward pass."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from ctypes import c_float
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper import tables
from anyattn.backends.hopper.backward_parts import PROCESSORS
from anyattn.backends.hopper.compile.launch import indexable, is_compiling, kinds_of, launch, loaded
from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.make_config import ByDocument, ForwardSpec, by_document, forward_spec
from anyattn.backends.hopper.pack_gqa import groups_of, groups_of_entry
from anyattn.backends.result import Result
from anyattn.documents.dispatch import dispatched
from anyattn.problem import Problem
from anyattn.sequences.l2_groups import heads_side_by_side
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.tensors.strides import Allocator, Layout, allocator, contiguous_strides, empty_in_order
from anyattn.triton_tools.recording import active_recorder

__all__ = ["ForwardLaunches", "Parts", "config_of", "counter_of", "multiprocessors", "processors_of", "runs_documents", "section_of"]

_NOTHING: Mapping[Config, Any] = {}


class _PreparedLaunch(NamedTuple):
    """A prepared launch. Calls of the same signature without tables, or with the same ones, differ only in
    tensors, scale and captured values.

    known: the mapping that holds the kernel; empty once kernels are forgotten. empty: allocates the results. of_out, of_rows: the layouts
    of out and of the statistics. numbers: the arguments after the scale. captures: whether anything is captured. is_plain: whether captures
    can be passed unchanged. visits: the tables.
    """

    kernel: Callable[..., None]
    known: Mapping[tuple, Any]
    empty: Allocator
    of_out: Layout
    of_rows: Layout
    numbers: tuple[int, int, int, int]
    captures: bool
    is_plain: bool
    visits: tables.TablesOnHost = tables.TablesOnHost()


class Parts(NamedTuple):
    """Results of split keys, as ``combine.merge`` has them: outs float32 (splits, B, H, S, Dv), lses (splits, B, H, S), natural logarithm;
    has_unused: rows that belong to no sequence have +inf there."""

    outs: Tensor
    lses: Tensor
    has_unused: bool


class ForwardLaunches:
    """The forward launches of calls that share a plan, and the sign of the scale and whether lse is wanted.

    splits: parts of each row tile's keys; with several ``run_parts`` takes the place of ``run``.
    prepared: launches by config, which depends on the signs and sizes of captured numbers. documents: how calls are run by their
    documents, None if they are not. prepared_for: the launches of calls with block lists or document tables, by these.
    """

    def __init__(self, problem: Problem, packs: bool, splits: int = 1) -> None:
        self.spec, self.splits = forward_spec(problem, packs, splits > 1), splits
        self.documents = None if packs else by_document(problem)
        self.prepared: dict[Config, _PreparedLaunch] = {}
        self.prepared_for: WeakKeyDictionary[Any, dict[Config, _PreparedLaunch]] = WeakKeyDictionary()

    @property
    def reads_lists(self) -> bool:
        return self.documents is not None or self.spec.listed is not None

    def run(self, problem: Problem) -> Result:
        """out and the statistics of a problem that ``plan.reason_against`` accepts."""
        if self.documents is not None:
            return self._run_by_documents(problem, self.documents)
        spec = self._spec_of(problem)
        config = spec.config_for(problem)
        known: Mapping[Config, _PreparedLaunch] = self.prepared
        if spec.listed is not None:
            known = _NOTHING if problem.blocks is None else self.prepared_for.get(problem.blocks, _NOTHING)
        prepared = known.get(config)
        if prepared is not None and prepared.known:
            return _launch_prepared(problem, spec, prepared)
        return self._run_first(problem, spec, config)

    def _spec_of(self, problem: Problem) -> ForwardSpec:
        return self.spec.without_order() if needs_lengths_alone(problem, self.spec, self.splits) else self.spec

    def run_parts(self, problem: Problem) -> Parts:
        """The splits' results, in ``self.splits`` parts."""
        spec, q, splits = self._spec_of(problem), problem.q, self.splits
        rows, s = q.shape[:3], problem.sequences
        assert s is not None
        stored = (splits * rows[0], *rows[1:])
        outs = torch.empty((*stored, problem.v.shape[3]), dtype=torch.float32, device=q.device)
        has_unused = not s.uses_all_rows  # the kernel visits rows of sequences only
        lses = torch.empty(stored, dtype=torch.float32, device=q.device)
        if has_unused:
            lses.fill_(math.inf)
        _launched(problem, spec, spec.config_for(problem), tables.visits_of(problem, spec), Result(outs, lses, None), splits)
        return Parts(outs.view(splits, *rows, -1), lses.view(splits, *rows), has_unused)

    def again(self, problem: Problem) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple | None] | None:
        """``plan.Repeater.again``; None for a call whose launch is not prepared, reads block lists or a varlen batch's tables, or passes
        captured tensors or sums of sections."""
        if problem.sequences is not None or self.reads_lists:
            return None
        prepared = self.prepared.get(self.spec.config_for(problem))
        numbers, captured = self.spec.captured(problem)
        if prepared is None or captured or self.spec.config.sums.in_global:
            return None
        kernel, known, dtype, device = prepared.kernel, prepared.known, problem.q.dtype, problem.q.device
        of_out, of_rows, empty = prepared.of_out, prepared.of_rows, prepared.empty
        wants_lse, wants_max, scale = problem.wants_lse, problem.wants_max, _scale_of(problem)

        def again(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple | None:
            if not known:
                return None
            out = empty(*of_out, dtype)
            lse = empty(*of_rows, torch.float32) if wants_lse else None
            highest = empty(*of_rows, torch.float32) if wants_max else None
            sink = None if sink is None else _float_sink(sink)
            kernel(q, k, v, out, lse, highest, sink, *prepared.visits, counter_of(device), scale, *prepared.numbers, numbers, ())
            return out, lse, highest

        return again

    def _run_by_documents(self, problem: Problem, dispatch: ByDocument) -> Result:
        """Launches the two kernels of ``documents.dispatch``, which write to the same results."""
        # both kernels read the documents' tables, so these are made even where they cannot be cached
        call = dispatched(problem, dispatch.form, needs_cache=False, needs_both=is_compiling())
        assert call is not None
        documents, config = call.tables, dispatch.sequences_spec.config_for(problem)  # the config depends on the score mod alone
        if call.answer:
            prepared = self.prepared_for.get(documents, _NOTHING).get(config)
            if prepared is not None and prepared.known:
                return _launch_prepared(call.over_sequences() if prepared.captures else problem, dispatch.sequences_spec, prepared)
        results = _results(problem)
        if call.by_sequences:
            visits = tables.visits_of_documents(documents, config)
            arguments = _launched(call.over_sequences(), dispatch.sequences_spec, config, visits, results)
            if call.answer:
                _store(self.prepared_for.setdefault(documents, {}), config, arguments, visits)
        if call.by_lists:
            visits = tables.visits_beside_documents(problem, dispatch.lists_spec, documents)
            _launched(problem, dispatch.lists_spec, dispatch.lists_spec.config_for(problem), visits, results)
        return results

    def _run_first(self, problem: Problem, spec: ForwardSpec, config: Config) -> Result:
        results = _results(problem)
        if _fills(problem):  # rows that belong to no sequence are 0 and -inf; the kernel does not visit them
            results.out.zero_()
        visits = tables.visits_of(problem, spec, results)
        arguments = _launched(problem, spec, config, visits, results)
        if problem.sequences is None:
            if spec.listed is None:
                _store(self.prepared, config, arguments, visits)
            elif problem.blocks is not None:  # frozen, as are their tables; a modified list is read again
                _store(self.prepared_for.setdefault(problem.blocks, {}), config, arguments, visits)
        return results


def _launch_prepared(problem: Problem, spec: ForwardSpec, prepared: _PreparedLaunch) -> Result:
    """Repeats a prepared launch with other tensors and values."""
    if (recorder := active_recorder()) is not None:
        recorder.refuse("a prepared launch is not reported")
    q, empty = problem.q, prepared.empty
    out = empty(*prepared.of_out, q.dtype)
    lse = empty(*prepared.of_rows, torch.float32) if problem.wants_lse else None
    highest = empty(*prepared.of_rows, torch.float32) if problem.wants_max else None
    numbers, captured = _captured(problem, spec, prepared.numbers[-1]) if prepared.captures else ((), ())
    prepared.kernel(
        q, problem.k, problem.v, out, lse, highest, _sink(problem), *prepared.visits, counter_of(q.device),
        _scale_of(problem), *prepared.numbers, numbers, captured if prepared.is_plain else indexable(captured),
    )  # fmt: skip
    return Result(out, lse, highest)


def _results(problem: Problem) -> Result:
    out = empty_in_order(problem.q, last=problem.v.shape[3])
    return Result(out, *(_statistic(problem) if wanted else None for wanted in (problem.wants_lse, problem.wants_max)))


def _launched(
    problem: Problem, spec: ForwardSpec, config: Config, visits: tables.TablesOnHost, results: Result, splits: int = 1
) -> tuple:  # fmt: skip
    """Launches the kernel and returns its arguments."""
    q, listed = problem.q, visits.entries if visits.order is None else visits.order
    rows = ceil_div(q.shape[2], config.tile_q) if listed is None else len(listed) - config.has_count
    spread, workers = _heads_in_turn(problem, config) * splits, _most_workers(config, multiprocessors(q.device))
    section = section_of(problem, groups_of(problem.qhead_per_kvhead, config.heads_per_tile))
    numbers = (rows, spread, min(spread, section), max(1, min(rows * spread, workers)))
    arguments = (
        q, problem.k, problem.v, *results, None if config.is_split else _sink(problem), *visits, counter_of(q.device),
        _scale_of(problem), *numbers, *_captured(problem, spec, numbers[-1]),
    )  # fmt: skip
    launch(config, arguments)
    return arguments


def _heads_in_turn(problem: Problem, config: Config) -> int:
    """The heads, or groups of heads, that share a row of the order of row tiles."""
    heads = groups_of_entry(problem, config)
    return {"all": problem.batch * heads, "heads": heads, "none": 1}[config.spread]


def _most_workers(config: Config, processors: int) -> int:
    """The thread blocks, or pairs of them, that run at once."""
    return max(1, processors * config.tiles.blocks // config.cluster)


def needs_lengths_alone(problem: Problem, spec: ForwardSpec, splits: int) -> bool:
    """Whether the kernel can read the batch's numbers of keys itself, without tables that another kernel makes of them: each entry has rows
    of storage of its own and one row tile, and all work items run at once, so that none has to be the first.

    That launch was 6 % of decoding 32 entries of 8,192 keys: 78.5 and 73.6 us (H200, 16 heads of 512, one cache).
    """
    s, config = problem.sequences, spec.config
    if not isinstance(s, StoredSequences) or spec.listed is not None:
        return False
    ends_q, ends_k, used_q, used_k = s.tables
    if used_k is None or ends_q is not None or ends_k is not None or used_q is not None or problem.q.shape[2] > config.tile_q:
        return False
    return problem.batch * _heads_in_turn(problem, config) * splits <= _most_workers(config, processors_of(problem.q.device))


def _captured(problem: Problem, spec: ForwardSpec, workers: int) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
    """``spec.captured`` and, if the config has them there, room for the sums of ``workers`` thread blocks."""
    numbers, tensors = spec.captured(problem)
    if spec.config.sums.in_global:
        tensors += (torch.empty(workers, spec.config.sums.in_global, dtype=torch.float32, device=problem.q.device),)
    return numbers, tensors


def _store(prepared: dict[Config, _PreparedLaunch], config: Config, arguments: tuple, visits: tables.TablesOnHost) -> None:
    """Stores a prepared launch, unless no kernel was loaded for it."""
    kinds, _ = kinds_of(arguments)
    known = loaded(config)
    if kinds in known:
        captured, out = arguments[-2:], arguments[3]
        shape = tuple(out.shape)
        prepared[config] = _PreparedLaunch(
            known[kinds],
            known,
            allocator(out.device),
            (shape, out.stride()),
            (shape[:3], contiguous_strides(shape[:3])),
            arguments[-6:-2],
            any(captured),
            kinds_of(captured)[1],
            visits,
        )


def _scale_of(problem: Problem) -> float:
    """The scale of scores in base 2; in the order of keys the product of float32 numbers, as Triton's kernel makes it."""
    if problem.is_batch_invariant:
        return c_float(c_float(problem.scale).value * c_float(LOG2E).value).value
    return problem.scale * LOG2E


def _sink(problem: Problem) -> Tensor | None:
    return None if problem.sink is None else _float_sink(problem.sink)


def _float_sink(sink: Tensor) -> Tensor:
    return sink.detach().float().contiguous()


def config_of(problem: Problem, packs: bool | None = None) -> Config:
    """The config of the kernel for ``problem``. packs: whether heads share row tiles if they can."""
    return forward_spec(problem, packs).config


def runs_documents(problem: Problem) -> bool:
    """Whether ``problem`` is run as one sequence per document if its ids are documents."""
    return by_document(problem) is not None


def section_of(problem: Problem, groups: int) -> int:
    """The number of heads whose row tiles are computed side by side, of ``groups`` heads that share keys, or groups of heads."""
    keys = problem.k.shape[2]
    if problem.sequences is not None and problem.sequences.page_table is not None:  # a pool; the batch may use a part of it
        keys = min(problem.k.shape[0] * keys, problem.batch * problem.bound_k)
    size = keys * (problem.q.shape[3] + problem.v.shape[3]) * problem.q.element_size()
    return heads_side_by_side(size, groups, tables.CACHE_FOR_KEYS)


def _fills(problem: Problem) -> bool:
    """Whether results are filled before the kernel runs; with ``StoredSequences`` the kernel that makes the tables clears unused rows."""
    return problem.sequences is not None and not isinstance(problem.sequences, StoredSequences)


def _statistic(problem: Problem) -> Tensor:
    shape, device = problem.q.shape[:3], problem.q.device
    if not _fills(problem):
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.full(shape, -math.inf, dtype=torch.float32, device=device)


_counters: dict[tuple[int, int], Tensor] = {}
_spares: defaultdict[int, list[Tensor]] = defaultdict(list)
_cleared: list[Tensor] = []  # of which the counters are views: they live as long as the process, since graphs do not hold them
_SPARES = 1024  # of a device at a time
_making = threading.Lock()


def counter_of(device: torch.device) -> Tensor:
    """The work counter of a launch: two zeros, which the kernel's thread blocks increment and the last block resets.

    Kernels of one stream run one after another and share a counter. A CUDA graph may run concurrently: each of its launches has its own for
    good, from spares that are made beside a stream's, since clearing one inside the graph would be a kernel more at every replay.
    """
    # torch.cuda's public functions for this take microseconds; on the CPU the counter exists only for compiling
    if device.type != "cuda":
        return torch.zeros(2, dtype=torch.int32, device=device)
    spares = _spares[device.index]
    if torch._C._cuda_isCurrentStreamCapturing():
        with _making:
            if not spares:
                return torch.zeros(2, dtype=torch.int32, device=device)
            found = spares.pop()
    else:
        key = (device.index, torch._C._cuda_getCurrentRawStream(device.index))
        known = _counters.get(key)
        if known is None or not spares:
            with _making:
                if not spares:
                    spares += _zeros_apart(device, _SPARES)
                known = _counters[key] = spares.pop() if known is None else known
        found = known
    if (recorder := active_recorder()) is not None:
        recorder.outlives(found, partial(counter_of, device))
    return found


def _zeros_apart(device: torch.device, count: int) -> list[Tensor]:
    """Counters, allocated in a separate thread: a compiled graph's memory pool would take allocations of the calling thread and reuse
    them."""

    def allocate() -> None:
        with torch.inference_mode(False), torch.cuda.device(device):
            _cleared.append(torch.zeros(count, 2, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()  # once per stream

    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    return [*_cleared[-1]]


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def processors_of(device: torch.device) -> int:
    """The multiprocessors for which kernels are chosen: the device's, or an H200's while kernels are compiled and not launched."""
    return PROCESSORS if is_compiling() else multiprocessors(device)
