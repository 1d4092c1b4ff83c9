"""A run as JSON and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.bars import BARS, Bar, Found
from benchmarks.case import OTHER_JOB, OURS, Record

__all__ = ["as_json", "as_markdown", "bar_rows", "describe_record", "print_bars"]


def as_json(machine: dict[str, Any], found: Found) -> dict[str, Any]:
    return {
        "machine": machine,
        "cases": [record.as_json() for record in found.records.values()],
        "probes": found.probes,
        "bars": [dict(zip(("bar", "measured", "floor", "aim", "verdict"), row)) for row in bar_rows(found)],
    }


def as_markdown(machine: dict[str, Any], found: Found) -> str:
    """A section for docs/measured.md."""
    bf16 = "with" if machine["bf16_instructions"] else "without"
    lines = [
        f"## {machine['date']}, commit {machine['commit']}",
        "",
        f"`{machine['command']}` on {machine['cpu']}, {machine['threads']} threads, {machine['capability']} {bf16} bf16 instructions; "
        f"torch {machine['torch']}, Python {machine['python']}, {machine['system']}.",
        "Rounds are interleaved; times are medians, ± half the distance between the quartiles; GFLOP/s count unmasked pairs only; a ratio",
        "is how many times as fast anyattn was in the same run; budget is the share of the allowed error against float64 (1 is the limit);",
        "a round during which other processes were busy is repeated; (disturbed) marks a case that had too few quiet ones.",
        "",
    ]
    for group in dict.fromkeys(record.group for record in found.records.values()):
        records = [r for r in found.records.values() if r.group == group]
        lines += [f"### {group}", "", *_table(records), ""]
    for name, figures in found.probes.items():
        lines += [f"- {name}: {_flat(figures)}"]
    lines += ["", "### Bars", "", "| bar | measured | floor | aim | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in bar_rows(found)]
    return "\n".join(lines) + "\n"


def bar_rows(found: Found, bars: Sequence[Bar] = BARS) -> list[tuple[str, str, str, str, str]]:
    """(bar, measured, floor, aim, verdict) of every bar, in their order."""
    return [_bar_row(bar, found) for bar in bars]


def _bar_row(bar: Bar, found: Found) -> tuple[str, str, str, str, str]:
    sign = "≥" if bar.at_least else "≤"
    floor, aim = f"{sign} {_figure(bar.floor)} {bar.unit}", "" if bar.aim is None else f"{_figure(bar.aim)} {bar.unit}"
    found.disturbed.clear()
    try:
        value, note = bar.measure(found), bar.note(found)
    except KeyError as missing:
        record = found.records.get(str(missing.args[0]))
        return bar.name, "refused" if record is not None else "not measured", floor, aim, "-"
    text = f"{_figure(value)} {bar.unit}" + (f" ({note})" if note else "")
    verdict = "pass" if bar.passes(value) else "**short**"
    return bar.name, text, floor, aim, verdict + (" (disturbed)" if found.disturbed else "")


def print_bars(console: Console, rows: Sequence[tuple[str, str, str, str, str]]) -> None:
    """The bars that were measured, as ``bar_rows`` gives them: green or, where the verdict is "short", red."""
    table = Table("bar", "measured", "floor", "aim", "", title="Bars")
    for row in rows:
        if row[1] != "not measured":
            verdict = row[4].replace("*", "")
            table.add_row(*row[:4], f"[{'green' if verdict.startswith(('pass', 'reached')) else 'red'}]{verdict}")
    console.print(table)


def describe_record(record: Record) -> str:
    """One line for people who are waiting."""
    if record.refused:
        return f"{record.case}: REFUSED, {record.refused}"
    ratios = ", ".join(f"{record.ratio(p):.2f}x {p}" for p in record.timings if p != OURS)
    missing = "".join(f", no {name}: {why}" for name, why in record.unavailable.items())
    noisy = ", while other processes were busy" if not record.is_quiet else ""
    return f"{record.case}: {_time(record, OURS)}, {ratios or 'no peer'}{missing}{noisy}"


def _table(records: list[Record]) -> list[str]:
    peers = list(dict.fromkeys(name for r in records for name in r.timings if name != OURS))
    has_flops = any(r.flops for r in records)
    head = ["case", "shape", "budget", "anyattn", *(c for p in peers for c in (p, f"vs {p}"))]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in records:
        if r.refused:
            rows.append(f"| {r.case} | {r.shape} | **{r.budget.get(OURS, float('nan')):.3g}** | refused | {' | ' * (2 * len(peers) - 1)} |")
            continue
        noisy = " (disturbed)" if not r.is_quiet else ""
        cells = [r.case + noisy, r.shape, f"{r.budget[OURS]:.2f}" if has_flops else "equal", _time(r, OURS)]
        for p in peers:
            cells += [_time(r, p), f"{r.ratio(p):.2f}x"] if p in r.timings else ["-", "-"]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _time(record: Record, name: str) -> str:
    timing = record.timings[name]
    text = f"{_figure(timing.median * 1e3)} ms ±{timing.spread * 100:.0f} %"
    failed = record.budget.get(name, 0.0) > 1.0
    return (
        text
        + (f", {record.flops / timing.median / 1e9:.0f} GF/s" if record.flops and name not in OTHER_JOB else "")
        + (" (fails the budget)" if failed else "")
    )


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _flat(figures: dict[str, Any]) -> str:
    parts = []
    for name, value in figures.items():
        if isinstance(value, dict):
            parts.append(f"{name} ({_flat(value)})")
        elif not isinstance(value, list):
            parts.append(f"{name} {_figure(value) if isinstance(value, float) else value}")
    return ", ".join(parts)
