"""Failure on any read of a tensor's contents, which on a GPU would synchronise. For calls whose CPU tensors represent a GPU's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from anyattn import hardware
from anyattn.call_cache import rebind
from anyattn.hardware import Hardware
from anyattn.validate import flash, sequences
from tests.support.inside import InsideMode

__all__ = ["Waited", "no_reading", "noted_launches", "pretend_unread"]

_METHODS = frozenset(
    ("tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__contains__", "numpy", "cpu", "equal", "nonzero")
)
_OPERATIONS = frozenset(
    (
        "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_dim", "_unique2", "masked_select", "unique_consecutive", "item",
    )
)  # fmt: skip


class Waited(AssertionError):
    """A tensor's contents were read."""


_may_read = False  # in code that is known to look at tensors of its own only


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS and not _may_read:
            raise Waited(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operations(InsideMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(isinstance(t, torch.Tensor) and t.dtype is torch.bool for t in tree_leaves(args[1:2]))
        is_sized = name != "repeat_interleave" or (kwargs or {}).get("output_size") is not None
        if (by_mask or name in _OPERATIONS or not is_sized) and not _may_read:
            raise Waited(name)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_reading(through_dispatch: bool = True) -> Iterator[None]:
    """Each mode sees what the other does not: ``tolist`` of a CPU tensor is no operation. With a dispatch mode no call is recalled."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_Methods())
        if through_dispatch:
            stack.enter_context(_Operations())
        yield


def pretend_unread(patch: pytest.MonkeyPatch, gpu: Hardware) -> None:
    """CPU tensors are taken for this GPU's, whose tables are not read.

    Indices of mods are settled on the CPU from sizes alone, which reads vectors of its own: it gets the captured tensors without contents,
    so that code which read them would fail.
    """
    patch.setattr(hardware, "of", lambda *a: gpu)
    patch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    for module in (flash, rebind):
        patch.setattr(module, "unsettled", _without_contents(module.unsettled))


def noted_launches(patch: pytest.MonkeyPatch, capability: tuple[int, int]) -> SimpleNamespace:
    """``pretend_unread`` on a GPU of the Triton backend. made: its launches, noted and not made. capability: may be changed."""
    from anyattn.backends.triton import api, launch_cache

    dtypes = frozenset((torch.bfloat16, torch.float16, torch.float32))
    found = SimpleNamespace(capability=capability, made=[])
    pretend_unread(patch, Hardware("cuda", "a GPU", 0, dtypes, capability, 132))
    patch.setattr(hardware, "of", lambda *a: Hardware("cuda", "a GPU", 0, dtypes, found.capability, 132))
    patch.setattr(launch_cache, "run_entry", lambda *args: found.made.append(args))
    for name in ("merge", "merge_shares"):
        patch.setattr(api, name, lambda *args: None)
    return found


def _without_contents(function: Callable) -> Callable:
    def call(mod: Any, *sizes: int) -> Any:
        global _may_read
        empty = replace(mod, tensors=tuple(t.to("meta") for t in mod.tensors))
        _may_read = True
        try:
            return function(empty, *sizes)
        finally:
            _may_read = False

    return call
