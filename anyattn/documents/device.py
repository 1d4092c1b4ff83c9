"""Launches of the document kernels: finds the documents of a dense batch and the order of their row tiles without synchronising.

``documents.sequences`` computes the same with two dozen torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.documents.sequences import DocumentSequences, DocumentSizes
from anyattn.triton_tools.launch import run_plain

__all__ = ["documents_found", "documents_ordered"]

_BLOCK = 2048  # positions per iteration
_PAIRS = 64  # ids compared with as many others at once
_CHUNK = 1024
_TILES, _ENTRIES = 64, 64  # row tiles per program, and documents per iteration


def documents_found(ids: Tensor, rows: int, places: int) -> tuple[DocumentSequences, Tensor]:
    """``documents.sequences.document_sequences`` on a CUDA device, as one kernel and a fill."""
    ids = ids if ids.ndim == 2 else ids[None]
    given, length = ids.shape
    starts, lengths = torch.empty((2, rows * places), dtype=torch.int64, device=ids.device).unbind(0)
    holds = torch.empty(1, dtype=torch.int32, device=ids.device)
    state = torch.zeros(2 + given, dtype=torch.int32, device=ids.device)
    numbers = (*ids.stride(), given, length, rows, places)
    options = {"BLOCK": _BLOCK, "PAIRS": _PAIRS, "CHUNK": _CHUNK, "num_warps": 8}
    from anyattn.documents.kernels import find_documents

    run_plain(find_documents, given, (ids, starts, lengths, holds, state, *numbers), (), ids.device, options)
    return DocumentSequences(starts, lengths, DocumentSizes(rows, length, places)), holds


def documents_ordered(s: DocumentSequences, tile_m: int, ends_with_row: bool) -> tuple[Tensor, Tensor]:
    """``documents.sequences.documents_in_order`` on a CUDA device, as one kernel."""
    most, batch = s.most_tiles(tile_m), s.batch
    order = torch.empty((most + 1, 3), dtype=torch.int32, device=s.device)
    entries = torch.empty((batch, 9), dtype=torch.int32, device=s.device)
    given = (order, entries, s.q_start, s.seqlens_q, batch, s.sizes.places, most, tile_m)
    options = {"ENDS_WITH_ROW": ends_with_row, "TILES": _TILES, "ENTRIES": _ENTRIES}
    from anyattn.documents.kernels import order_documents

    run_plain(order_documents, ceil_div(most + 1, _TILES), given, (), order.device, options)
    return order, entries
