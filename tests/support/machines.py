"""CPUs that tests plan for, independent of the CPU they run on: the test chooses its code path.

``tests/conftest.py`` installs ``WITH_BF16`` for the whole session, or the CPU that ``ANYATTN_TEST_CPU`` names. Every path runs on every
machine: where torch has no instructions for a dtype it computes the same products more slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from anyattn import hardware
from anyattn.call_cache import attention
from anyattn.hardware import Hardware

__all__ = ["CPUS", "PLAIN", "WITH_BF16", "WITH_FP16", "asked", "planned_for"]

asked = hardware.of  # the library's own, which asks the machine

_ALWAYS = frozenset((torch.float32, torch.float64))
PLAIN = Hardware("cpu", "a CPU without 16-bit products", 2, _ALWAYS)
WITH_BF16 = Hardware("cpu", "a CPU with bfloat16 products", 2, _ALWAYS | {torch.bfloat16})
WITH_FP16 = Hardware("cpu", "a CPU with 16-bit products of both kinds", 2, _ALWAYS | {torch.bfloat16, torch.float16})
CPUS = {"plain": PLAIN, "bf16": WITH_BF16, "fp16": WITH_FP16}


@contextmanager
def planned_for(cpu: Hardware) -> Iterator[None]:
    """Inside, calls on the CPU are planned for ``cpu``; those on other devices as before."""
    before = hardware.of

    def of(device_type: str, index: int | None = None) -> Any:
        return cpu if device_type == "cpu" else before(device_type, index)

    attention.clear()
    with mock.patch.object(hardware, "of", of):
        yield
    attention.clear()
