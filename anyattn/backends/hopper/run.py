"""The backend's door: a problem and its plan in, results out. The backward pass is another backend's (``Plan.backward``)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.backends.hopper import tables
from anyattn.backends.hopper.config import Config
from anyattn.backends.hopper.launch import launch
from anyattn.backends.hopper.specialise import Special, specialised
from anyattn.geometry.integers import ceil_div
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Result", "config_of", "forward", "heads_side_by_side"]

_CACHE_FOR_KEYS = 32 * 2**20  # bytes of the 50 MB L2 cache that K and V of the heads computed side by side may take


class Result(NamedTuple):
    """out: (B, Hq, Sq, Dv) in the inputs' dtype. lse, max_scores: (B, Hq, Sq) float32, or None where not wanted; lse in nats."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


def forward(problem: Problem, plan: Plan) -> Result:
    """out and the statistics of a problem that ``supports.reason_against`` has nothing against."""
    special = _special(problem, plan)
    config, q, v = special.config_for(problem), problem.q, problem.v
    visits = tables.visits_of(problem, special)
    # rows that belong to no sequence are 0 and -inf, and no kernel comes by them
    make = torch.empty if problem.sequences is None else torch.zeros
    out = make((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse, highest = (_statistic(problem) if wanted else None for wanted in (problem.wants_lse, problem.wants_max))
    sink = None if problem.sink is None else problem.sink.detach().float().contiguous()
    rows = ceil_div(q.shape[2], config.tiles.tile_m) if visits.order is None else len(visits.order)
    spread = {"all": problem.batch * problem.heads_q, "heads": problem.heads_q, "none": 1}[config.spread]
    numbers, captured = special.captured(problem)
    launch(
        config,
        (
            q, problem.k, v, out, lse, highest, sink, *visits, _counter(q.device), problem.scale * math.log2(math.e), rows, spread,
            min(spread, _section(problem)), max(1, min(rows * spread, _multiprocessors(q.device))), numbers, captured,
        ),
    )  # fmt: skip
    return Result(out, lse, highest)


def config_of(problem: Problem) -> Config:
    """What the kernel for ``problem`` is specialised for."""
    return specialised(problem).config


def _special(problem: Problem, plan: Plan) -> Special:
    """What calls of the same facts share."""
    key = ("hopper", problem.wants_lse, problem.scale > 0)
    found = plan.prepared.get(key)  # type: ignore[call-overload]
    if found is None:
        found = plan.prepared[key] = specialised(problem)  # type: ignore[index]
    return found


def _section(problem: Problem) -> int:
    size = problem.k.shape[2] * (problem.q.shape[3] + problem.v.shape[3]) * problem.q.element_size()
    return heads_side_by_side(size, problem.qhead_per_kvhead)


def heads_side_by_side(size: int, ratio: int) -> int:
    """How many query heads go side by side: those whose keys and values fit the cache together.

    size: bytes of one head's K and V; ratio: query heads that share them.
    """
    return max(1, _CACHE_FOR_KEYS // max(size, 1)) * ratio


def _statistic(problem: Problem) -> Tensor:
    shape, device = problem.q.shape[:3], problem.q.device
    if problem.sequences is None:
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.full(shape, -math.inf, dtype=torch.float32, device=device)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Two zeros from which a kernel's blocks draw their work, and which it leaves as zeros.

    Kernels of one stream follow one another and share them. A graph may run beside anything and gets its own.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a CPU's when only compiling
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]


@lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
