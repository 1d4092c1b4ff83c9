"""Prepared launches of the kernels that make block lists: a warm call substitutes addresses and captured numbers.

A ``PreparedLists`` holds the list sizes, the kernels and their compiled forms, which ``block_lists.list_tiles`` looks up at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.sparsity.grid import ListForm, TileGrid, lists_of_memory
from anyattn.sparsity.kernels.block_lists import Launches, compiled_for, in_front, launches_of, strides_of_captured
from anyattn.tensors.strides import allocator, contiguous_strides
from anyattn.triton_tools.launch import known_handle

__all__ = ["PreparedLists", "prepared"]


class PreparedLists(NamedTuple):
    """Launches for masks of one program whose captured tensors have the same shapes, strides and dtypes.

    memory: shapes and strides of the allocations. sends: for each launch the handle's ``send``, the grid, and whether it takes the lists.
    sizes: the kernels' ``TileSizes``. strides: strides and sizes of the captured tensors.
    """

    plan: Launches
    device: torch.device
    empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]
    memory: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    sends: tuple[tuple[Callable[[tuple[int, ...], Sequence[Any]], None], tuple[int, int, int], bool], ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def lists(self, scalars: Sequence[int | float], tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The lists that ``list_tiles`` returns for a mask with these captured values."""
        plan, empty = self.plan, self.empty
        lists = lists_of_memory([empty(shape, strides, torch.int32) for shape, strides in self.memory], plan.classes)
        pointers = in_front([None if t is None else t.data_ptr() for t in lists])
        hulls = empty((plan.hulls,), (1,), torch.int64) if plan.hulls else None
        behind = [pointers[0] if hulls is None else hulls.data_ptr(), *self.sizes]
        if plan.mask.scalar_slots:
            behind += bits_of_numbers([scalars[slot] for slot in plan.mask.scalar_slots])
        if tensors:
            behind += self.strides
            behind += [tensors[slot].data_ptr() for slot in plan.mask.tensor_slots]
        for send, grid, takes_lists in self.sends:
            send(grid, pointers + behind if takes_lists else behind)
        return lists


def prepared(mod: TracedMod, grid: TileGrid, device: torch.device, form: ListForm) -> PreparedLists | None:
    """The launches of ``list_tiles`` for these arguments; None unless each was launched before and its handle takes addresses.

    device: with an index.
    """
    plan = launches_of(mod.expr, grid, form)
    tensors = [mod.tensors[slot] for slot in plan.mask.tensor_slots]
    sends = []
    for kernel, size, constants, takes_lists in plan.launches:
        handle = known_handle(kernel, device, constants, compiled_for(tensors))
        if handle is None or not handle.takes_addresses:
            return None
        sends.append((handle.send, size, takes_lists))
    if not sends:
        return None
    memory = tuple([(shape, contiguous_strides(shape)) for shape in plan.shapes])
    strides = tuple(strides_of_captured(tensors))
    return PreparedLists(plan, device, allocator(device), memory, tuple(sends), tuple(plan.sizes), strides)
