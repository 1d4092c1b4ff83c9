"""The groups of arguments of the kernels that make and read tile lists: one NamedTuple each, without triton, which the host reads too.

In a kernel every field is a pointer, a scalar or a block of the compiler's. Kernels make them by keyword: Triton's disk cache knows a
kernel's text, not the order of a class's fields.
"""

from typing import Any, NamedTuple

__all__ = ["Lists", "SequenceTables", "TileSizes", "VarlenTileSizes"]


class Lists(NamedTuple):
    """Tile lists: pointers to int32. count: how many tiles each line (a row of tiles, or a column) lists. index: which they are, ascending.
    partial: tiles that the mask cuts through. full: tiles that it fills."""

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any


class TileSizes(NamedTuple):
    """Sizes of one pair of lengths, int32. rows, columns: how many tiles lie along queries and keys. column_hulls_at: where the columns'
    hulls begin behind the rows', in elements."""

    seqlen_q: Any
    seqlen_k: Any
    rows: Any
    columns: Any
    heads: Any
    column_hulls_at: Any


class VarlenTileSizes(NamedTuple):
    """Sizes of a ragged batch, int32. batch: sequences. most_rows, most_columns: all tiles along queries and keys, at most. width: of a
    row of tiles among flat indices. column_hulls_at: as in ``TileSizes``."""

    batch: Any
    most_rows: Any
    most_columns: Any
    width: Any
    column_hulls_at: Any


class SequenceTables(NamedTuple):
    """The rows of the table of a ragged batch's sequences: int64 (batch,) each, one behind the other in memory.

    row_ends, column_ends: the ends of each sequence's row tiles and key tiles when all are counted through. seqlens_q, seqlens_k: lengths.
    q_first: position of the first query. first_row, first_entry: where the sequence's lists begin, among counts and among indices.
    """

    row_ends: Any
    column_ends: Any
    seqlens_q: Any
    seqlens_k: Any
    q_first: Any
    first_row: Any
    first_entry: Any
