"""The Triton backend's part in decoding, without a GPU: run in Triton's interpreter, and compiled ahead of time."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
HERE = Path(__file__).resolve().parent


@pytest.mark.parametrize("what", ["cache", "combine"])
def test_in_the_interpreter(what: str) -> None:
    """The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(HERE / f"triton_{what}_interpreted.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


# ---- compiled

TARGETS = (80, 90, 100)
DTYPES = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {p.name for p in kernel.params if p.is_constexpr or p.name in constants}
    types = {p.name: "constexpr" if p.name in fixed else types.get(p.name) or p.annotation_type for p in kernel.params}
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(ASTSource(kernel, types, constants), target=target, options={"enable_fp_fusion": False})


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
