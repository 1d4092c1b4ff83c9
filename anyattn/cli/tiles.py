"""A mask's tile grid for one batch entry and head, and its drawing in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.text import Text

from anyattn.cli.pictures import EMPTY, FULL, PARTIAL, TilePanel
from anyattn.sparsity.compute import compute_block_sparsity
from anyattn.sparsity.drawing import PALETTE

__all__ = ["drawing", "legend", "panel"]

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
