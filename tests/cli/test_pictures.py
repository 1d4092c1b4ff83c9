"""Pictures: shapes are checked, files are whole, and the same panels give the same file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from anyattn import gallery
from anyattn.cli import pictures, tiles
from anyattn.mods import masks


def _causal(seqlen: tuple[int, int] = (100, 70), tile: tuple[int, int] = (32, 16)) -> pictures.TilePanel:
    return tiles.panel("Causal", masks.causal(), seqlen, tile)


def test_panel_matches_the_mask() -> None:
    panel = _causal()
    seen = np.tril(np.ones((100, 70), bool))
    assert panel.visible is not None and (panel.visible == seen).all()
    for i, j in np.ndindex(panel.classes.shape):
        part = seen[i * 32 : (i + 1) * 32, j * 16 : (j + 1) * 16]
        assert panel.classes[i, j] == (pictures.FULL if part.all() else pictures.PARTIAL if part.any() else pictures.EMPTY)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"classes has shape \(1, 1\).*\(4, 5\)"):
        pictures.TilePanel("x", np.zeros((1, 1), int), (32, 16), (100, 70))
    with pytest.raises(ValueError, match="visible"):
        pictures.TilePanel("x", np.zeros((4, 5), int), (32, 16), (100, 70), np.zeros((2, 2), bool))
    with pytest.raises(ValueError, match="panels is empty"):
        pictures.figure([])


@pytest.mark.parametrize("count", [8, pytest.param(24, marks=pytest.mark.slow)])
def test_files_are_reproducible_and_show_their_counts(count: int, tmp_path: Path) -> None:
    heat = pictures.HeatPanel("Bias", np.array([[0.0, np.nan], [1.0, -2.0]]))
    curve = pictures.CurvePanel("Cap", np.linspace(-1, 1, 5), {"all": np.tanh(np.linspace(-1, 1, 5))})
    # The layout's solver is not reproducible: about one figure in eight differed in its last bits.
    files = [tmp_path / f"{i}.svg" for i in range(count)]
    for path in files:
        pictures.save(pictures.figure([_causal(), heat, curve], heading="All"), path)
    assert len({path.read_bytes() for path in files}) == 1
    pictures.save(pictures.figure([_causal((4096, 4096), (128, 128))]), tmp_path / "long.png")
    assert (tmp_path / "long.png").stat().st_size > 5000
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
        pictures.save(pictures.figure([heat]), tmp_path / "a.gif")


@pytest.mark.covering(1)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("seqlen", [(512, 512), (4096, 4096), (900, 100)], ids=str)
def test_the_legend_covers_nothing(seqlen: tuple[int, int], count: int) -> None:
    fig = pictures.figure([tiles.panel("Causal", masks.causal(), seqlen, (64, 64))] * count, heading="All" if count > 2 else "")
    fig.draw_without_rendering()
    (legend,) = fig.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= fig.bbox.x1, "the legend is cut off"
    for axes in fig.axes:
        if axes.get_visible():
            drawn = axes.get_tightbbox()
            assert drawn is not None and not box.overlaps(drawn), f"{box} covers {drawn}: ticks and names of the axes are part of them"


def test_tile_colours_differ_in_lightness() -> None:
    def lightness(colour: str) -> float:
        return sum(w * int(colour[i : i + 2], 16) for w, i in zip((0.299, 0.587, 0.114), (1, 3, 5)))

    shades = sorted(lightness(pictures.PALETTE[name]) for name in ("full", "partial", "empty"))
    assert min(b - a for a, b in pairwise(shades)) > 40


def test_the_gallery_is_complete_and_documented() -> None:
    assert set(gallery.VARIANTS) == {
        *("causal", "sliding_window", "document", "prefix_lm", "sink_window", "block_diffusion", "neighborhood_3d", "sliding_tiles"),
        *("alibi", "t5_bias", "softcap", "head_bias", "forget_gate", "disentangled", "own"),
    }
    docs = Path(__file__).resolve().parents[2] / "docs"
    for variant in gallery.VARIANTS.values():  # the page itself: tests/project/test_docs.py
        assert f"](gallery/{variant.name}.svg)" in (docs / "gallery.md").read_text() and (docs / "gallery" / f"{variant.name}.svg").exists()
    with pytest.raises(ValueError, match="seqlen=0"):
        gallery.Setting(0, 1)
