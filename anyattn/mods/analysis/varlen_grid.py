"""Tile numbering of a varlen batch: the tiles of many sequences in one flat list, [sequence][row tile][key tile].

All values are vectors over the batch, so there is no loop over sequences; computations that need more memory than the flat list itself are
done in windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["RaggedTiles", "Window"]

_BATCH_TILES = 2**20  # tiles whose coordinates are computed at once, 8 bytes per coordinate


class Window(NamedTuple):
    """Row tiles ``rows``, numbered over all sequences, and their tiles ``tiles`` of the flat list."""

    rows: slice
    tiles: slice


@dataclass(frozen=True, eq=False)
class RaggedTiles:
    """The tiles of a ragged batch. seqlens_q, seqlens_k: int64 (B,), 0 or more. tile: (query rows, keys).

    Sequence b has num_m[b] x num_n[b] tiles. Its first row tile is number first_row[b] among all row tiles and its first tile number
    first_tile[b] in the flat list; both are int64 (B + 1,) and end with the totals.

    >>> tiles = RaggedTiles(torch.tensor([100, 0, 300]), torch.tensor([200, 50, 300]), (128, 128))
    >>> tiles.num_m.tolist(), tiles.num_n.tolist(), tiles.first_row.tolist(), tiles.first_tile.tolist()
    ([1, 0, 3], [2, 1, 3], [0, 1, 1, 4], [0, 2, 2, 11])
    """

    seqlens_q: Tensor
    seqlens_k: Tensor
    tile: tuple[int, int]

    @property
    def device(self) -> torch.device:
        return self.seqlens_q.device

    @property
    def batch(self) -> int:
        return len(self.seqlens_q)

    @cached_property
    def num_m(self) -> Tensor:
        return (self.seqlens_q + (self.tile[0] - 1)) // self.tile[0]

    @cached_property
    def num_n(self) -> Tensor:
        return (self.seqlens_k + (self.tile[1] - 1)) // self.tile[1]

    @cached_property
    def first_row(self) -> Tensor:
        return _ends(self.num_m)

    @cached_property
    def first_tile(self) -> Tensor:
        return _ends(self.num_m * self.num_n)

    @cached_property
    def on_host(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths in host memory, copied once; on a GPU this synchronises, and it is the only method of this class that does."""
        return self.seqlens_q.detach().cpu().numpy(), self.seqlens_k.detach().cpu().numpy()

    @cached_property
    def _numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """num_m and num_n in host memory."""
        lengths = self.on_host
        return ceil_div(lengths[0], self.tile[0]), ceil_div(lengths[1], self.tile[1])

    @cached_property
    def total_m(self) -> int:
        return int(self._numbers[0].sum())

    @cached_property
    def total_n(self) -> int:
        """The length of the flat list."""
        return int((self._numbers[0] * self._numbers[1]).sum())

    @cached_property
    def max_n(self) -> int:
        """The greatest number of key tiles of a sequence."""
        return int(self._numbers[1].max()) if self.batch else 0

    @cached_property
    def longest(self) -> tuple[int, int]:
        """The greatest numbers of query rows and of keys of a sequence."""
        return (int(self.on_host[0].max()), int(self.on_host[1].max())) if self.batch else (0, 0)

    @cached_property
    def sequence_of_row(self) -> Tensor:
        """int64 (total_m,): the sequence of each row tile."""
        return torch.repeat_interleave(torch.arange(self.batch, device=self.device), self.num_m, output_size=self.total_m)

    @cached_property
    def row_in_sequence(self) -> Tensor:
        """int64 (total_m,): each row tile's number inside its sequence."""
        return torch.arange(self.total_m, device=self.device) - self.first_row[self.sequence_of_row]

    @cached_property
    def row_begins(self) -> Tensor:
        """int64 (total_m + 1,): the begin of each row tile's entries in the flat list."""
        return _ends(self.num_n[self.sequence_of_row])

    def locate(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sequence, row tile and key tile of the places ``at`` in the flat list."""
        b = torch.searchsorted(self.first_tile, at, right=True) - 1
        inside, width = at - self.first_tile[b], self.num_n[b]
        m = inside // width
        return b, m, inside - m * width

    def place(self, b: Tensor, m: Tensor, n: Tensor) -> Tensor:
        """The places in the flat list of key tile n of row tile m of sequence b."""
        return self.first_tile[b] + m * self.num_n[b] + n

    def windows(self, budget: int, per_row: int = 0, per_tile: int = 1) -> Iterator[Window]:
        """The whole list as windows of whole row tiles that cost about ``budget`` each."""
        num_m, num_n = self._numbers
        begins = np.concatenate(([0], np.repeat(num_n, num_m).cumsum()))
        cost = begins * per_tile + np.arange(self.total_m + 1) * per_row
        ends = np.searchsorted(cost, np.arange(0, int(cost[-1]) + budget, budget))
        rows = np.unique(np.concatenate((ends, [0, self.total_m])).clip(max=self.total_m))
        ends, places = rows.tolist(), begins[rows].tolist()
        for i in range(len(ends) - 1):
            yield Window(slice(ends[i], ends[i + 1]), slice(places[i], places[i + 1]))

    def pieces(self) -> Iterator[tuple[slice, tuple[Tensor, Tensor, Tensor]]]:
        """The whole list in pieces, each with the result of ``locate``."""
        for first in range(0, self.total_n, _BATCH_TILES):
            piece = slice(first, min(first + _BATCH_TILES, self.total_n))
            yield piece, self.locate(torch.arange(piece.start, piece.stop, device=self.device))

    # ---- the same batch in other tiles; classes: (heads, total_n) of any dtype

    def with_tile(self, tile: tuple[int, int]) -> RaggedTiles:
        return self._knowing(RaggedTiles(self.seqlens_q, self.seqlens_k, tile), 1)

    def turned(self) -> RaggedTiles:
        """The tiles with queries and keys exchanged."""
        return self._knowing(RaggedTiles(self.seqlens_k, self.seqlens_q, self.tile[::-1]), -1)

    def _knowing(self, other: RaggedTiles, step: int) -> RaggedTiles:
        """``other``, tiles of the same batch, with the lengths that are already in host memory."""
        if "on_host" in vars(self):
            vars(other)["on_host"] = self.on_host[::step]
        return other

    def turn(self, classes: Tensor) -> Tensor:
        """The classes reordered for ``turned()``."""
        made, turned = torch.empty_like(classes), self.turned()
        for piece, (b, n, m) in turned.pieces():
            made[:, piece] = classes[:, self.place(b, m, n)]
        return made

    def cut(self, classes: Tensor, whole: RaggedTiles) -> Tensor:
        """Classes for these tiles: each is the class of the tile of ``whole`` that contains it;
        tiles of ``whole`` are multiples of these."""
        parts = [big // small for big, small in zip(whole.tile, self.tile, strict=True)]
        made = torch.empty(len(classes), self.total_n, dtype=classes.dtype, device=classes.device)
        for piece, (b, m, n) in self.pieces():
            made[:, piece] = classes[:, whole.place(b, m // parts[0], n // parts[1])]
        return made

    def least_and_most(self, classes: Tensor, small: RaggedTiles) -> tuple[Tensor, Tensor]:
        """The least and the greatest class among the tiles of ``small`` that form each tile."""
        parts = [big // little for big, little in zip(self.tile, small.tile, strict=True)]
        least, most = (torch.full((len(classes), self.total_n), fill, dtype=classes.dtype, device=classes.device) for fill in (255, 0))
        for piece, (b, m, n) in small.pieces():
            to = self.place(b, m // parts[0], n // parts[1]).expand(len(classes), -1)
            least.scatter_reduce_(1, to, classes[:, piece], "amin")
            most.scatter_reduce_(1, to, classes[:, piece], "amax")
        return least, most


def _ends(counts: Tensor) -> Tensor:
    """0 and the running totals, int64."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
