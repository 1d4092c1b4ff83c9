"""Lists that a compiled graph computes: Inductor gives one list's memory to the next, and each call follows its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import anyattn
from anyattn import masks
from anyattn.custom_ops.own_lists import own_list
from tests.support.compiling import fresh
from tests.support.covering import few

S, TILE, STEPS = 64, 16, 3
N = S // TILE


def computed(x: Tensor, n: int, room: int = N) -> tuple[Tensor, Tensor]:
    """Counts and indices of the first tiles of each row; how many differs with n."""
    cnt = ((torch.arange(N, dtype=torch.int32) + n + x) % room + 1)[None, None]
    idx = torch.arange(room, dtype=torch.int32).expand(1, 1, N, room)
    return cnt, torch.where(idx < cnt[..., None], idx, 0)


def flex(q: Tensor, k: Tensor, v: Tensor, x: Tensor, n: int) -> Tensor:
    lists = dict.fromkeys(("full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"))
    cnt, idx = computed(x, n)
    everything = lambda b, h, i, j: i + j >= 0
    mask = anyattn.BlockMask(
        seq_lengths=(S, S), kv_num_blocks=cnt, kv_indices=idx, **lists, BLOCK_SIZE=(TILE, TILE), mask_mod=everything
    )  # fmt: skip
    return anyattn.flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=mask).transpose(1, 2)


def flash(q: Tensor, k: Tensor, v: Tensor, x: Tensor, n: int) -> Tensor:
    """Compact lists, which are widened: the wide ones are kept."""
    lists = anyattn.BlockSparseTensors(*computed(x, n, N - 1), tile=(TILE, TILE), lengths=(S, S))
    return anyattn.flash_attn_func(q, k, v, block_sparse_tensors=lists)


@pytest.mark.parametrize("attention", few([flex, flash], flash))
def test_lists_of_one_size_in_one_graph(attention: Callable) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        outs = []
        for _ in range(STEPS):  # of equal code: what Inductor writes for the first step's lists it compiles for all
            q = attention(q, k, v, x, 0)
            x = x + 1 + (q.sum() * 0).to(torch.int32)  # the next lists wait for this call, and get the memory of its lists
            outs.append(q)
        return torch.stack(outs)

    given = [torch.randn(1, S, 1, 16) for _ in range(3)]
    compiled, _ = fresh(call, "inductor")
    for x in range(2):
        with torch.no_grad():
            found, wanted = (f(*given, torch.tensor(x, dtype=torch.int32)) for f in (compiled, call))
        assert torch.equal(found, wanted)


def recorded(call: Callable, *given: Any) -> list[int]:
    """How many copies, and how many of our operators, there are in the graph of a call."""
    torch._dynamo.reset()
    graphs = []

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    with torch.no_grad():
        torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=record))(*given)
    return [sum(what in name for name in graphs[0]) for what in ("anyattn.own_list", "anyattn.")]


def test_one_copy_of_a_list_that_two_calls_take() -> None:
    q, cnt = torch.randn(1, S, 1, 16), torch.ones(1, 1, N, dtype=torch.int32)

    def twice(q: Tensor, cnt: Tensor) -> Tensor:
        lists = anyattn.BlockSparseTensors(cnt + 1, torch.zeros(1, 1, N, N, dtype=torch.int32), tile=(TILE, TILE))
        q = anyattn.flash_attn_func(q, q, q, block_sparse_tensors=lists)
        return anyattn.flash_attn_func(q, q, q, block_sparse_tensors=lists)

    assert recorded(lambda q, c: twice(q, c - 1), q, cnt) == [2, 4]


def test_no_copies_of_lists_from_outside_and_of_our_own_makers() -> None:
    q, causal = torch.randn(1, S, 1, 16), masks.causal()
    lists = anyattn.compute_block_sparsity(TILE, TILE, None, None, S, S, causal, device="cpu")

    def made(q: Tensor) -> Tensor:
        lists = anyattn.compute_block_sparsity(TILE, TILE, None, None, S, S, causal, device="cpu")
        return anyattn.flash_attn_func(q, q, q, mask_mod=causal, block_sparse_tensors=lists)

    def made_mask(q: Tensor) -> Tensor:
        mask = anyattn.create_block_mask(causal, None, None, 1, S, device="cpu", BLOCK_SIZE=TILE)
        return anyattn.flex_attention(q.transpose(1, 2)[:, :, :1], *2 * [q.transpose(1, 2)], block_mask=mask)

    assert recorded(lambda q, m: anyattn.flash_attn_func(q, q, q, mask_mod=causal, block_sparse_tensors=m), q, lists) == [0, 1]
    assert recorded(made, q) == [0, 2]
    assert recorded(made_mask, q) == [0, 2]


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("attention", [flex, flash])
def test_exported_programs_copy_too(attention: Callable, strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
            return attention(attention(q, k, v, x, 0), k, v, x, 1)

    given = (*(torch.randn(1, S, 1, 16) for _ in range(3)), torch.tensor(0, dtype=torch.int32))
    program = torch.export.export(Model(), given, strict=strict)
    assert sum("own_list" in str(node.target) for node in program.graph.nodes) == 4
    assert torch.equal(program.module()(*given), Model()(*given))


def test_lists_from_outside_that_the_graph_writes_to() -> None:
    def call(q: Tensor, cnt: Tensor, idx: Tensor) -> Tensor:
        lists = anyattn.BlockSparseTensors(cnt, idx, tile=(TILE, TILE))
        before = anyattn.flash_attn_func(q, q, q, block_sparse_tensors=lists)
        cnt.add_(1)
        return torch.stack([before, anyattn.flash_attn_func(q, q, q, block_sparse_tensors=lists)])

    q, idx = torch.randn(1, S, 1, 16), torch.arange(N, dtype=torch.int32).expand(1, 1, N, N).contiguous()
    for backend in ("aot_eager", "inductor"):
        compiled, _ = fresh(call, backend)
        counts = [torch.ones(1, 1, N, dtype=torch.int32) for _ in range(2)]
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(compiled(q, counts[0], idx), call(q, counts[1], idx))
                assert torch.equal(*counts)


def test_the_operator() -> None:
    for one in (torch.arange(6, dtype=torch.int32).view(2, 3).T, torch.ones(1, 3, dtype=torch.int32).expand(4, 3)):
        found = own_list(one)
        assert torch.equal(found, one) and found.is_contiguous() and found.data_ptr() != one.data_ptr()
        torch.library.opcheck(own_list, (one,))
