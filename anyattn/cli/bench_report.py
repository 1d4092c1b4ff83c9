"""Report of ``anyattn bench``: a table of contestants, those not timed with the reasons, and a bar chart."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from anyattn.cli import bars
from anyattn.testing.harness.case import OURS, Case, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

__all__ = ["best_peer", "is_right", "lines", "pass_of", "plot"]

_TERA, _GIGA = 1e12, 1e9


def pass_of(case: Case) -> str:
    return "backward" if case.is_backward else "forward"


def is_right(record: Record) -> bool:
    """Whether anyattn was timed and is within its error budget, if it was judged."""
    return record.refused is None and OURS in record.timings and record.budget.get(OURS, 0.0) <= 1


def best_peer(record: Record) -> str | None:
    """The fastest contestant besides anyattn that computed the same result; None if there is none."""
    medians = {name: t.median for name, t in record.timings.items() if name != OURS and _is_fair(record, name)}
    return min(medians, key=lambda name: medians[name]) if medians else None


def _is_fair(record: Record, name: str) -> bool:
    return not record.differs(name) and record.budget.get(name, 0.0) <= 1


def lines(records: list[Record], cases: list[Case], where: dict[str, Any]) -> Iterator[RenderableType]:
    """Heading, table, summary, contestants that were not timed, and a legend."""
    case, unit = cases[0], _unit(records)
    yield f"[bold]{escape(case.variant)}[/]  {_sizes(case)} {case.dtype}, {_machine(where)}"
    yield _table(records, cases, unit)
    for record, each in zip(records, cases):
        yield _summary(record, each)
    yield from _missing(records)
    yield (
        "[dim]error: the share that a result uses of the error allowed against float64 (100% fails),\n"
        "-: compared with anyattn's result only; by: anyattn's backend.\n"
        "time: median over interleaved rounds, ± half the distance between the quartiles. Rates count visible pairs only.[/]"
    )
    if case.device == "cpu" and not any("disturbed_used" in record.extra for record in records):
        yield "[dim]Other processes were not watched for: pip install psutil.[/]"
    if any(record.extra.get("disturbed_used") for record in records):
        yield "[yellow]Other processes were busy meanwhile: too few quiet rounds. Close them and run again, or give more --patience.[/]"


def _sizes(case: Case) -> str:
    shape = case.shape
    heads = f"{shape.heads_q}" if shape.heads_q == shape.heads_kv else f"{shape.heads_q}/{shape.heads_kv}"
    return f"batch {shape.batch}, heads {heads}, head dim {shape.head_dim},"


def _machine(where: dict[str, Any]) -> str:
    return f"{where['gpu']}" if "gpu" in where else f"{where['cpu']}, {where['threads']} threads"


def _unit(records: list[Record]) -> tuple[float, str]:
    rates = [record.flops / t.median for record in records for t in record.timings.values()]
    return (_TERA, "TFLOP/s") if max(rates, default=0.0) >= 10 * _TERA else (_GIGA, "GFLOP/s")


def _table(records: list[Record], cases: list[Case], unit: tuple[float, str]) -> Table:
    table = Table(box=box.SIMPLE, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("pass")
    table.add_column("S", justify="right")
    table.add_column("who", no_wrap=True)
    for name in ("error", "ms", "±", unit[1], "anyattn is"):
        table.add_column(name, justify="right", no_wrap=True)
    for record, case in zip(records, cases):
        best = best_peer(record)
        for name in sorted(record.timings, key=lambda name: (name != OURS, record.timings[name].median)):
            timing = record.timings[name]
            table.add_row(
                pass_of(case),
                f"{case.shape.seqlen_q:,}",
                f"[bold]{name}[/]{_backend(record)}" if name == OURS else f"{name}{' *' if name == best else ''}",
                _error(record, name),
                f"{timing.median * 1e3:.{3 if timing.median < 1e-3 else 2 if timing.median < 0.1 else 0}f}",
                f"{timing.spread:.0%}",
                f"{record.flops / timing.median / unit[0]:.{1 if unit[0] == _TERA else 0}f}",
                _ratio(record, name),
            )
        table.add_section()
    return table


def _backend(record: Record) -> str:
    backend = record.extra.get("backend", "")
    return f" by {backend}" if backend else ""


def _error(record: Record, name: str) -> str:
    if name not in record.budget:
        return "differs" if record.differs(name) else "-"
    share = record.budget[name]
    return f"[{'green' if share <= 1 else 'bold red'}]{share:.0%}[/]"


def _ratio(record: Record, name: str) -> str:
    if name == OURS or OURS not in record.timings:
        return ""
    ratio = record.ratio(name)
    said = f"{ratio:.2f}x as fast"
    return f"[{'green' if ratio >= 1 else 'yellow'}]{said}[/]" if _is_fair(record, name) else f"[dim]({said})[/]"


def _summary(record: Record, case: Case) -> str:
    what, best = f"{pass_of(case)}, S {case.shape.seqlen_q:,}:", best_peer(record)
    if record.refused is not None or OURS not in record.timings:
        return f"[bold red]{what} refused: {escape(record.refused or record.unavailable.get(OURS, 'not timed'))}[/]"
    if best is None:
        return f"{what} no peer did this job here"
    judged = "" if OURS in record.budget else f" [dim](not judged: {escape(record.extra.get('not_judged', ''))})[/]"
    return f"{what} anyattn is [bold]{record.ratio(best):.2f}x[/] as fast as the best peer, {best}{judged}"


def _missing(records: Iterable[Record]) -> Iterator[str]:
    """Contestants that were not timed, grouped by reason."""
    reasons: dict[str, list[str]] = {}
    for record in records:
        for name, why in record.unavailable.items():
            who = reasons.setdefault(" ".join(why.replace(f"{name} ", "", 1).split()), [])
            who += [name] if name not in who else []
    if reasons:
        yield "[dim]not timed:[/]"
    for why, who in reasons.items():
        yield f"[dim]  {', '.join(who)}: {escape(why)}[/]"


def plot(records: list[Record], cases: list[Case], where: dict[str, Any]) -> Figure:
    """Chart of all contestants' rates by pass and length."""
    scale, unit = _unit(records)
    names = dict.fromkeys(name for record in records for name in record.timings)
    panels = []
    for which in dict.fromkeys(map(pass_of, cases)):
        groups = [
            bars.Group(f"S {case.shape.seqlen_q:,}", {n: record.flops / t.median / scale for n, t in record.timings.items()})
            for record, case in zip(records, cases)
            if pass_of(case) == which and record.timings
        ]
        panels += [bars.Panel(which, groups, unit, digits=1 if scale == _TERA else 0)] if groups else []
    case = cases[0]
    caption = f"{_sizes(case)} {case.dtype}; {_machine(where)}; torch {where['torch']}; {where['commit']}; {where['date']}"
    return bars.chart(panels, list(names), f"anyattn bench {case.variant}", caption)
