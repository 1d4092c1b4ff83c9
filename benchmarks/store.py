"""Files of a run: its results and the current step, so that a process that dies loses only one contestant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anyattn.testing.harness.case import Case
from benchmarks import report
from benchmarks.bars import Bar, Found

__all__ = ["State", "Store", "is_done"]


@dataclass
class State:
    """under_way: (case, contestant; "" while none is called). banned: case -> contestant -> reason. error: if known."""

    under_way: tuple[str, str] | None = None
    banned: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str = ""

    def ban(self, reason: str) -> bool:
        """Bans the contestant that was running; False if none was."""
        if self.under_way is None:
            return False
        case, contestant = self.under_way
        self.banned.setdefault(case, {})[contestant] = self.error or reason
        self.under_way, self.error = None, ""
        return True

    def banned_in(self, case: str, names: Iterable[str]) -> dict[str, str]:
        """The case's contestants that are not tried, with the reasons: those that died in it, and peers that died in two others."""
        deaths = [name for banned in self.banned.values() for name in banned]
        often = {name: "its process died in two other cases" for name in names if deaths.count(name) >= 2}
        return {**often, **self.banned.get(case, {})}


def is_done(found: Found, step: Case | str) -> bool:
    """Whether a probe was run, or each of a case's contestants was timed or has a reason against it."""
    if isinstance(step, str):
        return step in found.probes
    record = found.records.get(step.name)
    return record is not None and (record.refused is not None or {*record.timings, *record.unavailable} >= set(step.contestants))


class Store:
    """OUT.json (figures), OUT.md (tables), OUT.state.json (current step), OUT.ahead.log (compilers' output). bars: those of the tables."""

    def __init__(self, out: Path, bars: Sequence[Bar] = ()):
        self._bars = bars
        out.parent.mkdir(parents=True, exist_ok=True)
        self._figures, self._tables = out.with_name(out.name + ".json"), out.with_name(out.name + ".md")
        self._state, self.log = out.with_name(out.name + ".state.json"), out.with_name(out.name + ".ahead.log")

    def clear(self) -> None:
        for path in (self._figures, self._tables, self._state):
            path.unlink(missing_ok=True)

    def found(self) -> Found:
        return report.found_in(json.loads(self._figures.read_text())) if self._figures.exists() else Found({}, {})

    def commit(self) -> str:
        """The commit of the figures; empty if there are none."""
        return json.loads(self._figures.read_text())["machine"]["commit"] if self._figures.exists() else ""

    def save(self, machine: dict[str, Any], found: Found) -> None:
        _replace(self._figures, json.dumps(report.as_json(machine, found, self._bars), indent=1) + "\n")
        _replace(self._tables, report.as_markdown(machine, found, self._bars))

    def state(self) -> State:
        if not self._state.exists():
            return State()
        plain = json.loads(self._state.read_text())
        under_way = plain.pop("under_way")
        return State(under_way=tuple(under_way) if under_way else None, **plain)

    def save_state(self, state: State) -> None:
        _replace(self._state, json.dumps(vars(state)))


def _replace(path: Path, text: str) -> None:
    """Writes the file atomically, whenever the process ends."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)
