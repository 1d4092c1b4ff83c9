"""Conversions between grids of tile classes and tile lists on a CUDA device: launches kernels, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods.ir.expr import Builder
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.grid import ListForm, TileGrid
from anyattn.sparsity.kernels.block_lists import compiled_for, list_tiles
from anyattn.triton_tools.launch import current_device, launch

__all__ = ["EVERYTHING", "classes_of_lists", "lists_of_classes"]

_BLOCK = 256  # entries of lists that a program reads


_builder = Builder()
EVERYTHING = TracedMod("mask", _builder.build(_builder.add("const", dtype=torch.bool, attr=True)), (), (), "everything")  # hides nothing


def lists_of_classes(classes: Tensor, separate_full: bool, wants_columns: bool) -> list[Tensor | None]:
    """``lists.both_ways``. classes: uint8 (B, H, M, N)."""
    batch, heads, rows, columns = classes.shape
    if not classes.is_contiguous() and not classes.transpose(-1, -2).is_contiguous():
        classes = classes.contiguous()
    form = ListForm(separate_full, wants_columns, has_full_tails=True, broadcasts=False)
    return list_tiles(EVERYTHING, TileGrid((rows, columns), (1, 1), (batch, heads)), classes.device, form, given=classes)


def classes_of_lists(lists: Sequence[tuple[Tensor | None, Tensor, int]], columns: int) -> Tensor:
    """uint8 classes (B, H, M, columns) of counts (B, H, M), tiles (B, H, M, n) in any order, and the class of the listed tiles.

    A tile may be listed twice; a tile that does not exist is read as nothing, as is a count below 0. counts None: all entries count. The
    last of the lists decides for a tile that several name.
    """
    batch, heads, rows, _ = lists[0][1].shape
    device = lists[0][1].device
    classes = torch.zeros((batch, heads, rows, columns), dtype=torch.uint8, device=device)
    if classes.numel() == 0:
        return classes
    from anyattn.sparsity.kernels.listed_classes import store_class

    with current_device(device):
        for counts, tiles, value in lists:
            if (width := tiles.shape[-1]) == 0:
                continue
            known = [t for t in (tiles, counts) if t is not None]
            by_count = (0, 0, 0) if counts is None else counts.stride()
            arguments = [classes, tiles, tiles if counts is None else counts, rows, columns, width, *tiles.stride(), *by_count]
            options = {"CLASS": value, "HAS_COUNT": counts is not None, "BLOCK": _BLOCK}
            grid = (ceil_div(rows * width, _BLOCK), heads, batch)
            launch(store_class, grid, arguments, device, options, compiled_for(known))
    return classes
