"""Peak memory of one call, for the demo."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["extra_memory"]

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(call: Callable[[], Any]) -> int | None:
    """The largest growth of the process in bytes during ``call``; None if the system does not report it (other than Linux)."""
    try:
        # Freed memory that malloc keeps would hide new allocations: return it first, then reset the kernel's high-water mark.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        _CLEAR.write_text("5")
        before = _status_bytes("VmRSS")
        call()
        return max(0, _status_bytes("VmHWM") - before)
    except (OSError, LookupError):
        return None


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
