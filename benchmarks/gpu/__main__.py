"""``python -m benchmarks.gpu``: times anyattn and its peers on this machine's GPU, prints tables and bars, writes JSON and Markdown.

The work is done by a child process. When that dies, of a hang, a crash or an error on the device, the contestant that was running is
left out of its case and a new child goes on.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from benchmarks import machine
from benchmarks.gpu import report
from benchmarks.gpu.cases import CASES, GROUPS, GpuCase, chosen
from benchmarks.gpu.probes import PROBES, measure
from benchmarks.gpu.runner import DeviceLost, GpuRecord, run_case
from benchmarks.gpu.state import Store
from benchmarks.gpu.timing import Limits
from benchmarks.report import print_bars

_DEVICE_LOST = 3
_GROUPS = [*GROUPS, *PROBES]
_PACKAGES = ("torch", "triton", "nvidia-cutlass-dsl", "fa3-fwd", "tokenspeed-fa3", "flash-attn-4", "nvidia-cudnn-frontend")


@click.command(context_settings={"show_default": True})
@click.option("--group", "groups", multiple=True, type=click.Choice(_GROUPS), help="Only these groups, in this order (may be repeated).")
@click.option("--only", help="Only cases and probes in whose name this regular expression finds something.")
@click.option("--seconds", default=480.0, help="Start nothing after this long.")
@click.option("--case-seconds", default=3.0, help="Start no further round of a case after this long.")
@click.option("--rounds", default=30, type=click.IntRange(1), help="Interleaved rounds of each case, at most.")
@click.option("--hang", default=90.0, help="A step (compiling included) that takes longer is a hang; its process is ended.")
@click.option("--warm", is_flag=True, help="Leave the L2 cache as the calls before left it.")
@click.option("--out", default="bench-out/gpu", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
@click.option("--keep", is_flag=True, help="Go on from what OUT.json has.")
@click.option("--list", "list_only", is_flag=True, help="Name the cases, probes and bars, and stop. Needs no GPU.")
@click.option("--worker", is_flag=True, hidden=True)
def main(
    groups: tuple[str, ...],
    only: str | None,
    seconds: float,
    case_seconds: float,
    rounds: int,
    hang: float,
    warm: bool,
    out: Path,
    keep: bool,
    list_only: bool,
    worker: bool,
) -> None:
    """Time anyattn against its peers on a Hopper GPU, in interleaved rounds, on random data."""
    console = Console(width=None if sys.stdout.isatty() else 200)
    cases, probes = chosen(CASES, groups, only), _probes(groups, only)
    if list_only:
        _list(console, cases, probes)
        return
    if not cases and not probes:
        raise click.UsageError("nothing matches; --list names the cases and probes")
    if not torch.cuda.is_available():
        raise click.UsageError("this needs a CUDA device; --list works without one")
    store = Store(out)
    if worker:
        _work(store, cases, probes, Limits(rounds, case_seconds, min(5, rounds)), time.monotonic() + seconds, hang, not warm)
        return
    if not keep:
        store.clear()
    _supervise(store, [arg for arg in sys.argv[1:] if arg != "--keep"], time.monotonic() + seconds)
    print_bars(console, report.shown_bars(store.found()))


def _probes(groups: tuple[str, ...], only: str | None) -> list[str]:
    """The probes come last: each takes processes of its own."""
    return [p for p in PROBES if (not groups or p in groups) and (only is None or re.search(only, p))]


def _list(console: Console, cases: list[GpuCase], probes: list[str]) -> None:
    lines = [f"{c.name}  {c.shape}  vs {', '.join(c.peers)}" for c in cases]
    bars = [f"bar: {bar.name} {'≥' if bar.at_least else '≤'} {bar.floor:g} {bar.unit}" for bar in report.BARS]
    aims = ["" if bar.aim is None else f", aim {bar.aim:g}" for bar in report.BARS]
    console.print("\n".join([*lines, *(f"{p}  (in processes of its own)" for p in probes), *map(str.__add__, bars, aims)]), highlight=False)


def _supervise(store: Store, arguments: list[str], deadline: float) -> None:
    """Child after child until one ends well, time is up, or one dies without having begun anything."""
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


def _work(store: Store, cases: list[GpuCase], probes: list[str], limits: Limits, deadline: float, hang: float, cold: bool) -> None:
    where, found, state = _where(), store.found(), store.state()

    def watch(case: str, contestant: str) -> None:
        faulthandler.dump_traceback_later(hang, exit=True)
        state.under_way = (case, contestant)
        store.save_state(state)

    for case in [c for c in cases if c.name not in found.records]:
        if time.monotonic() > deadline:
            click.echo(f"time is up before {case.name}")
            break
        banned = state.banned_in(case.name, case.peers)
        try:
            record = _record(case, limits, banned, lambda contestant, case=case: watch(case.name, contestant), cold)
        except DeviceLost as error:
            state.error = str(error)
            store.save_state(state)
            click.echo(f"{case.name}: {error}")
            sys.stdout.flush()
            sys.exit(_DEVICE_LOST)
        found.records[case.name] = record
        store.save(where, found)
        click.echo(report.describe(record))
        sys.stdout.flush()
    faulthandler.cancel_dump_traceback_later()
    state.under_way = None
    store.save_state(state)
    torch.cuda.empty_cache()
    for probe in [p for p in probes if p not in found.probes and time.monotonic() < deadline]:
        found.probes[probe] = measure(probe, max(10.0, min(120.0, deadline - time.monotonic())))
        click.echo(f"{probe}: {found.probes[probe]}")
        store.save(where, found)


def _record(case: GpuCase, limits: Limits, banned: dict[str, str], watch: Any, cold: bool) -> GpuRecord:
    """A case that raises is a refusal: the others are still wanted."""
    try:
        if "" in banned:
            raise RuntimeError(banned[""])
        return run_case(case, limits, banned=banned, watch=watch, cold=cold)
    except DeviceLost:
        raise
    except Exception as error:
        record = GpuRecord(case.name, case.group, case.door, case.variant, "", str(case.shape))
        record.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return record


def _where() -> dict[str, Any]:
    versions = {name: version for name in _PACKAGES if (version := _version(name))}
    arguments = sys.argv[1 : sys.argv.index("--worker")] if "--worker" in sys.argv else sys.argv[1:]  # what the parent was called with
    place = machine.describe("python -m benchmarks.gpu " + " ".join(arguments))
    return {**place, "gpu": torch.cuda.get_device_name(), "versions": versions}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
