"""The Triton backend's part in decoding, without a GPU: run in Triton's interpreter, and compiled ahead of time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import check_lengths, hardware
from anyattn.hardware import Hardware

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("what", ["cache", "combine", "decode"])
def test_in_the_interpreter(what: str) -> None:
    """The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(HERE / f"triton_{what}_interpreted.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


# ---- compiled

TARGETS = (80, 90, 100)
DTYPES = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, **options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {p.name for p in kernel.params if p.is_constexpr or p.name in constants}
    types = {p.name: "constexpr" if p.name in fixed else types.get(p.name) or p.annotation_type for p in kernel.params}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, types, constants), target=target, options={"enable_fp_fusion": False, **options})


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {"HAS_PAGES": True, "TURNS": True, "INTERLEAVED": False, "FOLLOWS": True}),
        ("fp16", {"HAS_ROWS": True, "TURNS": True, "INTERLEAVED": True}),
        ("fp32", {"NEW_IS_PACKED": True, "Q_IS_PACKED": True, "SEARCH_STEPS": 8, "TURNS": True, "FOLLOWS": True}),
        ("bf16", {"Q_IS_PACKED": True, "SEARCH_STEPS": 4, "HAS_PAGES": True}),
    ],
)
def test_the_step_compiles(capability: int, dtype: str, options: dict[str, Any]) -> None:
    from anyattn.backends.triton.cache_step import cache_step

    flags = ("NEW_IS_PACKED", "Q_IS_PACKED", "HAS_ROWS", "HAS_PAGES", "TURNS", "INTERLEAVED", "FOLLOWS")
    constants = {**dict.fromkeys(flags, False), "IS_ALIGNED": True, "SEARCH_STEPS": 0, "LINES": 8, "BLOCK_D": 128, "BLOCK_DV": 128}
    last = ("new_k_d", "new_v_d", "q_d", "k_cache_d", "v_cache_d", "cos_d", "sin_d")
    types = dict.fromkeys(("new_k", "new_v", "q", "k_cache", "v_cache", "turned"), DTYPES[dtype])
    types |= {"cos": "*fp32", "sin": "*fp32", "cached": "*i32", "rows": "*i64", "ends": "*i32", "pages": "*i32"}
    made = built(cache_step, types, {**constants, **options, **dict.fromkeys(last, 1)}, capability)
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]
    assert "fma.rn.f32" not in made.asm["ptx"], "a product and a sum rounded once give other bits than torch"


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "block", "flag"), [(1, 16, False), (8, 128, True), (8, 256, False)])
def test_merging_compiles(capability: int, dtype: str, parts: int, block: int, flag: bool) -> None:
    from anyattn.backends.triton.combine_kernel import combine_row

    types = dict.fromkeys(("outs", "lses", "sink", "lse"), "*fp32") | {"out": DTYPES[dtype]}
    constants = {"HAS_SINK": flag, "HAS_UNUSED": flag, "HAS_LSE": True, "PARTS": parts, "BLOCK": block}
    made = built(combine_row, types, constants, capability)
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]


# ---- the forward kernel as a decoder launches it

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors are taken for a GPU's, of a capability to be named; launches of the forward kernel are noted and not made."""
    from anyattn.backends.triton import run

    fast = frozenset(POINTERS)
    found = SimpleNamespace(capability=(9, 0), made=[])
    monkeypatch.setattr(hardware, "of", lambda *a: Hardware("cuda", "a GPU", 0, fast, found.capability, 132))  # type: ignore[arg-type]
    monkeypatch.setattr(check_lengths, "takes_their_word", lambda device, validate: validate is not True)
    monkeypatch.setattr(run, "run_entry", lambda *args: found.made.append(args))
    monkeypatch.setattr(run, "merge", lambda *args: None)
    return found


def decode(sq: int = 1, heads: tuple[int, int] = (32, 8), width: int = 128, page: int = 0, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    pages = {"page_table": torch.zeros(4, 9, dtype=torch.int32)} if page else {}
    k = torch.zeros(40, page, heads[1], width, dtype=dtype) if page else torch.zeros(4, 1024, heads[1], width, dtype=dtype)
    q, lengths = torch.zeros(4, sq, heads[0], width, dtype=dtype), torch.zeros(4, dtype=torch.int32)
    return anyattn.flash_attn_with_kvcache(q, k, k.clone(), cache_seqlens=lengths, backend="triton", **pages, **more)


DECODES: dict[str, dict[str, Any]] = {
    "plain": {"causal": True, "num_splits": 1},
    "split": {"causal": True, "num_splits": 8, "return_lse": True},
    "pages": {"page": 16, "num_splits": 0, "causal": True},
    "pages of 3, window": {"page": 3, "window_size": (100, 0), "sq": 5, "dtype": torch.float16},
    "padding, softcap": {"cache_leftpad": torch.zeros(4, dtype=torch.int64), "softcap": 30.0, "num_splits": 3},
    "other rows, seven heads": {"cache_batch_idx": torch.zeros(4, dtype=torch.int64), "heads": (14, 2), "sq": 2, "width": 64},
    "wide heads": {"width": 256, "heads": (8, 1), "num_splits": 4},
    "float32": {"dtype": torch.float32, "num_splits": 4, "sink": torch.zeros(32)},
    "a mask that is asked": {"mask_mod": lambda b, h, i, j: (i ^ j) != 5, "num_splits": 2},
}


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("name", DECODES)
def test_decoding_compiles_and_fits(name: str, capability: int, launches: Any) -> None:
    launches.capability = divmod(capability, 10)
    decode(**DECODES[name])
    (kernel, _, values, captured, _, options) = launches.made[-1]
    names = [p.name for p in kernel.params if not p.is_constexpr]
    numbers = [n for read in captured for n in (*read.scalars, *(0 for t in read.tensors for _ in range(2 * t.ndim)), *read.tensors)]
    given = dict(zip(names, [*values, *numbers], strict=True))
    types = {n: POINTERS[v.dtype] for n, v in given.items() if isinstance(v, torch.Tensor)}
    constants = {n: v for n, v in options.items() if n.isupper()}
    warps = {n: options[n] for n in ("num_warps", "num_stages")}
    made = built(kernel, types, constants, capability, enable_fp_fusion=True, **warps)
    assert "cubin" in made.asm and made.metadata.shared <= SHARED[capability]

