"""Grids of tile classes, tile lists and chosen tiles on a CUDA device: launches the kernels that convert them, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.mods.ir.expr import Builder
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.grid import ListForm, TileGrid
from anyattn.sparsity.kernels.block_lists import compiled_for, list_tiles
from anyattn.triton_tools.launch import current_device, launch

__all__ = ["EVERYTHING", "classes_of_lists", "lists_of_classes", "ranked_lists", "sorted_choice"]

_BLOCK = 256  # entries of lists that a program reads
_RANKED = 128  # tiles that a program lists at a time
_SORTED = 1024  # entries that a program sorts, if a row has fewer


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


def ranked_lists(by_row: Sequence[Tensor], by_key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """``ranked_lists.ranked``."""
    batch, heads, keys, rows = by_key[1].shape
    device = by_key[1].device
    counts = torch.empty((batch, heads, keys), dtype=torch.int32, device=device)
    tiles, ranks = (torch.empty((batch, heads, keys, rows), dtype=torch.int32, device=device) for _ in range(2))
    from anyattn.sparsity.kernels.ranked_lists import store_ranked

    arguments = [counts, tiles, ranks, *(t.contiguous() for t in (*by_row, *by_key)), keys, rows]
    with current_device(device):
        launch(store_ranked, (keys + rows, heads, batch), arguments, device, {"BLOCK": _RANKED}, compiled_for(by_key))
    return counts, tiles, ranks


def sorted_choice(indices: Tensor, counts: Tensor | None, columns: int, room: int) -> tuple[Tensor, Tensor]:
    """int32 counts (B, H, M) and tiles (B, H, M, room), ascending, each once, of the tiles that rows name in any order.

    indices: integers (B, H, M, n), n at most ``chosen_blocks.MOST_SORTED``. counts: integers (B, H, M), or None: all entries count. A tile
    that does not exist is read as nothing. room: no less than the tiles of any row. Entries beyond a count are arbitrary.
    """
    batch, heads, rows, width = indices.shape
    device = indices.device
    found = torch.empty((batch, heads, rows), dtype=torch.int32, device=device)
    tiles = torch.empty((batch, heads, rows, room), dtype=torch.int32, device=device)
    if min(found.numel(), width, columns) == 0:
        return found.zero_(), tiles
    from anyattn.sparsity.kernels.sorted_choice import store_sorted

    padded = max(16, next_power_of_2(width))
    together = max(1, _SORTED // padded)
    by_count = (0, 0, 0) if counts is None else counts.stride()
    known = [t for t in (indices, counts) if t is not None]
    count = indices if counts is None else counts
    arguments = [found, tiles, indices, count, rows, columns, width, room, *indices.stride(), *by_count]
    options = {"HAS_COUNT": counts is not None, "ROWS": together, "WIDTH": padded}
    if padded > _SORTED:
        options["num_warps"] = 8
    with current_device(device):
        launch(store_sorted, (ceil_div(rows, together), heads, batch), arguments, device, options, compiled_for(known))
    return found, tiles
