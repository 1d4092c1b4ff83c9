"""Counts of the calls of replaced functions: those that anyattn computes, refuses, and passes on to torch's own function."""

from __future__ import annotations

import re
import threading
import warnings
from dataclasses import dataclass

__all__ = ["ReplacedCalls", "count_passed_on", "count_refused", "count_taken", "replaced"]

_MOST_REASONS = 100
_lock = threading.Lock()


@dataclass(frozen=True)
class ReplacedCalls:
    """Counts of calls of torch's ``flex_attention`` and ``varlen_attn`` and of FlashAttention's functions while they were replaced, since
    the process started.

    taken: calls that anyattn computed. passed_on: calls that torch's own function computed. refused: calls of FlashAttention's functions
    that raised an error. reasons: number of calls that were not taken, by the first line of the refusal; lines that differ only in numbers
    are one reason. Compiled calls are counted when Dynamo traces them, not when the graph runs; refused ones are not.
    """

    taken: int
    passed_on: int
    reasons: dict[str, int]
    refused: int = 0


class _Counts:
    def __init__(self) -> None:
        self.taken = self.refused = 0
        self.by_reason: dict[str, int] = {}  # by the reason without its numbers
        self.reasons: dict[str, str] = {}


_counts = _Counts()


def replaced() -> ReplacedCalls:
    """How many calls of replaced functions anyattn has computed, how many it has refused or passed on to torch's own, and why.

    >>> replaced().passed_on
    0
    """
    with _lock:
        reasons = {_counts.reasons[key]: count for key, count in _counts.by_reason.items()}
        return ReplacedCalls(_counts.taken, sum(reasons.values()) - _counts.refused, reasons, _counts.refused)


def count_taken() -> None:
    """Counts a call that anyattn has computed."""
    with _lock:
        _counts.taken += 1


count_taken._dynamo_marked_constant = True  # type: ignore[attr-defined] # called while Dynamo traces; assume_constant_result imports Dynamo


def count_refused(refusal: str) -> None:
    """Counts a call that raises an error. refusal: the whole message."""
    _count(refusal)
    with _lock:
        _counts.refused += 1


def count_passed_on(function: str, refusal: str) -> None:
    """Counts a call that torch's own ``function`` has computed, and warns once per reason. refusal: the whole message."""
    if _count(refusal):
        warnings.warn(
            f"torch's own {function} computes a call that anyattn was to take: {refusal}\n(calls like this one are counted in "
            "anyattn.replaced() without a further warning)",
            stacklevel=5,  # the caller of torch's function
        )


def _count(refusal: str) -> bool:
    """Counts a reason; whether it is a new one."""
    reason = refusal.strip().split("\n", 1)[0]
    key = re.sub(r"\d+", "#", reason)
    with _lock:
        if key not in _counts.by_reason and len(_counts.by_reason) >= _MOST_REASONS:
            reason = key = "other reasons"
        is_first = key not in _counts.by_reason
        _counts.by_reason[key] = _counts.by_reason.get(key, 0) + 1
        _counts.reasons.setdefault(key, reason)
    return is_first
