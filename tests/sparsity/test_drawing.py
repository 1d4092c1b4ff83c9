"""Block masks in notebooks."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import torch

import anyattn
from anyattn import masks
from anyattn.cli import tiles
from anyattn.sparsity.drawing import PALETTE, coarser


def drawn(shown: str) -> torch.Tensor:
    """The grid of an SVG: 0 empty, 1 partial, 2 full."""
    svg = ElementTree.fromstring(re.search("<svg.*</svg>", shown)[0])  # type: ignore[index]
    columns, rows = map(int, svg.attrib["viewBox"].split()[2:])
    grid = torch.zeros(rows, columns, dtype=torch.uint8)
    for path in svg:
        kind = {PALETTE["full"]: 2, PALETTE["partial"]: 1}[path.attrib["fill"]]
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\d+z", path.attrib["d"]):
            assert not grid[int(y), int(x) : int(x) + int(width)].any()
            grid[int(y), int(x) : int(x) + int(width)] = kind
    return grid


def test_a_notebook_shows_what_anyattn_show_draws() -> None:
    mask = masks.sliding_window(100, 0) | masks.prefix_lm(70)
    made = anyattn.create_block_mask(mask, 2, 3, 1000, 700, device="cpu", BLOCK_SIZE=64)
    shown = made._repr_html_()
    assert shown is not None and "1000 queries x 700 keys in blocks of 64 x 64, b = 0 of 2, h = 0 of 3" in shown
    panel = tiles.panel("", mask, (1000, 700), (64, 64))
    tail = made.block_sparse().classes()[0, 0]  # torch lists full blocks at the ends as partial
    assert torch.equal(drawn(shown), tail) and torch.equal(tail != 0, torch.from_numpy(panel.classes) != 0)


def test_its_size_is_bounded() -> None:
    scattered = anyattn.create_block_mask(lambda b, h, i, j: (i * 7 + j * 3) % 11 < 2, 1, 1, 2000, 3000, device="cpu", BLOCK_SIZE=2)
    shown = scattered._repr_html_()
    assert shown is not None and len(shown) < 100_000 and "drawn 24 x 24 to a square" in shown
    wanted, _ = coarser(scattered.block_sparse().classes()[0, 0].numpy(), 64, 64)
    assert drawn(shown).tolist() == wanted.tolist()


def test_masks_that_cannot_be_drawn() -> None:
    empty = anyattn.create_block_mask(masks.causal(), 1, 1, 0, 0, device="cpu")
    assert "empty 0" in (empty._repr_html_() or "")
    assert anyattn.create_block_mask(masks.causal(), 1, 1, 64, 64, device="meta")._repr_html_() is None
    assert "&lt;lambda&gt;" in (anyattn.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 9, 9, device="cpu")._repr_html_() or "")
