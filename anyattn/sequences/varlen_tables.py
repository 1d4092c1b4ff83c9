"""Tables of a varlen batch in the form that kernels read, made by torch operations that never wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences

__all__ = ["counted", "entries_table", "longest_first", "numbered_tiles"]


def entries_table(s: Sequences, lengths: tuple[Tensor, Tensor] | None = None, lists: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """int32 (B, 9): q_row, q_start, queries, k_row, k_start, keys, q_first of each sequence, then its first line and place in block lists.

    lengths: queries and keys by which lists were made, where not the batch's own. lists: (B,) integers each, zeros without.
    """
    zero = torch.zeros_like(s.q_row)
    seqlens_q, seqlens_k = (s.seqlens_q, s.seqlens_k) if lengths is None else lengths
    first, place = (zero, zero) if lists is None else (t.to(zero.dtype) for t in lists)
    columns = (s.q_row, s.q_start, seqlens_q, s.k_row, s.k_start, seqlens_k, s.q_first, first, place)
    return torch.stack(columns, 1).to(torch.int32)


def numbered_tiles(tiles: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(sequence, tile inside of it, whether there is one), each (most,), of the tiles of all sequences in one numbering.

    tiles: (B,) of each sequence. Numbers beyond the last tile have the last sequence.

    >>> [t.tolist() for t in numbered_tiles(torch.tensor([2, 0, 1]), 4)]
    [[0, 0, 2, 2], [0, 1, 0, 1], [True, True, True, False]]
    """
    ends = tiles.cumsum(0)
    number = torch.arange(most, device=ends.device)
    entry = torch.searchsorted(ends, number, right=True)
    exists = entry < len(tiles)
    entry = entry.clamp(max=max(len(tiles) - 1, 0))
    return entry, number - (ends - tiles)[entry], exists


def longest_first(s: Sequences, tile_m: int, most: int, ends_with_row: bool) -> Tensor:
    """The row tiles of a varlen batch, int32 (most, 3), about longest first; unused rows have m_block -1.

    Reads nothing on the host. ends_with_row: a row sees keys up to its own position.
    """
    entry, m_block, exists = numbered_tiles(ceil_div(s.seqlens_q, tile_m), most)
    cost = s.seqlens_k[entry]
    if ends_with_row:
        cost = torch.minimum(cost, (m_block + 1) * tile_m + cost - s.seqlens_q[entry]).clamp(min=0)
    cost = torch.where(exists, cost, -1)
    m_block = torch.where(exists, m_block, -1)
    order = cost.argsort(descending=True, stable=True)
    return torch.stack((m_block, torch.zeros_like(m_block), entry), 1)[order].to(torch.int32)


def counted(order: Tensor, tiles: Tensor) -> Tensor:
    """An order of row tiles with one more row, which holds the number of valid rows. tiles: that number."""
    last = torch.zeros((1, 3), dtype=torch.int32, device=order.device)
    last[:, :1] = tiles
    return torch.cat((order, last))
