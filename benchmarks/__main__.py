"""``python -m benchmarks``: runs cases and probes, prints a table, writes JSON and Markdown on request."""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks import machine, report
from benchmarks.bars import Found
from benchmarks.case import Case, Record
from benchmarks.cases import CASES
from benchmarks.probes import PROBES, measure
from benchmarks.runner import run_case

_PROBE_GROUPS = {
    "memory": ("memory",),
    "masks": ("long-masks",),
    "host": ("first-call", "closure", "import"),
    "sequences": ("decode-host", "decode-pages", "ragged-lists"),
}
_GROUPS = list(dict.fromkeys([*(case.group for case in CASES), *_PROBE_GROUPS]))


def _chosen(cases: list[Case], groups: tuple[str, ...], pattern: str | None) -> list[Case]:
    cases = [case for case in cases if not groups or case.group in groups]
    return [case for case in cases if pattern is None or fnmatch.fnmatch(case.name, f"*{pattern}*")]


@click.command()
@click.option("--group", "groups", multiple=True, type=click.Choice(_GROUPS), help="Only these groups (may be repeated).")
@click.option("--filter", "pattern", help="Only cases whose name group/variant/S/dtype contains this (with * and ?); no probes.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(3), help="Interleaved rounds of each case.")
@click.option("--seconds", default=40.0, show_default=True, help="Start no further round of a case after this long.")
@click.option("--patience", default=30.0, show_default=True, help="Wait this long per case for other processes to end.")
@click.option("--out", type=click.Path(path_type=Path), help="Write OUT.json and OUT.md.")
@click.option("--keep", is_flag=True, help="Keep what OUT.json has from quiet rounds of this commit, and measure the rest.")
@click.option("--list", "list_only", is_flag=True, help="Name the cases and probes and stop.")
def main(
    groups: tuple[str, ...],
    pattern: str | None,
    rounds: int,
    seconds: float,
    patience: float,
    out: Path | None,
    keep: bool,
    list_only: bool,
) -> None:
    """Time anyattn against its peers, in interleaved rounds, on random data, after judging its results."""
    console = Console()
    cases = _chosen(CASES, groups, pattern)
    probes = [p for g, names in _PROBE_GROUPS.items() if not groups or g in groups for p in names] if pattern is None else []
    assert set(probes) <= set(PROBES)
    if list_only:
        console.print("\n".join([*(f"{c.name}  {c.shape}  vs {', '.join(c.peers) or '-'}" for c in cases), *probes]), highlight=False)
        return
    if not cases and not probes:
        raise click.UsageError("no case matches; --list names them")
    where = machine.describe("python -m benchmarks " + " ".join(sys.argv[1:]))
    found = _earlier(out, where["commit"]) if keep else Found({}, {})
    for case in [case for case in cases if case.name not in found.records]:
        with console.status(f"{case.name} ({case.shape})"):
            found.records[case.name] = record = _run(case, rounds, seconds, patience)
        console.print(report.describe_record(record), highlight=False, soft_wrap=True)
        _write(out, where, found)
    for probe in [probe for probe in probes if probe not in found.probes]:
        with console.status(probe):
            found.probes[probe] = measure(probe)
        console.print(f"{probe}: {json.dumps(found.probes[probe])}", highlight=False, soft_wrap=True)
        _write(out, where, found)
    report.print_bars(console, report.bar_rows(found))
    if any(record.refused for record in found.records.values()):
        sys.exit(1)


def _earlier(out: Path | None, commit: str) -> Found:
    """What an earlier run of the same commit wrote, without the cases that were refused or disturbed."""
    if out is None:
        raise click.UsageError("--keep needs --out, the files to keep from")
    path = out.with_suffix(".json")
    if not path.exists():
        return Found({}, {})
    figures: dict[str, Any] = json.loads(path.read_text())
    if figures["machine"]["commit"] != commit:
        raise click.UsageError(f"{path} is of commit {figures['machine']['commit']}, this is {commit}; run without --keep")
    records = [Record.from_json(case) for case in figures["cases"]]
    return Found({r.case: r for r in records if r.is_quiet}, figures["probes"])


def _run(case: Case, rounds: int, seconds: float, patience: float) -> Record:
    """A case that raises is a refusal too: the other figures are still wanted."""
    try:
        return run_case(case, rounds, seconds, patience)
    except Exception as error:
        record = Record.of(case)
        record.refused = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return record


def _write(out: Path | None, where: dict, found: Found) -> None:
    """After every case, so that an interrupted run keeps what it has."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(report.as_json(where, found), indent=1) + "\n")
    out.with_suffix(".md").write_text(report.as_markdown(where, found))


if __name__ == "__main__":
    main()
