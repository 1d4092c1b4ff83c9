"""Check by torch's sync debug mode whether the host synchronises with the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["no_waiting"]


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """torch raises where an operation waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
