"""Draws docs/plots/chosen-blocks.svg, the tiles that models of docs/chosen-blocks.md choose: ``make docs``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from anyattn.cli import pictures, tiles
from anyattn.mods import masks

PICTURE = Path(__file__).resolve().parent / "plots" / "chosen-blocks.svg"
SEQLEN, BLOCK, CHOSEN, WINDOW = 512, 32, 3, 48


def content(seed: int) -> Tensor:
    """(SEQLEN, 8): vectors that change slowly, and come back to what they have been."""
    place = torch.arange(SEQLEN, device="cpu")[:, None] / SEQLEN
    pace = torch.rand(2, 8, generator=torch.Generator().manual_seed(seed), device="cpu") * 40
    return torch.sin(place * pace[0] + pace[1])


def chosen(suits: Tensor, own: Tensor) -> Tensor:
    """bool like suits (rows, blocks): each row's own block, and before it the best others."""
    block = torch.arange(suits.shape[1], device="cpu")
    suits = suits.masked_fill(block == own[:, None], torch.inf).masked_fill(block > own[:, None], -torch.inf)
    return torch.zeros_like(suits, dtype=torch.bool).scatter(-1, suits.topk(CHOSEN).indices, True) & (block <= own[:, None])


def panel(title: str, mask: Callable) -> pictures.TilePanel:
    return tiles.panel(title, mask, (SEQLEN,) * 2, (BLOCK,) * 2)


def panels() -> list[pictures.TilePanel]:
    q, means = content(1), content(2).unflatten(0, (-1, BLOCK)).mean(1)
    own = torch.arange(SEQLEN, device="cpu") // BLOCK
    by_query, by_tile = chosen(q @ means.T, own), chosen(q.unflatten(0, (-1, BLOCK)).mean(1) @ means.T, own[::BLOCK])
    causal, window = masks.causal(), masks.sliding_window(WINDOW, 0)
    of_tile = causal & (lambda b, h, q_idx, kv_idx: by_tile[q_idx // BLOCK, kv_idx // BLOCK])
    of_query = causal & (lambda b, h, q_idx, kv_idx: by_query[q_idx, kv_idx // BLOCK])
    return [
        panel("Chosen for a tile of queries", of_tile),
        panel("Chosen for each query", of_query),
        panel("Each query, and a window", of_query | window),
    ]


if __name__ == "__main__":
    pictures.save(pictures.figure(panels()), PICTURE)
