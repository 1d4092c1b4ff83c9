"""Import costs nothing: no compiler, no CUDA, no plotting, and a few modules beyond torch itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.counting import PYTHON_CALLS
from tests.support.limits import HANG

ROOT = Path(__file__).resolve().parents[2]
# Inductor and dynamo alone would double the time that importing torch takes.
FORBIDDEN = ("triton", "cutlass", "cuda", "matplotlib", "torch._dynamo", "torch._inductor", "click", "rich")

PROBE = (
    PYTHON_CALLS
    + """
import importlib, json
import torch
before = set(sys.modules)
calls = calls_of(lambda: importlib.import_module("anyattn"))
found = {"calls": calls, "new": sorted(set(sys.modules) - before)}
import anyattn.integrations
q = torch.randn(1, 2, 40, 8)
anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)
found["by a call"] = [name for name in ("triton", "cutlass", "matplotlib", "transformers") if name in sys.modules]
print(json.dumps(found | {"cuda": torch.cuda.is_initialized()}))
"""
)


def _probe(code: str = PROBE) -> Any:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=HANG)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy_and_is_fast() -> None:
    """And a call on a CPU no compiler and no other library."""
    found = _probe()
    heavy = [name for name in found["new"] if any(name == f or name.startswith(f + ".") for f in FORBIDDEN)]
    assert not heavy, heavy
    assert not found["cuda"] and not found["by a call"]
    assert len(found["new"]) <= 20 and found["calls"] <= 5000


def test_import_works_without_extras() -> None:
    """A machine with torch alone: the extras are not just unused but absent."""
    code = """
import json, sys
for name in ("triton", "cutlass", "matplotlib", "psutil"):
    sys.modules[name] = None
import anyattn
print(json.dumps({name: getattr(anyattn, name) is not None for name in anyattn.__all__}))
"""
    assert all(_probe(code).values())
