"""Report of the training step as Markdown tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.gpt.measure import ratio
from benchmarks.gpu.gpt.profile import FAMILIES

__all__ = ["FLASH", "PEER", "kernels", "tables"]

PEER, FLASH = "flex-triton", "flex-flash"
_KERNELS = 12
_Cell = Callable[[str], str]


def tables(name: str, figures: dict[str, Any]) -> list[str]:
    """The step's table, the profile's, and the reasons for missing figures."""
    contestants: dict[str, dict[str, Any]] = figures["contestants"]
    ran = [who for who, mine in contestants.items() if "first_s" in mine]
    lines = [f"### {name}: {figures['size']}", ""]
    if ran:
        lines += [*_table("", ran, _rows(figures)), ""]
    profiled = [who for who in ran if "families" in contestants[who].get("profile", {})]
    if profiled:
        lines += ["One step by torch's profiler, ms of the device (launches); idle time is an upper bound:", ""]
        lines += [*_table("family", profiled, _profile_rows(contestants)), ""]
    for who, mine in contestants.items():
        why = next((mine[key] for key in ("error", "missing", "budget_error") if key in mine), "")
        lines += [f"- {who}: {' '.join(why.split())[:300]}"] if why else []
    return lines


def kernels(figures: dict[str, Any]) -> list[str]:
    """The longest kernels of each contestant."""
    lines = []
    for who, mine in figures["contestants"].items():
        for family, kernel, ms, launches in mine.get("profile", {}).get("kernels", [])[:_KERNELS]:
            lines.append(f"{who:18}{ms:9.3f} ms {launches:5}  {family:26}{kernel[:90]}")
    return lines


def _table(head: str, names: list[str], rows: list[tuple[str, _Cell]]) -> list[str]:
    lines = [f"| {' | '.join([head, *names])} |", "|" + "---|" * (len(names) + 1)]
    return lines + [f"| {' | '.join([title, *(cell(who) for who in names)])} |" for title, cell in rows]


def _rows(figures: dict[str, Any]) -> list[tuple[str, _Cell]]:
    found = figures["contestants"]

    def of(key: str, shown: Callable[[Any], str]) -> _Cell:
        return lambda who: shown(found[who][key]) if key in found[who] else "-"

    def over(peer: str) -> _Cell:
        def cell(who: str) -> str:
            try:
                return f"{ratio(figures, who, peer):.3f}"
            except KeyError:
                return "-"

        return cell

    def taken(who: str) -> str:
        mine = found[who]
        return f"{mine['taken']}, {mine['passed_on']}" if "taken" in mine else "-"

    def share(part: str) -> _Cell:
        return lambda who: (
            f"{max((s for what, s in found[who].get('budget', {}).items() if ('loss' in what) == (part == 'loss')), default=0):.2f}"
        )

    return [
        ("first step, caches empty, s", of("first_s", lambda x: f"{x:.1f}")),
        ("step, ms", of("step_s", lambda x: f"{x * 1e3:.2f}")),
        ("least and most, ms", of("rounds", _extremes)),
        *((f"time over {peer}'s", over(peer)) for peer in (PEER, FLASH)),
        ("peak memory, GiB", of("peak_bytes", lambda x: f"{x / 2**30:.2f}")),
        ("between steps, GiB", of("between_bytes", lambda x: f"{x / 2**30:.2f}")),
        ("graphs of the model", of("graphs", str)),
        ("in so many steps", of("steps", str)),
        ("graph breaks", of("breaks", str)),
        *([("calls taken, passed on", taken)] if any("taken" in mine for mine in found.values()) else []),
        ("waits for the device a step", of("waits", lambda x: f"{x:g}")),
        ("share of its budget: losses", share("loss")),
        ("share of its budget: gradients", share("gradient")),
    ]


def _extremes(rounds: list[list[float]]) -> str:
    seconds = [s for taken in rounds for s in taken]
    return f"{min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f} of {len(seconds)}"


def _profile_rows(found: dict[str, dict[str, Any]]) -> list[tuple[str, _Cell]]:
    def family(name: str) -> _Cell:
        def cell(who: str) -> str:
            ms, launches = found[who]["profile"]["families"].get(name, (0, 0))
            return f"{ms:.2f} ({launches})" if launches else "-"

        return cell

    def of(key: str, digits: int = 2) -> _Cell:
        return lambda who: f"{found[who]['profile'].get(key, 0):.{digits}f}"

    def waits(who: str) -> str:
        calls = found[who]["profile"]["waits"]
        return ", ".join(f"{n} {name} {ms:.2f} ms" for name, (n, ms) in calls.items()) or "none"

    used = [name for name in FAMILIES if any(name in mine.get("profile", {}).get("families", {}) for mine in found.values())]
    return [
        *((name, family(name)) for name in used),
        ("all, first to last kernel", of("span_ms")),
        ("idle", of("idle_ms")),
        ("gaps over 5 us", of("gaps", 0)),
        ("longest gap, us", of("longest_gap_us", 0)),
        ("host, profiled, ms", of("host_ms")),
        ("calls that may wait", waits),
    ]
