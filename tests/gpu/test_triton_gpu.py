"""The Triton kernels on a GPU, at the sizes that they are for: what ``tests/backends/triton`` shows of them in Triton's interpreter.

The tests that they share with the Hopper kernel are run on them by ``ANYATTN_GPU_BACKEND=triton`` (``make test-gpu``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.testing import budget
from tests.support import cases
from tests.support.flex_calls import results
from tests.support.gpu import judging
from tests.support.gpu.graphs import IDS, captured
from tests.support.gpu.judging import DEVICE, judge, qkv, random, same
from tests.support.triton import proof

pytestmark = pytest.mark.gpu
judging.needs_the_backend(only="triton")

NAMES: dict[str, Any] = {"ids": lambda x: str(x).removeprefix("torch.")}
SHAPES = proof.MANY if judging.MODE == "gpu" else proof.FEW
RERUNS = 300 if judging.MODE == "gpu" else 2


def checked(case: cases.Case, dtype: torch.dtype, wanted: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    want = cases.expected(case, dtype, device=DEVICE, **wanted)
    got = results(case, want, backend=judging.BACKEND, **{"backward": wanted.get("backward", True)} | options)
    want.check(got, str(case))
    return got


@pytest.mark.parametrize(("case", "dtype"), proof.matrix(SHAPES), **NAMES)
def test_variant(case: cases.Case, dtype: torch.dtype) -> None:
    checked(case, dtype, {})


@pytest.mark.parametrize(("case", "dtype"), proof.alone(SHAPES), **NAMES)
def test_output_alone(case: cases.Case, dtype: torch.dtype) -> None:
    checked(case, dtype, {"with_lse": False, "backward": False})


@pytest.mark.parametrize("name", proof.LADDER)
@pytest.mark.parametrize("dtype", proof.DTYPES, **NAMES)
def test_ladder(name: str, dtype: torch.dtype) -> None:
    rung = proof.LADDER[name]
    for kind in cases.KINDS:
        judge(qkv(2, 2 * rung.ratio, 2, 1025, 1025, dtype=dtype, kind=kind), mask=rung.mask, label=kind)


@pytest.mark.parametrize("ratio", proof.RATIOS)
def test_grouped_heads(ratio: int) -> None:
    slopes = random(2 * ratio)
    score = judging.Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h] * (i - j) * 0.01)(to(slopes)))
    judge(qkv(1, 2 * ratio, 2), mask=lambda b, h, i, j: (i - j) % 2 <= h % 2, score=score, sink=slopes)


@pytest.mark.parametrize(("d", "dv"), proof.DIMS)
@pytest.mark.parametrize("dtype", proof.DTYPES, **NAMES)
def test_head_dims(d: int, dv: int, dtype: torch.dtype) -> None:
    for mask in (None, masks.causal(33), masks.sliding_window(100, 0)):
        judge(qkv(1, 4, 2, d=d, dv=dv, dtype=dtype), mask=mask)


@pytest.mark.parametrize(("d", "dv"), [(320, 300), (512, 512), (576, 512)])
@pytest.mark.parametrize("dtype", proof.DTYPES, **NAMES)
def test_wide_heads(d: int, dv: int, dtype: torch.dtype) -> None:
    """Values apart, and in the keys' memory."""
    q, k, v = qkv(1, 4, 2, d=d, dv=dv, dtype=dtype)
    for mask in (None, masks.causal(33), masks.sliding_window(100, 0)):
        judge((q, k, v), mask=mask)
        judge((q, k, k[..., :dv]), mask=mask)


@pytest.mark.parametrize("name", ["gated_sink", "documents", "t5", "islands_sink", "pair_bias", "head_bias", "relative"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **NAMES)
def test_deterministic_reruns_agree_bitwise(name: str, dtype: torch.dtype) -> None:
    case = cases.Case(name, cases.Shape(2, 8, 4, 1025, 1025, 64, 64) if judging.MODE == "gpu" else SHAPES[0], "normal")
    want = cases.expected(case, dtype, device=DEVICE)
    first = results(case, want, backend=judging.BACKEND, deterministic=True)
    want.check(first, str(case))
    for _ in range(RERUNS):
        again = results(case, want, backend=judging.BACKEND, deterministic=True)
        assert all(torch.equal(first[n], again[n]) for n in first)


def test_pages_that_sequences_share_rerun_bitwise() -> None:
    """Gradients of keys and values in pages, half of which all sequences hold, and of a bias that they capture; by torch's own, too."""
    batch, rows, keys, size = (8, 100, 1000, 16) if judging.MODE == "gpu" else (3, 9, 40, 8)
    width = -(-keys // size)
    table = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0)).view(batch, width).to(torch.int32)
    table[1:, : width // 2] = table[0, : width // 2]
    tensors = (
        random(batch * rows, 4, 64),
        random(batch * width, size, 2, 64, seed=1),
        random(batch * width, size, 2, 64, seed=2),
        random(4),
    )
    places = {
        "cu_seqlens_q": torch.arange(0, (batch + 1) * rows, rows), "seqused_k": torch.arange(keys, keys - batch, -1), "page_table": table,
    }  # fmt: skip
    places = {name: t.to(torch.int32).to(DEVICE) for name, t in places.items()}

    def gradients(backend: str, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
        *leaves, bias = (t.to(DEVICE, torch.bfloat16 if t.ndim > 1 else dtype).to(dtype).requires_grad_() for t in tensors)
        out = anyattn.flash_attn_varlen_func(
            *leaves, **places, causal=True, score_mod=lambda s, b, h, i, j: s + bias[h] * torch.tanh(s), deterministic=True, backend=backend
        )
        dout = random(*out.shape, seed=3).bfloat16().to(DEVICE, dtype)
        return torch.autograd.grad(out, [*leaves, bias], dout)

    first = gradients(judging.BACKEND or "triton")
    exact, plain = gradients("torch", torch.float64), gradients("torch")
    for name, *found in zip(("dq", "dk", "dv"), first, exact, plain, strict=False):
        budget.check(name, *found)
    for _ in range(RERUNS // 10 + 1):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(judging.BACKEND or "triton"), strict=True))


# ---- streams, threads and graphs with gradients; tests/gpu/test_device_gpu.py has them without, test_decode_gpu.py a decoder's


def with_gradients(which: int, leaves: list[torch.Tensor], dout: torch.Tensor) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call by row ranges, by lists, or with a score mod, and its backward pass; atomic sums are left out."""
    mask = (masks.causal(), masks.document(IDS.to(DEVICE)), masks.sliding_window(200, 0))[which % 3]
    slopes = torch.full((leaves[0].shape[1],), 0.01 * which, device=DEVICE)
    score = (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()) if which % 3 == 2 else None

    def call() -> tuple[torch.Tensor, ...]:
        out, lse = judging.flex(*leaves, score, mask, return_lse=True)
        return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)

    return call


def leaves_of(seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    leaves = [t.requires_grad_() for t in qkv(2, 4, 2, 700, 700, 64, seed=seed)]
    return leaves, random(2, 4, 700, 64, seed=seed).bfloat16().to(DEVICE)


@judging.on_the_gpu_alone
def test_gradients_in_streams_of_threads_at_once() -> None:
    made = [with_gradients(at, *leaves_of(at)) for at in range(6)]
    wanted = [call() for call in made[:3]]  # the others' mods are new to all threads at once
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in made]

    def work(at: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            found[at] = [made[at]() for _ in range(10)]

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    wanted += [call() for call in made[3:]]
    for at, results_of in enumerate(found):
        assert len(results_of) == 10, "a thread has failed"
        assert all(same(wanted[at], one) for one in results_of), at


@judging.on_the_gpu_alone
@pytest.mark.parametrize("which", [0, 1, 2], ids=["ranges", "lists", "score"])
def test_a_graph_of_gradients_with_other_inputs(which: int) -> None:
    leaves, dout = leaves_of(1)
    others, other_dout = leaves_of(2)
    wanted = [with_gradients(which, *given)() for given in ((leaves, dout), (others, other_dout))]
    call = with_gradients(which, leaves, dout)  # its captured tensors have to live as long as the graph
    graph, found = captured(call)
    for turn in (0, 0, 1):
        if turn:
            with torch.no_grad():
                for to, source in zip((*leaves, dout), (*others, other_dout), strict=True):
                    to.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        assert same(wanted[turn], found), turn


@judging.on_the_gpu_alone
def test_no_square_tensor_at_length_65536() -> None:
    """S x S of bytes would be 4 GiB; forward and backward take the gradients, the statistics and little more."""
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 2, 65536, 65536, 64))
    slopes = torch.rand(2, device=DEVICE, requires_grad=True)
    for options in (
        {"mask": masks.causal()},
        {"mask": masks.sliding_window(512, 0)},
        {"mask": masks.causal(), "score": lambda s, b, h, i, j: s - slopes[h] * (i - j)},
    ):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        judging.flex(q, k, v, **options).sum().backward()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - before
        assert used <= 16 * q.numel() * q.element_size(), f"{used / 2**20:.0f} MiB for {options}"


@judging.on_the_gpu_alone
def test_sixty_thousand_tokens_of_documents() -> None:
    """Packed by a causal document mask, forward and backward: out, gradients, statistics and block lists, nothing else."""
    tokens, heads, dim = 60_000, 16, 128
    ids = (torch.arange(tokens, device=DEVICE) // 3001).int()
    q, k, v = (random(1, heads, tokens, dim, seed=s).bfloat16().to(DEVICE).requires_grad_() for s in range(3))
    lists = anyattn.create_block_mask(masks.document(ids) & masks.causal(), None, None, tokens, tokens, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = judging.flex(q, k, v, block_mask=lists, return_lse=True)
    out.sum().backward()
    used = torch.cuda.max_memory_allocated() - before
    one = q.numel() * q.element_size()  # out, dout, dq, dk, dv; and dq in float32 where it is summed so
    assert used <= 8 * one, f"{used / one:.1f} times a tensor of q's size"
    rows, last = slice(tokens - 300, tokens), tokens - tokens % 3001
    judging.check(
        "the last document", {"out": out.detach()[:, :, rows], "lse": lse.detach()[:, :, rows]},
        *(t.detach() for t in (q[:, :, rows], k[:, :, last:], v[:, :, last:])), mask=masks.causal(tokens - 300 - last),
    )  # fmt: skip
