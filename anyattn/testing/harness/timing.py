"""Timing of calls in interleaved rounds, by the device's clock: every round runs every contestant once, in a newly shuffled order."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from anyattn.testing.harness.case import Timing

__all__ = ["Clock", "CpuClock", "CudaClock", "HostClock", "Limits", "Others", "measure", "shuffled_rounds"]

_FLUSH_BYTES = 256 * 2**20  # five times the L2 of an H200
_CYCLES_PER_SECOND = 1.98e9  # of the fastest clock: slower ones only wait longer
_LONGEST_HEAD_START = 0.02
_MARGIN = 1.5
_HOST_CALLS = 200
_DISTURBED = 0.15  # cores that other processes may use before a round is repeated
_LEAST_QUIET = 3
Call = Callable[[], Any]


@dataclass(frozen=True)
class Limits:
    """rounds: at most. seconds: no further round of a case after this long, but at least ``least``. sample: seconds of work per sample.

    patience: total seconds per case on the CPU to wait for other processes to end.
    """

    rounds: int = 30
    seconds: float = 3.0
    least: int = 5
    sample: float = 1e-3
    patience: float = 0.0


class Clock(Protocol):
    def times(self, call: Call, limits: Limits) -> tuple[int, float]:
        """(calls per sample, head start in seconds that their launches need)."""

    def sample(self, call: Call, times: int, head_start: float) -> float:
        """Seconds per call."""


class CpuClock:
    """Seconds per call of consecutive calls. Short ones are repeated, so that the clock's and the scheduler's resolution matter little."""

    def times(self, call: Call, limits: Limits) -> tuple[int, float]:
        call()
        return max(1, math.ceil(limits.sample / self.sample(call, 1, 0.0))), 0.0

    def sample(self, call: Call, times: int, head_start: float) -> float:
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times


class CudaClock:
    """Device seconds between two events around some calls.

    Before the first event the device waits ``head_start`` seconds, so that the host has queued the calls when it passes: only the device's
    work is timed. has_head_start: False if the host's time should be included. cold: the L2 cache is overwritten before each sample.
    """

    def __init__(self, cold: bool = True, has_head_start: bool = True):
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda") if cold else None
        self._has_head_start = has_head_start

    def times(self, call: Call, limits: Limits) -> tuple[int, float]:
        self.sample(call, 1, 0.0)
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        seconds = min(self.sample(call, 1, _LONGEST_HEAD_START if self._has_head_start else 0.0) for _ in range(2))
        times = max(1, min(1000, math.ceil(limits.sample / max(seconds, 1e-6))))
        if not self._has_head_start:
            return times, 0.0
        times = max(1, min(times, int(_LONGEST_HEAD_START / (_MARGIN * max(host, 1e-6)))))  # as many as can be queued meanwhile
        return times, min(_LONGEST_HEAD_START, _MARGIN * times * host + 2e-4)

    def sample(self, call: Call, times: int, head_start: float) -> float:
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        if head_start > 0:
            torch.cuda._sleep(int(head_start * _CYCLES_PER_SECOND))
        if self._flush is not None:
            self._flush.zero_()
        first.record()
        for _ in range(times):
            call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3 / times


class HostClock:
    """Host seconds per call: how long it takes to return, without the device's work."""

    def times(self, call: Call, limits: Limits) -> tuple[int, float]:
        for _ in range(20):
            call()
        return _HOST_CALLS, 0.0

    def sample(self, call: Call, times: int, head_start: float) -> float:
        wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        seconds = (time.perf_counter() - start) / times
        wait()
        return seconds


class Others:
    """The number of cores that other processes used since the last query: two OpenMP programs on the same cores slow each other tenfold."""

    def __init__(self, patience: float = 0.0) -> None:
        self._patience = patience
        self._last = self._look()

    @classmethod
    def found(cls, patience: float) -> Others | None:
        """None without psutil, which reads the processors' times."""
        return None if importlib.util.find_spec("psutil") is None else cls(patience)

    def _look(self) -> tuple[float, float]:
        import psutil

        whole, mine = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(getattr(whole, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        return busy - mine.user - mine.system, time.perf_counter()

    def cores(self) -> float:
        (busy, at), self._last = self._last, self._look()
        tick = 0.02  # the kernel counts in units of 0.01 s
        return max(0.0, self._last[0] - busy - tick) / max(self._last[1] - at, tick)

    def are_quiet(self) -> bool:
        return self.cores() <= _DISTURBED

    def wait(self) -> float:
        """Sleeps until half a second was quiet, or patience is used up; returns the seconds slept."""
        start = time.perf_counter()
        while time.perf_counter() - start < self._patience:
            time.sleep(0.5)
            if self.are_quiet():
                break
        waited = time.perf_counter() - start
        self._patience -= waited
        return waited


def shuffled_rounds(names: list[str], rounds: int | None = None, seed: int = 0) -> Iterator[list[str]]:
    """The order of each round: every name once. rounds: None for endless."""
    order, shuffle = list(names), random.Random(seed).shuffle
    for _ in itertools.count() if rounds is None else range(rounds):
        shuffle(order)
        yield list(order)


@dataclass
class _Rounds:
    """The samples so far. others: None if other processes do not matter."""

    others: Others | None
    quiet: list[dict[str, float]]
    disturbed: list[dict[str, float]]

    def begin(self) -> None:
        if self.others is not None:
            self.others.cores()

    def end(self, taken: dict[str, float]) -> float:
        """Stores a round; returns the seconds waited for other processes, which do not count for the case."""
        if self.others is None or self.others.are_quiet():
            self.quiet.append(taken)
            return 0.0
        self.disturbed.append(taken)
        return self.others.wait()

    @property
    def uses_disturbed(self) -> bool:
        return bool(self.disturbed) and len(self.quiet) < _LEAST_QUIET

    def used(self) -> list[dict[str, float]]:
        return self.quiet + self.disturbed if self.uses_disturbed else self.quiet


def measure(
    calls: Mapping[str, Call],
    clock: Clock,
    limits: Limits,
    failed: Callable[[str, Exception], None],
    watch: Callable[[str], None] = lambda name: None,
    others: Others | None = None,
    about: dict[str, Any] | None = None,
) -> dict[str, Timing]:
    """Timings whose n-th numbers come from one round, of all calls that did not raise.

    failed: called with a call that raised; it is left out from then on. watch: called with the next name. others: a round during which
    other processes were busy is repeated once they are not, and used only if there were fewer than 3 quiet ones; ``about`` gets the counts.
    """
    plans: dict[str, tuple[int, float]] = {}
    alive = set(calls)

    def attempt(name: str, what: Callable[[], Any]) -> Any:
        watch(name)
        try:
            return what()
        except Exception as error:
            alive.discard(name)
            failed(name, error)

    for name, call in calls.items():
        plan = attempt(name, partial(clock.times, call, limits))
        if plan is not None:
            plans[name] = plan
    rounds, start = _Rounds(others, [], []), time.perf_counter()
    for done, order in enumerate(shuffled_rounds(list(plans))):
        if len(rounds.quiet) >= limits.rounds or not alive:
            break
        if done >= limits.least and time.perf_counter() - start > limits.seconds:
            break
        taken: dict[str, float] = {}
        rounds.begin()
        for name in (n for n in order if n in alive):
            seconds = attempt(name, partial(clock.sample, calls[name], *plans[name]))
            if seconds is not None:
                taken[name] = seconds
        start += rounds.end(taken)
    if about is not None and others is not None:
        about.update(disturbed_rounds=len(rounds.disturbed), disturbed_used=rounds.uses_disturbed)
    used = rounds.used()
    return {name: Timing(tuple(taken[name] for taken in used)) for name in calls if name in alive and used}
