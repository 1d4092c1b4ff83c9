"""The kernels of the GPU suite are compiled before it runs, many at a time; see ``judging.MODE`` for the other modes.

A run on the GPU starts itself once more in the mode ``compile``, with the same arguments and without the GPU, and then finds all kernels in
the disk cache. ``ANYATTN_GPU_WARM=0`` leaves that out.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

import pytest

MODE = os.environ.get("ANYATTN_GPU_SUITE", "gpu")
_JOBS = int(os.environ.get("ANYATTN_GPU_JOBS", "0")) or len(os.sched_getaffinity(0))
_noted: dict[tuple, Future | None] = {}  # what would be launched, by config and kinds of arguments


def pytest_collection_finish(session: pytest.Session) -> None:
    import torch

    from anyattn import disk_cache

    is_wanted = any(hasattr(getattr(item, "module", None), "judging") for item in session.items)
    is_worker = hasattr(session.config, "workerinput")  # of pytest-xdist
    is_hopper = os.environ.get("ANYATTN_GPU_BACKEND", "hopper") == "hopper"  # Triton's kernels are compiled when launched
    if MODE != "gpu" or not is_hopper or not is_wanted or is_worker or not torch.cuda.is_available():
        return
    if os.environ.get("ANYATTN_GPU_WARM") == "0" or not disk_cache.is_on():
        return
    started = time.perf_counter()
    environment = {**os.environ, "ANYATTN_GPU_SUITE": "compile", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    arguments = [a for a in session.config.invocation_params.args if not str(a).startswith("--durations")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=session.config.invocation_params.dir)
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    tail = done.stdout[-6000:] + done.stderr[-2000:] if done.returncode else "".join(re.findall(r"kernels: .*", done.stdout))
    reporter.write_line(f"compiled ahead in {time.perf_counter() - started:.1f} s; {tail}")


@pytest.fixture(autouse=True, scope="session")
def _without_a_gpu() -> Iterator[None]:
    """In the modes ``compile`` and ``list``: the CPU is taken for a Hopper GPU, launches are noted, and compiled by other processes."""
    if MODE not in ("compile", "list"):
        yield
        return
    import torch

    from tests.support.gpu.judging import compiled, without_a_gpu

    torch.set_num_threads(1)
    # a forked child of a process whose torch has threads may hang
    pool = ProcessPoolExecutor(_JOBS, mp_context=multiprocessing.get_context("spawn")) if MODE == "compile" else None

    def note(config: Any, kinds: tuple) -> None:
        if (config, kinds) not in _noted:
            _noted[config, kinds] = None if pool is None else pool.submit(compiled, config, kinds)

    with without_a_gpu(note):
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says which kernels there are, or how many were compiled and which could not be."""
    if MODE not in ("compile", "list"):
        return
    from anyattn.backends.hopper.compile.build import name_of
    from anyattn.backends.hopper.config import Config

    seconds, failed = 0.0, 0
    for (config, _), future in _noted.items():
        name = str(config)
        if isinstance(config, Config):
            name = f"{name_of(config)} D {config.head_dim}/{config.head_dim_v} {'bf16' if config.is_bf16 else 'fp16'} {config.tiles}"
        error = None if future is None else future.exception()
        if future is None:
            terminalreporter.write_line(name)
        elif error is None:
            seconds += future.result()
        else:
            failed += 1
            terminalreporter.write_line(f"kernels: {name} failed: {error!r:.300}")
    terminalreporter.write_line(f"kernels: {len(_noted)} distinct, {seconds:.0f} s of compiling, {failed} failed")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Waits for what is being compiled: here, where no test's time runs out."""
    if any(future is not None and future.exception() is not None for future in _noted.values()):
        session.exitstatus = 1
