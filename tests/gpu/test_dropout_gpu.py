"""Dropout on a GPU: the bits of the definition, out and gradients by the oracle with the same bits, a new seed at each replay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.mods.analysis.evaluate import evaluate
from tests.support.gpu import judging
from tests.support.gpu.judging import BACKEND, DEVICE, RUNS, drawn, judge, qkv, where_calls_run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
judging.needs_the_backend()

IDS = torch.arange(4000) // 300
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(100, 7),
    "sinks": masks.sink_window(4, 90),
    "dilated": masks.dilated(3, 200),
}


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("first", [0, 1024, 1000])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_bits(heads: tuple[int, int], first: int, p: float) -> None:
    """Equal scores of 128 keys whose values are the rows of an identity: the output is not 0 where the pair is kept."""
    rows, keys = 300, 1200
    q, k, v = qkv(2, *heads, sq=rows, sk=keys, d=64, dv=128)
    q.zero_()
    v.zero_()
    v[:, :, first : first + 128] = torch.eye(128)
    dropout = drawn(1, p)
    torch.manual_seed(1)
    out = anyattn.flex_attention(
        q, k, v, enable_gqa=True, mask_mod=lambda b, h, i, j: (j >= first) & (j < first + 128), dropout_p=p, backend=BACKEND
    )
    if RUNS:
        b, h, i = (
            torch.arange(n, device=DEVICE).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate((2, heads[0], rows))
        )
        kept = evaluate(dropout.keep, b, h, i, torch.arange(first, first + 128, device=DEVICE))
        assert torch.equal(out != 0, kept)


@pytest.mark.parametrize("d", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_dense(name: str, dtype: torch.dtype, d: int) -> None:
    judge(qkv(2, 4, 2, sq=300, sk=333, d=d, dtype=dtype), mask=MASKS[name], backward=True, dropout_p=0.2)


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 400), (64, 128), (257, 31), (1025, 1025), (2048, 2048)])
def test_lengths(sq: int, sk: int) -> None:
    judge(qkv(1, 4, 2, sq=sq, sk=sk, d=128), mask=masks.causal(), backward=True, dropout_p=0.1)


@where_calls_run  # the backward pass is Triton's
@pytest.mark.parametrize("d", [192, 256])
def test_wide_heads(d: int) -> None:
    judge(qkv(1, 2, 1, sq=200, sk=333, d=d), mask=masks.causal(), backward=True, dropout_p=0.1)


@where_calls_run
def test_score_mod_sink_and_packed_heads() -> None:
    judge(qkv(1, 2, 1, sq=200, sk=333, d=64), score=lambda s, b, h, i, j: 20 * torch.tanh(s / 20), backward=True, dropout_p=0.3)
    judge(qkv(1, 4, 2, sq=200, sk=333, d=128), sink=torch.linspace(-1, 1, 4), backward=True, dropout_p=0.3)
    judge(qkv(2, 8, 1, sq=20, sk=900, d=128), kernel_options={"pack_gqa": True}, dropout_p=0.3)


def test_block_mask() -> None:
    ids = IDS.to(DEVICE)
    lists = anyattn.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, 700, 700, device=DEVICE)
    judge(qkv(2, 4, 2, sq=700, sk=700, d=128), mask=lambda b, h, i, j: ids[i] == ids[j], block_mask=lists, backward=True, dropout_p=0.2)


def test_packed_sequences() -> None:
    """Each sequence alone, as the batch entry of its number, gives the same bits of out as in the packed batch."""
    lengths, dropped = (300, 129, 1, 70), 0.3
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    q, k, v = (t[0].transpose(0, 1).detach().requires_grad_() for t in qkv(1, 4, 2, sq=500, sk=500, d=128))
    torch.manual_seed(0)
    out = anyattn.flash_attn_varlen_func(q, k, v, ends, ends, causal=True, dropout_p=dropped, backend=BACKEND)
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    if not RUNS:
        return
    padded = [torch.zeros(4, 300, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in (q, k, v)]
    for i, n in enumerate(lengths):
        for whole, t in zip(padded, (q, k, v), strict=True):
            whole[i, :n] = t.detach()[ends[i] : ends[i] + n]
    leaves = [t.requires_grad_() for t in padded]
    torch.manual_seed(0)
    alone = anyattn.flash_attn_func(*leaves, causal=True, dropout_p=dropped, backend=BACKEND)
    dout = torch.zeros_like(alone)
    for i, n in enumerate(lengths):
        dout[i, :n] = 1
    found = torch.autograd.grad(alone, leaves, dout)
    for i, n in enumerate(lengths):
        assert torch.equal(out[ends[i] : ends[i] + n], alone[i, :n])
        for packed, single in zip(grads, found, strict=True):
            difference = (packed[ends[i] : ends[i] + n] - single[i, :n]).float().abs().max()
            assert float(difference) <= 2**-6 * float(single.float().abs().max())


@judging.on_the_gpu_alone
def test_a_graph_draws_at_each_replay() -> None:
    q, k, v = qkv(1, 4, 4, sq=256, sk=256, d=64)
    run = lambda: anyattn.flex_attention(q, k, v, dropout_p=0.5, backend=BACKEND)
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    found = []
    for _ in range(2):
        graph.replay()
        found.append(out.clone())
    assert not torch.equal(*found)


@where_calls_run
def test_no_dropout_is_the_call_without_it() -> None:
    q, k, v = qkv(1, 4, 4, sq=256, sk=256, d=64)
    assert torch.equal(*(anyattn.flex_attention(q, k, v, backend=BACKEND, **given) for given in ({}, {"dropout_p": 0.0})))
