"""``python -m benchmarks.gpu``: times anyattn and its peers on this machine's GPU, prints tables and bars, writes JSON and Markdown.

First all kernels are compiled by many processes. One child process does the timing; if it dies of a hang, a crash or a device error,
the contestant that was running is left out of its case, and a new child continues.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from anyattn.testing.harness import machine
from anyattn.testing.harness.case import Case, Record
from anyattn.testing.harness.runner import DeviceLost, refused, run_case
from anyattn.testing.harness.timing import Limits
from benchmarks import report
from benchmarks.bars import Found
from benchmarks.gpu import ahead, estimate
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.cases import CASES, GROUPS, chosen
from benchmarks.gpu.probes import LONGEST, NAMES, measure
from benchmarks.store import State, Store, is_done

_DEVICE_LOST = 3
# The most informative groups first, for runs that are cut off.
_ORDER = ("variants", "gqa", "backward", "decode", "fa2", "fa2-backward", "gradients", "memory")
_GROUPS = list(dict.fromkeys([*_ORDER, *GROUPS, *NAMES]))
Step = Case | str  # a str is a probe's name
_PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "fa3-fwd", "tokenspeed-fa3", "flash-attn-4", "nvidia-cudnn-frontend")


@click.command(context_settings={"show_default": True})
@click.option("--group", "groups", multiple=True, type=click.Choice(_GROUPS), help="Only these groups, in this order (may be repeated).")
@click.option("--only", help="Only cases and probes in whose name this regular expression finds something.")
@click.option("--who", help="Of the peers only those in whose name this regular expression finds something.")
@click.option("--seconds", default=480.0, help="Start nothing after this long.")
@click.option("--jobs", default=min(16, os.cpu_count() or 1), help="Processes that compile ahead of the timing; 0 compiles nothing ahead.")
@click.option("--ahead-seconds", default=150.0, help="Leave what is not compiled after this long to the timing.")
@click.option("--case-seconds", default=3.0, help="Start no further round of a case after this long.")
@click.option("--rounds", default=30, type=click.IntRange(1), help="Interleaved rounds of each case, at most.")
@click.option("--hang", default=90.0, help="A step (compiling included) that takes longer is a hang; its process is ended.")
@click.option("--warm", is_flag=True, help="Leave the L2 cache as the calls before left it.")
@click.option("--out", default="bench-out/gpu", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
@click.option("--keep", is_flag=True, help="Go on from what OUT.json has.")
@click.option("--list", "list_only", is_flag=True, help="Name the cases, probes and bars, and stop. Needs no GPU.")
@click.option("--bars", "bars_only", is_flag=True, help="Print the bars of OUT.json, and stop. Needs no GPU.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    groups: tuple[str, ...],
    only: str | None,
    who: str | None,
    seconds: float,
    jobs: int,
    ahead_seconds: float,
    case_seconds: float,
    rounds: int,
    hang: float,
    warm: bool,
    out: Path,
    keep: bool,
    list_only: bool,
    bars_only: bool,
    worker: bool,
) -> None:
    """Time anyattn against its peers on a Hopper GPU, in interleaved rounds, on random data."""
    limits = Limits(rounds, case_seconds, min(5, rounds))
    steps = _steps(groups, only, who)
    if list_only:
        _list(steps, limits)
        return
    if bars_only:
        click.echo("\n".join(report.bar_lines(Store(out).found(), BARS)))
        return
    if not steps:
        raise click.UsageError("nothing matches; --list names the cases and probes")
    if not torch.cuda.is_available():
        raise click.UsageError("this needs a CUDA device; --list works without one")
    store, deadline = Store(out, BARS), time.monotonic() + seconds
    if worker:
        _work(store, steps, limits, deadline, hang, not warm, out, who)
        return
    if not keep:
        store.clear()
    for name, value in ahead.CACHES.items():
        os.environ.setdefault(name, value)
    _compile(store, steps, limits, jobs, min(ahead_seconds, seconds), hang)
    _supervise(store, [arg for arg in sys.argv[1:] if arg != "--keep"], deadline)
    click.echo("\n".join(report.bar_lines(store.found(), BARS)))


def _compile(store: Store, steps: list[Step], limits: Limits, processes: int, seconds: float, hang: float) -> None:
    """Compiles the kernels of the steps still to be timed, and prints an estimate of the total time."""
    found, state = store.found(), store.state()
    left = [step for step in steps if isinstance(step, Case) and not is_done(found, step)]
    jobs = [job for job in ahead.jobs_of(left) if not set(job.names) & set(state.banned_in(job.case, job.names))]
    flex = sum(name.startswith("flex") for job in jobs for name in job.names)
    start = min(seconds, estimate.ahead_seconds(len(jobs), flex, processes)) if processes else 0.0
    lines = estimate.described(steps, limits, processes > 0, found, start)
    click.echo("\n".join([f"estimated: compiling {len(jobs)} jobs ahead, ~{start:.0f} s; then", *lines]))
    sys.stdout.flush()
    if processes and jobs:
        ahead.compile_ahead(jobs, processes, seconds, hang, store.log, click.echo)


def _steps(groups: tuple[str, ...], only: str | None, who: str | None) -> list[Step]:
    """Cases and probes, group by group in the requested order."""
    cases, steps = chosen(CASES, groups, only, who), list[Step]()
    for group in groups or _GROUPS:
        steps += [case for case in cases if case.group == group]
        steps += [group] if group in NAMES and (only is None or re.search(only, group)) else []
    return steps


def _list(steps: list[Step], limits: Limits) -> None:
    lines = [f"{s}  (in processes of its own)" if isinstance(s, str) else f"{s.name}  {s.shape}  vs {', '.join(s.peers)}" for s in steps]
    bars = [f"bar: {bar.name} {'≥' if bar.at_least else '≤'} {bar.floor:g} {bar.unit}" for bar in BARS]
    aims = ["" if bar.aim is None else f", aim {bar.aim:g}" for bar in BARS]
    times = ["estimated, compiled ahead:", *estimate.described(steps, limits, True, Found({}, {}))]
    click.echo("\n".join([*lines, *map(str.__add__, bars, aims), *times]))


def _supervise(store: Store, arguments: list[str], deadline: float) -> None:
    """Starts children until one exits with 0, time is up, or one dies before it started a case."""
    while (left := deadline - time.monotonic()) > 0:
        command = [sys.executable, "-m", "benchmarks.gpu", *arguments, "--worker", "--seconds", f"{left:.0f}"]
        try:
            code = subprocess.run(command, timeout=left + 60).returncode
        except subprocess.TimeoutExpired:
            code = -1
        if code == 0:
            return
        state = store.state()
        at = state.under_way
        if not state.ban(f"its process died (exit code {code}): a hang or a crash"):
            click.echo(f"the benchmark's process died with exit code {code} before it began a case", err=True)
            return
        click.echo(f"exit code {code} at {' / '.join(at or ())}; going on without it", err=True)
        store.save_state(state)


def _work(
    store: Store,
    steps: list[Step],
    limits: Limits,
    deadline: float,
    hang: float,
    cold: bool,
    out: Path = Path("bench-out/gpu"),
    who: str | None = None,
) -> None:
    where, found, state = _where(), store.found(), store.state()

    def watch(case: str, contestant: str) -> None:
        faulthandler.dump_traceback_later(hang, exit=True)
        state.under_way = (case, contestant)
        store.save_state(state)

    def rest() -> None:
        faulthandler.cancel_dump_traceback_later()
        state.under_way = None
        store.save_state(state)

    for step in steps:
        name = step if isinstance(step, str) else step.name
        if is_done(found, step):
            continue
        if time.monotonic() > deadline:
            click.echo(f"time is up before {name}")
            break
        if isinstance(step, str):
            rest()
            torch.cuda.empty_cache()
            found.probes[name] = measure(name, max(10.0, min(LONGEST[name], deadline - time.monotonic())), out, who)
            click.echo("\n".join(report.probe_lines(name, found.probes[name])))
        else:
            found.records[name] = record = _measured(store, state, step, limits, watch, cold)
            click.echo(report.describe(record))
        store.save(where, found)
        sys.stdout.flush()
    rest()


def _measured(store: Store, state: State, case: Case, limits: Limits, watch: Callable[[str, str], None], cold: bool) -> Record:
    """Measures a case; ends the process if the device is lost."""
    try:
        banned = state.banned_in(case.name, case.contestants)
        return _record(case, limits, banned, lambda contestant: watch(case.name, contestant), cold)
    except DeviceLost as error:
        state.error = str(error)
        store.save_state(state)
        click.echo(f"{case.name}: {error}")
        sys.stdout.flush()
        sys.exit(_DEVICE_LOST)


def _record(case: Case, limits: Limits, banned: dict[str, str], watch: Any, cold: bool) -> Record:
    """The case's record; a case that raises gets a refusal, and the others still run."""
    try:
        if "" in banned:
            raise RuntimeError(banned[""])
        return run_case(case, limits, banned=banned, watch=watch, cold=cold)
    except DeviceLost:
        raise
    except Exception as error:
        return refused(case, error)


def _where() -> dict[str, Any]:
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    arguments = sys.argv[1 : sys.argv.index("--worker")] if "--worker" in sys.argv else sys.argv[1:]  # the arguments of the parent
    place = machine.describe("python -m benchmarks.gpu " + " ".join(arguments))
    return {**place, "gpu": torch.cuda.get_device_name(), "versions": versions}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
