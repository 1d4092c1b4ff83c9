"""Chosen blocks in tests: random choices, and the mask that reads the same choice from a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["EDGES", "choice", "edge", "mask_of", "table_of"]

# lengths in blocks and the rest, and the numbers of each block of queries
EDGES: dict[str, tuple[tuple[int, int], tuple[int, int], list[list[int]]]] = {
    "duplicates": ((4, 4), (0, 0), [[1, 1, 1], [0, 3, 0], [2, 2, 1], [3, 0, 3]]),
    "no block": ((4, 4), (0, 0), [[-1, -1], [0, -1], [-1, -1], [-5, 3]]),
    "no block at all": ((3, 4), (0, 0), [[-1]] * 3),
    "more numbers than blocks": ((4, 2), (0, 0), [[0, 1, 0, 1, 0, 1, -1]] * 4),
    "below one block": ((0, 0), (11, 9), [[0, 0]]),
    "one query and one key": ((0, 0), (1, 1), [[0]]),
    "last blocks of one": ((2, 1), (1, 1), [[1], [0], [1]]),
}


def choice(shape: tuple[int, int], lengths: tuple[int, int], tile: tuple[int, int], k: int, seed: int = 0, **options: Any) -> Tensor:
    """Random block numbers (B, H, query blocks, k) with repeats and -1. shape: B and H."""
    rows, columns = map(ceil_div, lengths, tile)
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, columns, (*shape, rows, k), generator=g, **options) if columns else torch.full((*shape, rows, k), -1)


def edge(name: str, block: int) -> tuple[tuple[int, int], Tensor]:
    """The lengths of queries and keys of an edge case, and its numbers (1, 1, query blocks, k)."""
    (m, n), (rest_q, rest_k), numbers = EDGES[name]
    return (m * block + rest_q, n * block + rest_k), torch.tensor([[numbers]])


def table_of(indices: Tensor, columns: int, counts: Tensor | None = None) -> Tensor:
    """bool (B, H, query blocks, columns): the chosen blocks, entry by entry."""
    table = torch.zeros(*indices.shape[:3], columns, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, indices.shape[:3])).reshape(-1, 3).tolist():
        count = indices.shape[3] if counts is None else max(0, min(int(counts[tuple(place)]), indices.shape[3]))
        for number in indices[tuple(place)][:count].tolist():
            if 0 <= number < columns:
                table[tuple(place)][number] = True
    return table


def mask_of(
    table: Tensor, tile: tuple[int, int], group: int, lengths: tuple[int, int], causal: bool = False, mask_mod: Callable | None = None
) -> Callable:
    """What people write without ``from_topk``: a mask that reads the table. group: query heads per head of the table."""
    shared = [n == 1 for n in table.shape[:2]]

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        seen = table[b * (not shared[0]), (h // group) * (not shared[1]), q // tile[0], k // tile[1]]
        if causal:
            seen = seen & (k - q <= lengths[1] - lengths[0])
        return seen if mask_mod is None else seen & mask_mod(b, h, q, k)

    return mask
