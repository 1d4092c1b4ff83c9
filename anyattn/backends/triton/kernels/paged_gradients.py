"""Kernel that sums the gradients of all sequences that hold a page (device code)."""

import triton
import triton.language as tl

__all__ = ["sum_pages"]

_NUMBERS = ("size", "chunks")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NUMBERS)
def sum_pages(rows, sums, held, starts, size: tl.int64, chunks: tl.int64, BLOCK: tl.constexpr):
    """rows: [places, size]. sums: [pages, size], where page p is the sum of the rows ``held[starts[p] : starts[p + 1]]``, in this order,
    in float32.

    Each program sums a part of one page; ``chunks``: the number of parts per page."""
    page, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    at = chunk * BLOCK + tl.arange(0, BLOCK)
    is_there = at < size
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(starts + page), tl.load(starts + page + 1)):
        total += tl.load(rows + tl.load(held + i) * size + at, mask=is_there, other=0.0).to(tl.float32)
    tl.store(sums + page * size + at, total.to(sums.dtype.element_ty), mask=is_there)
