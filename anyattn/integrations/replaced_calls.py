"""Counts of the calls of torch's ``flex_attention`` while it is replaced: those that anyattn computes, and those that it passes on."""

from __future__ import annotations

import re
import threading
import warnings
from dataclasses import dataclass

__all__ = ["ReplacedCalls", "count_passed_on", "count_taken", "replaced"]

_MOST_REASONS = 100
_lock = threading.Lock()


@dataclass(frozen=True)
class ReplacedCalls:
    """Counts of calls of torch's ``flex_attention`` while it was replaced, since the process started.

    taken: calls that anyattn computed. passed_on: calls that torch's own function computed. reasons: number of passed-on calls by the first
    line of the refusal; lines that differ only in numbers are one reason. Compiled calls are counted when Dynamo traces them, not when the
    graph runs.
    """

    taken: int
    passed_on: int
    reasons: dict[str, int]


class _Counts:
    def __init__(self) -> None:
        self.taken = 0
        self.by_reason: dict[str, int] = {}  # by the reason without its numbers
        self.reasons: dict[str, str] = {}


_counts = _Counts()


def replaced() -> ReplacedCalls:
    """How many calls of torch's ``flex_attention`` anyattn has computed, how many it has passed on to torch's own, and why.

    >>> replaced().passed_on
    0
    """
    with _lock:
        reasons = {_counts.reasons[key]: count for key, count in _counts.by_reason.items()}
        return ReplacedCalls(_counts.taken, sum(reasons.values()), reasons)


def count_taken() -> None:
    """Counts a call that anyattn has computed."""
    with _lock:
        _counts.taken += 1


def count_passed_on(refusal: str) -> None:
    """Counts a call that torch's own function has computed, and warns once per reason. refusal: the whole message."""
    reason = refusal.strip().split("\n", 1)[0]
    key = re.sub(r"\d+", "#", reason)
    with _lock:
        if key not in _counts.by_reason and len(_counts.by_reason) >= _MOST_REASONS:
            reason = key = "other reasons"
        is_first = key not in _counts.by_reason
        _counts.by_reason[key] = _counts.by_reason.get(key, 0) + 1
        _counts.reasons.setdefault(key, reason)
    if is_first:
        warnings.warn(
            f"torch's own flex_attention computes a call that anyattn was to take: {refusal}\n(calls like this one are counted in "
            "anyattn.replaced() without a further warning)",
            stacklevel=4,  # the caller of torch's function
        )
