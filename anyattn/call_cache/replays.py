"""Replays of warm calls on a GPU: the launches of an earlier call, for calls that differ in addresses and in numbers.

The fourth warm call of a key is recorded (``triton_tools.recording``), later ones are replays, unless a profiler wants the call's name or
a log its kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.backends import backend_module
from anyattn.mods.float32_scores import is_ordinary_scale
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.triton_tools import launch_log
from anyattn.triton_tools.recording import Recorder
from anyattn.triton_tools.replay import Replay

__all__ = ["Replays", "Results", "Values", "are_watched"]

_MOST = 64  # keys of a remembered call
_BEFORE = 3  # warm calls of a key: recording one takes the host as much longer as a few replays take less
_TRIES = 3  # recordings of a key: the first one's tensors may be where a replay cannot tell them apart
_is_profiled = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]

Results = tuple[Tensor | None, ...]


class Values(NamedTuple):
    """What a call's launches may be passed besides what follows from its key. tensors: its arguments and what its mods capture. numbers:
    those that its score mod captures."""

    tensors: list[Tensor]
    scale: float
    numbers: tuple[int | float, ...] = ()


def are_watched() -> bool:
    """Whether a profiler wants the calls' names or a log their kernels, so that none is replayed."""
    return _is_profiled() or launch_log.noted is not None


class Replays:
    """The replays of the calls that share a remembered call, by what their launches depend on besides the signature.

    has_numbers: ``Repeater.reports_numbers``. count: warm calls of any key before.
    """

    __slots__ = ("_by_key", "_count", "_found_again", "_has_numbers", "_latest")

    def __init__(self, has_numbers: bool, count: int = 0) -> None:
        self._by_key: dict[tuple, Replay | int] = {}  # or how many warm calls there have been
        self._has_numbers, self._count = has_numbers, count
        self._latest: tuple | None = None
        self._found_again: dict[tuple, Any] = {}

    @classmethod
    def of(cls, problem: Problem, plan: Plan) -> Replays | None:
        """The replays, yet to be recorded, of calls with this plan; None if they cannot be."""
        repeater = backend_module(plan.backend).Repeater
        if not repeater.reports_launches or plan.is_tuned or problem.needs_grad or problem.dropout is not None:
            return None
        return cls(repeater.reports_numbers)

    def comes_again(self, narrower: tuple) -> bool:
        """Whether the latest call for which this was asked had the same narrower key."""
        before, self._latest = self._latest, narrower
        return before == narrower

    def apart(self) -> Replays:
        """Replays for a narrower signature, of which there have been two warm calls."""
        return Replays(self._has_numbers, 2)

    def _key(self, values: Values) -> tuple:
        if not self._has_numbers:
            return values.scale, *bits_of_numbers(values.numbers)
        # the sizes of a score mod's integers decide its kernel's text
        return tuple([n if type(n) is int else None for n in values.numbers]) if values.numbers else ()

    def results(self, values: Values) -> Results | None:
        """The results of a replay; None if this call cannot be one."""
        replay = self._by_key.get(self._key(values))
        if type(replay) is not Replay or are_watched() or not is_ordinary_scale(values.scale):
            return None
        return replay.run(values.tensors, values.scale, bits_of_numbers(values.numbers) if values.numbers else ())

    def once(self, values: Values, make: Callable[[Replay], Any]) -> Any:
        """What ``make`` returned for the replay that ``results`` has run with these values, made once."""
        key = self._key(values)
        if key not in self._found_again:
            replay = self._by_key.get(key)
            self._found_again[key] = make(replay) if type(replay) is Replay else None
        return self._found_again[key]

    def made(self, values: Values, call: Callable[[], Results]) -> Results:
        """The results of ``call``, which is recorded if its turn has come."""
        by_key, key = self._by_key, self._key(values)
        count = by_key.get(key, self._count)
        if type(count) is not int or count >= _BEFORE + _TRIES or not is_ordinary_scale(values.scale):
            return call()
        if key not in by_key and len(by_key) >= _MOST:
            by_key.clear()
            self._found_again.clear()
        by_key[key] = count + 1
        if count < _BEFORE:
            return call()
        with Recorder(values.tensors) as recorder:
            results = call()
        replay = recorder.replay(results, len(values.numbers))
        if replay is not None:
            by_key[key] = replay
        return results
