"""The tables that tell the kernel where to look: lists of tiles, the order of row tiles, the places of a ragged batch's entries."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyattn.geometry.integers import ceil_div
from anyattn.geometry.sequences import Sequences

__all__ = ["Lists", "order_of_entries", "order_of_lists", "remembered", "table_of"]


@dataclass(frozen=True, eq=False)
class Lists:
    """Lists of tiles as the kernel reads them; ``layout`` and the tensors as in ``config.Config`` and ``visits.Tables``."""

    layout: str
    tile: tuple[int, int]
    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor | None
    full_index: Tensor | None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.partial_count, self.partial_index, self.full_count, self.full_index

    @property
    def visited(self) -> Tensor:
        return self.partial_count if self.full_count is None else self.partial_count + self.full_count


_kept: OrderedDict[tuple, tuple] = OrderedDict()
_MOST_KEPT = 64


def remembered(tensors: tuple[Tensor, ...], kind: Any, make: Callable[[], Any]) -> Any:
    """``make()``, once for these tensors as long as they live and nobody writes into them."""
    key = (kind, *map(id, tensors))
    found = _kept.get(key)
    versions = tuple(t._version for t in tensors)
    if found is not None and found[1] == versions and all(ref() is t for ref, t in zip(found[0], tensors, strict=True)):
        return found[2]
    value = make()
    _kept[key] = (tuple(map(weakref.ref, tensors)), versions, value)
    _kept.move_to_end(key)
    while len(_kept) > _MOST_KEPT:
        _kept.popitem(last=False)
    return value


def order_of_lists(lists: Lists, cut_m: int, tiles_m: int) -> tuple[Tensor, str]:
    """The row tiles, those that visit most first, int32 (rows, 3); and which heads share each: "all", "heads" or "none".

    cut_m: row tiles of the kernel in one of the lists'; tiles_m: row tiles of the kernel.
    """
    visited = lists.visited
    batch, heads, _ = visited.shape
    if cut_m > 1:
        visited = visited.repeat_interleave(cut_m, 2)[..., :tiles_m]
    order = visited.reshape(-1).argsort(descending=True, stable=True)
    spread = "all" if batch == heads == 1 else "heads" if heads == 1 else "none"
    places = (order % tiles_m, order // tiles_m % heads, order // (tiles_m * heads))
    return torch.stack(places, 1).to(torch.int32), spread


def table_of(sequences: Sequences, places: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """``visits.Tables.entries`` of a ragged batch. places: each entry's first row tile and first index in ragged lists."""
    s = sequences
    zero = torch.zeros_like(s.q_row)
    first, index = places if places is not None else (zero, zero)
    columns = (s.q_row, s.q_start, s.seqlens_q, s.k_row, s.k_start, s.seqlens_k, s.q_first, first.to(zero.dtype), index.to(zero.dtype))
    return torch.stack(columns, 1).to(torch.int32)


def order_of_entries(sequences: Sequences, tile_m: int, most: int, ends_with_row: bool) -> Tensor:
    """The row tiles of a ragged batch, int32 (most, 3), about longest first; -1 for those that are not. most: no batch has more.

    Asks nothing of the host. ends_with_row: a row sees keys up to its own place.
    """
    s = sequences
    tiles = ceil_div(s.seqlens_q, tile_m)
    ends = tiles.cumsum(0)
    number = torch.arange(most, device=ends.device)
    entry = torch.searchsorted(ends, number, right=True)
    exists = entry < s.batch
    entry = entry.clamp(max=s.batch - 1)
    m_block = number - (ends - tiles)[entry]
    cost = s.seqlens_k[entry]
    if ends_with_row:
        cost = torch.minimum(cost, (m_block + 1) * tile_m + cost - s.seqlens_q[entry])
    cost = torch.where(exists, cost, -1)
    m_block = torch.where(exists, m_block, -1)
    order = cost.argsort(descending=True, stable=True)
    return torch.stack((m_block, torch.zeros_like(m_block), entry), 1)[order].to(torch.int32)
