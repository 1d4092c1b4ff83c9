"""Drawings of a grid of tile classes: merged to a size that can be shown, and as an SVG for notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL

__all__ = ["PALETTE", "as_svg", "coarser"]

PALETTE = {"full": "#1f5fa8", "partial": "#f2a43a", "hidden": "#fbe3bd", "empty": "#e6e9ed"}
_MOST_SQUARES = 64  # on each side of an SVG, whose text is then below 100 KiB
_WIDTH = 320  # pixels


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


def as_svg(title: str, classes: np.ndarray, lengths: Sequence[int]) -> str:
    """An SVG in HTML of a grid (query tiles, key tiles): queries downwards, keys across, with the count of each class.

    classes: uint8. lengths: queries and keys, for the picture's proportions.
    """
    grid, factor = coarser(classes, _MOST_SQUARES, _MOST_SQUARES)
    rows, columns = grid.shape
    height = round(_WIDTH * min(max(lengths[0] / max(lengths[1], 1), 0.4), 2.5))
    paths, counts = [], []
    for kind, name in ((FULL, "full"), (PARTIAL, "partial"), (EMPTY, "empty")):
        colour, count = PALETTE[name], int((classes == kind).sum())
        runs = "" if kind == EMPTY else "".join(_runs(grid == kind))
        paths.append(f'<path fill="{colour}" d="{runs}"/>' if runs else "")
        counts.append(f'<span style="color:{colour}">&#9632;</span> {name} {count}')
    skipped = f"{(classes == EMPTY).sum() / max(classes.size, 1):.1%} skipped"
    merged = f", drawn {factor} x {factor} to a square" if factor > 1 else ""
    box = f"0 0 {max(columns, 1)} {max(rows, 1)}"
    return (
        f'<div><div>{html.escape(title + merged)}</div><svg width="{_WIDTH}" height="{height}" viewBox="{box}" '
        f'preserveAspectRatio="none" shape-rendering="crispEdges" style="background:{PALETTE["empty"]}">{"".join(paths)}</svg>'
        f"<div>{' &nbsp; '.join(counts)} &nbsp; {skipped}</div></div>"
    )


def _runs(hit: np.ndarray) -> list[str]:
    """SVG path commands of the rectangles of neighbouring hits in each row."""
    edges = np.diff(np.pad(hit.astype(np.int8), ((0, 0), (1, 1))), axis=1)
    starts, ends = (np.argwhere(edges == step) for step in (1, -1))
    return [f"M{x} {y}h{end - x}v1h{x - end}z" for (y, x), (_, end) in zip(starts.tolist(), ends.tolist(), strict=True)]
