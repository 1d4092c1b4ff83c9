"""Tests of calls that run while torch's default device is another one, instead of suspending it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["run_under"]


def run_under(device: str) -> None:
    """Every function that suspends the default device runs while it is ``device``; the bodies of mods have the CPU.

    The functions are decorated at import: to be called before the modules that have them are imported.
    """
    from anyattn.mods.tracing import default_device

    assert "anyattn.autograd" not in sys.modules

    def under_default_device(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.device(device):
                return fn(*args, **kwargs)

        return run

    default_device.without_default_device = under_default_device
    default_device.UsersDefaultDevice = lambda: torch.device("cpu")  # type: ignore[assignment,misc]
