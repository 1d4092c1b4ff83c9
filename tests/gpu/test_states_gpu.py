"""torch's state around a call on a GPU: a default device, CUDA graph capture, and no wait for the device, for every kind of mod."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention
from tests.support.counting import PYTHON_CALLS
from tests.support.gpu.graphs import captured
from tests.support.gpu.waiting import no_waiting

HAS_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="needs a CUDA device and triton")]
N, H = 512, 4


def mods(table: Tensor, ids: Tensor) -> dict[str, tuple[Any, Any]]:
    """(score_mod, mask_mod), new functions at each call."""

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    return {
        "causal": (None, causal),
        "documents": (None, lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)),
        "table": (lambda s, b, h, i, j: s + table[h, j], causal),
        "gather": (lambda s, b, h, i, j: s + table[h, ids[j]], causal),
        "gather in a mask": (None, lambda b, h, i, j: (table[h, ids[i]] >= table[h, ids[j]]) | (i == j)),
        "gather, documents": (lambda s, b, h, i, j: s + table[h, ids[j]], lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)),
        "hidden by contents": (lambda s, b, h, i, j: s + table[h, j - i], lambda b, h, i, j: (ids[i] <= ids[j]) & (j >= i)),
    }


NAMES = list(mods(torch.zeros(1), torch.zeros(1)))


@pytest.fixture
def inputs() -> tuple[Tensor, ...]:
    attention.clear()
    random = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = torch.randn(3, 2, H, N, 64, generator=random, device="cuda").bfloat16().unbind()
    table = torch.randn(H, N, generator=random, device="cuda")
    return q, k, v, table, torch.arange(N, device="cuda") // 100


@pytest.fixture(params=[None, "set_default_device", "with torch.device"])
def default_device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "set_default_device":
        torch.set_default_device("cuda")
    with torch.device("cuda") if request.param == "with torch.device" else nullcontext():
        yield
    torch.set_default_device(None)


def called(name: str, where: str, q: Tensor, k: Tensor, v: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    score, mask = mods(table, ids)[name]
    if where == "mask_mod":
        return anyattn.flex_attention(q, k, v, score, mask_mod=mask)
    return anyattn.flex_attention(q, k, v, score, block_mask=anyattn.create_block_mask(mask, None, H, N, N, device="cuda"))


@pytest.mark.parametrize("where", ["mask_mod", "block_mask"])
@pytest.mark.parametrize("name", NAMES)
def test_known_calls_wait_for_nothing_and_can_be_captured(name: str, where: str, inputs: tuple[Tensor, ...], default_device: None) -> None:
    q, k, v, table, ids = inputs
    wanted = [x.detach().clone().requires_grad_() for x in (q, k, v)]

    def trained() -> list[Tensor]:
        out = called(name, where, *wanted, table, ids)
        return [out, *torch.autograd.grad(out, wanted, torch.ones_like(out))]

    first = trained()
    torch.cuda.synchronize()
    with no_waiting():
        again = trained()
    assert all(torch.equal(a, b) for a, b in zip(first[:1], again[:1], strict=True))
    graph, found = captured(lambda: called(name, where, *inputs))
    graph.replay()
    assert torch.equal(found, first[0])


@pytest.mark.parametrize("name", [n for n in NAMES if "gather" in n])
def test_a_captured_gather_reads_the_ids_of_each_replay(name: str, inputs: tuple[Tensor, ...]) -> None:
    q, k, v, table, ids = inputs
    graph, found = captured(lambda: called(name, "mask_mod", *inputs))
    other = torch.arange(N, device="cuda") % 7
    expected = called(name, "mask_mod", q, k, v, table, other)
    ids.copy_(other)
    graph.replay()
    assert torch.equal(found, expected)
    ids.fill_(10**6)  # the capture cannot check: what is read is clamped to the table
    graph.replay()
    torch.cuda.synchronize()
    assert bool(torch.isfinite(found).all())
    with pytest.raises(ValueError, match="index 1000000"):
        called(name, "mask_mod", *inputs)


@pytest.mark.parametrize("name", [n for n in NAMES if "gather" in n])
def test_a_capture_reads_no_ids_that_are_new_to_it(name: str, inputs: tuple[Tensor, ...]) -> None:
    q, k, v, table, ids = inputs
    called(name, "mask_mod", *inputs)
    graph, new = torch.cuda.CUDAGraph(), ids.clone()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = called(name, "mask_mod", q, k, v, table, new)
    graph.replay()
    assert torch.equal(found, called(name, "mask_mod", *inputs))


def test_block_masks_clamp_an_index_from_contents(inputs: tuple[Tensor, ...]) -> None:
    """Their kernels read no entry outside a table, whatever the ids are."""
    _, _, _, table, ids = inputs
    mask = lambda b, h, i, j: table[h, ids[i]] >= table[h, ids[j]]
    ids.fill_(2**40)
    last = torch.full_like(ids, N - 1)
    found = anyattn.create_block_mask(mask, None, H, N, N, device="cuda")
    ids.copy_(last)
    expected = anyattn.create_block_mask(mask, None, H, N, N, device="cuda")
    assert torch.equal(found.to_dense(), expected.to_dense())


def decoding(appends: bool) -> Callable[[], Any]:
    cache, lengths = torch.randn(2, 4, 1024, 8, 64, device="cuda").bfloat16(), torch.full((4,), 700, dtype=torch.int32, device="cuda")
    q, new = torch.randn(2, 4, 1, 8, 64, device="cuda").bfloat16()
    more = (new, new) if appends else ()
    return lambda: anyattn.flash_attn_with_kvcache(q, *cache.unbind(), *more, cache_seqlens=lengths, causal=True)


def dense() -> Callable[[], Any]:
    q = torch.randn(1, 2, 128, 64, device="cuda").bfloat16()
    return lambda: anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)


def listed() -> Callable[[], Any]:
    ids = torch.arange(N, device="cuda") // 100
    return lambda: anyattn.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, N, N, device="cuda")


KNOWN = {"flex": dense, "lists": listed, "decode": lambda: decoding(False), "append": lambda: decoding(True)}


@pytest.mark.parametrize("name", KNOWN)
def test_a_default_device_adds_no_work_to_known_calls(name: str) -> None:
    """Counted in calls of functions: some suspend and resume the device, and no torch function passes through it."""
    call, scope = KNOWN[name](), {}
    exec(PYTHON_CALLS, scope)
    for _ in range(3):
        call()
    without = scope["calls_of"](call)
    with torch.device("cuda"):
        call()
        found = scope["calls_of"](call)
    assert found <= without + 16, (without, found)
