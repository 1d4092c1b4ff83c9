"""The order in which row tiles are worked on, so that a ragged mask keeps every worker busy to the end."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.sparsity.arguments import length

__all__ = ["work_list"]


def work_list(counts: Tensor, workers: int, max_pieces: int | None = None) -> Tensor:
    """Pieces of work, longest first: int32 (pieces, 5) of ``b, h, m, kv_begin, kv_end``.

    counts: integer (B, H, M), how many tiles each row tile visits (``BlockSparseTensors.visited()``). workers: threads or SMs.
    max_pieces: at most so many pieces per row tile (each costs a merge of partial results); None leaves it open.

    A row tile longer than its share, ``ceil(sum(counts) / workers)``, is split into even pieces no longer than that; ``kv_begin`` and
    ``kv_end`` are positions in the row's list. A row that visits nothing is one piece with kv_begin = kv_end = 0: its output is still to be
    written. Workers that take the next piece when free finish within 4/3 of the best possible time for these pieces.

    Raises ``TypeError`` or ``ValueError`` for counts that are not whole and non-negative or a number of workers below 1.

    >>> work_list(torch.tensor([[[1, 6, 2]]]), workers=3).tolist()
    [[0, 0, 1, 0, 3], [0, 0, 1, 3, 6], [0, 0, 2, 0, 2], [0, 0, 0, 0, 1]]

    R. L. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17(2), 1969.
    """
    if counts.ndim != 3 or counts.is_floating_point():
        raise TypeError(f"counts is {counts.dtype} of shape {tuple(counts.shape)}; wanted integers (B, H, M)")
    workers = length("workers", workers, 1)
    limit_pieces = None if max_pieces is None else length("max_pieces", max_pieces, 1)
    flat = counts.reshape(-1).to(torch.int64)
    if flat.numel() == 0:
        return torch.zeros(0, 5, dtype=torch.int32, device=counts.device)
    if int(flat.min()) < 0:
        raise ValueError(f"counts holds {int(flat.min())}; wanted numbers of tiles >= 0")
    share = max(1, -(-int(flat.sum()) // workers))
    pieces = torch.div(flat + share - 1, share, rounding_mode="floor").clamp(min=1, max=limit_pieces)
    row = torch.repeat_interleave(torch.arange(len(flat), device=flat.device), pieces)
    piece = torch.arange(len(row), device=flat.device) - (pieces.cumsum(0) - pieces)[row]
    begin, end = (torch.div((piece + i) * flat[row], pieces[row], rounding_mode="floor") for i in (0, 1))
    _, heads, rows = counts.shape
    b, h, m = (torch.div(row, heads * rows, rounding_mode="floor"), torch.div(row, rows, rounding_mode="floor") % heads, row % rows)
    order = torch.sort(end - begin, descending=True, stable=True).indices
    return torch.stack([b, h, m, begin, end], 1)[order].to(torch.int32)
