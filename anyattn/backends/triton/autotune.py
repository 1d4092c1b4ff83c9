"""Autotuning (``kernel_options={"autotune": True}``): measures a few tiles and remembers the fastest, in memory and on disk."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from anyattn import disk_cache
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.codegen.assumptions import shape_of
from anyattn.backends.triton.codegen.programs import Program
from anyattn.backends.triton.launch_shape import forward_shape, has_few_rows, padded_group, rows_of
from anyattn.backends.triton.tables import cache_read, may_be_padded
from anyattn.backends.triton.tile_config import Shape, Tiles, candidates
from anyattn.backends.triton.wide_tiles import padded
from anyattn.disk_cache import Payload
from anyattn.problem import Problem

__all__ = ["Question", "backward_question", "best", "forget", "forward_question", "seconds"]

_RUNS = 5
_MANY = 4096  # rows
_STORED = 2  # format version of the file on disk; files of an earlier version are neither read nor replaced
_LEAST_STEP, _WIDEST_STEP = 16, 128  # least and greatest tile_n of all measured tiles
_known: dict[Question, Tiles] = {}


class Question(NamedTuple):
    """The key of a measured winner. device: its name. kind: words for the mask, the mods and other properties that select a kernel. Forward
    pass
    only: few_rows, the rows of an entry, a power of two, if few rows have smaller tiles, else 0; group, rows of a position, a power of two;
    is_short, see ``tile_config.forward_tiles``."""

    pass_name: str
    device: str
    shape: Shape
    kind: str
    few_rows: int = 0
    group: int = 1
    is_short: bool = False

    @property
    def rows(self) -> tuple[int, bool, int]:
        """The row arguments of ``tile_config.candidates``."""
        return self.few_rows or _MANY, self.is_short, self.group

    @property
    def key(self) -> str:
        import triton

        return "tiles-" + hashlib.sha256(repr((*self, triton.__version__, _STORED)).encode()).hexdigest()[:32]


def forward_question(problem: Problem, program: Program, packed: int, splits: int) -> Question:
    """packed: see ``launch_shape.Layout``."""
    words = ["sink"] * (problem.sink is not None and splits == 1) + ["split keys"] * (splits > 1)
    kind, rows = _kind(problem, program, words), rows_of(problem, packed)
    is_short = has_few_rows(problem, tile_config.capability_of(problem.q.device))
    few = padded(rows) if rows <= 64 else 0
    return Question("forward", _name(problem.q.device), forward_shape(problem), kind, few, padded_group(packed), is_short)


def backward_question(name: str, problem: Problem, program: Program, words: Sequence[str]) -> Question:
    """words: properties that select a kernel, besides mask and mods."""
    shape = replace(shape_of(problem), is_band=program.has_band)
    return Question(name, _name(problem.q.device), shape, _kind(problem, program, words))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _kind(problem: Problem, program: Program, more: Sequence[str]) -> str:
    ranges = program.ranges
    mask = "lists" if ranges is None else f"{len(ranges.expr.outputs) // 2} range" + "s" * (len(ranges.expr.outputs) > 2)
    sequences = problem.sequences
    words = [mask, *(p.expr.key[:8] for p in program.parts if p.kind == "mask")]
    if program.score is not None:
        words.insert(0, f"score {program.score.expr.key[:8]}")
    if sequences is not None:
        is_padded = may_be_padded(sequences, cache_read(sequences, ranges is None))
        words.append("ragged" if sequences.page_table is None else _pages(problem.k.shape[2], is_padded))
    return ", ".join([*words, *more])


def _pages(size: int, is_padded: bool) -> str:
    """Page sizes by the tiles that fit them (``FITS`` of ``kernels.forward``): a tile divides a page, or a page a tile. Sizes that fit the
    same tiles have the same winner. is_padded: tiles begin at any place."""
    power = min(size & -size, _WIDEST_STEP)
    if power == _WIDEST_STEP and not is_padded:
        return f"pages of {power} or more"
    if is_padded or (power < _LEAST_STEP and size != power):
        return "pages that fit no tile"
    return f"pages of {power}" if size == power else f"pages of a multiple of {power}"


def best(question: Question, device: torch.device, measure: Callable[[Tiles], float]) -> Tiles:
    """The fastest tiles, measured if they are not known. measure: returns seconds; tiles with which it raises are not chosen.

    During CUDA graph capture, when nothing can be measured, the default tiles.
    """
    if question not in _known:
        possible = candidates(question.pass_name, question.shape, tile_config.capability_of(device), *question.rows)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return possible[0]
        cache = disk_cache.open_cache()
        measure_all = partial(_measured, question, possible, measure)
        _known[question] = _tiles_in(measure_all() if cache is None else cache.get_or_make(question.key, measure_all, _has_tiles), possible)
    return _known[question]


def _measured(question: Question, possible: list[Tiles], measure: Callable[[Tiles], float]) -> Payload:
    times: dict[Tiles, float] = {}
    for tiles in possible:
        try:
            times[tiles] = measure(tiles)
        except (RuntimeError, ValueError, _triton_error()):
            continue  # too many registers, or more shared memory than estimated
    fastest = min(times, key=lambda t: times[t]) if times else possible[0]
    facts: dict[str, Any] = {
        "name": f"tiles of {question.pass_name}: {question.kind}", "head_dim": question.shape.d,
        "dtype": str(question.shape.dtype).removeprefix("torch."), "device": question.device, "tiles": _numbers(fastest),
        "microseconds": {"x".join(map(str, _numbers(t))): round(s * 1e6, 1) for t, s in times.items()},
    }  # fmt: skip
    return Payload(b"", facts)


def _numbers(tiles: Tiles) -> list[int]:
    return [tiles.tile_m, tiles.tile_n, tiles.num_warps, tiles.num_stages]


def _has_tiles(payload: Payload) -> bool:
    tiles = payload.facts.get("tiles")
    return isinstance(tiles, list) and len(tiles) == 4 and all(type(n) is int for n in tiles)


def _tiles_in(payload: Payload, possible: list[Tiles]) -> Tiles:
    """The stored winner, if it is still a candidate."""
    kept = next((t for t in possible if _numbers(t) == payload.facts.get("tiles")), None)
    return possible[0] if kept is None else kept


def _triton_error() -> type[Exception]:
    from triton.runtime.errors import TritonError

    error_class: type[Exception] = TritonError
    return error_class


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call on the device, after a first call, which compiles."""
    call()
    times = []
    for _ in range(_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(torch.cuda.current_stream(device))
        call()
        end.record(torch.cuda.current_stream(device))
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def forget() -> None:
    """Clears the winners in memory; for tests."""
    _known.clear()
