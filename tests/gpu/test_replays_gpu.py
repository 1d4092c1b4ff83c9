"""On a GPU: replays of warm decoding and varlen calls are to the bit what first calls are, also inside CUDA graphs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention, latest
from anyattn.triton_tools import packed_params, replay
from tests.entry_points import test_flash_cache as cache_tests
from tests.support import flash_calls as calls
from tests.support.flash_calls import RECIPES
from tests.support.gpu.waiting import no_waiting
from tests.support.replayed import decoded, noted_replays

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)
pytestmark = pytest.mark.gpu

WARM = 9  # calls before one that is a replay
DECODE = cache_tests.Setting(cached=(300, 7, 463, 0), queries=(1,) * 4, rotary_dim=64, dims=(64, 64), heads=(8, 2), capacity=512)
KINDS = {
    "rows": DECODE,
    "other rows": replace(DECODE, rows=(5, 0, 6, 2)),
    "pages": replace(DECODE, page_size=16, leftpad=(40, 0, 33, 0)),
    "three queries, by halves": replace(DECODE, queries=(3,) * 4, interleaved=False),
    "nothing new": replace(DECODE, rotary_dim=0, new=None),
}
HAS_HOPPER = torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    attention.clear()
    with torch.no_grad():
        yield
    attention.clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return noted_replays(monkeypatch)


def there(given: dict[str, Any]) -> dict[str, Any]:
    lists = {n: [t.cuda() for t in v] for n, v in given.items() if isinstance(v, list)}
    return {n: v.cuda() if isinstance(v, Tensor) else v for n, v in given.items()} | lists


def step(kind: str, recipe: str, seed: int) -> dict[str, Any]:
    s = replace(KINDS[kind], dtype=torch.bfloat16, seed=2 * seed, page_seed=seed)
    tensors = {n: t.detach().cuda() for n, t in RECIPES[recipe].draw(s.heads[0], len(s.cached), s.capacity + 8, s.dtype, seed).items()}
    return there(cache_tests.arguments(s)) | RECIPES[recipe].options(tensors)


def batch(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(777, h, 128, generator=g).bfloat16().cuda() for h in (8, 2, 2))
    ends = torch.tensor(([0, 100, 100, 500, 777], [0, 1, 300, 301, 700])[seed % 2], dtype=torch.int32, device="cuda")
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 777, "max_seqlen_k": 777}


def attended(arguments: dict[str, Any], **more: Any) -> tuple[Tensor, ...]:
    return anyattn.flash_attn_varlen_func(**{"return_lse": True, **arguments, **more})


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(calls.same_bits(x.cpu(), y.cpu()) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


def check(call: Callable[[int], tuple[Tensor, ...]], replays: list[bool]) -> None:
    for seed in range(WARM):
        call(seed)
    count = len(replays)
    with no_waiting():
        warm = call(WARM)
    assert len(replays) == count + 1 and all(replays)
    attention.clear()
    assert same(warm, call(WARM))


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("recipe", ["causal", "everything", "window", "sink", "mask"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoding(kind: str, recipe: str, splits: int, replays: list[bool]) -> None:
    arguments = [step(kind, recipe, seed) for seed in range(WARM + 1)]
    check(lambda seed: decoded(arguments[seed], num_splits=splits), replays)


@pytest.mark.parametrize("backend", ["triton", *(["hopper"] if HAS_HOPPER else [])])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (70, 0)}, {"causal": True, "softcap": 20.0}], ids=str)
def test_varlen(options: dict[str, Any], backend: str, replays: list[bool]) -> None:
    arguments = [batch(seed) for seed in range(WARM + 1)]
    check(lambda seed: attended(arguments[seed], backend=backend, **options), replays)


@pytest.mark.parametrize("name", ["decoding", "triton", *(["hopper"] if HAS_HOPPER else [])])
def test_a_graph_that_captures_replays_reads_tables_anew(name: str, replays: list[bool]) -> None:
    given = step("pages", "causal", 0) if name == "decoding" else batch(0)
    given |= {n: given[n].nan_to_num() for n in ("k_cache", "v_cache") if n in given}

    def call(given: dict[str, Any]) -> tuple[Tensor, ...]:
        if name != "decoding":
            return attended(given, backend=name, causal=True)
        return anyattn.flash_attn_with_kvcache(**given, return_lse=True, backend="triton")

    for _ in range(WARM):
        call(given)
    count = len(replays)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call(given)
    assert len(replays) == count + 1 and all(replays)
    for turn in range(3):
        if name == "decoding":
            given["cache_seqlens"].add_(turn)
        else:
            given["cu_seqlens_q"].copy_(batch(turn)["cu_seqlens_q"])
        eager = {n: v.clone() if isinstance(v, Tensor) else v for n, v in given.items()}
        if name != "decoding":
            eager["cu_seqlens_k"] = eager["cu_seqlens_q"]
        for t in captured:
            t.fill_(math.nan)
        graph.replay()
        assert same(captured, call(eager)), turn


def test_streams_and_other_devices_of_the_thread() -> None:
    arguments = [step("rows", "causal", seed) for seed in range(WARM + 1)]
    for seed in range(WARM):
        decoded(arguments[seed])
    wanted = decoded(arguments[WARM])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = decoded(arguments[WARM])
    stream.synchronize()
    assert same(found, wanted)


def launchers_of(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What launches each kernel of a call that is a replay."""
    found: list[Any] = []
    own = replay.Replay.run
    with monkeypatch.context() as patched:
        patched.setattr(replay.Replay, "run", lambda self, *given: (found.extend(x[0] for x in self.launches), own(self, *given))[1])
        call()
    return [type(getattr(launcher, "__self__", launcher)).__name__ for launcher in found]


@pytest.mark.parametrize("kind", KINDS)
def test_launches_of_a_step_keep_their_arguments(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the driver tells the sizes of parameters."""
    if packed_params._driver() is None:
        pytest.skip("this driver does not tell the sizes of parameters")
    arguments = step(kind, "causal", 0)
    for _ in range(WARM):
        decoded(arguments)
    found = launchers_of(lambda: decoded(arguments), monkeypatch)
    assert len(found) >= 1 + (arguments.get("k") is not None) and {*found} == {"_PackedLaunch"}


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_launches_of_a_batch_keep_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(WARM):
        attended(batch(0), backend="hopper")
    assert launchers_of(lambda: attended(batch(0), backend="hopper"), monkeypatch) == ["PackedLaunch"] * 2


def test_hooks_see_the_launches_of_a_replay() -> None:
    from triton import knobs

    arguments, seen = step("rows", "causal", 0), []
    for _ in range(WARM):
        decoded(arguments)
    wanted = decoded(arguments)
    watch = lambda about: seen.append(about.get()["name"])
    knobs.runtime.launch_enter_hook.add(watch)
    try:
        found = decoded(arguments)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    assert len(seen) >= 2 and same(found, wanted)


@pytest.mark.parametrize("name", ["decoding", "triton", *(["hopper"] if HAS_HOPPER else [])])
def test_out_is_written_to(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernels themselves once the call is a replay, and on a side stream too."""
    given = step("pages", "causal", 0) if name == "decoding" else batch(0)
    function = anyattn.flash_attn_with_kvcache if name == "decoding" else anyattn.flash_attn_varlen_func
    options = {"backend": "triton" if name == "decoding" else name, "causal": True, "return_lse": True}
    wanted = function(**given | options)
    memory = [torch.full((*given["q"].shape[:-1], wanted[0].shape[-1]), math.nan, dtype=given["q"].dtype, device="cuda") for _ in range(2)]
    taken: list[bool] = []
    own = latest.LatestCall._takes
    monkeypatch.setattr(latest.LatestCall, "_takes", lambda *given: (taken.append(own(*given)), taken[-1])[1])
    for turn in range(2 * WARM):
        out = memory[turn % 2].fill_(math.nan)
        found = function(**given | options, out=out)
        assert found[0] is out and calls.same_bits(out.cpu(), wanted[0].cpu()), turn
    assert taken and taken[-1]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(**given | options, out=memory[0].fill_(math.nan))
    stream.synchronize()
    assert calls.same_bits(memory[0].cpu(), wanted[0].cpu())
