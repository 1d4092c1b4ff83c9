"""Times calls on the GPU in interleaved rounds: every round runs every contestant once, in an order shuffled anew."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.case import Timing

__all__ = ["Clock", "CudaClock", "HostClock", "Limits", "measure", "shuffled_rounds"]

_FLUSH_BYTES = 256 * 2**20  # five times an H200's L2
_CYCLES_PER_SECOND = 1.98e9  # of the fastest clock: a slower one waits longer, which does no harm
_LONGEST_HEAD_START = 0.02
_MARGIN = 1.5
_HOST_CALLS = 200
Call = Callable[[], Any]


@dataclass(frozen=True)
class Limits:
    """rounds: at most. seconds: no further round of a case after this long, but at least ``least``. sample: seconds of work per sample."""

    rounds: int = 30
    seconds: float = 3.0
    least: int = 5
    sample: float = 1e-3


class Clock(Protocol):
    def times(self, call: Call, limits: Limits) -> tuple[int, float]:
        """How many calls a sample is made of, and the head start in seconds that their launches need."""

    def sample(self, call: Call, times: int, head_start: float) -> float:
        """Seconds per call."""


class CudaClock:
    """Seconds of the device between two events around some calls.

    The device is kept waiting for ``head_start`` seconds before, so that the host has queued the calls when the first event passes: what
    is timed is the device's work. has_head_start: False where the host's part is meant to be seen too. cold: the L2 cache is
    overwritten before each sample.
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
    """Seconds of the host per call: how long it takes to return, the device working behind it."""

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


def shuffled_rounds(names: list[str], rounds: int, seed: int = 0) -> Iterator[list[str]]:
    """The order of each round: every name once."""
    order, shuffle = list(names), random.Random(seed).shuffle
    for _ in range(rounds):
        shuffle(order)
        yield list(order)


def measure(
    calls: dict[str, Call],
    clock: Clock,
    limits: Limits,
    failed: Callable[[str, Exception], None],
    watch: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Timings whose n-th numbers come from one round, of all calls that did not raise.

    failed: told of one that did; it is left out from there on. watch: told who is next.
    """
    plans: dict[str, tuple[int, float]] = {}
    samples: dict[str, list[float]] = {name: [] for name in calls}

    def attempt(name: str, what: Callable[[], Any]) -> Any:
        watch(name)
        try:
            return what()
        except Exception as error:
            samples.pop(name, None)
            failed(name, error)

    for name, call in calls.items():
        plan = attempt(name, lambda call=call: clock.times(call, limits))
        if plan is not None:
            plans[name] = plan
    start = time.perf_counter()
    for done, order in enumerate(shuffled_rounds(list(plans), limits.rounds)):
        if done >= limits.least and time.perf_counter() - start > limits.seconds:
            break
        for name in (n for n in order if n in samples):
            seconds = attempt(name, lambda name=name: clock.sample(calls[name], *plans[name]))
            if seconds is not None:
                samples[name].append(seconds)
    return {name: Timing(tuple(found)) for name, found in samples.items() if found}
