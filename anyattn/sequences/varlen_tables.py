"""Table of a varlen batch's sequences in the form that kernels read, computed with torch operations that do not synchronise."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.sequences.batch import Sequences

__all__ = ["entries_table"]


def entries_table(s: Sequences, lengths: tuple[Tensor, Tensor] | None = None, lists: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """int32 (B, 9): q_row, q_start, queries, k_row, k_start, keys, q_first of each sequence, then its first line and place in block lists.

    lengths: numbers of queries and keys for which lists were made, if they are not the batch's own. lists: (B,) integers each, default 0.
    """
    zero = torch.zeros_like(s.q_row)
    seqlens_q, seqlens_k = (s.seqlens_q, s.seqlens_k) if lengths is None else lengths
    first, place = (zero, zero) if lists is None else (t.to(zero.dtype) for t in lists)
    columns = (s.q_row, s.q_start, seqlens_q, s.k_row, s.k_start, seqlens_k, s.q_first, first, place)
    return torch.stack(columns, 1).to(torch.int32)
