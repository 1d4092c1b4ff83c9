"""``BlockMask.from_topk`` on a GPU: the lists of the CPU without a wait, in CUDA graphs and compiled code, and results by both backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import BlockMask, masks
from anyattn.sparsity.block_mask import LISTS
from tests.support.chosen_blocks import choice, mask_of, table_of
from tests.support.compiling import fresh
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, Capturing, judge, on_the_gpu_alone, qkv
from tests.support.gpu.waiting import no_waiting

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

HOLES: Any = lambda b, h, q, k: (q * k) % 7 != 0
SHAPES: list[tuple] = [
    *(((1000, 1300), (128, 128), 3), ((2049, 700), (64, 16), 9), ((40, 3000), (1, 64), 16), ((3000, 3000), (64, 64), 16)),
    *(((300, 3000), (1, 1), 700), ((100, 9000), (1, 1), 5000)),
]


@on_the_gpu_alone
@pytest.mark.parametrize("mask_mod", [None, masks.sliding_window(300, 20), HOLES], ids=["none", "window", "holes"])
@pytest.mark.parametrize(("lengths", "tile", "k"), SHAPES, ids=str)
def test_lists_are_those_of_the_cpu(lengths: tuple[int, int], tile: tuple[int, int], k: int, mask_mod: Any) -> None:
    indices = choice((2, 3), lengths, tile, k)
    counts = torch.randint(-1, k + 1, indices.shape[:3], generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"BLOCK_SIZE": tile, "seq_lengths": lengths, "mask_mod": mask_mod}
    for causal in (False, True):
        for dtype in (torch.int32, torch.int64):
            theirs = BlockMask.from_topk(indices, counts=counts, causal=causal, **options)
            there = indices.to(DEVICE, dtype), counts.to(DEVICE)
            with no_waiting():
                ours = BlockMask.from_topk(there[0], counts=there[1], causal=causal, **options)
                blocks = ours.block_sparse()
                blocks.transposed()
            for name in LISTS if tile[0] > 1 else LISTS[:4]:
                assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
            assert (ours.q_indices is None) == (tile[0] == 1)
            wanted = theirs.block_sparse()
            for found, want in ((blocks, wanted), (blocks.transposed(), wanted.transposed())):
                assert torch.equal(found.classes().cpu(), want.classes())
                assert torch.equal(found.mask_block_idx.cpu(), want.mask_block_idx)


@on_the_gpu_alone
def test_numbers_beyond_the_keys_are_read_as_nothing() -> None:
    indices = torch.tensor([[[[7, 1, -9, 2**40], [2, 3, 2**31, 0]]]], device=DEVICE)
    counts = torch.tensor([[[9, 2]]], device=DEVICE)
    mask = BlockMask.from_topk(indices, counts=counts, BLOCK_SIZE=16, seq_lengths=(32, 48))
    assert mask.to_dense().tolist() == [[[[0, 1, 0], [0, 0, 1]]]]


@pytest.mark.parametrize("tile", [(64, 64), (128, 128), (1, 64), (1, 16), (1, 1), (64, 32), (32, 128)], ids=str)
@pytest.mark.parametrize("of", [2, 4, 1])
def test_results(tile: tuple[int, int], of: int) -> None:
    """Choices of K/V heads, of query heads and of all, by a named backend where it takes the lists."""
    if not judging.RUNS and tile != (128, 128):
        pytest.skip("Triton's, which compiles when it launches")
    for lengths, causal in (((300, 333), True), ((260, 512), False)):
        indices = choice((2, of), lengths, tile, 3)
        table = table_of(indices, -(-lengths[1] // tile[1]))
        block_mask = BlockMask.from_topk(indices.to(DEVICE), BLOCK_SIZE=tile, seq_lengths=lengths, causal=causal)
        exact = Capturing(lambda to, t=table, s=lengths, c=causal: mask_of(to(t), tile, 4 // of, s, c))
        backend = None if judging.SUBJECT == "hopper" and tile != (128, 128) else judging.BACKEND
        judge(qkv(sq=lengths[0], sk=lengths[1]), mask=exact, block_mask=block_mask, backend=backend, label=f"{lengths}")


@on_the_gpu_alone
def test_single_queries_take_memory_of_their_choices_alone() -> None:
    """Lists, gradients and what is between them: not a byte for each pair of a query and a key."""
    length, k, heads = 16384, 32, 2
    indices = choice((1, heads), (length, length), (1, 1), k).to(DEVICE, torch.int32)
    rows = [t.requires_grad_() for t in qkv(sq=length, sk=length)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    mask = BlockMask.from_topk(indices, BLOCK_SIZE=(1, 1), seq_lengths=(length, length), causal=True)
    assert torch.cuda.max_memory_allocated() - before <= 20 * indices.numel() + 2**22
    grads = [anyattn.flex_attention(*rows, block_mask=mask, enable_gqa=True).float().square().sum() for _ in range(2)]
    found = [torch.autograd.grad(g, rows) for g in grads]
    assert all(map(torch.equal, *found)) and torch.cuda.max_memory_allocated() - before < length * length * heads


def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, block: tuple[int, int] = (64, 64)) -> tuple[Tensor, ...]:
    mask = BlockMask.from_topk(indices, BLOCK_SIZE=block, seq_lengths=(q.shape[2], k.shape[2]), causal=True)
    out = anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    return out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))


@on_the_gpu_alone
@pytest.mark.parametrize("block", [(64, 64), (1, 64), (1, 1)], ids=str)
def test_a_graph_takes_new_indices(block: tuple[int, int]) -> None:
    """Forward and backward, masks included, in one CUDA graph."""
    q, k, v = (t.requires_grad_() for t in qkv(sq=512, sk=512))
    indices = choice((2, 2), (512, 512), block, 3).to(DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            attend(q, k, v, indices, block)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(q, k, v, indices, block)
    for seed in (1, 2):
        indices.copy_(choice((2, 2), (512, 512), block, 3, seed))
        graph.replay()
        wanted = attend(q, k, v, indices, block)
        assert torch.equal(results[0], wanted[0]), seed
        for found, want in zip(results[1:], wanted[1:], strict=True):  # atomic sums
            assert float((found - want).float().norm()) <= 1e-2 * float(want.float().norm()), seed


@on_the_gpu_alone
def test_compiled_code_takes_new_indices() -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
        mask = BlockMask.from_topk(indices, BLOCK_SIZE=64, seq_lengths=(q.shape[2], k.shape[2]), causal=True)
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    compiled, graphs = fresh(call, "inductor")
    inputs = qkv(sq=512, sk=512)
    for seed in range(3):
        indices = choice((2, 2), (512, 512), (64, 64), 3, seed).to(DEVICE)
        assert torch.equal(compiled(*inputs, indices), call(*inputs, indices))
    assert graphs.frame_count == 1
