"""The Hopper backend without a GPU: which calls it takes, and that every kernel it may choose compiles for sm_90a without spilling."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import masks, plan
from anyattn.backends.hopper.config import Config, Tiles
from anyattn.backends.hopper.supports import Band, band_of, reason_against
from anyattn.hardware import Hardware
from anyattn.mods.trace import trace
from anyattn.problem import Problem

H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)


@pytest.mark.parametrize(
    "mask,band",
    [
        (masks.full(), Band(None, None)),
        (masks.causal(), Band(None, 1)),
        (masks.causal(-7), Band(None, -6)),
        (masks.sliding_window(100, 0), Band(-100, 1)),
        (masks.sliding_window(3, 20, offset=5), Band(2, 26)),
        (masks.sliding_window(9, None), Band(-9, None)),
        (lambda b, h, i, j: (i >= j) & (i - j < 64), Band(-63, 1)),
        (masks.prefix_lm(5), None),
        (masks.sink_window(4, 9), None),
        (masks.document(torch.tensor([0, 0, 1])), None),
        (lambda b, h, i, j: i >= j + h, None),
        (lambda b, h, i, j: j <= 2 * i, None),
        (lambda b, h, i, j: j < 9, None),
    ],
)
def test_bands(mask, band) -> None:  # type: ignore[no-untyped-def]
    found = band_of(trace(mask, "mask"))
    assert found == band
    if band is not None:
        i, j = torch.arange(40)[:, None], torch.arange(50)
        seen = torch.ones(40, 50, dtype=torch.bool)
        seen &= j >= i + band.left if band.left is not None else seen
        seen &= j < i + band.right if band.right is not None else seen
        assert torch.equal(torch.as_tensor(mask(0, 0, i, j)).expand(40, 50), seen)


def problem(**changes) -> Problem:  # type: ignore[no-untyped-def]
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1} | changes))


def test_what_it_takes_and_why_not_the_rest() -> None:
    assert reason_against(problem(predicates=(trace(masks.causal(), "mask"),))) is None
    small = torch.randn(1, 2, 64, 72, dtype=torch.bfloat16)
    odd = torch.randn(1, 2, 64, 129, dtype=torch.bfloat16)[..., :128]
    for changes, words in (
        ({name: torch.randn(1, 2, 64, 128) for name in "qkv"}, "not float32"),
        (dict.fromkeys("qkv", small), "head_dim is 72"),
        ({"predicates": (trace(masks.prefix_lm(5), "mask"),)}, "band"),
        ({"score": trace(lambda s, b, h, i, j: s + i // 3, "score")}, "floordiv"),
        ({"wants_max": True}, "max_scores"),
        ({"num_splits": 2}, "split keys"),
        ({"v": odd}, "v's strides"),
    ):
        assert words in str(reason_against(problem(**changes)))


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_the_plan_chooses_it_on_hopper() -> None:
    band, other = (problem(predicates=(trace(m, "mask"),)) for m in (masks.causal(), masks.prefix_lm(5)))
    chosen = plan.choose(band, H200)
    assert (chosen.backend, chosen.backward) == ("hopper", "torch") and "an H200 has it" in chosen.why[0]
    assert plan.choose(band, H200, "torch").backend == "torch"
    assert plan.choose(other, H200).backend == "torch" and "band" in plan.choose(other, H200).why[0]
    with pytest.raises(anyattn.BackendError, match="band"):
        plan.choose(other, H200, "hopper")


def test_it_says_what_it_needs() -> None:
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    with pytest.raises(anyattn.BackendError, match="NVIDIA GPU, and the tensors are on cpu"):
        anyattn.flex_attention(q, q, q, backend="hopper")
    older = Hardware("cuda", "an A100", 0, H200.fast_dtypes, (8, 0), 108)
    assert "compute capability 9.0" in str(plan.available(older)["hopper"]) and plan.choose(problem(), older).backend == "torch"


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Tiles(96, 128, 2), "tile_m=96"),
        (lambda: Tiles(128, 100, 2), "tile_n=100"),
        (lambda: Tiles(128, 128, 0), "stages=0"),
        (lambda: Config(96, True, Tiles(128, 128, 2)), "head_dim=96"),
        (lambda: Config(256, True, Tiles(128, 128, 2)), "shared memory"),
    ],
)
def test_configs_judge_themselves(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


COMPILE = '''
import itertools, json, struct, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import cutlass, cutlass.cute as cute, torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from anyattn.backends.hopper.config import HEAD_DIMS, Config, tiles_for
from anyattn.backends.hopper.kernel import HopperForward
from anyattn.mods.trace import trace

def fake(dtype, sizes, divisible, alignment):
    return make_fake_tensor(dtype, sizes, (*(cute.sym_int64(divisibility=divisible) for _ in sizes[1:]), 1), assumed_align=alignment)

def frame_sizes(cubin):
    """Bytes of local memory of each kernel, from the ELF sections .nv.info (attribute 0x11): what is spilled lies there."""
    data = cubin.read_bytes()
    start, (size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + size * i) for i in range(count)]
    found = []
    for *_, at, length in (s for s in sections if s[1] == 0x70000000):
        end = at + length
        while at < end:
            kind, attribute, extent = struct.unpack_from("<BBH", data, at)
            if kind == 4 and attribute == 0x11:
                found.append(struct.unpack_from("<II", data, at + 4)[1])
            at += 4 + (extent if kind == 4 else 0)
    return found

def compile(config, tensors, folder):
    B, H, Hk, S, Sk = (cute.sym_int() for _ in range(5))
    kernel = HopperForward(config)
    qkvo = [fake(kernel.dtype, (B, h, s, config.head_dim), 8, 16) for h, s in ((H, S), (Hk, Sk), (Hk, Sk), (H, S))]
    lse = fake(Float32, (B, H, S), 1, 4) if config.has_lse else None
    sink = fake(Float32, (H,), 1, 4) if config.has_sink else None
    numbers = (Float32(1.0), Int32(0), Int32(0))
    cute.compile(kernel, *qkvo, lse, sink, *numbers, (), tensors, make_fake_stream(), options=f"--keep-cubin --dump-dir={folder}")

slopes, table = torch.rand(4), torch.rand(4, 100)
scores = {
    "none": (None, 0),
    "alibi": (trace(lambda s, b, h, q, k: s - slopes[h] * (q - k), "score").expr, 1),
    "relative": (trace(lambda s, b, h, q, k: s + table[h, q - k], "score").expr, 2),
    "capped": (trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score").expr, 0),
}
result = {}
for head_dim, (name, (score, rank)) in itertools.product(HEAD_DIMS, scores.items()):
    for left, right, sink, is_bf16 in ((False, False, True, False), (True, True, False, True)):
        folder = Path(sys.argv[1]) / f"{head_dim}-{name}-{left}-{right}"
        folder.mkdir()
        tensors = (fake(Float32, tuple(cute.sym_int() for _ in range(rank)), 1, 4),) if rank else ()
        config = Config(head_dim, is_bf16, tiles_for(head_dim, score, left or right), score, left, right, sink, True)
        compile(config, tensors, folder)
        result[folder.name] = [size for cubin in folder.glob("*.cubin") for size in frame_sizes(cubin)]
print(json.dumps(result))
'''


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    (tmp_path / "cubins").mkdir()
    environment = {**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "cubins")], env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    frames = json.loads(done.stdout.splitlines()[-1])
    assert len(frames) == 24 and all(frames.values()), "a kernel left no cubin to look at"
    spilled = {name: sizes for name, sizes in frames.items() if any(sizes)}
    assert not spilled, f"bytes of local memory: {spilled}"
