"""Order in which kernels take the tiles of a batch: most expensive first, so that no long tile starts last.

The cost of a row tile is the number of keys that it sees, that of a key tile the number of queries that see it: the sequence's length, or
``keys_up_to`` where a row sees keys up to its own position. Tiles of equal cost stay in the order of their sequences. This module defines
the order, with torch operations that do not synchronise. Kernels compute the same tables in one launch each:

- ``sequences.tile_order_kernel`` (Triton): the same order for a ``StoredSequences``, by lengths.
- ``documents.kernels.order_documents`` (Triton): the same order for documents, whose queries and keys are the same positions.
- ``backends.hopper.kernel.tile_order`` (CuTe): a counting sort by the same costs, in bins; the order within a bin is arbitrary. For key
  tiles, sequences are sorted, by their rows, and the tiles of each one follow one another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences
from anyattn.sequences.integers import minimum

__all__ = ["counted", "keys_up_to", "longest_first", "most_tiles", "most_visits_first", "numbered_tiles", "of_all_heads"]


def keys_up_to(m_block: Any, tile_m: int, seqlen_q: Any, seqlen_k: Any) -> Any:
    """The number of keys up to the position of the last row of row tile ``m_block``, where the sequence's last row is at its last key;
    negative if all rows of the tile are before the first key. For Python ints, integer tensors and CuTe DSL integers.

    >>> [keys_up_to(m, 4, 10, 7) for m in range(3)], keys_up_to(0, 4, 10, 2)
    ([1, 5, 7], -4)
    """
    return minimum(seqlen_k, (m_block + 1) * tile_m + seqlen_k - seqlen_q)


def most_tiles(batch: int, bound: int, rows: int, tile: int) -> int:
    """An upper bound on the tiles of ``batch`` sequences of any lengths. bound: of each length. rows: of the whole storage."""
    return min(batch * ceil_div(bound, tile), rows // tile + batch)


def numbered_tiles(tiles: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, tile inside it, whether it exists), each (most,), for tile numbers that run through all sequences.

    tiles: (B,), the tiles of each sequence. Numbers beyond the last tile get the last sequence.

    >>> [t.tolist() for t in numbered_tiles(torch.tensor([2, 0, 1]), 4)]
    [[0, 0, 2, 2], [0, 1, 0, 1], [True, True, True, False]]
    """
    ends = tiles.cumsum(0)
    number = torch.arange(most, device=ends.device)
    entry = torch.searchsorted(ends, number, right=True)
    exists = entry < len(tiles)
    entry = entry.clamp(max=max(len(tiles) - 1, 0))
    return entry, number - (ends - tiles)[entry], exists


def longest_first(s: Sequences, tile: int, most: int, *, by_key: bool = False, ends_with_row: bool = False, list_tile: int = 0) -> Tensor:
    """The tiles of ``tile`` rows of a varlen batch, roughly longest first: int32 (most, 2), (sequence, tile, or -1 for no tile).

    by_key: tiles of keys. ends_with_row: a row sees keys up to its own position, which only row tiles take into account. list_tile: rows
    per tile of the block lists, of which a kernel's tiles are whole fractions; 0 without lists.
    """
    step = list_tile or tile
    lengths, others = (s.seqlens_k, s.seqlens_q) if by_key else (s.seqlens_q, s.seqlens_k)
    entry, at, exists = numbered_tiles(ceil_div(lengths, step) * ceil_div(step, tile), most)
    cost = others[entry]
    if ends_with_row:
        cost = keys_up_to(at, tile, lengths[entry], cost).clamp(min=0)
    order = torch.where(exists, cost, -1).argsort(descending=True, stable=True)
    return torch.stack((entry, torch.where(exists, at, -1)), 1)[order].to(torch.int32)


def of_all_heads(order: Tensor) -> Tensor:
    """``longest_first`` in the form (m_block, head, entry) of other kernels: int32 (most, 3), with head 0."""
    entry, m_block = order.unbind(1)
    return torch.stack((m_block, torch.zeros_like(m_block), entry), 1)


def most_visits_first(visited: Tensor, cut: int, tiles: int, by_head: bool = False) -> Tensor:
    """The row tiles, or key tiles, of a dense batch with block lists, those with most visited tiles first: int32 (rows, 3), (tile, head,
    entry).

    visited: (B, H, M), number of tiles that each row tile of the lists visits. cut: how many of the kernel's ``tiles`` make one of them.
    by_head: numbers of visits between the same powers of two count as equal, so that long runs of tiles belong to one head: for heads whose
    keys and values together exceed the L2 cache.

    >>> most_visits_first(torch.tensor([[[1, 5]], [[2, 0]]]), 1, 2).tolist()
    [[1, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 1]]
    >>> most_visits_first(torch.tensor([[[4, 5], [6, 0]]]), 1, 2, by_head=True).tolist()
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]]
    """
    _, heads, _ = visited.shape
    if cut > 1:
        visited = visited.repeat_interleave(cut, 2, output_size=cut * visited.shape[2])[..., :tiles]
    cost = visited.float().frexp().exponent if by_head else visited
    order = cost.reshape(-1).argsort(descending=True, stable=True)
    places = (order % tiles, order // tiles % heads, order // (tiles * heads))
    return torch.stack(places, 1).to(torch.int32)


def counted(order: Tensor, tiles: Tensor | int) -> Tensor:
    """An order of tiles with an additional last row that holds the number of valid rows. tiles: that number."""
    last = torch.zeros((1, 3), dtype=torch.int32, device=order.device)
    last[:, :1] = tiles
    return torch.cat((order, last))
