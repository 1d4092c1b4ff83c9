"""Documents of a dense batch as sequences: finds the runs of equal ids on the device, without reading the ids on the host."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.sequences.batch import Sequences
from anyattn.sequences.tile_order import counted, longest_first, of_all_heads
from anyattn.sequences.unread_varlen import UnreadSequences
from anyattn.sequences.varlen_tables import entries_table

__all__ = ["NO_DOCUMENTS", "DocumentSequences", "DocumentSizes", "document_sequences", "documents_in_order", "places_of"]

_MEAN = 128  # positions per document on average, at least: with more documents most kernels' row tiles would be half empty
_FEWEST = 8


class DocumentSizes(NamedTuple):
    """rows: batch entries of the dense call. length: positions per entry. places: room for documents per entry; unused places are empty."""

    rows: int
    length: int
    places: int

    @property
    def batch(self) -> int:
        return self.rows * self.places

    @property
    def bound_q(self) -> int:
        return self.length


def places_of(length: int) -> int:
    """The number of places for documents in a batch entry of ``length`` positions."""
    return max(_FEWEST, ceil_div(length, _MEAN))


class DocumentSequences(UnreadSequences):
    """``Sequences`` of the documents of a (rows, heads, length, D) batch, ``places`` for each row; queries and keys are the same positions.

    starts, lengths: int64 (rows * places,). Places beyond a row's last document have length 0.
    """

    def __init__(self, starts: Tensor, lengths: Tensor, sizes: DocumentSizes):
        # the dataclass is frozen, and some of its fields are properties here
        own = {"q_start": starts, "k_start": starts, "seqlens_q": lengths, "seqlens_k": lengths, "sizes": sizes, "device": starts.device}
        vars(self).update(own)

    sizes: DocumentSizes

    @property
    def bound_k(self) -> int:
        return self.sizes.length

    @property
    def uses_all_rows(self) -> bool:
        return True  # every position belongs to a document

    @property
    def position_bounds(self) -> tuple[int, int]:
        return 0, self.sizes.length

    def most_tiles(self, tile_m: int) -> int:
        """An upper bound on the number of row tiles of ``tile_m`` rows, for any documents."""
        return self.sizes.rows * (self.sizes.length // tile_m + self.sizes.places)

    def kept(self) -> Sequences:
        return self  # its vectors are never modified

    def turned(self) -> Sequences:
        return self

    @cached_property
    def q_row(self) -> Tensor:  # type: ignore[override]
        return self._number // self.sizes.places

    @cached_property
    def k_row(self) -> Tensor:  # type: ignore[override]
        return self.q_row

    @cached_property
    def q_first(self) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(self._number)


# for callers that use only the type of the sequences
NO_DOCUMENTS = DocumentSequences(
    torch.zeros(0, dtype=torch.int64, device="cpu"), torch.zeros(0, dtype=torch.int64, device="cpu"), DocumentSizes(0, 0, 0)
)


def document_sequences(ids: Tensor, rows: int, places: int) -> tuple[DocumentSequences, Tensor]:
    """The documents of a batch of ``rows`` entries, and int32 (1,): 1 if every document is one run and there is a place for each.

    ids: integers, (length,) for all entries or (rows, length); length >= 1. If the second result is 0, all document lengths are 0. Does not
    synchronise.

    >>> s, holds = document_sequences(torch.tensor([7, 7, 3]), 1, 4)
    >>> s.q_start.tolist(), s.seqlens_q.tolist(), holds.tolist()
    ([0, 2, 3, 3], [2, 1, 0, 0], [1])
    >>> document_sequences(torch.tensor([7, 3, 7]), 1, 4)[1].tolist()
    [0]
    """
    ids = ids if ids.ndim == 2 else ids[None]
    given, length = ids.shape
    begins = torch.ones(ids.shape, dtype=torch.int32, device=ids.device)
    torch.ne(ids[:, 1:], ids[:, :-1], out=begins[:, 1:])
    run = begins.cumsum(1)  # number of each position's run, from 1
    edges = torch.searchsorted(run, torch.arange(1, places + 2, device=ids.device).repeat(given, 1))  # length after the last run
    # Every document is one run if there are as many runs as different ids. Unused places repeat the last run's id. If there are more runs
    # than places, the run count exceeds the number of ids compared here.
    first = ids.gather(1, edges[:, :-1].clamp(max=length - 1)).sort(1).values
    different = (first[:, 1:] != first[:, :-1]).sum(1)
    holds = (different == run[:, -1] - 1).all()
    lengths = edges.diff(dim=1) * holds
    starts, lengths = (t.expand(rows, places).reshape(-1).contiguous() for t in (edges[:, :-1], lengths))
    return DocumentSequences(starts, lengths, DocumentSizes(rows, length, places)), holds.to(torch.int32).reshape(1)


def documents_in_order(s: DocumentSequences, tile_m: int, ends_with_row: bool) -> tuple[Tensor, Tensor]:
    """The order of the documents' row tiles, longest first, and the table of the documents: int32 (rows + 1, 3) and (B, 9).

    order: m_block (-1: unused), 0 and document of each row tile; the last row holds the number of tiles. entries: see
    ``varlen_tables.entries_table``. ends_with_row: a row sees keys up to its own position.

    >>> s, _ = document_sequences(torch.tensor([7, 7, 7, 3]), 1, 2)
    >>> documents_in_order(s, 2, False)[0].tolist()
    [[0, 0, 0], [1, 0, 0], [0, 0, 1], [-1, 0, 1], [3, 0, 0]]
    """
    order = longest_first(s, tile_m, s.most_tiles(tile_m), ends_with_row=ends_with_row)
    return counted(of_all_heads(order), ceil_div(s.seqlens_q, tile_m).sum()), entries_table(s)
