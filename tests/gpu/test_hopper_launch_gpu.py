"""Launches on a Hopper GPU: both ways give the same bits, nothing compiles twice, streams and graphs are obeyed, other processes load."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.backends.hopper.compile import build, launch
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.counting import PYTHON_CALLS
from tests.support.processes import python

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None
pytestmark = pytest.mark.gpu
if not HAS_HOPPER:
    pytest.skip("needs a Hopper GPU and nvidia-cutlass-dsl", allow_module_level=True)
if not build.has_tvm_ffi():
    pytest.skip("needs apache-tvm-ffi", allow_module_level=True)


def qkv(b: int = 2, h: int = 4, s: int = 300, d: int = 128) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(b * h * s)
    return [torch.randn(b, h, s, d, generator=generator, device="cuda").bfloat16() for _ in range(3)]


def run(inputs: list[torch.Tensor], score: Any = None, **options: Any) -> Any:
    return anyattn.flex_attention(*inputs, score, backend="hopper", **{"mask_mod": masks.causal()} | options)


def scaled(by: float, table: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: s * by + table[h, j]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple]]:
    """What is compiled from here on: no kernel is known, in memory or on disk."""
    notes: list[tuple] = []
    real = build._compiled

    def noting(config: Any, kinds: tuple, *rest: Any) -> Any:
        notes.append((config, kinds))
        return real(config, kinds, *rest)

    monkeypatch.setattr(build, "_compiled", noting)
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ANYATTN_CACHE", raising=False)
    launch.forget()
    yield notes
    launch.forget()


VARIANTS = {
    "causal": {},
    "full with lse": {"mask_mod": None, "return_lse": True},
    "sink": {"sink": torch.linspace(-1, 1, 4)},
    "numbers": {"score": lambda s, b, h, i, j: s * 0.5 + 0.01 * (i - j)},
    "table": {"score": ("table", torch.randn(4, 300))},
    "turned table": {"score": ("table", torch.randn(300, 4).T)},
    "broadcast table": {"score": ("table", torch.randn(4, 1).expand(4, 300))},
    "half table": {"score": ("table", torch.randn(4, 300).half())},
    "bool table": {"score": ("flags", torch.rand(4, 300) < 0.5)},
    "single value": {"score": ("one", torch.tensor(0.3))},
}
MODS = {
    "table": lambda t: scaled(2.0, t),
    "flags": lambda t: lambda s, b, h, i, j: torch.where(t[h, j], s, s * 0.5),
    "one": lambda t: lambda s, b, h, i, j: s * t,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_both_ways_to_launch_give_the_same_bits(name: str, compiled: list[tuple], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {k: v.cuda() if isinstance(v, torch.Tensor) else v for k, v in VARIANTS[name].items()}
    if isinstance(options.get("score"), tuple):
        kind, table = options["score"]
        # .cuda() keeps a dense tensor's strides, but not a broadcast one's
        on_gpu = table[:, :1].cuda().expand_as(table) if table.ndim == 2 and table.stride(1) == 0 else table.cuda()
        options["score"] = MODS[kind](on_gpu)
    direct = run(qkv(), **options)
    launch.forget()
    monkeypatch.setattr(build, "has_tvm_ffi", lambda: False)
    wrapped = run(qkv(), **options)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (direct, wrapped)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and len(compiled) == 2
    assert bool(torch.isfinite(direct[0] if isinstance(direct, tuple) else direct).all())


def test_a_thousand_shapes_and_a_new_closure(compiled: list[tuple]) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        b, h, s = (int(n) for n in torch.randint(1, 9, (3,), generator=generator))
        s = s * 37 - 5
        run(qkv(b, h, s), score=scaled(float(s), torch.zeros(h, s, device="cuda")))
    assert len(compiled) <= 2
    before = len(compiled)
    inputs = qkv(2, 4, 64)
    for by in (0.25, 7.0):
        table = torch.randn(4, 64, device="cuda")
        got = run(inputs, score=scaled(by, table))
        on_cpu = [t.cpu() for t in inputs]
        mods = {"score": scaled(by, table.cpu().double()), "mask": masks.causal()}
        want, plain, noise = (f(*on_cpu, **mods) for f in (oracle.attention, oracle.same_dtype, rounding))
        budget.check("out", got.cpu(), want.out, plain.out, noise.out)
    assert len(compiled) == before


def test_single_rows_heads_and_entries_have_any_stride(compiled: list[tuple]) -> None:
    """The stride of a dimension of one entry says nothing: torch leaves it what it was, DLPack may make it 1."""
    inputs = qkv(3, 2, 65)
    want = run(inputs)
    for b in range(3):
        got = run([t[b : b + 1] for t in inputs])
        assert torch.equal(got, want[b : b + 1])
    assert torch.equal(run([t[:, :1] for t in inputs]), want[:, :1])
    assert torch.equal(run([t[:, :, :1] for t in inputs]), want[:, :, :1])
    assert len(compiled) == 1


def test_the_current_stream_is_used() -> None:
    inputs = qkv(4, 8, 2048)
    want = run(inputs)
    blank = [torch.zeros_like(t) for t in inputs]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # without the stream's order, the kernel would read zeros
        for to, source in zip(blank, inputs, strict=True):
            to.copy_(source)
        got = run(blank)
    side.synchronize()
    assert torch.equal(got, want)


def test_a_graph_replays_it() -> None:
    inputs, others = qkv(), qkv(2, 4, 300)
    others = [t.flip(2) for t in others]
    want = run(others)
    run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs)
    for to, source in zip(inputs, others, strict=True):
        to.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_a_tensor_that_does_not_fit_is_an_error_not_a_launch() -> None:
    """What ``plan.reason_against`` keeps away is refused by the kernel's own checks as well."""
    from anyattn.backends.hopper.config import Config, Tiles

    config = Config(128, 128, True, Tiles(128, 128, 2))
    counter = torch.zeros(2, dtype=torch.int32, device="cuda")
    q = torch.zeros(1, 2, 64, 129, device="cuda").bfloat16()
    whole = torch.zeros(1, 2, 64, 128, device="cuda").bfloat16()

    def arguments(first: torch.Tensor) -> tuple:
        return (first, whole, whole, torch.empty_like(whole), *[None] * 10, counter, 0.1, 1, 2, 2, 1, (), ())

    launch.launch(config, arguments(whole))
    for bad in (q[..., 1:], q[..., :128], torch.zeros(1, 2, 64, 128).bfloat16()):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=r"(?i)align|divisible|device"):
            launch.launch(config, arguments(bad))
    torch.cuda.synchronize()


SCRIPT = (
    PYTHON_CALLS
    + """
import json
import torch
import anyattn
from anyattn import masks, scores
torch.cuda.init()
g = torch.Generator("cuda").manual_seed(3)
q, k, v = (torch.randn(2, 4, 300, 128, generator=g, device="cuda").bfloat16() for _ in range(3))
torch.cuda.synchronize()
outs = []
calls = calls_of(lambda: outs.append(anyattn.flex_attention(q, k, v, scores.softcap(5.0), mask_mod=masks.causal(), backend="hopper")))
print(json.dumps({"calls": calls, "compiler": "cutlass" in sys.modules, "sum": outs[0].view(torch.int16).long().sum().item()}))
"""
)


def test_another_process_loads_what_one_compiled(tmp_path: Path) -> None:
    def process(**more: str) -> dict[str, Any]:
        done = python("-c", SCRIPT, ANYATTN_CACHE_DIR=str(tmp_path), **more)
        assert done.returncode == 0, done.stderr[-3000:]
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    cold, warm, memory = process(), [process() for _ in range(3)], process(ANYATTN_CACHE="0")
    print("Python's calls in a first call: cold", cold["calls"], "warm", [w["calls"] for w in warm], "in memory", memory["calls"])
    assert len({p["sum"] for p in (cold, memory, *warm)}) == 1
    assert cold["compiler"] and not any(w["compiler"] for w in warm)
    assert all(2 * w["calls"] < cold["calls"] for w in warm)  # the seconds of a first call are the benchmark's (benchmarks/gpu/probes.py)
