"""Measurement of the training step: first steps one contestant after the other, timed steps in interleaved rounds."""

from __future__ import annotations

import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from anyattn.testing import budget
from anyattn.testing.harness.timing import shuffled_rounds
from benchmarks.gpu.ahead import CACHES
from benchmarks.gpu.gpt.contestants import CONTESTANTS, EXACT, PLAIN, REFERENCES
from benchmarks.gpu.gpt.model import Size
from benchmarks.gpu.gpt.worker import Worker
from benchmarks.process import CACHE_FOLDERS, Child

__all__ = ["Limits", "chosen", "judged", "measured", "processes", "ratio"]

_ENDING = 5.0
_RESERVE = 40.0  # seconds reserved for timing the contestants whose first step is done
_MOST_MEMORY = 0.85  # of the device's, for all that contestants keep between their turns
Start = Callable[[str], Worker]


@dataclass(frozen=True)
class Limits:
    """rounds: of ``timed`` steps each, after one that is not timed. hang: limit of one question in seconds. seconds: nothing is started
    after them."""

    rounds: int = 5
    timed: int = 4
    hang: float = 120.0
    seconds: float = 240.0


@dataclass
class _Run:
    workers: dict[str, Worker]
    figures: dict[str, Any]
    limits: Limits
    save: Callable[[dict[str, Any]], None]
    echo: Callable[[str], None]
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        return self.limits.seconds - (time.monotonic() - self.started)

    def ask(self, name: str, what: str, **given: Any) -> dict[str, Any] | None:
        """The answer, added to the contestant's figures; None if there is none. A contestant whose worker is gone is left out."""
        worker, mine = self.workers.get(name), self.figures["contestants"].setdefault(name, {})
        if worker is None:
            return None
        if self.left() <= 0:
            mine.setdefault("missing", f"time was up before: {what}")
            return None
        try:
            answer = worker.ask({"do": what, **given}, min(self.limits.hang, self.left() + 10))
        except RuntimeError as gone:
            answer = {"error": f"{what}: {gone}"}
            self.drop(name)
        if "error" in answer:
            mine.setdefault("error", f"{what}: {answer['error']}")
            self.echo(f"  {name}: {what}: {answer['error'][:300]}")
            return None
        if what != "times":
            mine.update({"profile": answer} if what == "profile" else answer)
            self.save(self.figures)
        return answer

    def drop(self, name: str) -> None:
        if name in self.workers:
            self.workers.pop(name).end(_ENDING)


def chosen(who: str | None) -> list[str]:
    """The contestants, the most informative first; of the peers only those whose name matches ``who``."""
    names = [name for name in CONTESTANTS if name not in REFERENCES]
    return [name for name in names if name == "anyattn" or who is None or re.search(who, name)]


def processes(
    size: Size, device: str, backend: str, folder: Path, scratch: Path, hang: float, caches: Path | None, stack: ExitStack
) -> Start:
    """A fresh process per contestant. scratch: an empty folder. caches: the compilers' cache folder, by default in scratch."""

    def start(name: str) -> Worker:
        mine = (caches or scratch / "caches").absolute() / name
        mine.mkdir(parents=True, exist_ok=True)
        environment = {**CACHES, **os.environ, **{key: str(mine / key.lower()) for key in CACHE_FOLDERS}}
        log = stack.enter_context((folder / f"{name}.log").open("w"))
        command = ["-m", "benchmarks.gpu.gpt.worker", name, size.name, device, backend, str(folder), str(scratch), str(hang)]
        return Child([sys.executable, *command], log, environment)

    return start


def measured(
    size: Size,
    names: list[str],
    start: Start,
    scratch: Path,
    limits: Limits = Limits(),
    save: Callable[[dict[str, Any]], None] = lambda figures: None,
    echo: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Figures by contestant. scratch: the folder for workers' results. save: called with the figures whenever some were added."""
    everyone = [*REFERENCES, *names]
    run = _Run({name: start(name) for name in everyone}, {"size": str(size), "contestants": {}}, limits, save, echo)
    try:
        for name in everyone:
            if run.ask(name, "begin") is None:
                run.drop(name)
        for name in REFERENCES:
            run.ask(name, "first")
            run.drop(name)
        for name in names:
            _looked_at(run, name, scratch)
        _timed(run, names)
        for name in names:
            run.ask(name, "profile")
            run.ask(name, "graphs")
    finally:
        for name in list(run.workers):
            run.drop(name)
    for name in REFERENCES:
        run.figures["contestants"].pop(name, None)
    run.figures["seconds"] = round(time.monotonic() - run.started, 1)
    save(run.figures)
    return run.figures


def _looked_at(run: _Run, name: str, scratch: Path) -> None:
    """Runs a contestant's first steps; one whose first step fails is left out."""
    first = run.ask(name, "first") if run.left() > _RESERVE else None
    if first is None:
        run.figures["contestants"][name].setdefault("missing", "time was up before its first step")
        run.drop(name)
        return
    mine = run.figures["contestants"][name]
    try:
        mine["budget"] = judged(scratch, name)
    except FileNotFoundError as missing:
        mine["budget_error"] = str(missing)
    memory = run.ask(name, "memory") or {}
    run.ask(name, "waits")
    run.ask(name, "graphs")
    gib = f", peak {memory['peak_bytes'] / 2**30:.2f} GiB" if memory else ""
    run.echo(f"  {name}: first step {first['first_s']:.1f} s{gib}, {time.monotonic() - run.started:.0f} s gone")


def judged(scratch: Path, name: str) -> dict[str, float]:
    """The share of its budget that each compared result uses (``anyattn.testing.budget``); at most 1 passes.

    Losses by row; the gradient of a weight as a single row, since one token's error is in all elements of its rows and so is no statistic.
    """
    found = [torch.load(scratch / f"{who}.pt") for who in (name, EXACT, PLAIN)]
    rows = [{what: t if "loss" in what else t.reshape(1, -1) for what, t in tensors.items()} for tensors in found]
    return {what: budget.share(*(tensors[what] for tensors in rows)) for what in rows[0]}


def _timed(run: _Run, names: list[str]) -> None:
    """Times interleaved rounds, each contestant's steps in a row. Memory is released in between only if not all of it fits."""
    reserved = sum(run.figures["contestants"][name].get("reserved_bytes", 0) for name in run.workers)
    releases = reserved > 0 and reserved > _MOST_MEMORY * torch.cuda.get_device_properties(0).total_memory
    for order in shuffled_rounds(names, run.limits.rounds):
        taken = {}
        for name in [name for name in order if name in run.workers]:
            answer = run.ask(name, "times", warm=1, timed=run.limits.timed, releases=releases)
            if answer is not None:
                taken[name] = answer["seconds"]
            elif run.left() > 0:
                run.drop(name)
        if run.left() <= 0:  # only whole rounds count: the n-th rounds of all contestants belong together
            break
        for name, seconds in taken.items():
            run.figures["contestants"][name].setdefault("rounds", []).append(seconds)
    for mine in run.figures["contestants"].values():
        if "rounds" in mine:
            mine["step_s"] = statistics.median(s for seconds in mine["rounds"] for s in seconds)
    run.save(run.figures)


def ratio(figures: dict[str, Any], mine: str, peer: str) -> float:
    """A step's time relative to the peer's: the median of the ratios within rounds. ``KeyError`` if either was not timed."""
    ours, theirs = (figures["contestants"][name]["rounds"] for name in (mine, peer))
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs))
