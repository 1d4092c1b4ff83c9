"""Chosen blocks on a GPU: lists per K/V head, edge cases, random choices for a few programs, packed sequences, thresholds in graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import AuxRequest, BlockMask, VarlenBlockSparseTensors, masks
from anyattn.arithmetic import ceil_div
from tests.support.chosen_blocks import EDGES, choice, edge, mask_of, table_of
from tests.support.compiling import fresh
from tests.support.fuzz.choices import Choice
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import DEVICE, Capturing, hopper_alone, judge, on_the_gpu_alone, qkv, same

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240, method="thread")]
judging.needs_the_backend()

HOLES: Any = lambda b, h, q, k: (q * k) % 7 != 0


def lists_of(indices: Tensor, tile: tuple[int, int], lengths: tuple[int, int], heads: int, **options: Any) -> dict[str, Any]:
    """A block mask of chosen blocks, and the mask that it means. heads: of the queries."""
    table = table_of(indices, ceil_div(lengths[1], tile[1]))
    group, causal, mask_mod = heads // indices.shape[1], options.get("causal", False), options.get("mask_mod")
    made = BlockMask.from_topk(indices.to(DEVICE), BLOCK_SIZE=tile, seq_lengths=lengths, **options)
    return {"block_mask": made, "mask": Capturing(lambda to: mask_of(to(table), tile, group, lengths, causal, mask_mod))}


# ---- lists of K/V heads, which kernels read in place


@pytest.mark.parametrize(
    ("heads", "d", "tile"), [((8, 2), 128, (64, 64)), ((6, 2), 64, (128, 128)), ((12, 3), 128, (128, 64)), ((4, 4), 128, (64, 64))], ids=str
)
def test_lists_of_key_value_heads(heads: tuple[int, int], d: int, tile: tuple[int, int]) -> None:
    """Other lists for each entry and K/V head, both passes; those copied for each query head give the same output bits."""
    lengths = (450, 520)
    indices = choice((2, heads[1]), lengths, tile, 3)
    inputs = qkv(2, *heads, *lengths, d=d)
    given = lists_of(indices, tile, lengths, heads[0], causal=True)
    out = judge(inputs, backward=True, kernel_options={"pack_gqa": False}, **given)
    each = lists_of(indices.repeat_interleave(heads[0] // heads[1], 1), tile, lengths, heads[0], causal=True)
    assert same(out, judge(inputs, backward=False, kernel_options={"pack_gqa": False}, **each))


@pytest.mark.parametrize("heads", [(8, 2), (12, 2), (16, 2)], ids=str)
@pytest.mark.parametrize("queries", [5, 300])
def test_query_heads_that_share_row_tiles(queries: int, heads: tuple[int, int]) -> None:
    lengths = (queries, 700)
    inputs = qkv(2, *heads, *lengths)
    for tile, options in (((64, 64), {}), ((128, 128), {"mask_mod": HOLES})):
        indices = choice((2, heads[1]), lengths, tile, 4, seed=queries)
        judge(inputs, kernel_options={"pack_gqa": True}, **lists_of(indices, tile, lengths, heads[0], **options))


@hopper_alone
def test_gradients_of_divided_groups() -> None:
    """Few K/V heads: their query heads are divided into parts, each by a thread block."""
    lengths = (400, 300)
    for heads in ((16, 2), (6, 2)):
        indices = choice((1, 2), lengths, (64, 64), 2)
        judge(qkv(1, *heads, *lengths), backward=True, **lists_of(indices, (64, 64), lengths, heads[0]))


def test_deterministic_gradients() -> None:
    lengths = (450, 520)
    indices = choice((1, 2), lengths, (128, 128), 2)
    options = lists_of(indices, (128, 128), lengths, 4, causal=True) | {"deterministic": True, "backward": True}
    assert same(judge(qkv(1, 4, 2, *lengths), **options), judge(qkv(1, 4, 2, *lengths), **options))


@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("listed", [2, 4, 1])
def test_packed_sequences(listed: int, layout: str) -> None:
    batch = ragged.drawn(([70, 0, 300, 129, 1], [130, 5, 400, 256, 64]))
    stored, tile = ragged.packed(batch), (128, 128)
    each = [choice((1, listed), (len(q), len(k)), tile, 2, seed) for seed, (q, k, _) in enumerate(batch)]
    rows, columns = (max(ceil_div(len(one[side]), 128) for one in batch) for side in (0, 1))
    table = torch.zeros(len(batch), listed, rows, columns, dtype=torch.bool)
    for b, one in enumerate(each):
        own = table_of(one, ceil_div(len(batch[b][1]), 128))[0]
        table[b, :, : own.shape[1], : own.shape[2]] = own
    where = {name: t for name, t in stored.where.items() if name.startswith("cu_seqlens")}
    lists = VarlenBlockSparseTensors.from_topk(torch.cat(each, 2)[0].to(DEVICE), tile=tile, layout=layout, **where)
    meant = {"mask_mod": mask_of(table.to(DEVICE), tile, 4 // listed, (0, 0))}
    ragged.judge(batch, stored, {}, layout, more=meant, block_sparse_tensors=lists)
    ragged.judge_gradients(batch, stored, {}, layout, more=meant, block_sparse_tensors=lists)


# ---- edge cases


@pytest.mark.parametrize("name", EDGES)
def test_edge_cases(name: str) -> None:
    lengths, numbers = edge(name, 64)
    inputs = qkv(1, 4, 2, *lengths)
    for causal in (False, True):
        judge(inputs, backward=True, **lists_of(numbers, (64, 64), lengths, 4, causal=causal))


# ---- random choices, of programs that are compiled once


PROGRAMS: dict[str, tuple[int, tuple[int, int], tuple[int, int], str, bool, Any]] = {
    "64": (128, (64, 64), (8, 2), "K/V heads", False, None),
    "64, holes": (64, (64, 64), (4, 2), "query heads", False, HOLES),
    "128": (128, (128, 128), (6, 2), "K/V heads", True, None),
    "128, window": (64, (128, 128), (3, 1), "all heads", False, masks.sliding_window(200, 30)),
    "wide": (256, (64, 64), (4, 2), "K/V heads", True, None),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_random_choices(name: str) -> None:
    """Lengths, numbers and counts; every third both ways."""
    (d, tile, heads, of, causal, mask_mod), draws = PROGRAMS[name], random.Random(name)
    for i in range(24 if judging.RUNS else 6):
        lengths = (draws.choice((1, 63, 64, 65, 200, 449, 700)), draws.choice((1, 63, 65, 128, 333, 512, 900)))
        k, has_counts, is_int32 = draws.choice((0, 1, 2, 5, 12)), draws.random() < 0.5, draws.random() < 0.5
        drawn = Choice(tile, k, of, False, causal, has_counts, is_int32, i)
        made, meant = drawn.made(2, heads, lengths, mask_mod, DEVICE)
        inputs = qkv(2, *heads, *lengths, d=d, kind=judging.KINDS[i % 3], seed=i)
        options: dict[str, Any] = {"kernel_options": {"pack_gqa": False}, "label": f"{lengths} {drawn}"}
        judge(inputs, mask=meant, block_mask=made, backward=i % 3 == 0, **options)


# ---- thresholds in graphs


def skipping(q: Tensor, k: Tensor, v: Tensor, below: Any) -> tuple[Tensor, Tensor]:
    out, aux = anyattn.flex_attention(
        q, k, v, mask_mod=masks.causal(), enable_gqa=True, skip_below=below, return_aux=AuxRequest(skipped=True)
    )
    return out, aux.skipped


@on_the_gpu_alone
def test_thresholds_in_compiled_code_and_cuda_graphs() -> None:
    q, k, v = qkv(2, 4, 2, 1000, 1000)
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, :500, 0] = 3.0 * 128**0.5
    compiled, graphs = fresh(skipping, "inductor")
    for size in (0.0, 1e-3, 0.1):
        below = torch.full((4,), size, device=DEVICE)
        got, wanted = compiled(q, k, v, below), skipping(q, k, v, below)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1]) and bool(got[1].any()) is (size > 0)
    assert graphs.frame_count == 1
    below = torch.zeros(4, device=DEVICE)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compiled(q, k, v, below)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, share = compiled(q, k, v, below)
    for size in (0.0, 0.1):
        below.fill_(size)
        graph.replay()
        wanted = skipping(q, k, v, below)
        assert torch.equal(out, wanted[0]) and torch.equal(share, wanted[1])
