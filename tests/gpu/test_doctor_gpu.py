"""``anyattn doctor`` on a machine with a GPU: real calls of every backend of the device, named by their kernels, from empty caches."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyattn import hardware, planner
from tests.support.gpu import judging

pytestmark = [pytest.mark.gpu, judging.on_the_gpu_alone]
judging.needs_the_backend()

MOST_KERNELS = 12  # in the caches after a cold run: each takes a second or two to compile, so that a run stays under 20 s


def test_a_cold_run_calls_every_backend_and_names_its_kernels(tmp_path: Path) -> None:
    cache, triton_cache = tmp_path / "anyattn", tmp_path / "triton"
    cache.mkdir(mode=0o700)
    environment = {**os.environ, "ANYATTN_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(triton_cache), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", "from anyattn import cli; cli.main(['doctor'])"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for index in range(torch.cuda.device_count()):
        backends = [name for name, reason in planner.available(hardware.of("cuda", index)).items() if reason is None]
        for backend in backends:
            calls = ("forward and backward", "decode") if backend in ("torch", "triton") else ("forward and backward",)
            for call in calls:
                lines = [x for x in done.stdout.splitlines() if re.match(rf"cuda:{index} .*, {backend}, {call}: ", x)]
                assert len(lines) == 1 and "% of the error budget" in lines[0], done.stdout
                assert re.search(rf", by {'torch' if backend == 'torch' else backend}", lines[0]), lines[0]
    made = [*triton_cache.rglob("*.cubin"), *(p for p in cache.rglob("*") if p.is_file() and p.suffix not in (".py", ".lock"))]
    assert len(made) <= MOST_KERNELS, made
