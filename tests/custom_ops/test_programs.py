"""Compiled programs as users write them: a GPT with documents and biases; checkpoints, autocast, export, parallel wrappers."""

from __future__ import annotations

import io
import os
import shutil
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anyattn
from anyattn import scores
from tests.support.compiling import fresh, nearly_same
from tests.support.covering import few

B, S, WIDTH, HEADS, HEADS_KV, D = 2, 80, 32, 4, 2, 8
needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")


class Attention(nn.Module):
    """Strided q, k and v of one projection, a learned bias by distance, a document mask made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, (HEADS + 2 * HEADS_KV) * D)
        self.out = nn.Linear(HEADS * D, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, 33) * 0.1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        b, s, _ = x.shape
        parts = self.project(x).split([HEADS * D, HEADS_KV * D, HEADS_KV * D], -1)
        q, k, v = (t.view(b, s, -1, D).transpose(1, 2) for t in parts)
        blocks = anyattn.create_block_mask(lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]), b, None, s, s, x.device, BLOCK_SIZE=32)
        score = lambda sc, b, h, i, j: sc + self.bias[h, torch.clamp(i - j, 0, 32)]
        y = anyattn.flex_attention(q, k, v, score_mod=scores.softcap(20.0).then(score), block_mask=blocks, enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class GPT(nn.Module):
    def __init__(self, checkpoints: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, ids, use_reentrant=False) if self.checkpoints else layer(x, ids))
        return x


def batch(length: int = S, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.arange(length) // (17 + seed), torch.arange(length) // 30])
    return torch.randn(B, length, WIDTH, generator=g), ids


def agree(model: nn.Module, compiled, args, context=nullcontext) -> bool:
    def within(call):
        def run(*given):
            with context():
                return call(*given).float()

        return run

    return nearly_same(within(compiled), within(model), args, [*model.parameters()])


@pytest.mark.parametrize("options", [{}, {"checkpoints": True}], ids=["plain", "checkpoint"])
def test_one_graph_over_steps(options) -> None:
    model = GPT(**options)
    compiled, graphs = fresh(model)
    assert all(agree(model, compiled, batch(seed=step)) for step in range(3))
    assert graphs.frame_count == 1


def test_other_lengths_make_one_more_graph() -> None:
    model = GPT(layers=1)
    compiled, graphs = fresh(model)
    assert all(agree(model, compiled, batch(length)) for length in (80, 96, 70, 101))
    assert graphs.frame_count == 2
    compiled, graphs = fresh(model, dynamic=True)
    assert all(agree(model, compiled, batch(length)) for length in (80, 96, 70))
    assert graphs.frame_count == 1


@needs_compiler
def test_inductor() -> None:
    model = GPT(layers=1)
    compiled, graphs = fresh(model, "inductor")
    assert all(agree(model, compiled, batch(seed=step)) for step in range(2))
    assert graphs.frame_count == 1


def test_saved_tensors_are_unpacked_once() -> None:
    """A checkpoint around the operators themselves refuses a second access, and hooks that store tensors elsewhere load them anew."""
    attend, _ = fresh(lambda q: anyattn.flex_attention(q, q, q), backend="eager")
    q = torch.randn(1, 2, 16, D, requires_grad=True)
    wanted = torch.autograd.grad(attend(q).square().sum(), q)[0]
    found = torch.autograd.grad(checkpoint(attend, q, use_reentrant=False).square().sum(), q)[0]
    assert torch.equal(found, wanted)


def test_autocast() -> None:
    model = GPT(layers=1)
    compiled, _ = fresh(model)
    assert agree(model, compiled, batch(), lambda: torch.autocast("cpu", dtype=torch.bfloat16))


def test_functional_call() -> None:
    model = GPT(layers=1)
    call = lambda parameters, x, ids: torch.func.functional_call(model, parameters, (x, ids))
    parameters = {name: p.detach() * 0.9 for name, p in model.named_parameters()}
    x, ids = batch()
    assert nearly_same(fresh(call)[0], call, (parameters, x, ids))


@pytest.mark.parametrize("strict", few([True, False], False), ids=["strict", "not strict"])
def test_export(strict: bool) -> None:
    """Saved, loaded and run, with a length that is left open."""
    model = GPT().eval()
    length = torch.export.Dim("length", min=40, max=512)
    with torch.no_grad():
        exported = torch.export.export(model, batch(), strict=strict, dynamic_shapes=({1: length}, {1: length}))
        assert {str(n.target) for n in exported.graph.nodes if "anyattn" in str(n.target)} == {
            "anyattn.attend.default",
            "anyattn.block_lists.default",
        }
        file = io.BytesIO()
        torch.export.save(exported, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        assert all(nearly_same(loaded, model, batch(n)) for n in (S, 64))


@pytest.fixture
def one_process():
    if dist.is_initialized():  # a test of DTensors leaves its group behind
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(one_process) -> None:
    model = GPT()
    wrapped = nn.parallel.DistributedDataParallel(model)
    torch._dynamo.reset()
    compiled = torch.compile(wrapped, backend="aot_eager")
    wanted = GPT()
    for step in range(2):
        for m in (compiled, wanted):
            m.zero_grad()
            m(*batch(seed=step)).square().sum().backward()
        for p, w in zip(model.parameters(), wanted.parameters(), strict=True):
            assert float((p.grad - w.grad).abs().max()) <= 32 * torch.finfo(p.dtype).eps * float(w.grad.abs().max())


def test_fully_sharded(one_process) -> None:
    from torch.distributed.fsdp import fully_shard

    model, wanted = GPT(), GPT()
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for m in (compiled, wanted):
        m(*batch()).square().sum().backward()
    for p, w in zip(model.parameters(), wanted.parameters(), strict=True):
        grad = p.grad.full_tensor()
        assert float((grad - w.grad).abs().max()) <= 32 * torch.finfo(w.dtype).eps * float(w.grad.abs().max())
