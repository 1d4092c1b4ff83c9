"""Pictures of masks and score mods as PNG or SVG: tiles that a kernel skips, masks or computes without a mask.

A mask is drawn tile by tile: **full** (no mask is evaluated), **partial** (the mask is evaluated in it) and **empty**
(never loaded). For short sequences the single elements inside partial tiles are drawn too. A score mod is drawn as the
value that it adds to a score of zero, or, if it does not depend on the position, as a curve over the score. A placement on ranks is drawn
as the mask's chunks, in the colour of the rank that owns the rows.

Needs matplotlib (``pip install 'anyattn[viz]'``), imported when the first picture is made. The background is opaque and
the text dark, so a picture is legible on dark and on light pages; the two tile colours differ in lightness as well as in
hue, for colour-blind readers and for print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anyattn.arithmetic import ceil_div
from anyattn.sparsity.drawing import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CURVES",
    "EMPTY",
    "FULL",
    "INK",
    "PALETTE",
    "PAPER",
    "PARTIAL",
    "QUIET",
    "CurvePanel",
    "HeatPanel",
    "OwnerPanel",
    "TilePanel",
    "blank_figure",
    "figure",
    "save",
    "settle",
]

EMPTY, PARTIAL, FULL = 0, 1, 2
INK, QUIET, PAPER = "#1d2430", "#5d6878", "#ffffff"
CURVES = ("#1f5fa8", "#f2a43a", "#2f9e77", "#b3477d", "#7a5cc2", "#5d6878")
# With more elements per side a pixel would cover several of them.
_MAX_ELEMENTS = 1024
# With more tiles than this, white lines between them would cover them.
_MAX_RULED_TILES = 64


@dataclass(frozen=True)
class TilePanel:
    """One mask, for one batch entry and head.

    ``classes`` is ``(q_tiles, kv_tiles)`` of EMPTY, PARTIAL and FULL; ``visible``, if given, is the mask itself,
    ``(seqlen_q, seqlen_k)`` of bool, and is drawn inside partial tiles.
    """

    title: str
    classes: np.ndarray
    tile: tuple[int, int]
    seqlen: tuple[int, int]
    visible: np.ndarray | None = None

    def __post_init__(self) -> None:
        wanted = tuple(ceil_div(length, size) for length, size in zip(self.seqlen, self.tile))
        if self.classes.shape != wanted:
            raise ValueError(f"classes has shape {self.classes.shape}, but seqlen={self.seqlen} in tiles of {self.tile} is {wanted}")
        if self.visible is not None and self.visible.shape != self.seqlen:
            raise ValueError(f"visible has shape {self.visible.shape}, wanted seqlen={self.seqlen}")

    def count(self, kind: int) -> int:
        """The number of tiles of this class."""
        return int((self.classes == kind).sum())


@dataclass(frozen=True)
class HeatPanel:
    """The values that a score mod adds to a score of zero, ``(seqlen_q, seqlen_k)`` of float; NaN where a mask hides the pair."""

    title: str
    values: np.ndarray
    note: str = ""


@dataclass(frozen=True)
class CurvePanel:
    """A score mod as a function of the score: ``curves`` maps a label to values over ``scores``."""

    title: str
    scores: np.ndarray
    curves: dict[str, np.ndarray]
    note: str = ""


@dataclass(frozen=True)
class OwnerPanel:
    """Which rank owns which rows: ``owner`` is ``(chunks,)``, the rank of each chunk, and ``needs`` ``(chunks, chunks)`` of bool, which
    chunks of keys its rows see; what rows see is drawn in the colour of their rank. chunk: positions in a chunk."""

    title: str
    owner: np.ndarray
    needs: np.ndarray
    chunk: int
    note: str = ""


Panel = TilePanel | HeatPanel | CurvePanel | OwnerPanel


def _pixels(panel: TilePanel) -> np.ndarray:
    """Colour numbers per element, or per tile if there are too many elements: 0 to 3, as in _LEGEND."""
    kinds = np.where(panel.classes == FULL, 3, np.where(panel.classes == PARTIAL, 2, 0)).astype(np.uint8)
    if max(panel.seqlen) > _MAX_ELEMENTS or panel.visible is None:
        return kinds
    rows, columns = panel.seqlen
    fine = kinds.repeat(panel.tile[0], axis=0).repeat(panel.tile[1], axis=1)[:rows, :columns]
    fine[(fine == 2) & ~panel.visible] = 1
    return fine


_LEGEND = (
    ("full", "full: computed without a mask"),
    ("partial", "partial: the mask decides each element"),
    ("hidden", "hidden element of a partial tile"),
    ("empty", "empty: skipped, never loaded"),
)


def _draw_tiles(axes: Axes, panel: TilePanel) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([PALETTE["empty"], PALETTE["hidden"], PALETTE["partial"], PALETTE["full"]])
    rows, columns = panel.seqlen
    grid_m, grid_n = panel.classes.shape
    pixels = _pixels(panel)
    # The last tile may be shorter; with one pixel per tile the picture extends to the padded length, and the limits cut it.
    is_fine = pixels.shape == panel.seqlen
    extent = (0, columns, rows, 0) if is_fine else (0, grid_n * panel.tile[1], grid_m * panel.tile[0], 0)
    axes.imshow(pixels, cmap=colours, vmin=0, vmax=3, extent=extent, interpolation="nearest", aspect="auto")
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    if max(grid_m, grid_n) <= _MAX_RULED_TILES:
        width = 0.7 if max(grid_m, grid_n) <= 32 else 0.35
        axes.hlines(np.arange(1, grid_m) * panel.tile[0], 0, columns, colors=PAPER, linewidth=width)
        axes.vlines(np.arange(1, grid_n) * panel.tile[1], 0, rows, colors=PAPER, linewidth=width)
    skipped = panel.count(EMPTY) / max(panel.classes.size, 1)
    note = f"{panel.count(FULL)} full, {panel.count(PARTIAL)} partial, {panel.count(EMPTY)} empty ({skipped:.0%} skipped)"
    _label(axes, panel.title, note)
    _place_axis(axes, rows, columns)


def _draw_heat(axes: Axes, panel: HeatPanel) -> None:
    from matplotlib import colormaps

    shown = panel.values[np.isfinite(panel.values)]
    reach = max(float(np.abs(shown).max()) if shown.size else 0.0, 1e-6)
    rows, columns = panel.values.shape
    colours = colormaps["RdYlBu"].with_extremes(bad=PALETTE["empty"])
    extent = (0, columns, rows, 0)
    image = axes.imshow(panel.values, cmap=colours, vmin=-reach, vmax=reach, extent=extent, interpolation="nearest", aspect="auto")
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.046, pad=0.03)
    bar.ax.tick_params(labelsize=7, colors=QUIET, length=2)
    bar.outline.set_visible(False)
    _label(axes, panel.title, panel.note)
    _place_axis(axes, rows, columns)


def _draw_curves(axes: Axes, panel: CurvePanel) -> None:
    axes.plot(panel.scores, panel.scores, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), label="unchanged")
    for (label, values), colour in zip(panel.curves.items(), CURVES):
        axes.plot(panel.scores, values, color=colour, linewidth=1.6, label=label)
    axes.legend(fontsize=7, frameon=False, labelcolor=INK, loc="upper left")
    axes.set_xlabel("score", fontsize=8, color=QUIET)
    axes.set_ylabel("score after the mod", fontsize=8, color=QUIET)
    axes.set_box_aspect(1)
    axes.tick_params(labelsize=7, colors=QUIET, length=2)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(PALETTE["empty"])
    _label(axes, panel.title, panel.note)


def _draw_owners(axes: Axes, panel: OwnerPanel) -> None:
    from matplotlib.colors import to_rgb

    ranks = int(panel.owner.max()) + 1
    colours = np.array([to_rgb(colour) for colour in CURVES])[np.arange(ranks) % len(CURVES)]
    # ranks that share a colour differ in lightness
    lighter = (np.arange(ranks) // len(CURVES) * 0.37 % 0.8)[:, None]
    colours = colours + (1 - colours) * lighter
    pixels = np.where(panel.needs[..., None], colours[panel.owner][:, None], to_rgb(PALETTE["empty"]))
    length = len(panel.owner) * panel.chunk
    axes.imshow(pixels, extent=(0, length, length, 0), interpolation="nearest", aspect="auto")
    _label(axes, f"{panel.title}, {ranks} ranks", panel.note)
    _place_axis(axes, length, length)


def _label(axes: Axes, title: str, note: str) -> None:
    axes.set_title(title, fontsize=11, color=INK, loc="left", pad=18, fontweight="bold")
    axes.text(0, 1.02, note, transform=axes.transAxes, fontsize=7.5, color=QUIET, va="bottom", ha="left")


def _place_axis(axes: Axes, rows: int, columns: int) -> None:
    """Draws query positions downwards and key positions across, like a score matrix."""
    axes.set_box_aspect(1 if rows == columns else min(max(rows / columns, 0.4), 2.5))
    axes.set_xticks([0, columns // 2, columns])
    axes.set_yticks([0, rows // 2, rows])
    axes.tick_params(labelsize=7, colors=QUIET, length=2)
    axes.set_xlabel("key position", fontsize=8, color=QUIET, labelpad=2)
    axes.set_ylabel("query position", fontsize=8, color=QUIET, labelpad=2)
    for spine in axes.spines.values():
        spine.set_visible(False)


def blank_figure(**options: Any) -> Figure:
    """An empty matplotlib figure. Raises ``ImportError`` with the package to install."""
    try:
        # Not pyplot: it would choose a window system and keep every figure alive.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'anyattn[viz]'") from error
    return Figure(**options)


def figure(panels: Sequence[Panel], *, heading: str = "", columns: int = 4) -> Figure:
    """Draw panels in a grid, with one legend for all.

    Args:
        panels: at least one ``TilePanel``, ``HeatPanel``, ``CurvePanel`` or ``OwnerPanel``.
        heading: a line above everything.
        columns: panels side by side.

    Returns:
        A matplotlib ``Figure``, for :func:`save`.

    Raises:
        ValueError: no panels.
        ImportError: matplotlib is missing.
    """
    if not panels:
        raise ValueError("panels is empty: give at least one")
    columns = min(columns, len(panels))
    rows = ceil_div(len(panels), columns)
    has_tiles = any(isinstance(panel, TilePanel) for panel in panels)
    # Inches, so that the text size does not depend on the number of panels.
    legend = _legend(panels, columns) if has_tiles else []
    head, foot, side = 0.55 if heading else 0.1, 0.14 + 0.18 * max(len(legend), 2) if has_tiles else 0.1, 3.3
    height = rows * side + head + foot
    fig = blank_figure(figsize=(columns * side, height), facecolor=PAPER, layout="constrained")
    fig.get_layout_engine().set(  # type: ignore[union-attr, call-arg]
        rect=(0.005, foot / height, 0.99, 1 - (head + foot) / height), wspace=0.06, hspace=0.06
    )
    grid = fig.subplots(rows, columns, squeeze=False).ravel()
    for axes, panel in zip(grid, panels):
        axes.set_facecolor(PAPER)
        if isinstance(panel, TilePanel):
            _draw_tiles(axes, panel)
        elif isinstance(panel, HeatPanel):
            _draw_heat(axes, panel)
        elif isinstance(panel, OwnerPanel):
            _draw_owners(axes, panel)
        else:
            _draw_curves(axes, panel)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    if heading:
        fig.text(0.012, 1 - 0.3 / height, heading, fontsize=13, color=INK, va="center", fontweight="bold")
    if has_tiles:
        _draw_legend(fig, legend)
    settle(fig)
    return fig


def settle(fig: Figure) -> None:
    """Lays out the panels now, and rounds their positions.

    The layout solver visits its variables in the order of their addresses, so its last bits differ between figures; an SVG's
    clip ids are hashes of those bits.
    """
    from matplotlib.transforms import Bbox

    fig.draw_without_rendering()
    fig.set_layout_engine("none")
    for axes in fig.axes:
        axes.set_position(Bbox(axes.get_position(original=True).get_points().round(6)))


def _legend(panels: Sequence[Panel], columns: int) -> list[list[tuple[str, str]]]:
    """The legend's entries by line, with as many per line as fit under the panels."""
    has_elements = any(isinstance(p, TilePanel) and p.visible is not None for p in panels)
    entries = [entry for entry in _LEGEND if has_elements or entry[0] != "hidden"]
    per_line = len(entries) if columns >= 3 else columns
    return [entries[at : at + per_line] for at in range(0, len(entries), per_line)]


def _draw_legend(fig: Figure, lines: list[list[tuple[str, str]]]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=PALETTE[name], label=text) for line in lines for name, text in line]
    per_row = len(lines[0])
    fig.legend(handles=patches, loc="lower left", ncols=per_row, frameon=False, fontsize=8, labelcolor=INK, handlelength=1.1)


def save(fig: Figure, *paths: str | Path) -> None:
    """Writes a figure to each path; the suffix, ``.png`` or ``.svg``, selects the format. Folders are created.

    Raises:
        ValueError: another suffix.
    """
    from matplotlib import rc_context

    for path in map(Path, paths):
        if path.suffix.lower() not in (".png", ".svg"):
            raise ValueError(f"cannot write {path}: the name must end in .png or .svg")
        path.parent.mkdir(parents=True, exist_ok=True)
        # No date and no random ids: equal panels give equal files.
        with rc_context({"svg.hashsalt": "anyattn"}):
            fig.savefig(path, dpi=160, facecolor=fig.get_facecolor(), metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
