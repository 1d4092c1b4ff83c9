"""Report of a run as JSON and as Markdown, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from anyattn.testing.harness.case import OTHER_FLOPS, OURS, Record
from benchmarks.bars import Bar, Found, bar_rows

__all__ = ["as_json", "as_markdown", "bar_lines", "describe", "found_in", "probe_lines", "shown_bars"]

_LEGEND = """\
Rounds are interleaved in shuffled order; a figure is the median over rounds, ± half the distance between the quartiles; `x` says how
many times as fast as that peer anyattn was, the median of the ratios within each round. GF/s and TF/s count visible pairs only, GB/s keys
and values. budget: the share of the allowed error against float64 that anyattn's result uses (1 is the limit). difference: the largest
relative RMS between a contestant's result and anyattn's (0 for block masks: the same tiles); one marked **differs** computed something
else (or, if all do, anyattn did)."""
_LEGEND_CPU = "A round during which other processes were busy is repeated; (disturbed) marks a case that had too few quiet ones."
_LEGEND_GPU = """\
backend: which of anyattn's computed the case, of a backward pass "forward's + backward's"; `anyattn-mod` has the mask as a function and no
block mask."""


def as_json(machine: dict[str, Any], found: Found, bars: Sequence[Bar]) -> dict[str, Any]:
    return {
        "machine": machine,
        "cases": [record.as_json() for record in found.records.values()],
        "probes": found.probes,
        "bars": [dict(zip(("bar", "measured", "floor", "aim", "verdict"), row)) for row in bar_rows(found, bars)],
    }


def found_in(figures: dict[str, Any]) -> Found:
    """The run from the ``figures`` that ``as_json`` returned."""
    records = [Record.from_json(case) for case in figures["cases"]]
    return Found({record.case: record for record in records}, dict(figures["probes"]))


def as_markdown(machine: dict[str, Any], found: Found, bars: Sequence[Bar]) -> str:
    """A section for a page of docs/history."""
    legend = _LEGEND_GPU if "gpu" in machine else _LEGEND_CPU
    lines = [f"## {machine['date']}, commit {machine['commit']}", "", f"`{machine['command']}` on {_place(machine)}.", _LEGEND, legend, ""]
    for group in dict.fromkeys(record.group for record in found.records.values()):
        lines += [f"### {group}", "", *_table([r for r in found.records.values() if r.group == group]), ""]
    for name, figures in found.probes.items():
        lines += probe_lines(name, figures)
    missing = [f"- {r.case}: no {name}: {why}" for r in found.records.values() for name, why in r.unavailable.items()]
    if missing:
        lines += ["", "Not timed:", "", *missing]
    lines += ["", "### Bars", "", "| bar | measured | floor | aim | |", "|---|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in shown_bars(found, bars)]
    return "\n".join(lines) + "\n"


def _place(machine: dict[str, Any]) -> str:
    if "gpu" in machine:
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        return f"{machine['gpu']}; {versions}"
    bf16 = "with" if machine["bf16_instructions"] else "without"
    what = f"{machine['cpu']}, {machine['threads']} threads, {machine['capability']} {bf16} bf16 instructions"
    return f"{what}; torch {machine['torch']}, Python {machine['python']}, {machine['system']}"


def probe_lines(name: str, figures: dict[str, Any]) -> list[str]:
    if "contestants" not in figures:
        return [f"- {name}: {_rounded(figures)}"]
    from benchmarks.gpu.gpt import report as gpt  # imported here: reading a CPU run needs none of its modules

    return gpt.tables(name, figures)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def shown_bars(found: Found, bars: Sequence[Bar]) -> list[tuple[str, str, str, str, str]]:
    """(bar, measured, floor, aim, reached or short) of every bar."""
    rows = bar_rows(found, bars)
    return [(row[0], row[1].replace("refused", "no figure"), *row[2:4], row[4].replace("pass", "reached")) for row in rows]


def bar_lines(found: Found, bars: Sequence[Bar]) -> list[str]:
    """The bars briefly, one per line: verdict, bar, measured, wanted; and the number of bars without figures."""
    rows = shown_bars(found, bars)
    measured = [row for row in rows if row[4] != "-"]
    lines = [f"{row[4].replace('*', ''):8}{row[0]}: {row[1]}, wanted {row[2].strip()}" for row in measured]
    short = sum(line.startswith("short") for line in lines)
    summary = f"bars: {len(lines) - short} reached, {short} short, {len(rows) - len(lines)} without figures"
    return [*lines, summary]


def describe(record: Record) -> str:
    """One progress line for a record."""
    if record.refused:
        return f"{record.case}: REFUSED, {record.refused}"
    speeds = [f"{name} {_cell(record, name)}" for name in record.timings]
    missing = [f"no {name} ({why[:120]})" for name, why in record.unavailable.items()]
    missing += [f"anyattn waits for the device ({waits[:120]})"] if (waits := record.extra.get("syncs")) else []
    missing += ["while other processes were busy"] if record.timings and not record.is_quiet else []
    backend, seconds = _backend(record), f"{record.extra.get('seconds', '?')} s"
    return f"{record.case}{f' [{backend}]' if backend else ''}: " + "; ".join([*speeds, *missing, seconds])


def _table(records: list[Record]) -> list[str]:
    """The table of records, without columns that are empty in all of them."""
    names = list(dict.fromkeys(name for r in records for name in (*r.timings, *r.unavailable) if name != OURS))
    about = {"backend": _backend, "budget": _budget, "difference": _difference}
    columns = {title: cell for title, cell in about.items() if any(cell(r) for r in records)}
    head = ["case", "shape", *columns, OURS, *names]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for r in records:
        case = r.case + (" (disturbed)" if r.timings and not r.is_quiet else "")
        figures = [f"refused: {r.refused}", *["-"] * len(names)] if r.refused else [_cell(r, name) for name in (OURS, *names)]
        rows.append("| " + " | ".join([case, r.shape, *(cell(r) or "-" for cell in columns.values()), *figures]) + " |")
    return rows


def _backend(record: Record) -> str:
    backend, by_mod = record.extra.get("backend", ""), record.extra.get("backend_mod", "")
    return f"{backend} (mod: {by_mod})" if by_mod and by_mod != backend else backend


def _budget(record: Record) -> str:
    if OURS not in record.budget:
        return ""
    share = record.budget[OURS]
    return f"{share:.2f}" if share <= 1 else f"**{share:.3g}**"


def _difference(record: Record) -> str:
    others = [d for name, d in record.difference.items() if name != OURS]
    return f"{max(others):.1e}" if others else ""


def _cell(record: Record, name: str) -> str:
    if name not in record.timings:
        return "-"
    parts = [_speed(record, name)]
    if name != OURS and OURS in record.timings:
        parts.append(f"{record.ratio(name):.2f}x")
    if record.differs(name):
        parts.append(f"**differs** ({record.difference[name]:.1e})")
    if not record.budget.get(name, 0.0) <= 1.0:
        parts.append("(fails the budget)")
    return ", ".join(parts)


def _speed(record: Record, name: str) -> str:
    """The speed as text: the rate alone for devices so fast that milliseconds are not informative."""
    timing = record.timings[name]
    seconds, spread = timing.median, f" ±{timing.spread * 100:.0f} %"
    if "bytes" in record.extra:
        return f"{record.extra['bytes'] / seconds / 1e9:,.0f} GB/s{spread}"
    rate = record.flops / seconds if name not in OTHER_FLOPS else 0.0
    if rate >= 1e12:
        return f"{rate / 1e12:.0f} TF/s{spread}"
    shown = f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
    return shown + spread + (f", {rate / 1e9:.0f} GF/s" if rate else "")
