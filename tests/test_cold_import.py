"""Import costs nothing: no compiler, no CUDA, no plotting, and under a second beyond torch itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Inductor and dynamo alone would double the time that importing torch takes.
FORBIDDEN = ("triton", "cutlass", "cuda", "matplotlib", "torch._dynamo", "torch._inductor", "click", "rich")

PROBE = """
import json, sys, time
import torch
torch_ready = time.perf_counter()
before = set(sys.modules)
import anyattn
anyattn_ready = time.perf_counter()
print(json.dumps({
    "seconds": anyattn_ready - torch_ready,
    "new": sorted(set(sys.modules) - before),
    "cuda": torch.cuda.is_initialized(),
}))
"""


def _probe(code: str = PROBE) -> Any:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_loads_nothing_heavy_and_is_fast() -> None:
    # The best of three: one slow run on a busy machine says nothing about the code.
    runs = [_probe() for _ in range(3)]
    heavy = [name for name in runs[0]["new"] if any(name == f or name.startswith(f + ".") for f in FORBIDDEN)]
    assert not heavy, heavy
    assert not runs[0]["cuda"]
    assert min(run["seconds"] for run in runs) < 1.0


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


FIRST_CALL = """
import json, sys
import anyattn, torch
q = torch.randn(1, 2, 40, 8)
anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)
print(json.dumps([name for name in ("triton", "cutlass", "matplotlib") if name in sys.modules]))
"""


def test_a_call_on_a_cpu_loads_no_compiler() -> None:
    assert _probe(FIRST_CALL) == []
