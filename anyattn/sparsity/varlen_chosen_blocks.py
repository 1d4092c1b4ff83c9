"""Tile classes of chosen blocks over a varlen batch: the numbers of k key tiles of each row tile of every sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.tile_classes import EMPTY, FULL
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.analysis.visible_loads import Ragged, check_call
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.chosen_blocks import check_numbers, deciding, is_within_counts

__all__ = ["classes_of_choice"]


def classes_of_choice(indices: Any, counts: Any, tiles: RaggedTiles, mask: TracedMod | None) -> tuple[Tensor, bool]:
    """uint8 (H, total_n), and whether the whole mask has decided them; if not, no tile is known to be full.

    indices: integers (H, total_m, k). counts: integers (H, total_m), or None. Raises ``TypeError`` or ``ValueError`` naming the argument.
    """
    check_numbers(indices, counts, ("H", "row tiles"))
    if indices.shape[1] != tiles.total_m:
        raise ValueError(
            f"indices has {indices.shape[1]} row tiles, but the lengths in tiles of {tiles.tile} make {tiles.total_m}; wanted one row of "
            "indices for each row tile of every sequence: pass the tile and the lengths that the tiles were chosen for"
        )
    if indices.device != tiles.device:
        raise ValueError(f"indices is on {indices.device} and the lengths on {tiles.device}; move one of them with .to()")
    chosen = _chosen(indices, counts, tiles)
    if mask is None:
        return torch.where(chosen, FULL, EMPTY).to(torch.uint8), True
    heads, (decides, is_whole) = len(indices), deciding(mask, shares_entries=False)
    if decides is None:
        return torch.where(chosen, FULL, EMPTY).to(torch.uint8), is_whole
    with torch.no_grad():  # a mask may compare learned parameters; tile classes have no gradient
        ((decides,), _) = check_call(Ragged(heads, tiles.seqlens_q, tiles.seqlens_k, torch.zeros_like(tiles.seqlens_q)), [decides])
        classes = classify_ragged(decides, tiles.seqlens_q, tiles.seqlens_k, *tiles.tile, heads)
    return torch.where(chosen, classes, EMPTY).to(torch.uint8), is_whole


def _chosen(indices: Tensor, counts: Tensor | None, tiles: RaggedTiles) -> Tensor:
    """bool (H, total_n): the tiles that are chosen. On a CPU, raises ``ValueError`` for a tile that its sequence does not have."""
    width = tiles.num_n[tiles.sequence_of_row][:, None]
    is_read = indices >= 0
    if counts is not None:
        is_read &= is_within_counts(counts, indices.shape[2])
    beyond = is_read & (indices >= width)
    if indices.device.type == "cpu" and bool(beyond.any()):
        h, row, place = beyond.nonzero()[0].tolist()
        b = int(tiles.sequence_of_row[row])
        raise ValueError(
            f"indices[{h}, {row}, {place}] is {int(indices[h, row, place])}, but sequence {b} has {int(width[row])} key tiles; wanted "
            "numbers below that, or -1 for no tile"
        )
    goal = torch.where(is_read & ~beyond, tiles.row_begins[:-1, None] + indices, tiles.total_n).flatten(1)
    marked = torch.zeros(len(indices), tiles.total_n + 1, dtype=torch.bool, device=indices.device)
    return marked.scatter_(1, goal, True)[:, :-1]
