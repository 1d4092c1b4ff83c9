"""Between a grid of tile classes and the lists that kernels read: how many tiles a row has, and which."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from anyattn.mods.bounds import EMPTY, FULL, PARTIAL

__all__ = ["grid_of_lists", "lists_of_grid", "ordered"]

_BATCH_TILES = 2**22  # tiles enumerated at once: their coordinates take 16 bytes each


def lists_of_grid(classes: Tensor, separate_full: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Counts and ascending indices of the partial tiles, then of the full ones (None unless ``separate_full``: all are listed as partial).

    classes: uint8 (B, H, M, N) -> int32 (B, H, M), (B, H, M, N), (B, H, M), (B, H, M, N).
    """
    if not separate_full:
        return *ordered(classes, (PARTIAL, FULL)), None, None
    return *ordered(classes, (PARTIAL,)), *ordered(classes, (FULL,))


def ordered(classes: Tensor, listed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are of a ``listed`` class, and their columns, ascending; the tail is 0."""
    columns = classes.shape[-1]
    grid = classes.reshape(classes.shape[:-1].numel(), columns)
    counts = torch.zeros(len(grid), dtype=torch.int32, device=classes.device)
    indices = _zeros((len(grid), columns), classes.device)
    for part in _batches(grid):
        hit = grid[part] == listed[0] if len(listed) == 1 else grid[part] != EMPTY
        count = hit.sum(-1, dtype=torch.int32)
        row, column = hit.nonzero().unbind(1)
        position = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
        indices[part].view(-1)[row * columns + position] = column.to(torch.int32)
        counts[part] = count
    return counts.reshape(classes.shape[:-1]), indices.reshape(classes.shape)


def _batches(grid: Tensor) -> Iterator[slice]:
    step = max(1, _BATCH_TILES // max(grid.shape[-1], 1))
    return (slice(first, first + step) for first in range(0, len(grid), step))


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros whose pages the system provides when first written: most of a long mask's index tensor is never touched."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


def grid_of_lists(
    mask_cnt: Tensor, mask_idx: Tensor, full_cnt: Tensor | None, full_idx: Tensor | None, columns: int | None = None
) -> Tensor:
    """uint8 classes (B, H, M, N) of lists; entries beyond a row's count are not read, and N defaults to the lists' width."""
    columns = mask_idx.shape[-1] if columns is None else columns
    lead = mask_idx.shape[:-1]
    classes = torch.zeros(lead.numel(), columns, dtype=torch.uint8, device=mask_idx.device)
    for cnt, idx, value in ((mask_cnt, mask_idx, PARTIAL), (full_cnt, full_idx, FULL)):
        if cnt is None or idx is None:
            continue
        cnt, idx = cnt.reshape(-1), idx.reshape(lead.numel(), idx.shape[-1])
        position = torch.arange(idx.shape[-1], device=idx.device)
        for part in _batches(idx):
            row, at = (position < cnt[part, None]).nonzero().unbind(1)
            column = idx[part][row, at].to(torch.int64)
            if bool(((column < 0) | (column >= columns)).any()):
                raise ValueError(f"block lists name column {int(column.min())} to {int(column.max())} of {columns}; the lists are damaged")
            classes[part].view(-1)[row * columns + column] = value
    return classes.reshape(*lead, columns)
