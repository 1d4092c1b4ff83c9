"""Kernels that gather each sequence's keys and values, widened, and that sum gradients of gathered ones in pages (device code)."""

import triton
import triton.language as tl

from anyattn.backends.triton.kernels.arguments import NO_FACTOR, OF_HEAD, OF_KEY
from anyattn.backends.triton.kernels.eight_bits import widened
from anyattn.backends.triton.kernels.key_tiles import load_rows
from anyattn.backends.triton.kernels.paged_kv import inside

__all__ = ["gather_keys", "grown_lengths", "sum_pages"]

_NO_FACTOR: tl.constexpr = tl.constexpr(NO_FACTOR)
_OF_HEAD: tl.constexpr = tl.constexpr(OF_HEAD)
_OF_KEY: tl.constexpr = tl.constexpr(OF_KEY)
_NUMBERS = ("size", "chunks")
_GROWN = ("new", "capacity", "batch")
_GATHERED = (
    "k_line", "k_head", "k_position", "v_line", "v_head", "v_position", "k_factor_line", "k_factor_head", "k_factor_position",
    "v_factor_line", "v_factor_head", "v_factor_position", "table_line", "last_page", "storage", "heads", "line", "tiles", "bound",
    "new", "rows_q",
)  # fmt: skip


@triton.jit(do_not_specialize=_GROWN, do_not_specialize_on_alignment=_GROWN)
def grown_lengths(used, lengths, new: tl.int32, capacity: tl.int32, batch: tl.int32, BLOCK: tl.constexpr):
    """lengths: int32 (batch,), gets those before a step, ``used``, and the ``new`` rows that it appended to each sequence, as far as
    there was room: 0 to ``capacity``."""
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grown = tl.load(used + b, mask=b < batch, other=0) + new
    tl.store(lengths + b, tl.minimum(tl.maximum(grown, 0), capacity).to(tl.int32), mask=b < batch)


@triton.jit(do_not_specialize=_GATHERED, do_not_specialize_on_alignment=_GATHERED)
def gather_keys(
    k, v, k_out, v_out, k_factors, v_factors, used, ends, starts, rows, pages, new_ends, lengths, k_factors_out,
    k_line: tl.int64, k_head: tl.int64, k_position: tl.int64, v_line: tl.int64, v_head: tl.int64, v_position: tl.int64,
    k_factor_line: tl.int64, k_factor_head: tl.int64, k_factor_position: tl.int64,
    v_factor_line: tl.int64, v_factor_head: tl.int64, v_factor_position: tl.int64,
    table_line: tl.int64, last_page: tl.int64, storage: tl.int64, heads: tl.int64, line: tl.int64, tiles: tl.int64, bound: tl.int64,
    new: tl.int64, rows_q: tl.int64,
    PAGE_SIZE: tl.constexpr, HAS_USED: tl.constexpr, HAS_ENDS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_ROWS: tl.constexpr,
    IS_CACHE: tl.constexpr, HAS_NEW_ENDS: tl.constexpr,
    K_SCALE: tl.constexpr, V_SCALE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, KV_BYTES: tl.constexpr, IS_NVIDIA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copies the keys and values of sequences: k_out (lines, ``line`` rows, heads, D), v_out alike. A cache's are copied to the beginning
    of each sequence's line, those of other batches to rows of the same positions.

    A value times its factor, in float32, is rounded once. With K_SCALE OF_KEY the keys' factors are copied too: k_factors_out, float32
    (B, heads, ``bound``), in the order of each sequence's keys. Rows that belong to no sequence are neither read nor written. lengths:
    int32 (B,), gets each sequence's keys: those that its line has room for, whatever the tables hold.

    Each program copies ROWS rows of one head. used, ends, starts, rows, pages: tables, of which HAS_... and PAGE_SIZE say whether they
    exist: rows in use (B,), ends of packed sequences (B + 1,), first rows (B,), lines of storage (B,), and pages (B, ``table_line``).
    IS_CACHE: the rows in use are those before the step, with padding; it appended ``new`` ones, or as many as an entry has queries by
    new_ends (B + 1,), of ``rows_q`` together. storage: lines of k. last_page: the last page of the pool. tiles: of ROWS rows, for each
    sequence. bound: upper bound on a sequence's keys. line: rows of a line of the copy, and in storage; packed sequences have one together.
    """
    program, near_heads, near_tiles = tl.program_id(0), heads.to(tl.int32), tiles.to(tl.int32)
    head, tile = (program % near_heads).to(tl.int64), (program // near_heads % near_tiles).to(tl.int64)
    b = (program // near_heads // near_tiles).to(tl.int64)
    start, count = b * 0, b * 0 + line
    if HAS_ENDS:
        start = tl.minimum(tl.maximum(tl.load(ends + b).to(tl.int64), 0), line)
        count = tl.load(ends + b + 1).to(tl.int64) - start
    if HAS_STARTS:
        start = tl.minimum(tl.maximum(tl.load(starts + b).to(tl.int64), 0), line)
    if HAS_USED:
        count = tl.load(used + b).to(tl.int64)
    if IS_CACHE:
        if HAS_NEW_ENDS:
            first, last = tl.load(new_ends + b).to(tl.int64), tl.load(new_ends + b + 1).to(tl.int64)
            new = tl.maximum(tl.minimum(tl.maximum(last, 0), rows_q) - tl.minimum(tl.maximum(first, 0), rows_q), 0)
        count = tl.minimum(count + new, line) - start
    if HAS_ROWS:
        row = tl.load(rows + b).to(tl.int64)
        count = tl.where((row >= 0) & (row < storage), count, 0)
    count = tl.minimum(tl.maximum(count, 0), line - start)
    if tile == 0 and head == 0:
        tl.store(lengths + b, count.to(tl.int32))
    if tile * ROWS < count:
        lane = tile * ROWS + tl.arange(0, ROWS)
        is_key, position = lane < count, start + lane
        to = b * 0 if HAS_ENDS else b
        at = ((to * line + (lane if IS_CACHE else position)) * heads + head)[:, None]
        if PAGE_SIZE > 0:
            near = position.to(tl.uint32)  # as in ``paged_kv``
            numbers = tl.load(pages + b * table_line + near // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
            lines, position = inside(numbers, last_page), (near % PAGE_SIZE).to(tl.int64)
        elif HAS_ROWS:
            lines = row + lane * 0
        else:
            lines = to + lane * 0
        d, dv = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_DV)[None, :]
        k_at, v_at = lines * k_line + head * k_head + position * k_position, lines * v_line + head * v_head + position * v_position
        is_row = is_key[:, None]
        own_k = load_rows(k, k_at[:, None], is_row, HEAD_DIM, BLOCK_D, False, KV_BYTES)
        own_v = load_rows(v, v_at[:, None], is_row, HEAD_DIM_V, BLOCK_DV, False, KV_BYTES)
        if K_SCALE == _OF_KEY:
            of_k = tl.load(k_factors + lines * k_factor_line + head * k_factor_head + position * k_factor_position, mask=is_key)
            tl.store(k_factors_out + (b * heads + head) * bound + lane, of_k, mask=is_key)
        own_k = widened(own_k, k_out.dtype.element_ty, IS_NVIDIA)
        if V_SCALE == _NO_FACTOR:
            own_v = widened(own_v, v_out.dtype.element_ty, IS_NVIDIA)
        else:
            if V_SCALE == _OF_HEAD:
                of_v = tl.load(v_factors + b * v_factor_line + head * v_factor_head)
            else:
                v_factor_at = lines * v_factor_line + head * v_factor_head + position * v_factor_position
                of_v = tl.load(v_factors + v_factor_at, mask=is_key, other=0.0)[:, None]
            own_v = (widened(own_v, tl.float32, IS_NVIDIA) * of_v).to(v_out.dtype.element_ty)
        tl.store(k_out + at * HEAD_DIM + d, own_k, mask=is_row & (d < HEAD_DIM))
        tl.store(v_out + at * HEAD_DIM_V + dv, own_v, mask=is_row & (dv < HEAD_DIM_V))


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
