"""CUDA graphs of calls, and document ids that several files of the GPU suite use."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.gpu.judging import DEVICE

IDS = (torch.rand(4, 1025, generator=torch.Generator().manual_seed(3)) < 0.01).long().cumsum(1)


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def captured(call: Any) -> tuple[Any, Any]:
    """(graph, its result)."""
    call()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found
