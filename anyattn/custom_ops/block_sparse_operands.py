"""Block lists of FlashAttention's entry points as an operator's operands, and the lists that an operator makes of them."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anyattn.custom_ops.list_operands import places_of
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.pytree_nodes import unchecked
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors

__all__ = ["BlockSparse", "blocks_of_operands", "operands_of_blocks"]

_LISTS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
_TABLES = ("cu_block_cnt", "cu_block_idx", "seqlens_q", "seqlens_k")
_UNKNOWN = [-1, -1]


class BlockSparse(NamedTuple):
    """Block lists as an operator has them.

    block_lists: counts and indices of partial tiles, then of full ones where they are listed, then the four tables of varlen lists.
    block_lengths: of dense lists the lengths that they were built for, -1 where they know none.
    """

    block_lists: list[Tensor]
    block_tile: list[int]
    block_lengths: list[int]


def operands_of_blocks(parts: tuple) -> tuple[BlockSparse, BlockSparseTensors | VarlenBlockSparseTensors]:
    """The operands, and the lists, of ``validate.block_sparse.parts_of_blocks``; tensors may be fake, lengths may be symbols."""
    lists, tables, tile, lengths = parts
    tile = tuple(int(n) for n in tile)
    if tables:
        made = unchecked(VarlenBlockSparseTensors, (*_LISTS, *_TABLES, "tile"), (*lists, *tables, tile))
    else:
        made = unchecked(BlockSparseTensors, (*_LISTS, "tile", "lengths"), (*lists, tile, lengths))
    return BlockSparse([t for t in (*lists, *tables) if t is not None], list(tile), list(lengths or _UNKNOWN)), made


# ---- in an operator

# An entry keeps the memory that it views allocated, so that no other tensor gets the same address. It lives as long as the tensor of counts
# that came last: a backward pass gets another one of the same memory, with the same count of writes.
_by_place: WeakValueDictionary[tuple, Any] = WeakValueDictionary()
_by_counts: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def blocks_of_operands(operands: BlockSparse) -> BlockSparseTensors | VarlenBlockSparseTensors:
    """The lists of an operator's call: the same object for the same tensors, since what backends make of lists is kept with it.

    Raises as the lists' class; lists on a GPU were checked when they were made, and their contents are not read.
    """
    tensors, tile, lengths = operands
    places = places_of(tensors)
    if places is None:
        return _made(operands)
    key = (*tile, *lengths, *places)
    found = _by_place.get(key)
    if found is None:
        # views: an entry must not keep alive what it is kept by
        found = _by_place[key] = _made(operands._replace(block_lists=[t.detach() for t in tensors]))
    _by_counts[tensors[0]] = found
    return found


def _made(operands: BlockSparse) -> BlockSparseTensors | VarlenBlockSparseTensors:
    tensors, (tile_m, tile_n), lengths = operands
    tile, count = (tile_m, tile_n), len(tensors)
    if count in (2, 4):
        return BlockSparseTensors(*tensors, tile=tile, lengths=None if -1 in lengths else tuple(lengths))  # type: ignore[arg-type, misc]
    if count not in (6, 8):
        raise ValueError(f"block_lists has {count} tensors; wanted 2 or 4 of dense lists, or 4 more of varlen lists")
    lists, tables = (*tensors[:-4], None, None)[:4], tensors[-4:]
    if tensors[0].is_cpu:
        fields: dict[str, Any] = dict(zip((*_LISTS, *_TABLES), (*lists, *tables), strict=True))
        return VarlenBlockSparseTensors(**fields, tile=tile)
    tiles = RaggedTiles(tables[2], tables[3], tile)  # not checked, which would wait for the device
    return unchecked(VarlenBlockSparseTensors, (*_LISTS, *_TABLES, "tile", "tiles"), (*lists, *tables, tile, tiles))
