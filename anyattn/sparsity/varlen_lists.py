"""Tile lists of a varlen batch for a kernel's own tiles; on a GPU they are made without waiting for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.compose import turned
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.sequences.varlen_tables import entries_table
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.compute import runs_kernels
from anyattn.sparsity.lists import kept_transposed
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors

__all__ = ["RaggedLists", "lists_of_call", "ragged_lists"]


class RaggedLists(NamedTuple):
    """Per row of tiles of each sequence, the counts of partial and full key tiles, int32 (H, rows), and their indices, ascending, int32.

    Sequence b has ceil(seqlens_q[b] / tile_m) rows of tiles, from row first_row[b] on, and each of them owns ceil(seqlens_k[b] / tile_n)
    indices, from index first_entry[b] on: the flat layout of ``VarlenBlockSparseTensors``, with unused rows and indices after
    those of the last sequence, or after those of each sequence. (From lists in the padded layout, indices are (H, rows, columns) and
    first_entry is not used.) Entries beyond a count are 0. H is 1 if the mask ignores h.

    first_row, first_entry: (B,) integers. seqlens_q, seqlens_k: int64 (B,), the batch's lengths clamped to its upper bounds, so that reads
    stay inside the lists for any contents of a GPU's tables. None if the caller passed the lists: then the batch's own lengths are used.
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None
    full_block_idx: Tensor | None
    first_row: Tensor
    first_entry: Tensor
    seqlens_q: Tensor | None = None
    seqlens_k: Tensor | None = None

    @classmethod
    def of(cls, lists: VarlenBlockSparseTensors) -> RaggedLists:
        """The form of block lists that a caller passed."""
        return cls(*tensors_of(lists), lists.cu_block_cnt[:-1], lists.cu_block_idx[:-1])

    def entries(self, s: Sequences, by_key: bool = False) -> Tensor:
        """``varlen_tables.entries_table`` with the places of each sequence's lists. by_key: the lists' rows are key tiles."""
        lengths = None if self.seqlens_q is None or self.seqlens_k is None else (self.seqlens_q, self.seqlens_k)
        if lengths is not None and by_key:
            lengths = lengths[::-1]
        return entries_table(s, lengths, (self.first_row, self.first_entry))


def lists_of_call(
    blocks: VarlenBlockSparseTensors | None, mask: TracedMod, s: Sequences, tile: tuple[int, int], heads: int, by_key: bool = False
) -> RaggedLists:
    """The call's own lists, or else ``ragged_lists`` of a mask. by_key: of the row tiles that visit each tile of keys."""
    if blocks is not None:
        return RaggedLists.of(kept_transposed(blocks) if by_key else blocks)
    return ragged_lists(turned(mask) if by_key else mask, s.turned() if by_key else s, tile, heads)


def ragged_lists(mask: TracedMod, sequences: Sequences, tile: tuple[int, int], heads: int) -> RaggedLists:
    """The lists of a mask over a batch of at least one sequence, in tiles of ``tile`` (rows, keys), in the flat layout.

    heads: query heads. The caller has checked that the mask reads inside its captured tensors (``load_bounds.check_loads_ragged``). Only
    pairs inside a sequence count: a tail tile whose pairs are all visible is full. On a CUDA device with Triton the host does not wait, and
    the lists take ``bound_k / tile[1]`` indices for every possible row of tiles. The host reads the lengths on other devices, if the mask
    captures an integer of magnitude 2 ** 40 or more, and if the lists would take 2 ** 31 indices or more.

    >>> from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
    >>> from anyattn.mods.tracing.trace import trace
    >>> ends = torch.tensor([0, 200, 300])
    >>> batch = StoredSequences(LengthTables(ends, ends, None, None), StoredSizes(2, 300, 300, 300, 300))
    >>> lists = ragged_lists(trace(lambda b, h, q, k: q >= k, "mask"), batch, (128, 128), 1)
    >>> lists.mask_block_cnt.tolist(), lists.full_block_cnt.tolist(), lists.first_row.tolist()
    ([[1, 1, 1]], [[0, 1, 0]], [0, 2])
    """
    device = sequences.seqlens_q.device
    if runs_kernels(device) and (lists := _on_device(mask, sequences, tile, heads)) is not None:
        return lists
    lengths = (sequences.seqlens_q, sequences.seqlens_k)
    with torch.no_grad():  # a mask may compare learned parameters; tile classes have no gradient
        classes = classify_ragged(mask, *lengths, *tile, heads, sequences.q_first)
    return RaggedLists.of(VarlenBlockSparseTensors.from_classes(classes, tile, *lengths))


def _on_device(mask: TracedMod, s: Sequences, tile: tuple[int, int], heads: int) -> RaggedLists | None:
    """The lists made by Triton kernels without waiting for the device; None if they cannot be used."""
    from anyattn.sparsity.kernels import block_lists as kernels

    most = _most_tiles(s, tile)
    last = s.bound_q if isinstance(s, StoredSequences) else s.end_position
    if not kernels.can_list(mask, (last, s.bound_k)) or min(most) == 0 or most[0] * ceil_div(s.bound_k, tile[1]) >= 2**31:
        return None
    heads = heads if any(d.h for d in dependence(mask.expr)) else 1
    tables, lists = kernels.list_ragged(mask, (s.seqlens_q, s.seqlens_k, s.q_first), (s.bound_q, s.bound_k), most, tile, heads)
    return RaggedLists(*lists, tables.first_row, tables.first_entry, tables.seqlens_q, tables.seqlens_k)


def _most_tiles(s: Sequences, tile: tuple[int, int]) -> tuple[int, int]:
    """Upper bounds of the batch's row tiles and key tiles, without reading its lengths."""
    if not isinstance(s, StoredSequences):
        pairs = ((s.on_host.seqlens_q, tile[0]), (s.on_host.seqlens_k, tile[1]))
        return tuple(sum(ceil_div(n, size) for n in lengths) for lengths, size in pairs)  # type: ignore[return-value]
    tile_counts, sizes = [], s.sizes
    sides = ((s.tables.cu_seqlens_q, sizes.rows_q, s.bound_q, tile[0]), (s.tables.cu_seqlens_k, sizes.rows_k, s.bound_k, tile[1]))
    for ends, room, bound, size in sides:
        each = sizes.batch * ceil_div(bound, size)
        # packed sequences share ``room`` rows, and each may add one partly filled tile
        tile_counts.append(each if ends is None else min(each, room // size + sizes.batch))
    return tile_counts[0], tile_counts[1]
