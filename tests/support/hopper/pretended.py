"""A CPU that is treated as a Hopper GPU, as far as possible without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.backends.hopper import api
from anyattn.backends.hopper.compile.launch import kinds_of
from anyattn.hardware import Hardware
from anyattn.triton_tools.recording import active_recorder

__all__ = ["H200", "Launch", "count_in_one_tensor", "described", "noting"]

COUNTER = torch.zeros(2, dtype=torch.int32)
H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)
Launch = tuple[Any, tuple]  # config, arguments


def noting(found: list[Launch], config: Any, kinds: tuple) -> Callable[..., None]:
    """A kernel for ``config`` that notes its launches, and takes arguments of its own kinds alone, as a compiled one does."""
    wanted = list(kinds)
    for i, kind in enumerate(kinds):  # as ``launch.indexable`` passes them
        if kind is torch.bool:
            wanted[i] = torch.uint8
        if isinstance(kind, torch.dtype) and kinds[i + 1] == 0:
            wanted[i + 1] = 1

    def kernel(*arguments: Any) -> None:
        assert [*kinds_of(arguments)[0]] == wanted, f"a kernel for {wanted} is given {kinds_of(arguments)[0]}"
        found.append((config, arguments))

    return kernel


def count_in_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels count their work in ``COUNTER``, which outlives calls, as a device's own counter does."""

    def counter_of(device: torch.device) -> Tensor:
        if (recorder := active_recorder()) is not None:
            recorder.outlives(COUNTER, lambda: COUNTER)
        return COUNTER

    monkeypatch.setattr(api, "counter_of", counter_of)


def described(launches: list[Any], arguments: dict[str, Any], results: Any) -> list[Any]:
    """Arguments of launches (what, arguments), with tensors by what they are: an argument of the call, a result, ``COUNTER``, or another
    allocation, by its first use."""
    names = {t.data_ptr(): name for name, t in arguments.items() if isinstance(t, Tensor)}
    names |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)} | {COUNTER.data_ptr(): "counter"}

    def of(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(of, x))
        if isinstance(x, Tensor):
            return names.setdefault(x.data_ptr(), f"allocation {len(names)}"), x.dtype, x.shape, x.stride()
        return type(x), x

    return [of(given) for _, given in launches]
