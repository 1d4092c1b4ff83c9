"""Block masks in the form that kernels read, converted once for as long as their lists stay the same."""

from __future__ import annotations

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.lists import keep_transposed

__all__ = ["kept_lists", "lists_facts", "lists_of", "read_lists"]


def lists_of(block_mask: Any, mask: TracedMod) -> tuple[BlockSparseTensors | None, bool]:
    """The lists of a block mask, and whether they follow from the mask, so that a backend may use either alone.

    None on a CPU if the mask has row ranges, which describe the same mask more finely; on other devices, finding the ranges of captured ids
    would synchronise.
    """
    follows = getattr(block_mask, "is_exact", False)
    if follows and block_mask.kv_indices.device.type == "cpu" and row_ranges(mask) is not None:
        return None, True
    return read_lists(block_mask), follows


class KeptLists(NamedTuple):
    """A cached reading of a block mask. objects: the values of its fields ``_FIELDS``. versions: version counter and shape of each list.
    facts: ``lists_facts``. blocks: the lists in the form that kernels read."""

    objects: tuple
    versions: list[Any]
    facts: tuple
    blocks: BlockSparseTensors


_FIELDS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "mask_mod", "seq_lengths", "BLOCK_SIZE", "_exact",
)  # fmt: skip
_lists: WeakKeyDictionary[Any, KeptLists] = WeakKeyDictionary()  # by block mask, held weakly


def kept_lists(block_mask: Any) -> KeptLists | None:
    """The cached reading of a block mask if its fields are still the same objects and its lists have not been written to; else None.

    Only writes that torch counts are detected: not those of kernels that torch does not know.
    """
    known = None if type(block_mask).__hash__ is None else _lists.get(block_mask)
    if known is None:
        return None
    fields = block_mask.__dict__
    for name, found in zip(_FIELDS, known.objects):
        if fields.get(name) is not found:
            return None
    return known if _versions(known.objects) == known.versions else None


def _versions(objects: tuple) -> list[Any]:
    count, index, full_count, full_index, *_ = objects
    if full_count is None:
        return [count._version, count.shape, index._version, index.shape]
    return [
        count._version, count.shape, index._version, index.shape, full_count._version, full_count.shape, full_index._version,
        full_index.shape,
    ]  # fmt: skip


def lists_facts(block_mask: Any) -> tuple:
    """The properties of a block mask on which checks and plans depend, but for what its mask captures."""
    lists = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    is_exact = getattr(block_mask, "was_exact", False)
    sizes = [None if t is None else (t.shape, t.dtype, t.device) for t in lists]
    leaves_heads = getattr(block_mask, "_leaves_heads", False)
    return type(block_mask), block_mask.seq_lengths, block_mask.BLOCK_SIZE, is_exact, leaves_heads, *sizes


def read_lists(block_mask: Any) -> BlockSparseTensors:
    """``BlockSparseTensors.from_block_mask``, cached with the block mask: see ``kept_lists``."""
    known = kept_lists(block_mask)
    if known is not None:
        return known.blocks
    blocks = BlockSparseTensors.from_ordered_lists(block_mask) if getattr(block_mask, "may_share", False) else None
    if blocks is None:
        blocks = BlockSparseTensors.from_block_mask(block_mask)
    elif getattr(block_mask, "q_indices", None) is not None:
        keep_transposed(blocks, BlockSparseTensors.from_ordered_lists(block_mask, by_key=True))
    if type(block_mask).__hash__ is None or not all(type(x) is tuple for x in (block_mask.seq_lengths, block_mask.BLOCK_SIZE)):
        return blocks  # not cached: changes could not be detected
    objects = tuple(block_mask.__dict__.get(name) for name in _FIELDS)
    tensors = [t for t in objects[:4] if t is not None]
    if len(tensors) in (2, 4) and not any(t.is_inference() for t in tensors):  # torch counts no writes to inference tensors
        _lists[block_mask] = KeptLists(objects, _versions(objects), lists_facts(block_mask), blocks)
    return blocks
