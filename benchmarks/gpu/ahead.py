"""Compilation ahead of a run: builds the kernels that it will launch, in many processes at once, before anything is timed.

Each process builds contestants on the GPU and calls them once, which fills the disk caches of Triton, Inductor and CuTe DSL, where the
measuring process then finds all kernels. ``python -m benchmarks.gpu.ahead`` is such a process: it reads jobs, one JSON line each, and
answers each with one line.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from anyattn.testing.harness.case import OURS, Case
from anyattn.testing.harness.peers import PEERS
from benchmarks.gpu.cases import CASES
from benchmarks.process import ANSWER, Child, apart

__all__ = ["CACHES", "Done", "Job", "compile_ahead", "jobs_of"]

# Caches that are off by default, and thread counts that keep the processes from competing for cores.
CACHES = {"FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}
_ALONE = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@dataclass(frozen=True)
class Job:
    """Some contestants of a case, compiled by one process."""

    case: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Done:
    """The outcome of a job. failed: contestant -> reason."""

    job: Job
    seconds: float
    failed: dict[str, str]


def jobs_of(cases: Iterable[Case]) -> list[Job]:
    """The jobs of a run: anyattn's contestants of a case together, every peer alone.

    Cases that differ only by lengths share their kernels, except Inductor's, which are compiled for a shape, and those of decoding,
    which depend on the batch size.
    """
    jobs, seen = [], set()
    for case in cases:
        shape, names = case.shape, [name for name in case.contestants if not name.startswith("flex")]
        sizes = replace(
            shape, batch=1, heads_q=shape.heads_q // shape.heads_kv, heads_kv=1, seqlen_q=1, seqlen_k=shape.batch * (case.bytes > 0)
        )
        alike = replace(case, group="", shape=sizes)
        if alike in seen:
            names = []
        seen.add(alike)
        if ours := tuple(name for name in names if name.startswith((OURS, "splits-"))):
            jobs.append(Job(case.name, ours))
        jobs += [Job(case.name, (name,)) for name in case.peers if PEERS[name].is_compiled and (name in names or name.startswith("flex"))]
    return jobs


def compile_ahead(
    jobs: list[Job],
    processes: int,
    seconds: float,
    hang: float,
    log: Path,
    echo: Callable[[str], None] = print,
    command: tuple[str, ...] = ("-m", "benchmarks.gpu.ahead"),
) -> list[Done]:
    """Runs the jobs in order in ``processes`` processes, and starts none after ``seconds``. hang: limit of a job in seconds."""
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    start, done = time.monotonic(), list[Done]()
    environment = {**CACHES, **os.environ, **_ALONE}

    def work(errors: TextIO) -> None:
        process = None
        while time.monotonic() - start < seconds:
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                break
            begun = time.monotonic()
            try:
                process = process or Child([sys.executable, *command], errors, environment)
                failed = process.ask(vars(job), min(hang, max(10.0, seconds - (begun - start))))
            except (RuntimeError, OSError) as error:
                failed = dict.fromkeys(job.names, str(error))
                if process is not None:
                    process.end()
                process = None
            done.append(Done(job, time.monotonic() - begun, failed))
        if process is not None:
            process.end()

    with log.open("w") as errors:
        threads = [threading.Thread(target=work, args=(errors,)) for _ in range(min(processes, len(jobs)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    _report(jobs, done, time.monotonic() - start, echo)
    return done


def _report(jobs: list[Job], done: list[Done], seconds: float, echo: Callable[[str], None]) -> None:
    work = sum(d.seconds for d in done)
    left = f", {len(jobs) - len(done)} left to the run itself" if len(done) < len(jobs) else ""
    echo(f"compiled ahead: {len(done)} of {len(jobs)} jobs in {seconds:.0f} s ({work:.0f} s of one process){left}")
    for d in sorted(done, key=lambda d: -d.seconds)[:3]:
        echo(f"  slow: {d.job.case} {', '.join(d.job.names[:3])}: {d.seconds:.0f} s")
    reasons: dict[str, list[tuple[str, str]]] = {}
    for d in done:
        for name, why in d.failed.items():
            reasons.setdefault(why[:160], []).append((name, d.job.case))
    for why, failed in reasons.items():
        names, cases = dict.fromkeys(name for name, _ in failed), dict.fromkeys(case for _, case in failed)
        echo(f"  not compiled: {_few(names)} of {_few(cases)}: {why}")


def _few(names: Iterable[str]) -> str:
    first, *rest = names
    return f"{first} and {len(rest)} more" if rest else first


# ---- the child process


def answer(job: Job, cases: dict[str, Case], device: str) -> dict[str, str]:
    """Compiles a job's contestants; returns those that failed with the reasons. Raises ``DeviceLost``."""
    import torch

    from anyattn.testing.harness.runner import prepared

    with torch.no_grad():
        run = prepared(cases[job.case], job.names, device, {})
        failed = {name: why for name, why in run.record.unavailable.items() if name in job.names}
    del run
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failed


def _serve(device: str = "cuda") -> None:
    cases = {case.name: case for case in CASES}
    with apart() as answers:
        for line in sys.stdin:
            figures = json.loads(line)
            job = Job(figures["case"], tuple(figures["names"]))
            try:
                failed = answer(job, cases, device)
            except (ValueError, TypeError, RuntimeError, KeyError) as error:
                failed = dict.fromkeys(job.names, f"{type(error).__name__}: {str(error)[:200]}")
            print(ANSWER + json.dumps(failed), file=answers, flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
