"""What a kernel does to memory and beside others: reruns, garbage around inputs, strides, streams, graphs, torch.compile, all doors."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging, ragged
from tests.support.gpu.graphs import IDS, captured, synchronize
from tests.support.gpu.judging import DEVICE, NAN, flex, hole, judge, qkv, random, same, surrounded

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

RERUNS = 300
nothing = hole(9, 5, 3)


# ---- the same bits again


def rerun(call: Any) -> None:
    first = call()
    differ = torch.zeros((), dtype=torch.bool, device=DEVICE)  # looked at once: launches follow one another without a pause
    for _ in range(RERUNS if judging.MODE == "gpu" else 2):
        for a, b in zip(first, call(), strict=True):
            differ |= (a != b).any()  # NaN counts as a difference
    assert not judging.RUNS or not bool(differ)


@pytest.mark.parametrize("name", ["causal", "full", "window", "lists"])
def test_reruns_agree(name: str) -> None:
    """288 row tiles for 132 multiprocessors: two waves and a ragged third."""
    heads = 8 if judging.MODE == "gpu" else 1
    q, k, v = qkv(4 if heads == 8 else 2, heads, heads, 1025, 1025)
    if name == "lists":
        mask = masks.document(IDS.to(DEVICE))
        lists = anyattn.create_block_mask(mask, len(q), None, 1025, 1025, device=DEVICE)
        rerun(lambda: flex(q, k, v, block_mask=lists, return_lse=True))
    else:
        mask = {"causal": masks.causal(), "full": None, "window": masks.sliding_window(200, 10)}[name]
        rerun(lambda: flex(q, k, v, None, mask, return_lse=True))


@pytest.mark.parametrize("form", ["packed", "pages of 64"])
def test_reruns_of_sequences_agree(form: str) -> None:
    lengths = ([1025, 3, 700, 2048], [1025, 900, 700, 2048]) if judging.MODE == "gpu" else ragged.LENGTHS
    stored = ragged.FORMS[form](ragged.drawn(lengths, heads=16, kv_heads=4))
    rerun(lambda: ragged.call(stored, causal=True))


# ---- memory around what is given, and what outputs held before


@pytest.mark.parametrize("fill", [NAN, float("inf")], ids=str)
@pytest.mark.parametrize("d", [128, 72, 256])
def test_what_lies_around_inputs_is_not_read(d: int, fill: float) -> None:
    inputs = qkv(d=d)
    around = [surrounded(t, fill) for t in inputs]
    # head dims differ in their strides, and masks in where rows end: not every pair has to be a kernel
    for mask in (None, masks.causal(33), masks.sliding_window(50, 20)) if d == 128 else (masks.causal(33),):
        want = judge(inputs, mask=mask)
        assert same(want, judge(around, mask=mask, meant=inputs))
    lists = masks.document(IDS.to(DEVICE))
    assert same(judge(inputs, mask=lists), judge(around, mask=lists, meant=inputs))


def test_what_lies_around_captured_tensors_is_not_read() -> None:
    whole = torch.full((2, 6, 800), NAN, device=DEVICE)
    whole[:, 1:5, 50:750] = random(2, 4, 700).to(DEVICE)
    tables = whole[:, 1:5, 50:750]
    table = tables[1]
    inputs = qkv()
    for score in (lambda s, b, h, i, j: s + table[h, i - j + 350], lambda s, b, h, i, j: s + tables[b, h, j]):
        assert judging.MODE != "gpu" or bool(torch.isfinite(flex(*inputs, score, masks.causal())).all())
        judge(inputs, score=score, mask=masks.causal())


@judging.on_the_gpu_alone
def test_outputs_do_not_depend_on_what_their_memory_held() -> None:
    """Everything that the cache of the allocator hands out holds first NaN, then a large number."""
    inputs, batch = qkv(2, 4, 2, 450, 500), ragged.drawn()
    lists = masks.document(IDS.to(DEVICE))
    calls = {
        "band": lambda: flex(*inputs, None, masks.sliding_window(3, -9), return_lse=True),
        "lists": lambda: flex(*inputs, None, lists, return_lse=True),
        "nothing": lambda: flex(*inputs, None, nothing, return_lse=True),
        "packed": lambda: ragged.call(ragged.partly_used(batch), causal=True),
    }
    for name, call in calls.items():
        want = call()
        for fill in (NAN, 1e30):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            held = [torch.full((size // 4,), fill, device=DEVICE) for size in [2048, 16384, 65536, 2**20, 4 * 2**20] * 24]
            del held
            assert same(want, call()), (name, fill)


def test_inputs_are_never_written() -> None:
    inputs = qkv()
    before = [t.clone() for t in inputs]
    flex(*inputs, None, masks.causal(), return_lse=True)
    assert same(before, inputs)


# ---- strides and doors


def test_strides() -> None:
    q, k, v = qkv(2, 4, 2, 300, 300)
    want = flex(q, k, v, None, masks.causal(), return_lse=True)
    by_token = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    wide = [torch.cat([t, t * NAN], -1)[..., :128] for t in (q, k, v)]
    every_other = [torch.stack([t, t * NAN], 3).flatten(2, 3)[:, :, ::2] for t in (q, k, v)]
    together = torch.cat([q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)], 2).transpose(1, 2)
    for other in (by_token, wide, every_other, list(together.split([4, 2, 2], 1)), [by_token[0], wide[1], every_other[2]]):
        assert same(want, flex(*other, None, masks.causal(), return_lse=True))


def test_expanded_keys() -> None:
    q, k, v = qkv(3, 4, 2, 300, 333)
    one, shared = [t[:1].contiguous() for t in (k, v)], [t[:1].expand(3, -1, -1, -1) for t in (k, v)]
    want = flex(q, *[t.contiguous() for t in shared], None, masks.causal())
    assert same(want, flex(q, *shared, None, masks.causal()))
    assert same(want, flex(q, *one, None, masks.causal()))
    head = [t[:, :1].expand(-1, 4, -1, -1) for t in (k, v)]
    assert same(flex(q, *[t.contiguous() for t in head], None, masks.causal()), flex(q, *head, None, masks.causal()))


def test_doors_give_the_same_bits() -> None:
    q, k, v = qkv(2, 4, 2, 256, 256)
    want, lse = flex(q, k, v, None, masks.causal(), return_lse=True)
    by_token = [t.transpose(1, 2) for t in (q, k, v)]
    out, of_flash = anyattn.flash_attn_func(*by_token, causal=True, return_lse=True, backend=judging.BACKEND)
    assert same((want, lse), (out.transpose(1, 2), of_flash))
    ends = torch.tensor([0, 256, 512], dtype=torch.int32, device=DEVICE)
    rows = [t.flatten(0, 1) for t in by_token]
    packed, _ = anyattn.flash_attn_varlen_func(
        *rows, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, return_lse=True, backend=judging.BACKEND
    )
    # the kernel for packed rows may add in another order
    judging.check("packed", {"out": packed.unflatten(0, (2, 256)).transpose(1, 2)}, q, k, v, mask=masks.causal())


def test_a_batch_in_another_order_and_alone() -> None:
    q, k, v = qkv(3, 4, 2)
    want = flex(q, k, v, None, masks.causal())
    assert same(want.flip(0), flex(*(t.flip(0) for t in (q, k, v)), None, masks.causal()))
    assert same(want[1:2], flex(*(t[1:2] for t in (q, k, v)), None, masks.causal()))


# ---- streams, threads, graphs, torch.compile


def window_and_documents() -> tuple[Any, Any]:
    return masks.sliding_window(200, 0), masks.document(IDS.to(DEVICE))


@judging.on_the_gpu_alone
def test_two_streams_at_once() -> None:
    """Each stream's blocks draw their work from a counter of their own."""
    given = [qkv(2, 8, 8, 1025, 1025, seed=s) for s in (1, 2)]
    wanted = [flex(*x, None, mask, return_lse=True) for x, mask in zip(given, window_and_documents(), strict=True)]
    streams = [torch.cuda.Stream() for _ in given]
    synchronize()
    for _ in range(50):
        found = []
        for stream, x, mask in zip(streams, given, window_and_documents(), strict=True):
            with torch.cuda.stream(stream):
                found.append(flex(*x, None, mask, return_lse=True))
        synchronize()
        assert all(same(a, b) for a, b in zip(wanted, found, strict=True))


@judging.on_the_gpu_alone
def test_threads_at_once() -> None:
    given = [qkv(1, 4, 4, 700, 700, seed=s) for s in range(4)]
    wanted = [flex(*x, None, masks.causal()) for x in given]
    synchronize()
    wrong: list[int] = []

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(25):
                if not same(wanted[at], flex(*given[at], None, masks.causal())):
                    wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["causal", "window and score", "lists"])
def test_a_graph_with_other_inputs(name: str) -> None:
    """More row tiles than multiprocessors, so that the counter is drawn from, launch after launch."""
    inputs, others = qkv(2, 8, 8, 1025, 1025), qkv(2, 8, 8, 1025, 1025, seed=5)
    options: dict[str, Any] = {"return_lse": True}
    if name == "causal":
        options["mask"] = masks.causal()
    if name == "window and score":
        options |= {"mask": masks.sliding_window(200, 0), "score": scores.softcap(5.0)}
    if name == "lists":
        mask = masks.document(IDS.to(DEVICE))
        options["block_mask"] = anyattn.create_block_mask(mask, 2, None, 1025, 1025, device=DEVICE)
    want, first = (flex(*x, **options) for x in (others, inputs))
    graph, out = captured(lambda: flex(*inputs, **options))
    for _ in range(3):
        graph.replay()
        synchronize()
        assert same(out, first)
    for to, source in zip(inputs, others, strict=True):
        to.copy_(source)
    graph.replay()
    synchronize()
    assert same(out, want)


@judging.on_the_gpu_alone
def test_graphs_at_once() -> None:
    """Replays on two streams and calls on a third one, all of more row tiles than multiprocessors: none draws from another's counter."""
    given = [qkv(2, 8, 8, 1025, 1025, seed=s) for s in range(3)]
    want = [flex(*x, mask=masks.causal()) for x in given]
    graphs = [captured(lambda x=x: [flex(*x, mask=masks.causal()) for _ in range(4)]) for x in given[:2]]
    streams = [torch.cuda.Stream() for _ in range(3)]
    synchronize()
    for _ in range(10):
        for (graph, outs), stream in zip(graphs, streams, strict=False):
            with torch.cuda.stream(stream):
                for out in outs:
                    out.fill_(math.nan)
                graph.replay()
        with torch.cuda.stream(streams[2]):
            poison = torch.full_like(want[2], math.nan)  # what fresh memory may hold
            del poison
            found = flex(*given[2], mask=masks.causal())
        synchronize()
        assert same(found, want[2])
        assert all(same(out, right) for (_, outs), right in zip(graphs, want, strict=False) for out in outs)


@judging.on_the_gpu_alone
def test_a_graph_with_other_lengths() -> None:
    """Packed sequences whose ends change between replays."""
    total, ends, others = 900, [0, 100, 700, 900], [0, 450, 460, 900]
    q, k, v = (random(total, 4, 128, seed=s).bfloat16().to(DEVICE) for s in range(3))
    lengths = [torch.tensor(e, dtype=torch.int32, device=DEVICE) for e in (ends, others)]
    held = lengths[0].clone()

    def call(at: Tensor) -> Any:
        where = {"cu_seqlens_q": at, "cu_seqlens_k": at, "validate": False}
        return anyattn.flash_attn_varlen_func(q, k, v, **where, causal=True, return_lse=True, backend=judging.BACKEND)

    want = [call(at) for at in lengths]
    graph, out = captured(lambda: call(held))
    for at, expected in ((1, want[1]), (0, want[0])):
        held.copy_(lengths[at])
        graph.replay()
        synchronize()
        assert same(out, expected)


@judging.where_calls_run
def test_torch_compile() -> None:
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=DEVICE)
    lists = anyattn.create_block_mask(masks.document(IDS.to(DEVICE)), 2, None, 300, 300, device=DEVICE)
    causal, alibi = masks.causal(), anyattn.mod(lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex(q * 2, k, v, mask=causal, return_lse=True)

    def biased(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex(q * 2, k, v, alibi, return_lse=True)

    def by_lists(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex(q * 2, k, v, block_mask=lists, return_lse=True)

    def through_flash(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q * 2, k, v)), causal=True, backend=judging.BACKEND)

    inputs, exact = qkv(sk=300), slopes.double()
    documents = lambda b, h, i, j: (ids := IDS.to(DEVICE))[b, i] == ids[b, j]
    score = lambda s, b, h, i, j: s - exact[h] * (i - j).abs()
    for function, mods in (
        (plain, {"mask": causal}),
        (biased, {"score": score}),
        (by_lists, {"mask": documents}),
        (through_flash, {"mask": causal}),
    ):
        torch._dynamo.reset()
        # inductor would need a minute for what is around the call
        found = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
        got = {"out": found} if function is through_flash else {"out": found[0], "lse": found[1]}
        got["out"] = got["out"].transpose(1, 2) if function is through_flash else got["out"]
        judging.check(function.__name__, got, inputs[0] * 2, *inputs[1:], **mods)


@judging.where_calls_run
def test_gradients_through_torch_compile() -> None:
    inputs = [t.requires_grad_() for t in qkv(1, 2, 2, 200, 200)]
    causal = masks.causal()
    torch._dynamo.reset()
    out = torch.compile(lambda q, k, v: flex(q, k, v, mask=causal), fullgraph=True, backend="aot_eager")(*inputs)
    dout = random(*out.shape, seed=1).to(out.dtype).to(DEVICE)
    grads = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, inputs, dout), strict=True))
    judging.check("compiled", {"out": out, **grads}, *(t.detach() for t in inputs), dout, mask=causal)


@pytest.mark.skipif(judging.RUNS, reason="compiles ahead what tests of the device itself launch")
def test_kernels_of_the_device_tests() -> None:
    inputs = qkv(2, 8, 8, 1025, 1025)
    flex(*inputs, None, masks.causal())
    for mask in (None, masks.causal(), *window_and_documents(), masks.sliding_window(3, -9), nothing):
        flex(*inputs, None, mask, return_lse=True)
    flex(*inputs, scores.softcap(5.0), masks.sliding_window(200, 0), return_lse=True)
    slopes = torch.rand(8)
    flex(*inputs, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), return_lse=True)
    table = torch.zeros(2, 8, 1025)
    flex(*inputs, lambda s, b, h, i, j: s + table[b, h, j], masks.causal(), return_lse=True)
    ragged.call(ragged.packed(ragged.drawn()), causal=True)
    ragged.call(ragged.packed(ragged.drawn(ragged.EQUAL)), causal=True)
    ragged.call(ragged.paged(ragged.drawn(), 64), causal=True)


# ---- beyond 32 bits


@judging.on_the_gpu_alone
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_offsets_past_two_to_the_31(side: str) -> None:
    """The last heads of tensors of more than 2^31 elements against the same heads alone."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free memory")
    torch.cuda.empty_cache()
    heads, sq, sk = (33, 2**19, 256) if side == "queries" else (33, 256, 2**19)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.empty(1, heads, s, 128, dtype=torch.bfloat16, device=DEVICE).normal_(generator=generator) for s in (sq, sk, sk))
    assert max(q.numel(), k.numel()) > 2**31
    for mask in (None, masks.sliding_window(300, 300)):
        out, lse = flex(q, k, v, None, mask, return_lse=True)
        for head in (0, heads - 1):
            alone = [t[:, head : head + 1].clone() for t in (q, k, v)]
            assert same((out[:, head : head + 1], lse[:, head : head + 1]), flex(*alone, None, mask, return_lse=True)), (mask, head)
    rows = slice(-256, None)
    last = [t[:, -1:].clone() for t in (q[:, :, rows], k, v)]
    out, lse = (t[:, -1:, rows] for t in flex(q, k, v, return_lse=True))
    del q, k, v
    judging.check("the last rows", {"out": out, "lse": lse}, *last)


@judging.on_the_gpu_alone
def test_a_view_whose_strides_pass_two_to_the_31() -> None:
    torch.cuda.empty_cache()
    pool = torch.zeros(2**31 + 2**21, dtype=torch.bfloat16, device=DEVICE)
    made = qkv(2, 1, 1, 300, 300)
    views = []
    for at, t in enumerate(made):
        views.append(pool.as_strided(t.shape, (2**31, 0, 128, 1), at * 300 * 128))
        views[-1].copy_(t)
    assert same(flex(*made, None, masks.causal()), flex(*views, None, masks.causal()))
    one = [t[0].transpose(0, 1)[:150] for t in qkv(1, 1, 1, 150, 150, seed=3)]
    ends = torch.tensor([0, 150], dtype=torch.int32, device=DEVICE)
    options = {"cu_seqlens_q": ends, "causal": True, "return_lse": True, "backend": judging.BACKEND}
    want, _ = anyattn.flash_attn_varlen_func(one[0], one[1], one[1], cu_seqlens_k=ends, **options)
    for size in (64, 16, 1):
        pages = pool[: (2**31 // (size * 128) + 8) * size * 128].view(-1, size, 1, 128)
        numbers = [i + 5 if i % 2 else len(pages) - 1 - i for i in range(-(-150 // size))]
        for which, at in enumerate(numbers):
            rows = one[1][which * size : which * size + size]
            pages[at, : len(rows)] = rows
        table = torch.tensor([numbers], dtype=torch.int32, device=DEVICE)
        where = {"seqused_k": torch.tensor([150], dtype=torch.int32, device=DEVICE), "page_table": table}
        got, _ = anyattn.flash_attn_varlen_func(one[0], pages, pages, **where, **options)
        assert bool(torch.isfinite(got).all())
        exact = [t.transpose(0, 1)[None] for t in (one[0], one[1], one[1])]
        judging.check(f"pages of {size}", {"out": got.transpose(0, 1)[None]}, *exact, mask=masks.causal())
    judging.check(
        "rows", {"out": want.transpose(0, 1)[None]}, *(t.transpose(0, 1)[None] for t in (one[0], one[1], one[1])), mask=masks.causal()
    )


@judging.on_the_gpu_alone
def test_a_captured_table_indexed_past_two_to_the_31() -> None:
    torch.cuda.empty_cache()
    table = torch.zeros(3 * 2**30 + 1024, device=DEVICE).as_strided((2, 4, 333), (512, 2**30, 1))
    table.copy_(random(2, 4, 333))
    exact, inputs = table.double(), qkv()
    out, lse = flex(*inputs, lambda s, b, h, i, j: s + table[b, h, j], masks.causal(), return_lse=True)
    judging.check("table", {"out": out, "lse": lse}, *inputs, score=lambda s, b, h, i, j: s + exact[b, h, j], mask=masks.causal())
