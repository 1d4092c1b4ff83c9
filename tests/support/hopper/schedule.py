"""Scheduler of simulated threads, one of which runs at a time, and the objects they wait for: the layer below ``protocol.py``.

Wherever threads could interact, the next one to continue, a thread or a copy in flight, is chosen at random; a seed repeats a schedule. A
deadlock is detected at once, because nothing can continue, and is reported with the lines at which all threads stand.
"""

from __future__ import annotations

import random
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, SimpleNamespace, TracebackType
from typing import Any

from tests.support.limits import HANG

__all__ = ["Broken", "MemoryBarrier", "NamedBarrier", "Pipe", "Schedule", "State"]

_MOST_STEPS = 60_000  # of one schedule; the longest, of a pair of wide thread blocks with 150 row tiles, take 30,000 and more


class Broken(AssertionError):
    """The protocol is broken."""


class _Stopped(BaseException):
    """Another thread has failed."""


class _Actor:
    def __init__(self, number: int, name: str, weight: float, body: Callable[[], None]):
        self.number, self.name, self.weight, self.body = number, name, weight, body
        self.baton = threading.Lock()
        self.baton.acquire()
        self.condition: Callable[[], bool] | None = None
        self.waits_for, self.is_done = "", False
        self.thread = threading.Thread(target=lambda: None)


class Schedule:
    """texts: lines of source files, those that are told when something fails."""

    def __init__(self, seed: int, texts: dict[str, list[str]]):
        self.random, self.texts = random.Random(seed), texts
        self.actors: list[_Actor] = []
        self.under_way: list[Callable[[], None]] = []  # copies
        self.failure: BaseException | None = None
        self.steps, self.turns = 0, 0  # turns: a number that says who went on when
        # schedules in which one thread is far ahead or behind come as often as fair ones
        self.uneven = self.random.choice((1.0, 0.3, 0.03))
        self.copy_weight = self.random.uniform(self.uneven, 1.0)
        self.now: Any = None

    def add(self, name: str, body: Callable[[], None]) -> None:
        self.actors.append(_Actor(len(self.actors), name, self.random.uniform(self.uneven, 1.0), body))

    def step(self) -> None:
        """Others may go on before the caller does."""
        me, after = self.now, self._picked()
        if after is not me:
            self.now = after
            after.baton.release()
            me.baton.acquire()
            if self.failure is not None:
                raise _Stopped

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.now.condition, self.now.waits_for = condition, what
        self.step()
        self.now.condition, self.now.waits_for = None, ""

    def run(self) -> None:
        """Runs the threads to their ends; raises what one of them raises first."""
        for actor in self.actors:
            actor.thread = threading.Thread(target=self._body, args=(actor,), daemon=True)
            actor.thread.start()
        self.now = self._picked()
        self.now.baton.release()
        for actor in self.actors:
            actor.thread.join(HANG)
            if actor.thread.is_alive():
                raise Broken(f"no progress\n{self._places(None)}")
        if self.failure is not None:
            raise self.failure

    def _picked(self) -> Any:
        while True:
            self.steps += 1
            if self.steps > _MOST_STEPS:
                raise Broken("it never ends")
            able = [a for a in self.actors if not a.is_done and (a.condition is None or a.condition())]
            if not able and not self.under_way:
                if all(a.is_done for a in self.actors):
                    return None
                raise Broken("deadlock")
            at = self.random.random() * (sum(a.weight for a in able) + (self.copy_weight if self.under_way else 0.0))
            for actor in able:
                at -= actor.weight
                if at < 0.0:
                    self.turns = hash((self.turns, actor.number))
                    return actor
            if not self.under_way:
                return able[-1]
            self.under_way.pop(self.random.randrange(len(self.under_way)))()

    def _body(self, actor: _Actor) -> None:
        actor.baton.acquire()
        try:
            if self.failure is None:
                actor.body()
                actor.is_done, actor.waits_for = True, "done"
                self.now = self._picked()
                if self.now is not None:
                    self.now.baton.release()
        except _Stopped:
            pass
        except BaseException as error:
            self.failure = Broken(f"{type(error).__name__}: {error}\n{self._places(error.__traceback__)}")
            self.failure.__cause__ = error
            actor.is_done = True
            for other in self.actors:
                if other is not actor and not other.is_done:
                    other.baton.release()

    def _places(self, failed: TracebackType | None) -> str:
        """Where each thread stands in the kernel's text."""
        frames = sys._current_frames()
        lines = []
        for actor in self.actors:
            frame: FrameType | None = frames.get(actor.thread.ident or 0)
            is_me = failed is not None and actor.thread is threading.current_thread()
            stack = traceback.extract_tb(failed) if is_me else traceback.extract_stack(frame) if frame else []
            seen = [self._line(s.filename, s.lineno or 1, s.name) for s in stack if s.filename in self.texts]
            what = "done" if actor.is_done and not is_me else actor.waits_for or "could go on"
            lines.append("\n    ".join([f"{actor.name} ({what})", *seen]))
        return "\n".join(lines)

    def _line(self, file: str, number: int, function: str) -> str:
        return f"{file.rsplit('/', 1)[-1]}:{number} {function}: {self.texts[file][number - 1].strip()}"


class MemoryBarrier:
    """An mbarrier: a phase ends when everyone has arrived and all expected bytes have come; only the phase's parity can be asked."""

    def __init__(self, schedule: Schedule, name: str, arrivals: int):
        self.schedule, self.name, self.arrivals = schedule, name, arrivals
        self.parity, self.arrived, self.expected = 0, list[str](), 0
        self.may_owe = False  # copies of another thread block may come before they are expected

    def arrive(self, expected: int = 0) -> None:
        self.schedule.step()
        who = self.schedule.now.name
        if who in self.arrived:
            raise Broken(f"{who} arrives twice at {self.name}")
        self.arrived.append(who)
        self.expected += expected
        self._turn()

    def came(self, count: int = 1) -> None:
        """So many of the expected copies, or bytes, are there."""
        self.expected -= count
        if self.expected < 0 and not self.may_owe:
            raise Broken(f"{self.name} is told of {-self.expected} more than it expects")
        self._turn()

    def wait(self, parity: int) -> None:
        self.schedule.until(lambda: self.parity != parity, f"waits for {self.name}, phase {parity}")

    def _turn(self) -> None:
        if len(self.arrived) == self.arrivals and self.expected == 0:
            self.parity ^= 1
            self.arrived.clear()


class NamedBarrier:
    """``bar.sync`` and ``bar.arrive``; a thread of the schedule stands for the 128 of a warp group, or for ``size``."""

    def __init__(self, schedule: Schedule, name: str, threads: int):
        self.schedule, self.name, self.threads = schedule, name, threads
        self.arrived, self.waiting, self.generation = 0, 0, 0

    def arrive(self, threads: int, waits: bool, size: int = 128) -> None:
        self.schedule.step()
        if threads != self.threads:
            raise Broken(f"{self.name} is asked for {threads} threads and for {self.threads}")
        mine = self.generation
        self.arrived += size
        self.waiting += waits
        if self.arrived > self.threads:
            raise Broken(f"{self.arrived} threads at {self.name}, which is for {self.threads}")
        if self.arrived == self.threads:
            if not self.waiting:
                raise Broken(f"nobody waits at {self.name}")
            self.arrived, self.waiting, self.generation = 0, 0, mine + 1
        if waits:
            self.schedule.until(lambda: self.generation != mine, f"waits at {self.name}")


@dataclass
class State:
    """``PipelineState``."""

    stages: int
    index: int
    phase: int

    def advance(self) -> None:
        self.index += 1
        if self.index == self.stages:
            self.index, self.phase = 0, self.phase ^ 1

    def clone(self) -> State:
        return State(self.stages, self.index, self.phase)


class Pipe:
    """``PipelineTmaAsync`` where ``amount`` copies or bytes fill a stage, ``PipelineAsync`` where it is 0. One arrival stands for a warp
    group's. block: its ``schedule``, and the ``group`` that runs. held: of each stage the groups that have waited for it and not released
    it."""

    def __init__(self, block: Any, name: str, stages: int, groups: int, amount: int):
        self.block, self.name, self.amount = block, name, amount
        self.full = [MemoryBarrier(block.schedule, f"{name} {i} full", 1) for i in range(stages)]
        self.empty = [MemoryBarrier(block.schedule, f"{name} {i} empty", groups) for i in range(stages)]
        self.held = [set[int]() for _ in range(stages)]
        self.sync_object_empty = SimpleNamespace(wait=lambda index, phase: self.empty[index].wait(phase))
        self.sync_object_full = SimpleNamespace(arrive=lambda index, _: self.full[index].arrive(amount))

    def producer_acquire(self, state: Any) -> None:
        self.sync_object_empty.wait(state.index, state.phase)
        if self.amount:
            self.sync_object_full.arrive(state.index, None)

    def producer_commit(self, state: Any) -> None:
        if not self.amount:
            self.sync_object_full.arrive(state.index, None)

    def producer_get_barrier(self, state: Any) -> MemoryBarrier:
        return self.full[state.index]

    def producer_tail(self, state: Any) -> None:
        for _ in self.full:
            self.sync_object_empty.wait(state.index, state.phase)
            state.advance()

    def consumer_wait(self, state: Any) -> None:
        self.full[state.index].wait(state.phase)
        self.held[state.index].add(self.block.group.number)

    def consumer_release(self, state: Any) -> None:
        number = self.block.group.number
        if number not in self.held[state.index]:
            raise Broken(f"{self.name} {state.index} is given back by group {number}, which does not hold it")
        self.released(state.index)
        self.held[state.index].discard(number)
        self.empty[state.index].arrive()

    def released(self, index: int) -> None:
        """Raises ``Broken`` if the running group is not through with the stage."""
