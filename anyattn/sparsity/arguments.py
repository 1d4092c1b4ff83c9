"""Argument checks shared by the functions that make tile lists."""

from __future__ import annotations

import importlib.util
import operator
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.row_ranges import check_positions
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.grid import TileGrid
from anyattn.tensors import kinds
from anyattn.tensors.devices import usable_device
from anyattn.tensors.dynamo import opaque

__all__ = [
    "MOST_TILES",
    "check_many",
    "check_tables",
    "device_of",
    "has_triton",
    "length",
    "may_have_kernels",
    "pair",
    "positions",
    "ragged_lengths",
    "reads_nothing",
    "runs_kernels",
    "without_transforms",
]


MOST_TILES = 2**31  # over all batch entries and heads: each list of so many takes 8 GiB


def check_many(grid: TileGrid) -> None:
    """Raises ``ValueError`` if lists would have more than ``MOST_TILES`` tiles, before any memory is allocated."""
    batch, (rows, columns) = grid.batch, grid.shape
    if (tiles := batch[0] * batch[1] * rows * columns) > MOST_TILES:
        raise ValueError(
            f"the lists of {rows} x {columns} tiles for (batch, heads) {batch} have {tiles:,} entries, 4 bytes each; wanted at most "
            f"{MOST_TILES:,}: take larger tiles, or pass the function as mask_mod= to the attention call, which makes no lists"
        )


def length(name: str, value: Any, least: int = 0) -> int:
    """``value`` as an int >= ``least``."""
    wanted = f"an integer >= {least}"
    if isinstance(value, (bool, float, str)) or value is None:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); wanted {wanted}{_int_cure(value)}")
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__}; wanted {wanted}, such as tensor.shape[-2]") from None
    if number < least:
        raise ValueError(f"{name} is {number}; wanted {wanted}")
    return number


def positions(name: str, value: Any) -> int:
    """The length of a sequence: an int from 0 to ``row_ranges.LONGEST``."""
    number = length(name, value)
    check_positions(name, number)
    return number


def _int_cure(value: Any) -> str:
    return f"; pass {int(value)}" if isinstance(value, float) and value.is_integer() else ""


def pair(name: str, value: Any) -> tuple[int, int]:
    """A tile size: one positive int for both sides, or (rows, columns)."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name} is {value!r}; wanted one integer or a pair (query rows, keys)")
        return length(f"{name}[0]", value[0], 1), length(f"{name}[1]", value[1], 1)
    number = length(name, value, 1)
    return number, number


def reads_nothing(mod: TracedMod, device: torch.device) -> bool:
    """Whether a mask's captured tensors have no values (fake and meta tensors), so that its lists are fake too.

    Raises ``TypeError`` for captured tensors of other kinds that have no memory of their own.
    """
    if device.type == "meta" or kinds.are_fake(mod.tensors):
        return True
    kinds.refuse_hidden_captures(mod)
    return False


def without_transforms(mod: TracedMod, device: torch.device) -> AbstractContextManager[Any]:
    """The context in which lists are made: inside function transforms (``torch.func.grad``) an allocation has no address for a kernel, and
    lists have no gradient. Raises as ``reads_nothing``, since a captured tensor may be of a transform."""
    reads_nothing(mod, device)
    return kinds.outside_transforms()


def check_tables(side: str, cu_seqlens: Any, seqused: Any) -> None:
    """The checks of ``ragged_lengths`` that do not read the tables' contents; raises the same errors."""
    if cu_seqlens is None and seqused is None:
        raise TypeError(f"cu_seqlens_{side} is None; pass it, (B + 1,) integers from 0, or seqused_{side}, (B,) lengths")
    for name, table, shape in ((f"cu_seqlens_{side}", cu_seqlens, "(B + 1,)"), (f"seqused_{side}", seqused, "(B,)")):
        if table is not None:
            _whole_numbers(name, table, shape)


def ragged_lengths(side: str, cu_seqlens: Any, seqused: Any) -> Tensor:
    """The lengths of a varlen batch, int64 (B,): ``seqused`` if given (``cu_seqlens`` may then be None), else the steps of ``cu_seqlens``.

    side: "q" or "k". Raises ``TypeError`` or ``ValueError`` naming the first bad entry.
    """
    check_tables(side, cu_seqlens, seqused)
    steps = None if cu_seqlens is None else _steps(f"cu_seqlens_{side}", cu_seqlens)
    if seqused is None:
        assert steps is not None
        check_positions(f"the longest sequence of cu_seqlens_{side}", int(steps.max()) if len(steps) else 0)
        return steps
    used = _whole_numbers(f"seqused_{side}", seqused, "(B,)")
    most = steps if steps is not None else torch.full_like(used, torch.iinfo(torch.int64).max)
    if used.shape != most.shape:
        raise ValueError(f"seqused_{side} has {len(used)} entries, but cu_seqlens_{side} has {len(most) + 1}; wanted B and B + 1")
    if used.device != most.device:
        raise ValueError(f"seqused_{side} is on {used.device} and cu_seqlens_{side} on {most.device}; wanted one device")
    bad = ((used < 0) | (used > most)).nonzero()
    if len(bad):
        b = int(bad[0])
        room = "wanted 0 or more" if steps is None else f"wanted 0 to {int(most[b])}, the length that cu_seqlens_{side} gives the sequence"
        raise ValueError(f"seqused_{side}[{b}] is {int(used[b])}; {room}")
    check_positions(f"the greatest of seqused_{side}", int(used.max()) if len(used) else 0)
    return used


def _steps(name: str, cu_seqlens: Any) -> Tensor:
    ends = _whole_numbers(name, cu_seqlens, "(B + 1,)")
    if len(ends) == 0 or int(ends[0]) != 0:
        raise ValueError(f"{name} starts with {ends[:1].tolist()}; wanted 0, then the end of each sequence")
    steps = ends.diff()
    falls = (steps < 0).nonzero()
    if len(falls):
        i = int(falls[0])
        raise ValueError(f"{name}[{i + 1}] is {int(ends[i + 1])}, less than {int(ends[i])} before it; wanted non-decreasing entries")
    return steps


def _whole_numbers(name: str, value: Any, shape: str) -> Tensor:
    wanted = f"an int32 or int64 tensor {shape}"
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; wanted {wanted}")
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {value.dtype}; wanted {wanted}, as tensor.to(torch.int64)")
    if value.ndim != 1:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; wanted {wanted}")
    return value.to(torch.int64)


def device_of(device: Any, mod: TracedMod) -> torch.device:
    """The device to build on: ``device`` if given, else that of the mod's captured tensors, else the accelerator, else the CPU."""
    if device is None:
        if mod.tensors:
            return mod.tensors[0].device
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device(current or "cpu")
    device = usable_device(device)
    for tensor in mod.tensors:
        if tensor.device.type != device.type:
            raise ValueError(
                f"device is {str(device)!r} but {mod.kind}_mod {mod.name!r} captures a tensor of shape {tuple(tensor.shape)} on "
                f"{str(tensor.device)!r}; move it with .to({str(device)!r}) before capturing it, or build on its device"
            )
    return device


@opaque
def may_have_kernels(device: Any) -> bool:
    """Whether kernels may make the lists on the device that the ``device`` argument names; decided without tracing the mask."""
    if type(device) is str:
        return device.startswith("cuda")
    if device is None:
        return torch.cuda.is_initialized()
    return type(device) is torch.device and device.type == "cuda"


def runs_kernels(device: torch.device) -> bool:
    """Whether lists on this device are made by kernels, if the mask's numbers and tensors allow it."""
    return device.type == "cuda" and has_triton()


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether lists can be made by kernels on a CUDA device."""
    return importlib.util.find_spec("triton") is not None
