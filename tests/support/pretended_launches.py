"""Launches of Triton kernels with a GPU pretended: noted, with addresses; none is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.call_cache import attention
from anyattn.hardware import Hardware
from anyattn.sequences import tile_order_device
from tests.support.no_reading import pretend_unread

__all__ = ["Launched", "batch", "described", "noted_by_address", "step"]

Launched = tuple[tuple[int, ...], list[Any]]


@contextmanager
def noted_by_address(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    from anyattn.triton_tools import launch
    from anyattn.triton_tools.fast_launch import Handle

    found: list[Launched] = []

    def send(grid: tuple[int, ...], values: Any) -> None:
        found.append((tuple(grid), [x.data_ptr() if isinstance(x, Tensor) else x for x in values]))

    def first(kernel: Any, grid: tuple[int, ...], given: Any, *_: Any) -> Handle:
        send(grid, given)
        return Handle(send, True)

    pretend_unread(monkeypatch, Hardware("cuda", "a GPU", 0, frozenset((torch.bfloat16,)), (8, 0), 132))
    monkeypatch.setattr(launch, "_launched", first)
    monkeypatch.setattr(tile_order_device, "_runs_kernels", lambda device: True)
    attention.clear()
    yield found
    attention.clear()


def step(seed: int, pages: bool, appends: bool) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    store = (12, 64) if pages else (3, 256)
    lengths = torch.randint(10, 200, (3,), generator=g, dtype=torch.int32)
    given = {
        "q": rows(3, 1, 8, 64),
        "k_cache": rows(*store, 2, 64),
        "v_cache": rows(*store, 2, 64),
        "cache_seqlens": lengths,
        "causal": True,
    }
    if pages:
        given["page_table"] = torch.randperm(12, generator=g).view(3, 4).int()
    if appends:
        angles = torch.rand(256, 32, generator=g)
        given |= {"k": rows(3, 1, 2, 64), "v": rows(3, 1, 2, 64), "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return given


def batch(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(600, h, 64, generator=g).bfloat16() for h in (4, 2, 2))
    ends = torch.tensor([0, 200 + seed, 600], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 500, "max_seqlen_k": 500}


def described(launches: list[Launched], arguments: dict[str, Any], results: tuple[Tensor, ...]) -> list[Any]:
    """Launches' arguments, with addresses by what they are: of an argument, of a result, or of other memory by its first use."""
    names = {t.data_ptr(): name for name, t in arguments.items() if isinstance(t, Tensor)}
    names |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)}
    found = []
    for grid, values in launches:
        for x in values:
            if type(x) is int and x > 2**32:
                names.setdefault(x, f"memory {len(names)}")
        found.append((grid, [names.get(x, x) if type(x) is int else x for x in values]))
    return found
