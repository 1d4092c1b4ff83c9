"""Every mutant of the Hopper backend is caught by the check that it names; with no bug all pass, and the sanitizer finds nothing."""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.mutants import hopper_mutants
from tests.mutants.hopper_killers import KILLERS
from tests.support.gpu import judging
from tests.support.limits import HANG
from tests.support.processes import ROOT, environment

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
judging.needs_the_backend(only="hopper")

AT_ONCE = max(1, min(12, len(os.sched_getaffinity(0)) - 2))


@pytest.mark.parametrize("name", KILLERS)
def test_without_a_bug_the_checks_pass(name: str) -> None:
    KILLERS[name]()


def run(names: list[str], path: Path, before: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess:
    """Checks in a process of their own, whose package is the one in ``path``."""
    command = [*before, sys.executable, "-m", "tests.mutants.hopper_killers", *names]
    return subprocess.run(
        command, env=environment(path, OMP_NUM_THREADS="1", **more), cwd=path, capture_output=True, text=True, timeout=HANG
    )


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future]]:
    """All mutants at once: most of a process's time goes into importing and compiling."""
    folder = tmp_path_factory.mktemp("mutants")

    def one(name: str) -> Any:
        path = hopper_mutants.planted(hopper_mutants.MUTANTS[name], folder / name)
        return run([hopper_mutants.MUTANTS[name].killer], path, ANYATTN_CACHE_DIR=str(path))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(one, name) for name in hopper_mutants.MUTANTS}
        pool.shutdown(cancel_futures=True)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", hopper_mutants.MUTANTS)
def test_killed(name: str, outcomes: dict[str, Future]) -> None:
    done = outcomes[name].result()
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    # what the bug breaks must be noticed by the judge: an error of another kind would say that the mutant does not compile
    assert done.returncode == 0 and len(lines) == 1, f"{done.stdout[-500:]}\n{done.stderr[-2500:]}"
    assert name in Path(lines[0]["package"]).parts, "the plain package ran"
    print(name, "said:", lines[0]["said"])
    assert lines[0]["said"], f"{name} went unnoticed by {hopper_mutants.MUTANTS[name].killer!r}"


def sanitizer() -> str | None:
    places = [shutil.which("compute-sanitizer"), *sorted(glob.glob("/usr/local/cuda*/bin/compute-sanitizer"), reverse=True)]
    return next(filter(None, places), None)


@judging.on_the_gpu_alone
@pytest.mark.skipif(sanitizer() is None, reason="compute-sanitizer is neither on PATH nor in /usr/local/cuda*/bin")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_sanitizer(tool: str) -> None:
    """Every allocation stands alone, so that reading past one shows. Nothing is judged: that would be the sanitizer's work for minutes."""
    before = (str(sanitizer()), "--tool", tool, "--error-exitcode", "9", "--print-limit", "5")
    done = run(list(KILLERS), ROOT, before, PYTORCH_NO_CUDA_MEMORY_CACHING="1", ANYATTN_GPU_JUDGE="0")
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-1500:]}"
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == len(KILLERS)
