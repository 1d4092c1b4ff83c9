"""Replays that a test's calls try, and decoding steps that leave their caches as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import Tensor

import anyattn
from anyattn.call_cache import attention, replays
from anyattn.triton_tools import replay

__all__ = ["decoded", "noted_replays", "replayed_and_first"]


def noted_replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every replay that was tried, whether it had results."""
    found: list[bool] = []
    run = replay.Replay.run

    def noted(*given: Any) -> Any:
        results = run(*given)
        found.append(results is not None)
        return results

    monkeypatch.setattr(replay.Replay, "run", noted)
    return found


def decoded(arguments: dict[str, Any], **more: Any) -> tuple[Tensor, ...]:
    """A call on copies of its caches: out, lse and both caches."""
    caches = {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
    found = anyattn.flash_attn_with_kvcache(**{**arguments, **caches, "return_lse": True, "backend": "triton", **more})
    return (*found, *caches.values())


def replayed_and_first(call: Callable[[int], Any], warming: Iterable[int], last: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What ``call(last)`` gives as a replay, after calls of the numbers ``warming``, and as a first call."""
    for number in warming:
        call(number)
    with monkeypatch.context() as patched:
        patched.setattr(replays.Replays, "made", None)  # a call that were not a replay would fail
        warm = call(last)
    attention.clear()
    return warm, call(last)
