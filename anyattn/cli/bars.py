"""Bar charts of speeds as PNG or SVG, in groups of bars with one colour per contestant: for ``anyattn bench`` and the docs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyattn.cli.pictures import CURVES, INK, PAPER, QUIET, blank_figure, settle

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Group", "Panel", "chart"]

_BAR, _GAP, _HEAD, _FOOT, _WIDTH, _LETTER = 0.19, 0.1, 0.72, 0.5, 5.4, 0.068  # inches

_OVER_LINES = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.5}


@dataclass(frozen=True)
class Group:
    """Bars under one name. values: contestant -> its value; a missing contestant has no bar. note: smaller text after the name."""

    name: str
    values: dict[str, float]
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """A chart with its own axis. unit: of the values. line: a value marked across the panel, such as 1 for "as
    fast". digits: of bar labels."""

    title: str
    groups: Sequence[Group]
    unit: str
    line: float | None = None
    digits: int = 0


def chart(panels: Sequence[Panel], contestants: Sequence[str], heading: str, caption: str = "") -> Figure:
    """Panels one below the other, bars from left to right. contestants: in the order of their colours.

    Raises ``ValueError`` for no panels, ``ImportError`` without matplotlib.
    """
    if not panels:
        raise ValueError("panels is empty: give at least one")
    heights = [_HEAD + sum(_BAR * len(g.values) + _GAP for g in panel.groups) for panel in panels]
    top, bottom = 0.65 if len(contestants) > 1 else 0.42, 0.15 + 0.17 * (1 + caption.count("\n"))
    total = top + bottom + sum(heights)
    labels = [line for panel in panels for group in panel.groups for line in _label(group).splitlines()]
    margin = 0.2 + _LETTER * max(map(len, labels), default=0)
    width = max(margin + _WIDTH, 0.4 + 0.105 * len(heading))
    most = max((value for panel in panels for group in panel.groups for value in group.values.values()), default=1.0)
    fig = blank_figure(figsize=(width, total), facecolor=PAPER)
    at = total - top
    for panel, height in zip(panels, heights):
        place = (margin / width, (at - height + _FOOT) / total, 1 - (margin + 0.3) / width, (height - _HEAD) / total)
        _draw(fig.add_axes(place), panel, list(contestants), most)
        at -= height
    fig.text(0.15 / width, 1 - 0.25 / total, heading, fontsize=12, color=INK, va="center", fontweight="bold")
    if len(contestants) > 1:
        _legend(fig, contestants, total)
    fig.text(0.15 / width, 0.1 / total, caption, fontsize=7.5, color=QUIET, va="bottom")
    settle(fig)
    return fig


def _label(group: Group) -> str:
    if not group.note:
        return group.name
    return f"{group.name}{chr(10) if len(group.values) > 1 else '  '}{group.note}"


def _draw(axes: Axes, panel: Panel, contestants: list[str], most: float) -> None:
    at, ticks = 0.0, []
    for group in panel.groups:
        first = at
        for who, value in group.values.items():
            axes.barh(at, value, height=0.84, color=CURVES[contestants.index(who) % len(CURVES)])
            axes.text(value + most * 0.01, at, f"{value:.{panel.digits}f}", fontsize=7.5, color=INK, va="center", bbox=_OVER_LINES)
            at += 1
        ticks.append(((first + at - 1) / 2, _label(group)))
        at += _GAP / _BAR
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks])
    axes.set_ylim(at - _GAP / _BAR - 0.4, -0.6)
    axes.set_xlim(0, most * 1.1)
    axes.set_facecolor(PAPER)
    axes.set_title(panel.title, fontsize=9.5, color=INK, loc="left")
    axes.set_xlabel(panel.unit, fontsize=8, color=QUIET, labelpad=2)
    axes.tick_params(labelsize=8, colors=INK, length=0)
    axes.tick_params(axis="x", labelsize=7, colors=QUIET)
    if panel.line is not None:
        axes.axvline(panel.line, color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)


def _legend(fig: Figure, contestants: Sequence[str], total: float) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=CURVES[i % len(CURVES)], label=name) for i, name in enumerate(contestants)]
    place = (0.01, 1 - 0.38 / total)
    fig.legend(
        handles=patches,
        loc="upper left",
        bbox_to_anchor=place,
        ncols=8,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1.1,
        columnspacing=1.2,
    )
