"""Launches of the Triton backend that are made again on a GPU: with other tensors, at other strides, and past Triton's launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, judge, qkv

pytestmark = pytest.mark.gpu
judging.needs_the_backend(only="triton")


def shifted(x: Tensor) -> Tensor:
    """The same, but no row begins at a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": lambda x: x,
    "again": torch.clone,
    "shifted": shifted,
    "turned": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "surrounded": judging.surrounded,
    "plain again": torch.clone,
    "shifted again": shifted,
}


@pytest.mark.parametrize("dim", (64, 128))
def test_one_call_after_another(dim: int) -> None:
    """Of one kind but for where their rows lie: each finds its own kernel."""
    for seed, (name, layout) in enumerate(LAYOUTS.items()):
        tensors = [layout(t) for t in qkv(2, 4, 2, 257, 257, dim, seed=seed)]
        slope = 0.01 * (1 + seed)
        judge(tensors, score=lambda s, b, h, i, j, slope=slope: s - slope * (i - j), mask=lambda b, h, i, j: i >= j, label=name)


@judging.on_the_gpu_alone
def test_known_kernels_go_past_tritons_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """With this Triton: also those with tensor descriptors made with the launch."""
    from anyattn.triton_tools import launch

    monkeypatch.setattr(launch, "_ready", {})
    for dim in (64, 128):
        x = [t.requires_grad_() for t in qkv(1, 2, 2, 128, 128, dim)]
        for _ in range(2):
            anyattn.flex_attention(*x, backend="triton").sum().backward()
    handles = list(launch._ready.values())
    assert len(handles) >= 8 and all(h.takes_addresses for h in handles)
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert any(h.spread is not None for h in handles) is is_hopper


@judging.on_the_gpu_alone
def test_streams_and_threads() -> None:
    """A launch goes to the stream that is current where it is made, whoever made it first."""
    x = qkv(1, 2, 2, 512, 512, 64)
    want = anyattn.flex_attention(*x, backend="triton")
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**6)
            own = [t.clone() for t in x]
            found[number] = anyattn.flex_attention(*own, backend="triton")
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 4 and all(torch.equal(out, want) for out in found.values())


@judging.on_the_gpu_alone
def test_in_a_graph() -> None:
    """What is captured is a launch made again; replays read what the tensors hold by then."""
    x = qkv(1, 2, 2, 300, 300, 64)
    anyattn.flex_attention(*x, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = anyattn.flex_attention(*x, backend="triton")
    for seed in (1, 2):
        for t, other in zip(x, qkv(1, 2, 2, 300, 300, 64, seed=seed), strict=True):
            t.copy_(other)
        graph.replay()
        judging.check("graph", {"out": out.clone()}, *x)


@judging.on_the_gpu_alone
def test_gradients_of_the_output_at_any_alignment() -> None:
    x = [t.requires_grad_() for t in qkv(1, 2, 2, 256, 256, 64)]
    dout = torch.randn(1, 2, 256, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE, x[0].dtype)
    for layout in (torch.clone, shifted, torch.clone, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)):
        out = anyattn.flex_attention(*x, backend="triton")
        grads = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, x, layout(dout)), strict=True))
        judging.check("gradients", {"out": out.detach(), **grads}, *[t.detach() for t in x], dout)
