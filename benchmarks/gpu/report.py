"""A GPU run as JSON and as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.bars import Found
from benchmarks.case import OURS, Record
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.gpt import report as gpt
from benchmarks.gpu.runner import GpuRecord, is_wrong
from benchmarks.report import bar_rows

__all__ = ["BARS", "as_json", "as_markdown", "bar_lines", "describe", "found_in", "probe_lines", "shown_bars"]

_LEGEND = """\
Rounds are interleaved in shuffled order; a figure is the median over rounds, ± half the distance between the quartiles; `x` says how
many times as fast as that peer anyattn was, the median of the ratios within each round. TF/s count visible pairs only. difference: the
largest relative RMS between a contestant's result and anyattn's (0 for block masks: the same tiles); one marked **differs** computed
something else (or, if all do, anyattn did). backend: which of anyattn's computed the case, of a backward pass "forward's + backward's";
`anyattn-mod` has the mask as a function and no block mask. GB/s count keys and values."""


def as_json(machine: dict[str, Any], found: Found) -> dict[str, Any]:
    return {
        "machine": machine,
        "cases": [record.as_json() for record in found.records.values()],
        "probes": found.probes,
        "bars": [dict(zip(("bar", "measured", "floor", "aim", "verdict"), row)) for row in bar_rows(found, BARS)],
    }


def found_in(figures: dict[str, Any]) -> Found:
    """The run that ``as_json`` gave ``figures`` of."""
    records = [GpuRecord.from_json(case) for case in figures["cases"]]
    return Found({record.case: record for record in records}, dict(figures["probes"]))


def as_markdown(machine: dict[str, Any], found: Found) -> str:
    """A section for docs/measured.md."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    lines = [
        f"## {machine['date']}, commit {machine['commit']}",
        "",
        f"`{machine['command']}` on {machine['gpu']}; {versions}.",
        _LEGEND,
        "",
    ]
    for group in dict.fromkeys(record.group for record in found.records.values()):
        lines += [f"### {group}", "", *_table([r for r in found.records.values() if r.group == group]), ""]
    for name, figures in found.probes.items():
        lines += probe_lines(name, figures)
    missing = [f"- {r.case}: no {name}: {why}" for r in found.records.values() for name, why in r.unavailable.items()]
    if missing:
        lines += ["", "Not timed:", "", *missing]
    lines += ["", "### Bars", "", "| bar | measured | floor | aim | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in shown_bars(found)]
    return "\n".join(lines) + "\n"


def probe_lines(name: str, figures: dict[str, Any]) -> list[str]:
    return gpt.tables(name, figures) if "contestants" in figures else [f"- {name}: {figures}"]


def shown_bars(found: Found) -> list[tuple[str, str, str, str, str]]:
    """(bar, measured, floor, aim, reached or short) of every bar."""
    rows = bar_rows(found, BARS)
    return [(row[0], row[1].replace("refused", "no figure"), *row[2:4], row[4].replace("pass", "reached")) for row in rows]


def bar_lines(found: Found) -> list[str]:
    """The bars in few characters, one a line: verdict, bar, measured, wanted. Of those that have no figure only the number."""
    rows = shown_bars(found)
    measured = [row for row in rows if row[4] != "-"]
    lines = [f"{row[4].replace('*', ''):8}{row[0]}: {row[1]}, wanted {row[2].strip()}" for row in measured]
    short = sum(line.startswith("short") for line in lines)
    summary = f"bars: {len(lines) - short} reached, {short} short, {len(rows) - len(lines)} without figures"
    return [*lines, summary]


def _table(records: list[Record]) -> list[str]:
    names = list(dict.fromkeys(name for r in records for name in (*r.timings, *r.unavailable) if name != OURS))
    head = ["case", "shape", "backend", "difference", OURS, *names]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in records:
        if r.refused:
            rows.append("| " + " | ".join([r.case, r.shape, "-", "-", f"refused: {r.refused}", *["-"] * len(names)]) + " |")
            continue
        cells = [r.case, r.shape, _backend(r), _difference(r), *(_cell(r, name) for name in (OURS, *names))]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _backend(record: Record) -> str:
    backend, by_mod = record.extra.get("backend", ""), record.extra.get("backend_mod", "")
    return f"{backend} (mod: {by_mod})" if by_mod and by_mod != backend else backend


def _difference(record: Record) -> str:
    others = [d for name, d in record.budget.items() if name != OURS]
    return f"{max(others):.1e}" if others else ""


def _cell(record: Record, name: str) -> str:
    if name not in record.timings:
        return "-"
    parts = [_speed(record, name)]
    if name != OURS and OURS in record.timings:
        parts.append(f"{record.ratio(name):.2f}x")
    if is_wrong(record, name):
        parts.append(f"**differs** ({record.budget[name]:.1e})")
    return ", ".join(parts)


def _speed(record: Record, name: str) -> str:
    timing = record.timings[name]
    seconds, spread = timing.median, f" ±{timing.spread * 100:.0f} %"
    if "bytes" in record.extra:
        return f"{record.extra['bytes'] / seconds / 1e9:,.0f} GB/s{spread}"
    if record.flops:
        return f"{record.flops / seconds / 1e12:.0f} TF/s{spread}"
    return (f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms") + spread


def describe(record: Record) -> str:
    """One line for people who are waiting."""
    if record.refused:
        return f"{record.case}: refused, {record.refused}"
    speeds = [f"{name} {_cell(record, name)}" for name in record.timings]
    missing = [f"no {name} ({why[:120]})" for name, why in record.unavailable.items()]
    backend = _backend(record)
    missing += [f"anyattn waits for the device ({waits[:120]})"] if (waits := record.extra.get("syncs")) else []
    seconds = f"{record.extra.get('seconds', '?')} s"
    return f"{record.case}{f' [{backend}]' if backend else ''}: " + "; ".join([*speeds, *missing, seconds])
