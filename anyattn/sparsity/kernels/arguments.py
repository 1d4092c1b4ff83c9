"""Argument groups of the kernels that make and read tile lists: NamedTuples for kernels and the host, so without an import of triton.

In a kernel every field is a Triton pointer, scalar or block. Kernels make them by keyword: the key of Triton's disk cache covers a kernel's
text, not the order of a class's fields.
"""

from typing import Any, NamedTuple

__all__ = ["Lists", "SequenceTables", "TileSizes"]


class Lists(NamedTuple):
    """Tile lists: pointers to int32. count: the number of tiles that each line (a row or a column of tiles) lists. index: their places
    along the line, ascending. partial: tiles with visible and hidden pairs. full: tiles with visible pairs only."""

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any


class TileSizes(NamedTuple):
    """Sizes of a grid of tiles, int32. rows, columns: the numbers of tiles along queries and keys. column_hulls_at: the offset of the
    columns' hulls, which follow the rows', in elements. Of a varlen batch seqlen_q and seqlen_k are upper bounds of each sequence's, and
    rows and columns of the tiles of all sequences."""

    seqlen_q: Any
    seqlen_k: Any
    rows: Any
    columns: Any
    heads: Any
    column_hulls_at: Any


class SequenceTables(NamedTuple):
    """The rows of the table of a varlen batch's sequences: int64 (batch,) each, one after another in memory.

    row_ends, column_ends: running totals of the sequences' row tiles and key tiles. seqlens_q, seqlens_k: lengths. q_first: position of the
    first query. first_row, first_entry: the beginning of the sequence's lists, among counts and among indices.
    """

    row_ends: Any
    column_ends: Any
    seqlens_q: Any
    seqlens_k: Any
    q_first: Any
    first_row: Any
    first_entry: Any
