"""Counts that replace time and memory in the tests: operations, their bytes, and Python calls, which are the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.support.inside import InsideMode

__all__ = ["PYTHON_CALLS", "Work", "peak_bytes"]

# A script's function that counts the calls of Python and C functions that another one makes.
PYTHON_CALLS = """
import sys

def calls_of(function):
    made = 0
    def count(frame, event, argument):
        nonlocal made
        made += event in ("call", "c_call")
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return made
"""


class Work(InsideMode):
    """operations: how many ran inside. results: the bytes of all that they returned. largest: those of the largest storage among it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.results = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, Tensor):
                self.results += t.nbytes
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return result


def peak_bytes(function: Callable[[], Any]) -> int:
    """The most bytes that torch has allocated on the CPU at one time during the call, beyond what there was before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "torch's profiler has recorded no allocation"
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
