"""Child processes of tests, for settings that a module reads once at import: Triton's interpreter, a compiler's target, a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tests.support.limits import HANG

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"


def environment(*first: Path, **more: str) -> dict[str, str]:
    """The variables of this process, with ``first`` and then this checkout in front of the path."""
    path = os.pathsep.join([*map(str, first), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **more}


def python(*arguments: str, seconds: float | None = HANG, at: Path = ROOT, **more: str) -> subprocess.CompletedProcess:
    """Runs Python in the folder ``at``, whose packages precede those of the repository, with the variables ``more``."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment(at, **more), cwd=at, capture_output=True, text=True, timeout=seconds)


_QUIETLY = ("-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-W", "ignore")


class Run(NamedTuple):
    """files: below ``tests``. options: pytest's. variables: of this run; what is None is unset."""

    files: Sequence[str]
    options: Sequence[str] = ()
    variables: Mapping[str, str | None] = MappingProxyType({})


def in_the_interpreter(*files: str, options: Sequence[str] = (), seconds: float | None = HANG, **more: str) -> str:
    """Runs test files below ``tests`` by Triton's interpreter and returns pytest's report. Fails if any of their tests fails."""
    return all_in_the_interpreter([Run(files, options, dict(more))], seconds)


def all_in_the_interpreter(runs: Sequence[Run], seconds: float | None = HANG) -> str:
    """Runs test files by Triton's interpreter, one run after the other in one process, and returns pytest's reports."""
    given = [(dict(run.variables), [*_QUIETLY, *run.options, *(str(TESTS / file) for file in run.files)]) for run in runs]
    done = python("-m", "tests.support.several_runs", json.dumps(given), seconds=seconds, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return str(done.stdout)


def result_of(done: subprocess.CompletedProcess) -> str:
    """The last line that a process printed. Fails if the process did."""
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return str(done.stdout.splitlines()[-1])
