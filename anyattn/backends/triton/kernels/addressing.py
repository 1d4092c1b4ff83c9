"""Addressing of a program's tile (device code): its sequence, its rows in storage, and the storage of the sequence's keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.arguments import Sequence

__all__ = [
    "Portion", "RowTile", "cache_entry", "entry", "is_off", "key_places", "place_of_program", "row_at", "row_offsets", "row_tile",
    "sequence_of", "slot_of", "tile_of", "tile_offsets", "work_of",
]  # fmt: skip


class RowTile(NamedTuple):
    """A row tile of a sequence: int32. m: its number. b: its batch entry. h: its first query head. kv_head: the K/V head. line: its line in
    block lists. first, end: its positions, none if first >= end. group: rows of a position. at, heads, position: of each row, its place in
    storage, query head and position, those of a row that exists where is_row is False. sequence: ``Sequence``."""

    m: Any
    b: Any
    h: Any
    kv_head: Any
    line: Any
    first: Any
    end: Any
    group: Any
    position: Any
    is_row: Any
    heads: Any
    at: Any
    sequence: Any


class Portion(NamedTuple):
    """Parts ``first`` to ``first + count`` of the key tiles that a row tile visits, which are divided into ``of`` parts: int32."""

    first: Any
    count: Any
    of: Any


@triton.jit
def parted(n, parts):
    """(n // parts, n % parts); skips the division, on which a program's start may wait, if there is only one part."""
    whole, rest = n, n * 0
    if parts > 1:
        whole = n // parts
        rest = n - whole * parts
    return whole, rest


@triton.jit
def work_of(sizes, dealt, order, HAS_ENTRIES: tl.constexpr):
    """(row tile, batch entry, first query head, its K/V head, split) of this program; row tiles that see most keys come first.

    With L2 grouping the heads of a group are the first axis of the grid and the groups are part of the last, so that no long program starts
    last. With too many entries for the last axis (together of -1) entries are the first axis and row tiles the last.
    """
    m, h, last = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if HAS_ENTRIES:
        at, split = order + m * 2, last
        b, m = tl.load(at), tl.load(at + 1)
    else:
        is_turned = dealt.together < 0
        m, last = tl.where(is_turned, last, m), tl.where(is_turned, m, last)
        b, rest = parted(last, sizes.splits * dealt.groups)
        is_near = dealt.together > 0
        row_tile = tl.where(is_near, h, m)
        h, split = tl.where(is_near, rest * dealt.together + m, h), tl.where(is_near, 0, rest)
        m = sizes.row_tiles - 1 - row_tile
    kv_head, part = parted(h, dealt.tiles_each)
    return m, b, kv_head * sizes.ratio + part * dealt.packed, kv_head, split


@triton.jit
def entry(b, entries, seqlen_q, seqlen_k, HAS_ENTRIES: tl.constexpr):
    """``Sequence`` b of the table ``entries``, int32 (B, 9); without a table every entry fills its storage."""
    if HAS_ENTRIES:
        at = entries + b * 9
        return Sequence(
            q_row=tl.load(at), q_start=tl.load(at + 1), seqlen_q=tl.load(at + 2), k_row=tl.load(at + 3), k_start=tl.load(at + 4),
            seqlen_k=tl.load(at + 5), q_first=tl.load(at + 6), lists_line=tl.load(at + 7), lists_place=tl.load(at + 8),
        )  # fmt: skip
    else:
        return Sequence(
            q_row=b, q_start=0, seqlen_q=seqlen_q, k_row=b, k_start=0, seqlen_k=seqlen_k, q_first=0, lists_line=0, lists_place=0
        )


@triton.jit
def cache_entry(b, tensors, sizes, seqlen_q, HAS_LEFTPAD: tl.constexpr, HAS_ROWS: tl.constexpr):
    """``Sequence`` b of a decoder's cache after a step, from the step's own tables; see ``sequences.unread_kvcache.StoredCache``.

    sizes: ``CacheSizes``. For any table contents, no key lies outside.
    """
    end = tl.minimum(tl.load(tensors.cached + b).to(tl.int64) + sizes.new, sizes.capacity)
    if HAS_LEFTPAD:
        start = tl.minimum(tl.maximum(tl.load(tensors.leftpad + b).to(tl.int64), 0), sizes.capacity)
    else:
        start = end * 0
    seqlen_k = tl.maximum(end - start, 0).to(tl.int32)
    if HAS_ROWS:
        row = tl.load(tensors.cache_rows + b).to(tl.int64)
        is_row = (row >= 0) & (row < sizes.storage)
        k_row, seqlen_k = tl.where(is_row, row, 0).to(tl.int32), tl.where(is_row, seqlen_k, 0)
    else:
        k_row = b
    return Sequence(
        q_row=b, q_start=b * 0, seqlen_q=seqlen_q, k_row=k_row, k_start=start.to(tl.int32), seqlen_k=seqlen_k, q_first=seqlen_k - seqlen_q,
        lists_line=b * 0, lists_place=b * 0,
    )  # fmt: skip


@triton.jit
def row_tile(m, seqlen_q, TILE_M: tl.constexpr, LIST_M: tl.constexpr, group):
    """(line of the lists, first position, end) of row tile m, which is part of one of the lists' row tiles of LIST_M positions.

    group: rows of a position, with packed heads. LIST_M of 0: no lists.
    """
    step = TILE_M // group
    if LIST_M > 0:
        cut = (LIST_M + step - 1) // step
        line = m // cut
        first = line * LIST_M + (m % cut) * step
        return line, first, tl.minimum((line + 1) * LIST_M, seqlen_q)
    else:
        return m, m * step, seqlen_q


@triton.jit
def sequence_of(b, tensors, cache, sizes, c):
    """``Sequence`` b of the call."""
    if c.IS_CACHE:
        return cache_entry(b, tensors, cache, sizes.seqlen_q, c.HAS_LEFTPAD, c.HAS_ROWS)
    else:
        return entry(b, tensors.entries, sizes.seqlen_q, sizes.seqlen_k, c.HAS_ENTRIES)


@triton.jit
def tile_of(m, b, h, kv_head, sequence, dealt, sizes, c):
    """``RowTile`` m of a sequence, whose first query head is h; it has no row if ``first >= end``."""
    if c.IS_PACKED:
        packed, group = dealt.packed, dealt.padded
    else:
        packed, group = 1, 1
    line, first_row, end_row = row_tile(m, sequence.seqlen_q, c.TILE_M, c.LIST_M, group)
    r = tl.arange(0, c.TILE_M)
    position = first_row + r // group
    is_row = position < end_row
    position = tl.minimum(position, end_row - 1)  # missing rows are evaluated as the last row, and not stored
    heads = h + r % group
    if c.IS_PACKED:
        end_head = tl.minimum(h + packed, (kv_head + 1) * sizes.ratio)
        is_row = is_row & (heads < end_head)
        heads = tl.minimum(heads, end_head - 1)
    return RowTile(
        m=m, b=b, h=h, kv_head=kv_head, line=line, first=first_row, end=end_row, group=group, position=position, is_row=is_row,
        heads=heads, at=sequence.q_start + position, sequence=sequence,
    )  # fmt: skip


@triton.jit
def is_off(guard):
    """True if the other speculative launch does the work. guard: int32 (1,), see ``documents.dispatch``."""
    return tl.load(guard) != 0


@triton.jit
def key_places(at, k_row, strides):
    """64-bit offsets of storage rows ``at`` of a sequence's keys that are not in pages."""
    return k_row.to(tl.int64) * strides.rows + at.to(tl.int64) * strides.position


@triton.jit
def row_offsets(row, head, at, strides):
    """64-bit offsets of positions ``at`` in a storage row, for its heads."""
    return row.to(tl.int64) * strides.rows + head.to(tl.int64) * strides.head + at.to(tl.int64) * strides.position


@triton.jit
def tile_offsets(lane, strides, BLOCK_D: tl.constexpr, IS_NEAR: tl.constexpr):
    """Offsets of the elements of a tile's rows ``lane`` from the tile's first row. 64 bits, or with IS_NEAR, if the elements of a head's
    storage are less than 2^31 apart, 32 bits, which take half the registers."""
    if IS_NEAR:
        return (lane * strides.position.to(tl.int32))[:, None] + tl.arange(0, BLOCK_D)[None, :]
    else:
        return lane.to(tl.int64)[:, None] * strides.position + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def row_at(at, strides, IS_NEAR: tl.constexpr):
    """The offset of a row in a sequence's storage, in 64 bits, or with IS_NEAR in 32."""
    if IS_NEAR:
        return at * strides.position.to(tl.int32)
    else:
        return at.to(tl.int64) * strides.position


@triton.jit
def place_of_program(sizes, order, LAST_FIRST: tl.constexpr, HAS_ENTRIES: tl.constexpr):
    """(tile, batch entry, head) of this program. Programs process a few heads at a time (``sizes``): first these heads' first tiles, then
    their second tiles, and so on. So no long program starts last, and the data that they read stays in the cache.

    LAST_FIRST: under a causal mask the last row tiles see most keys and must start first."""
    tiles, together = sizes.row_tiles, sizes.together
    x, heads = tl.num_programs(0), tl.num_programs(1)
    at = tl.program_id(0) + x * (tl.program_id(1) + heads * tl.program_id(2))
    entries = tl.where(x == tiles, tl.num_programs(2), x)  # too many entries for the last axis are the first axis
    first = at // (tiles * together) * together  # numbered over the heads of all entries
    width = tl.minimum(together, heads * entries - first)
    at -= first * tiles
    m, of_all = at // width, first + at % width
    b, h = of_all // heads, of_all % heads
    if HAS_ENTRIES:
        return tl.load(order + m * 2 + 1), tl.load(order + m * 2), h
    elif LAST_FIRST:
        return tiles - 1 - m, b, h
    else:
        return m, b, h


@triton.jit
def slot_of(sequence, m, b, h, sizes, TILE_M: tl.constexpr, WIDTH: tl.constexpr):
    """Begin of the slot of row tile m of a sequence, WIDTH numbers per tile; tiles of different sequences do not share slots."""
    per_row = (sizes.positions + TILE_M - 1) // TILE_M
    return ((h * sizes.slots) + sequence.q_row * per_row + sequence.q_start // TILE_M + b + m).to(tl.int64) * WIDTH
