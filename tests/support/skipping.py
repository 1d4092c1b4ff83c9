"""The tiles that Hopper's forward kernel skips, found from the scores in float64: by 64 rows of a warp group and the keys of a tile.

``tiered`` makes calls whose tiles are far above or far below any threshold in use, so that rounding decides nothing.
"""

from __future__ import annotations

from itertools import takewhile

import torch
from torch import Tensor

__all__ = ["kept_pairs", "tiered", "visits"]

BELOW = 1e-3
_ROWS = 64  # of a warp group
_APART = 20.0  # between the scores of high and of low keys: e^-20 is far below every threshold
_BLOCK = 64  # keys in a row that are all high or all low


def tiered(
    batch: int, heads: int, kv_heads: int, sq: int, sk: int, d: int, dtype: torch.dtype, low: float = 0.6, seed: int = 0
) -> list[Tensor]:
    """q, k, v (B, H, S, D) on the CPU. low: the share of blocks of keys whose scores lie ``_APART`` below the others'."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, h, n, d, generator=g) for h, n in ((heads, sq), (kv_heads, sk), (kv_heads, sk)))
    is_low = torch.rand(batch, kv_heads, -(-sk // _BLOCK), generator=g) < low
    q[..., 0] = 4.0
    k[..., 0] = -is_low.repeat_interleave(_BLOCK, 2)[..., :sk].float() * (_APART * d**0.5 / 4)
    return [x.to(dtype) for x in (q, k, v)]


def visits(visible: Tensor, tile_n: int, is_listed: bool = False) -> list[int]:
    """The key tiles of a row tile in the order of ``kernel.skipping``. visible: (rows, keys), of one row tile's rows. is_listed: the tiles
    stand in lists, of partly and of wholly visible ones.

    >>> visits(torch.ones(2, 70, dtype=torch.bool), 16)
    [4, 0, 1, 2, 3]
    >>> visits(torch.tril(torch.ones(48, 48, dtype=torch.bool))[32:], 16), visits(torch.tril(torch.ones(48, 48, dtype=torch.bool))[16:], 16)
    ([2, 0, 1], [2, 1, 0])
    """
    tiles = visible.split(tile_n, 1)
    seen = [n for n in reversed(range(len(tiles))) if tiles[n].any()]
    whole = {n for n in seen if tiles[n].all()}
    if is_listed:
        full, partial = [n for n in seen if n in whole], [n for n in seen if n not in whole]
        is_cut = bool(full) and tiles[full[0]].shape[1] < tile_n
        ahead = [*full[: is_cut or not partial], *partial]
        return [*ahead, *(n for n in reversed(full) if n not in ahead)]
    ahead = [*seen[:1], *takewhile(lambda n: n not in whole, seen[1:])]
    bare = list(takewhile(lambda n: n in whole, seen[len(ahead) :]))
    return [*ahead, *reversed(bare), *seen[len(ahead) + len(bare) :]]


def kept_pairs(
    scores: Tensor, below: Tensor, visible: Tensor, ratio: int, tiles: tuple[int, int, int], is_listed: bool = False
) -> tuple[Tensor, Tensor]:
    """(pairs that the kernel sums (B, Hq, Sq, Sk), the share of skipped tiles of each head (B, Hq)).

    scores: (B, Hq, Sq, Sk) float64. below: (Hq,). visible: (Hq, Sq, Sk). ratio: query heads per K/V head. tiles: tile_m, tile_n and
    ``heads_per_tile``.
    """
    tile_m, tile_n, packed = tiles
    batch, heads, sq, _ = scores.shape
    scores, kept = scores.masked_fill(~visible, -torch.inf), visible.expand(batch, -1, -1, -1).clone()
    counts = torch.zeros(batch, heads, 2)
    groups = [list(range(kv + i, kv + min(i + packed, ratio))) for kv in range(0, heads, ratio) for i in range(0, ratio, packed)]
    own, each = tile_m // packed, _ROWS // packed
    for b in range(batch):
        for group in groups:
            for first in range(0, sq, own):
                order = visits(visible[group, first : first + own].flatten(0, 1), tile_n, is_listed)
                for begin in range(first, min(first + own, sq), each):
                    rows = slice(begin, min(begin + each, first + own, sq))
                    skipped = _skipped(scores[b, group, rows], below[group], order, tile_n)
                    counts[b, group] += torch.tensor([float(len(skipped)), float(len(order))])
                    for n in skipped:
                        kept[b, group, rows, n * tile_n : (n + 1) * tile_n] = False
    return kept, counts[..., 0] / counts[..., 1].clamp_min(1)


def _skipped(scores: Tensor, below: Tensor, order: list[int], tile_n: int) -> list[int]:
    """scores: (heads, rows, keys) of a warp group."""
    tops, found = torch.full(scores.shape[:2], -torch.inf, dtype=scores.dtype), []
    for i, n in enumerate(order):
        top = scores[..., n * tile_n : (n + 1) * tile_n].amax(-1)
        if i > 0 and bool((top - tops < below.log().to(top.dtype)[:, None]).all()):
            found.append(n)
        tops = torch.maximum(tops, top)
    return found
