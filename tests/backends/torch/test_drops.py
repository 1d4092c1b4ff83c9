"""Dropout of tiles by words of four pairs, beside the mask's definition."""

from __future__ import annotations

import pytest
import torch

from anyattn.backends.torch.drops import Drops
from anyattn.backends.torch.mod_runner import Tile
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.problem import Problem


@pytest.mark.parametrize("p", [0.1, 0.5, 1e-4, 0.9999])
@pytest.mark.parametrize(
    "tile",
    [
        Tile(0, 2, 0, 3, 0, 64, 0, 48),
        Tile(1, 2, 1, 3, 5, 21, 9, 10),
        Tile(0, 1, 2, 3, 17, 18, 0, 100),
        Tile(0, 2, 0, 1, 24, 100, 40, 57, q_first=7),
    ],
    ids=["aligned", "across sixteens", "one row", "rows that begin elsewhere"],
)
def test_a_tile_has_the_pairs_of_the_definition(tile: Tile, p: float) -> None:
    q = torch.zeros(2, 3, 107, 16, device="cpu")
    dropout = dropout_of(Seeded(torch.tensor([3, -4], dtype=torch.int32, device="cpu"), p))
    assert dropout is not None
    drops = Drops(Problem(q=q, k=q, v=q, scale=1.0, dropout=dropout))
    b, h, rows, keys = (torch.arange(lo, hi, device="cpu") for lo, hi in zip(tile[:8:2], tile[1:8:2], strict=True))
    kept = evaluate(dropout.keep, b.view(-1, 1, 1, 1), h.view(-1, 1, 1), tile.q_first + rows.flip(0)[:, None], keys)
    assert torch.equal(drops.dropped(tile), ~kept)
    weights = torch.ones(tile.shape, device="cpu").flatten(0, 1)
    drops.apply(weights, tile)
    assert torch.equal(weights.view(tile.shape) == 1.0, kept)
