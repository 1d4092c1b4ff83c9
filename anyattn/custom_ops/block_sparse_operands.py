"""Block lists of FlashAttention's entry points as operands of an operator, and their conversion back to lists."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anyattn.custom_ops.list_operands import places_of
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.sparsity.block_sparse import LISTS, BlockSparseTensors
from anyattn.sparsity.pytree_nodes import unchecked
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors

__all__ = ["BlockSparse", "blocks_of_operands", "operands_of_blocks"]

_TABLES = ("cu_block_cnt", "cu_block_idx", "seqlens_q", "seqlens_k")
_UNKNOWN = [-1, -1]


class BlockSparse(NamedTuple):
    """Block lists as operator arguments.

    block_lists: counts and indices of partial tiles, then of full tiles if they are listed, then the four tables of varlen lists.
    block_lengths: for dense lists the lengths that they were built for, -1 if they have none.
    """

    block_lists: list[Tensor]
    block_tile: list[int]
    block_lengths: list[int]


def operands_of_blocks(parts: tuple) -> tuple[BlockSparse, BlockSparseTensors | VarlenBlockSparseTensors]:
    """The operands, and the lists, from ``validate.block_sparse.parts_of_blocks``; tensors may be fake, lengths may be symbolic."""
    lists, tables, tile, lengths = parts
    tile = tuple(int(n) for n in tile)
    if tables:
        block_sparse = unchecked(VarlenBlockSparseTensors, (*LISTS, *_TABLES, "tile"), (*lists, *tables, tile))
    else:
        block_sparse = unchecked(BlockSparseTensors, (*LISTS, "tile", "lengths"), (*lists, tile, lengths))
    return BlockSparse([t for t in (*lists, *tables) if t is not None], list(tile), list(lengths or _UNKNOWN)), block_sparse


# ---- inside an operator

# Cache of lists, by the memory of their tensors. An entry's views keep that memory allocated, so no other tensor gets the same address. An
# entry lives as long as the counts tensor passed last: a backward pass gets another tensor of the same memory and version.
_by_place: WeakValueDictionary[tuple, Any] = WeakValueDictionary()
_by_counts: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def blocks_of_operands(operands: BlockSparse) -> BlockSparseTensors | VarlenBlockSparseTensors:
    """The lists of an operator's call: the same object for the same tensors, since backends cache data with the lists object.

    Raises as the constructor of the lists does; lists on a GPU were checked when they were made, and their contents are not read.
    """
    tensors, tile, lengths = operands
    places = places_of(tensors)
    if places is None:
        return _block_sparse_of(operands)
    key = (*tile, *lengths, *places)
    known_lists = _by_place.get(key)
    if known_lists is None:
        # views, so that the entry does not keep alive the tensor whose lifetime it has
        known_lists = _by_place[key] = _block_sparse_of(operands._replace(block_lists=[t.detach() for t in tensors]))
    _by_counts[tensors[0]] = known_lists
    return known_lists


def _block_sparse_of(operands: BlockSparse) -> BlockSparseTensors | VarlenBlockSparseTensors:
    tensors, (tile_m, tile_n), lengths = operands
    tile, count = (tile_m, tile_n), len(tensors)
    if count in (2, 4):
        return BlockSparseTensors(*tensors, tile=tile, lengths=None if -1 in lengths else tuple(lengths))  # type: ignore[arg-type, misc]
    if count not in (6, 8):
        raise ValueError(f"block_lists has {count} tensors; wanted 2 or 4 of dense lists, or 4 more of varlen lists")
    lists, tables = (*tensors[:-4], None, None)[:4], tensors[-4:]
    if tensors[0].is_cpu:
        fields: dict[str, Any] = dict(zip((*LISTS, *_TABLES), (*lists, *tables), strict=True))
        return VarlenBlockSparseTensors(**fields, tile=tile)
    tiles = RaggedTiles(tables[2], tables[3], tile)  # unchecked: a check would synchronise
    return unchecked(VarlenBlockSparseTensors, (*LISTS, *_TABLES, "tile", "tiles"), (*lists, *tables, tile, tiles))
