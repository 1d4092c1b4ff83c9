"""Block masks of documents, which the Hopper backend runs as sequences where every document is one run of positions, and by lists else."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, KINDS, Capturing, both, flex, judge, qkv, random, same

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

S = 900


def ids_of(*lengths: int, values: tuple[int, ...] = (5, -3, 12, 0, 7, 100, -40, 2)) -> Tensor:
    return torch.repeat_interleave(torch.tensor(values[: len(lengths)]), torch.tensor(lengths))


ONE = ids_of(1, 127, 300, 128, 200, 144)
OTHER = ids_of(640, 3, 257)
ENTRIES = torch.stack([ONE, OTHER])
INTERLEAVED = torch.arange(S) // 100 % 3
COMES_AGAIN = torch.where(torch.arange(S) > 850, 5, ONE)
SHORT = torch.arange(S) // 7


def by_entry(ids: Tensor, *others: Any) -> Capturing:
    return Capturing(lambda to: anyattn.and_masks(masks.document(to(ids)), *others))


MASKS: dict[str, Any] = {
    "documents": by_entry(ONE),
    "documents by entry": by_entry(ENTRIES),
    "bytes": by_entry(ENTRIES.to(torch.uint8)),
    "causal": by_entry(ENTRIES, masks.causal()),
    "window": by_entry(ENTRIES.to(torch.int32), masks.sliding_window(70, 0)),
    "both sides": by_entry(ONE, masks.sliding_window(20, 50)),
    "hidden rows": by_entry(ENTRIES, masks.causal(-5)),
    "one document": by_entry(torch.zeros(S, dtype=torch.int64), masks.causal()),
    "interleaved": by_entry(INTERLEAVED, masks.causal()),
    "comes again": by_entry(torch.stack([ONE, COMES_AGAIN])),
    "short": by_entry(SHORT),
}
RUN_AS_SEQUENCES = ("documents", "documents by entry", "bytes", "causal", "window", "both sides", "hidden rows", "one document")


def block_mask(mask: Any, entries: int | None = 2, s: int = S, **options: Any) -> Any:
    return anyattn.create_block_mask(both(mask)[0], entries, None, s, s, device=DEVICE, **options)


@pytest.mark.parametrize("name", MASKS)
def test_documents(name: str) -> None:
    """The first call does not know yet whether the ids are documents; the later ones do."""
    lists = block_mask(MASKS[name])
    for kind in KINDS:
        inputs = qkv(2, 4, 2, S, S, kind=kind)
        first = judge(inputs, mask=MASKS[name], block_mask=lists, label=kind)
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        assert same(first, flex(*inputs, block_mask=lists, return_lse=True)[0])
    judge(inputs, mask=MASKS[name], block_mask=lists, has_max=True)


def test_one_entry_without_statistics() -> None:
    lists = block_mask(MASKS["documents"], None)
    for batch in (1, 3):
        inputs = qkv(batch, 6, 2, S, S)
        out = flex(*inputs, block_mask=lists)
        judging.check(f"batch {batch}", {"out": out}, *inputs, mask=both(MASKS["documents"])[1])
        assert same(out, flex(*inputs, block_mask=lists))


SCORES: dict[str, Any] = {
    "alibi": Capturing(lambda to: scores.alibi(to(torch.tensor([0.02, 0.04, 0.06, 0.08])))),
    "softcap": scores.softcap(5.0),
    "table": Capturing(lambda to: scores.relative_bias(to(random(4, 201)))),
    "pairs": Capturing(lambda to: scores.pair_bias(to(random(1, 4, S, S)))),  # sees where a document begins: by lists
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", ["documents by entry", "causal", "interleaved"])
def test_with_scores(name: str, score: str) -> None:
    judge(qkv(2, 4, 2, S, S), score=SCORES[score], mask=MASKS[name], block_mask=block_mask(MASKS[name]))


@pytest.mark.parametrize("d", [64, 72, 256])
def test_head_dims_and_a_sink(d: int) -> None:
    for name in ("causal", "comes again"):
        lists = block_mask(MASKS[name])
        judge(qkv(2, 4, 4, S, S, d=d), mask=MASKS[name], block_mask=lists, sink=torch.linspace(-1, 3, 4))


@pytest.mark.parametrize("tile", [64, (256, 128)], ids=str)
def test_tiles_of_lists(tile: Any) -> None:
    for name in ("documents by entry", "interleaved"):
        judge(qkv(2, 4, 2, S, S), mask=MASKS[name], block_mask=block_mask(MASKS[name], BLOCK_SIZE=tile))


def test_a_mask_beside_the_block_mask() -> None:
    """Both must allow: the documents come by lists, causal as a mask of its own."""
    inputs, lists = qkv(2, 4, 2, S, S), block_mask(MASKS["documents by entry"])
    want = judge(inputs, mask=MASKS["causal"], block_mask=block_mask(MASKS["causal"]))
    out = flex(*inputs, block_mask=lists, mask_mod=masks.causal())
    judging.check("beside", {"out": out}, *inputs, mask=both(MASKS["causal"])[1])
    assert not judging.RUNS or judging.SUBJECT != "hopper" or judging.MODE == "cpu" or same(out, want)


@pytest.mark.parametrize("s", [1, 2, 127, 128, 129, 1300])
def test_lengths(s: int) -> None:
    ids = (torch.rand(2, s, generator=torch.Generator().manual_seed(s)) < 0.005).long().cumsum(1)
    for others in ((), (masks.causal(),)):
        mask = by_entry(ids, *others)
        judge(qkv(2, 2, 1, s, s), mask=mask, block_mask=block_mask(mask, s=s))


# ---- what the ids hold later


def in_one_tile(entries: int = 2) -> tuple[Tensor, Any, list[Tensor]]:
    """Ids and a causal block mask of one tile, which is partial whatever documents there are; and other ids, the last two no documents."""
    base = torch.arange(256)
    kinds = [base // 100, base // 60 * -7, (base > 3).long(), base // 40 % 2, base // 3]
    kinds = [torch.stack([x, x.flip(0)])[:entries].to(DEVICE) for x in kinds]
    ids = kinds[0].clone()
    mask = lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)
    return ids, anyattn.create_block_mask(mask, entries, None, 256, 256, device=DEVICE, BLOCK_SIZE=256), kinds


@judging.where_calls_run
def test_ids_changed_in_place() -> None:
    ids, lists, kinds = in_one_tile()
    inputs = qkv(2, 4, 2, 256, 256)
    for again in range(2):
        for i, kind in enumerate(kinds):
            ids.copy_(kind)
            for _ in range(2):
                out, lse = flex(*inputs, block_mask=lists, return_lse=True)
                seen = lambda b, h, i, j, kind=kind: (kind[b, i] == kind[b, j]) & (i >= j)
                judging.check(f"{again}, {i}", {"out": out, "lse": lse}, *inputs, mask=seen)


@judging.on_the_gpu_alone
def test_a_graph_with_other_ids() -> None:
    """What the documents are is found anew in each replay, whether or not they are documents then."""
    ids, lists, kinds = in_one_tile()
    inputs = qkv(2, 4, 2, 256, 256)
    flex(*inputs, block_mask=lists, return_lse=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flex(*inputs, block_mask=lists, return_lse=True)
    for kind in (*kinds, kinds[0]):
        ids.copy_(kind)
        for t in (out, lse):
            t.fill_(judging.NAN)
        graph.replay()
        torch.cuda.synchronize()
        judging.check("graph", {"out": out, "lse": lse}, *inputs, mask=lambda b, h, i, j, k=kind: (k[b, i] == k[b, j]) & (i >= j))
        # the graph's lists followed from the ids when it was captured; those of a new block mask follow from the ids of now
        anew = anyattn.create_block_mask(lists.mask_mod, len(ids), None, 256, 256, device=DEVICE, BLOCK_SIZE=256)
        assert same((out, lse), flex(*inputs, block_mask=anew, return_lse=True))


# ---- on the device itself


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["causal", "comes again"])
def test_reruns_agree_and_wait_for_nothing(name: str) -> None:
    """More row tiles than multiprocessors; block masks made anew have their first calls among the others."""
    s = 1025
    ids = torch.stack([ids_of(1, 300, 500, 224), ids_of(1000, 25)]) if name == "causal" else torch.arange(s).expand(2, -1) // 300 % 3
    mask = by_entry(ids.contiguous(), masks.causal())
    inputs = qkv(2, 8, 8, s, s)
    want = flex(*inputs, block_mask=block_mask(mask, s=s), return_lse=True)
    for _ in range(10):
        lists = block_mask(mask, s=s)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [flex(*inputs, block_mask=lists, return_lse=True) for _ in range(30)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(same(want, x) for x in found)


@judging.on_the_gpu_alone
@judging.hopper_alone
@pytest.mark.parametrize("name", RUN_AS_SEQUENCES)
def test_documents_are_run_as_packed_sequences_are(name: str) -> None:
    """The same bits, and so the same way; what is by lists has others."""
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True}, "one document": {"causal": True}, "window": {"window_size": (70, 0)},
        "both sides": {"window_size": (20, 50)}, "hidden rows": {"window_size": (None, -5)},
    }  # fmt: skip
    inputs, ids = qkv(2, 4, 2, S, S), {"documents": ONE, "both sides": ONE, "one document": ONE * 0}.get(name, ENTRIES).expand(2, -1)
    lists = block_mask(MASKS[name])
    assert "documents" in str(anyattn.explain(*inputs, block_mask=lists, enable_gqa=True).plan.why)
    out, lse = flex(*inputs, block_mask=lists, return_lse=True)
    for b in range(2):
        edges = [0, *(ids[b].diff().nonzero().flatten() + 1).tolist(), S]
        cu = torch.tensor(edges, dtype=torch.int32, device=DEVICE)
        packed = [t[b].transpose(0, 1) for t in inputs]
        most = max(y - x for x, y in pairwise(edges))
        given = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": most, "max_seqlen_k": most, "return_lse": True}
        want, want_lse = anyattn.flash_attn_varlen_func(*packed, **given, **options.get(name, {}), backend="hopper")
        assert same(out[b].transpose(0, 1), want) and same(lse[b], want_lse)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "documents by entry", "window", "interleaved"])
def test_gradients(name: str, deterministic: bool) -> None:
    """Both passes as sequences, and of interleaved documents both by the lists."""
    lists = block_mask(MASKS[name])
    judge(qkv(2, 4, 2, S, S), mask=MASKS[name], block_mask=lists, backward=True, deterministic=deterministic, label=name)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_held", [True, False])
def test_gradients_of_one_key_tile(is_held: bool, deterministic: bool) -> None:
    """dQ by lists is written at once, and that of documents is not cleared by it."""
    mask = by_entry(torch.arange(100) // 40 if is_held else torch.arange(100) // 10 % 2)
    judge(qkv(2, 4, 2, 100, 100), mask=mask, block_mask=block_mask(mask, s=100), backward=True, deterministic=deterministic)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["causal", "documents by entry", "interleaved"])
def test_deterministic_gradients_agree_bitwise(name: str) -> None:
    """Also between the first calls of a block mask, which make both launches, and later ones, which make one."""
    s = 8 * S
    mask = by_entry({"interleaved": INTERLEAVED.repeat(8)}.get(name, torch.repeat_interleave(ENTRIES, 8, 1)), *_BESIDE.get(name, ()))
    leaves = [t.detach().requires_grad_() for t in qkv(2, 16, 8, s, s)]
    dout = random(2, 16, s, leaves[0].shape[3], seed=1).to(leaves[0])
    first = None
    for _ in range(5):
        lists = block_mask(mask, s=s)
        for _ in range(40):
            out = flex(*leaves, block_mask=lists, deterministic=True)
            found = torch.autograd.grad(out, leaves, dout)
            first = found if first is None else first
            assert all(map(torch.equal, first, found))


_BESIDE = {"causal": (masks.causal(),), "interleaved": (masks.causal(),)}
