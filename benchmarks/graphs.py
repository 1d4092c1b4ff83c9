"""CUDA graphs of calls, and their times: of kernels alone, without the host between them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import torch

__all__ = ["medians"]


class _Graph(NamedTuple):
    """graph: of some runs of ``call``, which keeps the tensors that they read. result: of the last run, whose memory the graph writes."""

    graph: torch.cuda.CUDAGraph
    call: Callable[[], Any]
    result: Any


def _graph_of(call: Callable[[], Any], repeats: int) -> _Graph:
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph, result = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            result = call()
    return _Graph(graph, call, result)


def medians(calls: dict[str, Callable[[], Any]], rounds: int = 7, repeats: int = 5) -> dict[str, float]:
    """Microseconds of each call, medians of rounds in which all take turns. repeats: runs of a call in its graph.

    Two rounds come first that are not counted.
    """
    graphs = {name: _graph_of(call, repeats) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for n in range(rounds + 2):
        for name, made in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            made.graph.replay()
            end.record()
            end.synchronize()
            if n >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3 / repeats)
    return {name: median(found) for name, found in times.items()}
