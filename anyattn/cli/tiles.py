"""A mask's tile grid for one batch entry and head, and its drawing in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.text import Text

from anyattn.arithmetic import ceil_div
from anyattn.cli.pictures import EMPTY, FULL, PALETTE, PARTIAL, TilePanel
from anyattn.sparsity.compute import compute_block_sparsity

__all__ = ["coarser", "drawing", "legend", "panel"]

_ELEMENTS = 1024  # longest sequence whose single elements are drawn
# Two characters are about square; the characters differ too, for terminals without colour and colour-blind readers.
_MARKS = {FULL: ("██", PALETTE["full"]), PARTIAL: ("▒▒", PALETTE["partial"]), EMPTY: ("··", "grey50")}


def panel(title: str, mask: Callable, seqlen: tuple[int, int], tile: tuple[int, int], batch: int = 0, head: int = 0) -> TilePanel:
    """The tiles of ``mask`` over ``seqlen`` (queries, keys) in tiles of ``tile``, and its elements if they would be visible."""

    def of_place(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask(b + batch, h + head, q_idx, kv_idx)

    lists = compute_block_sparsity(*tile, 1, 1, *seqlen, of_place if batch or head else mask, device="cpu")
    grid = lists.classes()[0, 0].numpy()
    visible = None
    if max(seqlen) <= _ELEMENTS:
        place = [torch.tensor(i, device="cpu") for i in (batch, head)]
        seen = mask(*place, torch.arange(seqlen[0], device="cpu")[:, None], torch.arange(seqlen[1], device="cpu"))
        visible = torch.as_tensor(seen, device="cpu").expand(seqlen).numpy()
    return TilePanel(title, grid, tile, seqlen, visible)


def coarser(classes: np.ndarray, most_rows: int, most_columns: int) -> tuple[np.ndarray, int]:
    """(grid, factor): the grid with factor x factor squares of tiles merged until it fits; mixed squares are partial."""
    factor = max(1, ceil_div(classes.shape[0], most_rows), ceil_div(classes.shape[1], most_columns))
    if factor == 1:
        return classes, 1
    rows, columns = (ceil_div(size, factor) for size in classes.shape)
    # edge padding repeats the last tiles: it does not change whether a square is all full or all empty
    padding = [(0, rows * factor - classes.shape[0]), (0, columns * factor - classes.shape[1])]
    squares = np.pad(classes, padding, mode="edge").reshape(rows, factor, columns, factor)
    low, high = squares.min((1, 3)), squares.max((1, 3))
    return np.where(low == high, low, PARTIAL), factor


def drawing(classes: np.ndarray) -> Text:
    """The grid in colour, one line per row of tiles."""
    text = Text(no_wrap=True)
    for row in classes.tolist():
        for kind in row:
            mark, colour = _MARKS[kind]
            text.append(mark, style=colour)
        text.append("\n")
    return text


def legend(shown: TilePanel) -> Text:
    """The meaning and the count of each mark."""
    text = Text()
    for kind, name in ((FULL, "full"), (PARTIAL, "partial"), (EMPTY, "empty")):
        mark, colour = _MARKS[kind]
        text.append(mark, style=colour).append(f" {name} {shown.count(kind)}   ")
    return text.append(f"{shown.count(EMPTY) / max(shown.classes.size, 1):.1%} skipped")
