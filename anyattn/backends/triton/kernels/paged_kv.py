"""Keys in pages (device code): page numbers of a tile of keys, and the offsets of its rows.

Rows and page numbers are never negative, and are unsigned here: then a division by a page size that is a power of two is a shift, its
remainder is a mask, and the product of a number and a stride is two multiplications.
"""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.tile_iterator import first_at, full_at

__all__ = ["NEARBY", "first_numbers", "inside", "page_numbers", "paged_places"]

NEARBY: tl.constexpr = tl.constexpr(128)
_SECTOR: tl.constexpr = tl.constexpr(32)  # bytes that a cache fetches at a time


@triton.jit
def inside(numbers, last_page):
    """Page numbers, clamped to the pool: the host has not read the table."""
    return tl.minimum(tl.maximum(numbers, 0), last_page)


@triton.jit
def page_numbers(first, last, pages, c, IS_CUT: tl.constexpr):
    """The pages of storage rows ``first .. first + TILE_N``: one number per row, or a single one if the tile lies in one page.

    IS_CUT: no page beyond row ``last`` is looked up.
    """
    lane = tl.arange(0, c.TILE_N)
    if c.PAGES_FIT and c.PAGE_SIZE >= c.TILE_N:
        indices = first.to(tl.uint32) // c.PAGE_SIZE
    elif c.PAGES_FIT:
        indices = first.to(tl.uint32) // c.PAGE_SIZE + lane // c.PAGE_SIZE
        if IS_CUT:
            indices = tl.minimum(indices, last.to(tl.uint32) // c.PAGE_SIZE)
    elif IS_CUT:
        indices = tl.minimum(first + lane, last).to(tl.uint32) // c.PAGE_SIZE
    else:
        indices = (first + lane).to(tl.uint32) // c.PAGE_SIZE
    return tl.load(pages + indices)


@triton.jit
def _nearby(first, last, pages, PAGE_SIZE: tl.constexpr):
    """[NEARBY]: page numbers of storage rows ``first .. last``, one from every sector of the table, which brings the others into the cache.
    A number that came from memory, behind the loads of keys in flight, would arrive too late for the loop.
    """
    EVERY: tl.constexpr = _SECTOR * 8 // pages.dtype.element_ty.primitive_bitwidth
    indices = first.to(tl.uint32) // PAGE_SIZE + tl.arange(0, NEARBY) * EVERY
    return tl.load(pages + tl.minimum(indices, last.to(tl.uint32) // PAGE_SIZE))


@triton.jit
def _first_ahead(runs, i, begin, end, full, seqlen_k, c):
    """The first key of the i-th tile, or of the last one before ``end``; 0 if there is none from ``begin`` on."""
    first = begin * 0
    if begin < end:
        if c.IS_SHARED and c.RANGES > 0:
            first = first_at(runs, tl.minimum(i, end - 1), full, seqlen_k, c)
        else:
            first = full_at(runs, tl.minimum(i, end - 1), c.RANGES, c.TILE_N, c.LIST_N)
    return first


@triton.jit
def first_numbers(runs, start, end, full, k_start, seqlen_k, pages, last_page, c):
    """The initial values of a loop over the tiles ``start .. end``: the page numbers of the first tile, clamped to the pool; of the second,
    clamped to 0; of the third, not clamped; and ``_nearby`` of all. If there is no tile they are of rows that the sequence has.

    The loop is over full tiles, or with even shares and ranges over all, of which ``full`` are full.
    """
    last_key = k_start + seqlen_k - 1
    one = k_start + _first_ahead(runs, start, start, end, full, seqlen_k, c)
    two = k_start + _first_ahead(runs, start + 1, start, end, full, seqlen_k, c)
    three = k_start + _first_ahead(runs, start + 2, start, end, full, seqlen_k, c)
    last = k_start + _first_ahead(runs, end, start, end, full, seqlen_k, c) + c.TILE_N - 1
    nearby = _nearby(one, tl.minimum(last, last_key), pages, c.PAGE_SIZE)
    numbers = inside(page_numbers(one, last_key, pages, c, True), last_page)
    near = tl.maximum(page_numbers(two, last_key, pages, c, True), 0)
    return numbers, near, page_numbers(three, last_key, pages, c, True), nearby


@triton.jit
def paged_places(first, last, numbers, strides, c, IS_CUT: tl.constexpr):
    """64-bit offsets of storage rows ``first .. first + TILE_N`` on the pages ``numbers``. strides: ``RowStrides`` of the pool."""
    stride = strides.position
    lane = tl.arange(0, c.TILE_N)
    page = numbers.to(tl.uint32).to(tl.uint64).to(tl.int64) * strides.rows
    if IS_CUT:
        lane = tl.minimum(lane, last - first)
    if c.PAGES_FIT and c.PAGE_SIZE >= c.TILE_N:
        return page + (first.to(tl.uint32) % c.PAGE_SIZE).to(tl.int64) * stride + lane * stride
    elif c.PAGES_FIT:
        return page + (lane % c.PAGE_SIZE) * stride
    else:
        return page + ((first + lane).to(tl.uint32) % c.PAGE_SIZE).to(tl.int64) * stride
