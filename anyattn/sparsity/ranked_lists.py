"""Row tiles of each key tile, from the last to the first, for sums in a fixed order, and each key tile's rank at a row tile."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL
from anyattn.sparsity.lists import grid_of_lists, has_kernels, ordered

__all__ = ["ranked"]


def ranked(by_row: Sequence[Tensor], by_key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """int32 counts (B, H, N), tiles (B, H, N, M) and ranks (B, H, N, M) of the row tiles of each key tile.

    by_row, by_key: counts and ascending indices of the partial tiles, then of the full ones, of each row tile, (B, H, M) and (B, H, M, N),
    and of each key tile. tiles: each key tile's row tiles in descending order, as twice their number, plus 1 if the tile is partial;
    entries beyond a count are arbitrary. ranks: the number of earlier key tiles that list a row tile; arbitrary for others.

    On a CUDA device by one kernel, without waiting: with torch's 70 operations, documents' deterministic backward pass took 2.5 times the
    default's. On a CPU ``by_row`` is not read.

    >>> from anyattn.sparsity.lists import both_ways
    >>> both = both_ways(torch.tensor([[[[1, 1], [0, 2], [2, 2]]]], dtype=torch.uint8), True)
    >>> counts, tiles, ranks = ranked(both[:4], both[4:])
    >>> counts.tolist(), tiles[0, 0, 0, :2].tolist(), tiles[0, 0, 1].tolist(), ranks[0, 0, :, 2].tolist()
    ([[[2, 3]]], [4, 1], [4, 2, 1], [0, 1])
    """
    if has_kernels(by_key[0]):
        from anyattn.sparsity.kernels.class_grids import ranked_lists

        return ranked_lists(by_row, by_key)
    counts, indices, full_counts, full_indices = by_key
    classes = grid_of_lists(counts, indices, full_counts, full_indices)
    is_listed, tiles = classes != EMPTY, classes.shape[-1]
    counts, backwards = ordered(classes.flip(-1), (PARTIAL, FULL))
    row = tiles - 1 - backwards
    found = 2 * row + (classes.gather(-1, row.long()) == PARTIAL)
    return counts, found.to(torch.int32), is_listed.cumsum(-2, dtype=torch.int32) - is_listed.to(torch.int32)
