"""Masks of documents on a GPU: as sequences, by their lists, and launched both ways while nobody knows which of the two is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn.documents.rewrite import DocumentTables
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, judge, qkv

pytestmark = pytest.mark.gpu
judging.needs_the_backend(only="triton")

LENGTH = 1100 if judging.MODE == "gpu" else 200
RESTS: dict[str, Any] = {
    "all": None,
    "causal": lambda i, j: i >= j,
    "window": lambda i, j: (i - j <= 70) & (j - i <= 3),
}


def runs(count: int, seed: int) -> torch.Tensor:
    """Ids of so many documents of random lengths, in no order; one may have a single token."""
    g = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(LENGTH - 1, generator=g)[: count - 1].sort().values
    names = torch.randperm(100, generator=g)[:count]
    return names[torch.bucketize(torch.arange(LENGTH), cuts, right=False)]


def apart(count: int, seed: int) -> torch.Tensor:
    ids = runs(count, seed)
    return torch.where(torch.arange(LENGTH) >= LENGTH - 5, ids[0], ids)


def mask_of(ids: torch.Tensor, rest: Any) -> Any:
    ids = ids.to(DEVICE)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = ids[i] == ids[j] if ids.ndim == 1 else ids[b, i] == ids[b, j]
        return same if rest is None else same & rest(i, j)

    return mask


def lists_of(mask: Any, batch: int | None = None) -> Any:
    return anyattn.create_block_mask(mask, batch, None, LENGTH, LENGTH, device=DEVICE)


@pytest.fixture(params=["known", "unknown"])
def knowledge(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "unknown":
        monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    return request.param


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("make", [runs, apart], ids=lambda f: f.__name__)
def test_documents(make: Any, rest: str, knowledge: str) -> None:
    for at, (batch, heads, kv_heads, d, dtype) in enumerate([(1, 4, 1, 128, torch.bfloat16), (2, 3, 3, 64, torch.float16)]):
        mask = mask_of(make(6, at), RESTS[rest])
        lists = lists_of(mask)
        for kind in ("normal", "peaky"):
            judge(qkv(batch, heads, kv_heads, LENGTH, LENGTH, d, dtype=dtype, kind=kind), mask=mask, block_mask=lists, label=kind)
            if DEVICE == "cuda":
                torch.cuda.synchronize()  # from the second call on it is known


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ids_of_each_entry(dtype: torch.dtype, knowledge: str) -> None:
    mask = mask_of(torch.stack([runs(3, 1), runs(9, 2)]), RESTS["causal"])
    judge(qkv(2, 4, 2, LENGTH, LENGTH, 64, 48, dtype=dtype), mask=mask, sink=torch.linspace(-1, 1, 4), block_mask=lists_of(mask, 2))


@pytest.mark.parametrize("make", [runs, apart], ids=lambda f: f.__name__)
def test_gradients_of_a_table(make: Any, knowledge: str) -> None:
    """Every pair of a query and a key is counted once, whichever launch comes by it."""
    from anyattn import oracle
    from anyattn.testing import budget
    from anyattn.testing.rounding import rounding

    q, k, v = qkv(2, 4, 2, LENGTH, LENGTH, 64)
    table = judging.random(4, LENGTH).to(DEVICE).requires_grad_()
    exact = table.detach().double().requires_grad_()
    mask = mask_of(make(5, 3), RESTS["causal"])
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = judging.flex(*leaves, lambda s, b, h, i, j: s + table[h, (i - j).abs()], block_mask=lists_of(mask))
    dout = judging.random(*out.shape, seed=1).to(out.dtype).to(DEVICE)
    got = torch.autograd.grad(out, (*leaves, table), dout)
    mods = {"score": lambda s, b, h, i, j: s + exact[h, (i - j).abs()], "mask": mask, "captured": [exact]}
    q, k, v = (t.detach() for t in leaves)
    want = [f(q, k, v, dout, **mods) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    noise = rounding(q, k, v, dout, **mods)
    for name, value in zip(("dq", "dk", "dv"), got, strict=False):
        budget.check(name, value, *(getattr(t, name) for t in (*want, noise)))
    budget.check("table", got[3], *(t.captured[0] for t in (*want, noise)))


@judging.on_the_gpu_alone
def test_nobody_waits() -> None:
    """First calls and later ones, forward and backward, under torch's check that nothing waits for the device."""
    from anyattn.sparsity.lists import kept_transposed
    from anyattn.sparsity.read_lists import read_lists

    mask = mask_of(runs(7, 0), RESTS["causal"])
    tensors = [t.requires_grad_() for t in qkv(1, 4, 2, LENGTH, LENGTH, 64)]
    judging.flex(*tensors, block_mask=lists_of(mask)).sum().backward()  # compiles
    lists = lists_of(mask)
    kept_transposed(read_lists(lists))  # the one thing that waits, where a backward pass goes by lists
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            judging.flex(*tensors, block_mask=lists).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@judging.on_the_gpu_alone
def test_two_streams_at_once() -> None:
    """Tables of one stream are not there yet for another: each stream's call is right, whichever came first."""
    mask = mask_of(runs(7, 5), RESTS["causal"])
    tensors = qkv(2, 4, 2, LENGTH, LENGTH, 64)
    want = judging.flex(*tensors, block_mask=lists_of(mask))
    for _ in range(10):
        lists = lists_of(mask)
        torch.cuda.synchronize()
        streams, got = [torch.cuda.Stream(), torch.cuda.Stream()], []
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if at == 0:
                    torch.cuda._sleep(20_000_000)
                got.append(judging.flex(*tensors, block_mask=lists))
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in got)


@judging.on_the_gpu_alone
def test_in_a_graph() -> None:
    """What is captured reads the ids of each replay, and what was kept before stays right."""
    ids = runs(7, 5).to(DEVICE)
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    tensors = qkv(2, 4, 2, LENGTH, LENGTH, 64)
    judging.flex(*tensors, block_mask=lists_of(mask))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = judging.flex(*tensors, block_mask=lists_of(mask))
    for other in (runs(3, 8), apart(4, 9)):
        ids.copy_(other)
        graph.replay()
        want = judging.flex(*tensors, block_mask=lists_of(mask))
        judging.check("graph", {"out": out.clone()}, *tensors, mask=mask)
        judging.check("after", {"out": want}, *tensors, mask=mask)
