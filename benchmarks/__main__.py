"""``python -m benchmarks``: runs cases and probes, prints a table, writes JSON and Markdown on request."""

from __future__ import annotations

import fnmatch
import json
import sys
from dataclasses import replace
from pathlib import Path

import click

from anyattn.testing.harness import machine
from anyattn.testing.harness.case import Case
from anyattn.testing.harness.runner import refused, run_case
from anyattn.testing.harness.timing import Limits
from benchmarks import report
from benchmarks.bars import Found
from benchmarks.cpu.bars import BARS
from benchmarks.cpu.cases import CASES
from benchmarks.probes import PROBES, measure
from benchmarks.store import Store

_PROBE_GROUPS = {
    "memory": ("memory",),
    "masks": ("long-masks",),
    "host": ("first-call", "closure", "import"),
    "busy": ("busy",),
    "sequences": ("decode-host", "decode-step", "decode-pages", "ragged-lists"),
}
_LEAST_ROUNDS = 3
_SAMPLE = 0.02  # seconds
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
    cases = _chosen(CASES, groups, pattern)
    probes = [p for g, names in _PROBE_GROUPS.items() if not groups or g in groups for p in names] if pattern is None else []
    assert set(probes) <= set(PROBES)
    if list_only:
        click.echo("\n".join([*(f"{c.name}  {c.shape}  vs {', '.join(c.peers) or '-'}" for c in cases), *probes]))
        return
    if not cases and not probes:
        raise click.UsageError("no case matches; --list names them")
    where = machine.describe("python -m benchmarks " + " ".join(sys.argv[1:]))
    if keep and out is None:
        raise click.UsageError("--keep needs --out, the files to keep from")
    store = None if out is None else Store(out, BARS)
    found = _earlier(store, where["commit"]) if keep and store is not None else Found({}, {})
    limits = Limits(rounds, seconds, _LEAST_ROUNDS, _SAMPLE, patience)
    for name, step in [*((case.name, case) for case in cases), *((probe, None) for probe in probes)]:
        if name in (found.probes if step is None else found.records):
            continue
        if step is None:
            found.probes[name] = measure(name)
            click.echo(f"{name}: {json.dumps(found.probes[name])}")
        else:
            try:
                found.records[name] = run_case(step, limits)
            except Exception as error:
                found.records[name] = refused(step, error)
            click.echo(report.describe(found.records[name]))
        if store is not None:  # after every case, so that an interrupted run keeps its results
            store.save(where, found)
    click.echo("\n".join(report.bar_lines(found, BARS)))
    if any(record.refused for record in found.records.values()) or any("error" in figures for figures in found.probes.values()):
        sys.exit(1)


def _earlier(store: Store, commit: str) -> Found:
    """The results of an earlier run of the same commit, without cases that were refused or disturbed and probes that failed."""
    if store.commit() not in ("", commit):
        raise click.UsageError(f"the figures in --out are of commit {store.commit()}, this is {commit}; run without --keep")
    found = store.found()
    quiet = {name: record for name, record in found.records.items() if record.is_quiet}
    return replace(found, records=quiet, probes={name: figures for name, figures in found.probes.items() if "error" not in figures})


if __name__ == "__main__":
    main()
