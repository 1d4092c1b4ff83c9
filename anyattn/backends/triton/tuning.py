"""``kernel_options={"autotune": True}``: a handful of tiles is measured on the device, and the winner remembered, in memory and on disk."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from anyattn import disk_cache
from anyattn.backends.triton import config
from anyattn.backends.triton.config import Shape, Tiles, candidates, padded
from anyattn.backends.triton.programs import Program
from anyattn.backends.triton.styles import shape_of
from anyattn.disk_cache import Payload
from anyattn.problem import Problem

__all__ = ["Question", "best", "forget", "question_of", "seconds"]

_RUNS = 5
_MANY = 4096  # rows
_known: dict[Question, Tiles] = {}


class Question(NamedTuple):
    """What a winner is remembered by. device: its name. kind: of mask and mods, in words. few_rows: those of an
    entry, a power of two, where tiles of fewer rows than usual do; else 0."""

    pass_name: str
    device: str
    shape: Shape
    kind: str
    few_rows: int

    @property
    def key(self) -> str:
        import triton

        return "tiles-" + hashlib.sha256(repr((*self, triton.__version__)).encode()).hexdigest()[:32]


def question_of(pass_name: str, problem: Problem, program: Program, rows: int = 0, splits: int = 1) -> Question:
    """rows: of an entry, in the forward pass."""
    device = problem.q.device
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    kind = _kind(problem, program) + ", split keys" * (splits > 1)
    shape = shape_of(problem)
    if pass_name != "forward":
        shape = replace(shape, is_band=program.has_band)
    return Question(pass_name, named, shape, kind, padded(rows) if 0 < rows <= 64 else 0)


def _kind(problem: Problem, program: Program) -> str:
    ranges = program.ranges
    mask = "lists" if ranges is None else f"{len(ranges.expr.outputs) // 2} range" + "s" * (len(ranges.expr.outputs) > 2)
    sequences = problem.sequences
    words = [mask, *(p.expr.key[:8] for p in program.parts if p.kind == "mask")]
    if program.score is not None:
        words.insert(0, f"score {program.score.expr.key[:8]}")
    if sequences is not None:
        words.append("ragged" if sequences.page_table is None else "pages")
    return ", ".join(words)


def best(question: Question, device: torch.device, measure: Callable[[Tiles], float]) -> Tiles:
    """The fastest tiles, measured if they are not known. measure: seconds; what fails with a tile is not chosen.

    Inside of a CUDA graph, where nothing can be measured, the default.
    """
    if question not in _known:
        possible = candidates(question.pass_name, question.shape, config.capability_of(device), question.few_rows or _MANY)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return possible[0]
        cache = disk_cache.open_cache()
        made = partial(_measured, question, possible, measure)
        _known[question] = _tiles_in(made() if cache is None else cache.get_or_make(question.key, made), possible)
    return _known[question]


def _measured(question: Question, possible: list[Tiles], measure: Callable[[Tiles], float]) -> Payload:
    found: dict[Tiles, float] = {}
    for tiles in possible:
        try:
            found[tiles] = measure(tiles)
        except (RuntimeError, ValueError, _triton_error()):
            continue  # too many registers, or more shared memory than was thought
    fastest = min(found, key=lambda t: found[t]) if found else possible[0]
    facts: dict[str, Any] = {
        "name": f"tiles of {question.pass_name}: {question.kind}", "head_dim": question.shape.d,
        "dtype": str(question.shape.dtype).removeprefix("torch."), "device": question.device, "tiles": _numbers(fastest),
        "microseconds": {"x".join(map(str, _numbers(t))): round(s * 1e6, 1) for t, s in found.items()},
    }  # fmt: skip
    return Payload(b"", facts)


def _numbers(tiles: Tiles) -> list[int]:
    return [tiles.tile_m, tiles.tile_n, tiles.num_warps, tiles.num_stages]


def _tiles_in(payload: Payload, possible: list[Tiles]) -> Tiles:
    """What was kept, as long as it is still among the candidates."""
    kept = next((t for t in possible if _numbers(t) == payload.facts.get("tiles")), None)
    return possible[0] if kept is None else kept


def _triton_error() -> type[Exception]:
    from triton.runtime.errors import TritonError

    found: type[Exception] = TritonError
    return found


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call on the device, after one that compiles."""
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
    """Forgets what is in memory; for tests."""
    _known.clear()
