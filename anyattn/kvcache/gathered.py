"""Gathering of cached keys before a prefill: when a contiguous copy of the keys that a call reads, in its queries' dtype, pays.

The rule needs sizes alone, which the host knows without waiting: signatures of warm calls contain its result.
"""

from __future__ import annotations

from enum import IntEnum

from anyattn.arithmetic import ceil_div

__all__ = ["FEW", "MANY", "MOST_BYTES", "Gathering", "gathering", "line_of"]

MOST_BYTES = 2**30  # of the copies of keys and values together: what is left of a GPU's memory beside a cache may be little
# Queries of an entry, on average. A key of 128 e4m3 numbers and its value are read once and written as 512 bytes, in some 0.2 ns on an
# H200; in return a query's products with them take 1.0 ps less (267 and 594 TFLOP/s): with 4 query heads to a K/V head 50 queries are
# even.
MANY = 128
FEW = 16  # queries, as in decoding: never, not even if asked
# Queries of an entry from which keys that are read in place go to Hopper's kernel, if all heads of a group together fill a tile's rows: by
# Triton 32 queries of 8 entries over 8,192 keys, 32/8 heads of 128, take 98 us and by Hopper 95, of 32 entries over 4,096 keys 164 and 132,
# 64 queries of 8 entries 150 and 109 (H200).
_SEVERAL, _FEW_TILES = 32, 64
_TILE, _LEAST_TILES = 128, 132  # rows, and tiles of rows: one for each multiprocessor of an H200, for Hopper's kernel does not split keys
_SHARE = 4  # keys of an entry for each query, up to which gathering pays under masks that hide most keys


class Gathering(IntEnum):
    """When gathering pays. SEEN: if each query sees all keys up to some key. ALWAYS: under any mask."""

    NEVER = 0
    SEEN = 1
    ALWAYS = 2


def gathering(queries: int, heads: int, batch: int, bound_k: int, copied: int, group: int = 1) -> Gathering:
    """When gathering pays for a call. queries: of all entries together. heads: of queries. bound_k: upper bound on an entry's keys. copied:
    bytes; 0 where keys are read in place. group: query heads of a K/V head.

    >>> gathering(4 * 8192, 32, 4, 8192, 2**27), gathering(1024, 32, 1, 8192, 2**25), gathering(32, 32, 32, 8192, 2**30)
    (<Gathering.ALWAYS: 2>, <Gathering.SEEN: 1>, <Gathering.NEVER: 0>)
    """
    fills = not copied and queries * group >= _TILE * batch and queries * heads >= _FEW_TILES * _TILE
    if copied > MOST_BYTES or queries < MANY * batch or queries * heads < _LEAST_TILES * _TILE:
        return Gathering.SEEN if fills and queries >= _SEVERAL * batch else Gathering.NEVER
    return Gathering.ALWAYS if not copied or queries * _SHARE >= batch * bound_k else Gathering.SEEN


def line_of(rows: int, bound_k: int, page_size: int) -> int:
    """Rows that an entry has in the copy. rows: that it has in storage, or packed keys have together. page_size: 0 without pages."""
    return min(rows, max(1, ceil_div(bound_k, page_size)) * page_size) if page_size else rows
