"""Triton kernel that lists the row tiles of each key tile from the last on, and ranks key tiles among those that list the same row tile."""

import triton
import triton.language as tl

__all__ = ["store_ranked"]

_LISTS = tuple(f"{side}_{name}" for side in ("row", "key") for name in ("partial_count", "partial_index", "full_count", "full_index"))
_PLAIN = ("counts", "tiles", "ranks", *_LISTS, "keys", "rows")


@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)
def store_ranked(
    counts, tiles, ranks, row_partial_count, row_partial_index, row_full_count, row_full_index, key_partial_count, key_partial_index,
    key_full_count, key_full_index, keys: tl.int32, rows: tl.int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """See ``sparsity.ranked_lists.ranked``. Grid: (keys + rows, heads, batch): a program lists the row tiles of a key tile, or ranks the
    key tiles of a row tile. All tensors are contiguous; what follows a key tile's tiles, and ranks of tiles that are not listed, are not
    written."""
    number, h, b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    head = b * tl.num_programs(1) + h
    if number < keys:
        line = head * keys + number
        partials, fulls = tl.load(key_partial_count + line), tl.load(key_full_count + line)
        tl.store(counts + line, partials + fulls)
        own, of_partials, of_fulls = tiles + line * rows, key_partial_index + line * rows, key_full_index + line * rows
        _store_list(own, of_partials, partials, of_fulls, fulls, rows, True, True, BLOCK)
        _store_list(own, of_fulls, fulls, of_partials, partials, rows, False, True, BLOCK)
    else:
        row = number - keys
        line = head * rows + row
        partials, fulls = tl.load(row_partial_count + line), tl.load(row_full_count + line)
        own, of_partials, of_fulls = ranks + head * keys * rows + row, row_partial_index + line * keys, row_full_index + line * keys
        _store_list(own, of_partials, partials, of_fulls, fulls, rows, True, False, BLOCK)
        _store_list(own, of_fulls, fulls, of_partials, partials, rows, False, False, BLOCK)


@triton.jit
def _store_list(
    own, index, count, other, others, rows: tl.int32, IS_PARTIAL: tl.constexpr, BY_KEY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Stores a list's part of a key tile's tiles (BY_KEY), or of a row tile's ranks, at ``own``. index, count: the list. other, others:
    the other list, of full tiles if IS_PARTIAL. Both ascend, and share no entry."""
    for start in range(0, count, BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_one = place < count
        tile = tl.load(index + place, mask=is_one, other=0)
        low, high = tl.zeros_like(tile), tl.zeros_like(tile) + others  # bounds on the entries of the other list that are less
        span = others
        while span > 0:
            middle = (low + high) // 2
            is_less = tl.load(other + middle, mask=low < high, other=0) < tile
            low, high = tl.where(is_less & (low < high), middle + 1, low), tl.where(is_less, high, middle)
            span = span // 2
        at = place + low  # in both lists together
        if BY_KEY:
            tl.store(own + count + others - 1 - at, 2 * tile + IS_PARTIAL, mask=is_one)
        else:
            tl.store(own + tile.to(tl.int64) * rows, at, mask=is_one)
