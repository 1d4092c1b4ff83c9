"""The groups of a Triton kernel's arguments, and what its functions hand on together: one NamedTuple each.

Neither triton nor a tensor is needed here: the host takes the order of a launch's arguments from the same classes. In a kernel every
field is a scalar, a pointer or a block of the compiler's, so all of them are ``Any``; a field with a class of its own is a group inside
of a group. Kernels make them by keyword: Triton's disk cache knows a kernel's text, not the order of a class's fields.
"""

from typing import Any, NamedTuple

from anyattn.sparsity.kernels.arguments import Lists

__all__ = [
    "BackwardSizes", "BackwardStrides", "BackwardTensors", "CachePlaces", "CacheSizes", "Captured", "CapturedPart", "ForwardSpans",
    "ForwardStrides", "ForwardTensors", "HeadPointers", "HeadsDealt", "KeyStorage", "LineStrides", "ListSpans", "ListStrides",
    "ListedTiles", "Lists", "PrepareSpans", "PrepareStrides", "PrepareTensors", "Rotary", "RowRun", "RowStrides", "RowsOfParts", "Run",
    "Runs", "Scales", "Sequence", "Sizes", "TileOfScores", "TileRange",
]  # fmt: skip


# ---- arguments of a launch


class RowStrides(NamedTuple):
    """Elements from one batch entry, head and position of a tensor to the next: int64. The last dimension is contiguous."""

    rows: Any
    head: Any
    position: Any


class ListStrides(NamedTuple):
    """Where block ``Lists`` go on, in elements: int64. They are (batch, heads, tiles), or those of a ragged batch.

    entry, head: from one batch entry's and head's counts to the next's, 0 where they share. row: indices of a row of tiles, 0 where
    indices lie flat. flat: from one head's flat indices to the next's.
    """

    entry: Any
    head: Any
    row: Any
    flat: Any


class Sizes(NamedTuple):
    """Sizes of the problem: int32.

    seqlen_q, seqlen_k: the greatest of all entries. heads: query heads. positions: of a row of statistics. row_tiles: programs of a head.
    splits: pieces of the keys. pages_each: from one sequence's page numbers to the next's. ratio: query heads of a K/V head.
    """

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    positions: Any
    row_tiles: Any
    splits: Any
    pages_each: Any
    ratio: Any


class BackwardSizes(NamedTuple):
    """``Sizes`` and two more: int32. slots: row tiles of one head that have a place of their own, see ``backward._slot``. together: heads
    that programs go through at a time."""

    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    positions: Any
    row_tiles: Any
    splits: Any
    pages_each: Any
    ratio: Any
    slots: Any
    together: Any


class CacheSizes(NamedTuple):
    """Sizes of a decoder's cache: int32. new: rows that the step appends. capacity: rows of an entry. storage: entries of the cache.
    last_page: the greatest number of a page in the pool."""

    new: Any
    capacity: Any
    storage: Any
    last_page: Any


class HeadsDealt(NamedTuple):
    """Which query heads a program has: int32.

    packed: query heads that share a tile. padded: the least power of two that holds them. together: heads that
    programs compute at a time; 0 computes each alone, -1 is explained in ``addressing.work_of``. groups: groups of such heads in an entry.
    tiles_each: tiles among which a K/V head's query heads are divided.
    """

    packed: Any
    padded: Any
    together: Any
    groups: Any
    tiles_each: Any


class CapturedPart(NamedTuple):
    """What one part of the program captured. scalars: int64, the bits of its numbers. tensors: (pointer, stride 0, size 0, stride 1, ...)
    of each tensor. totals: the same of each tensor that sums gradients. Each is a number where there is none: Triton has no empty tuple."""

    scalars: Any
    tensors: Any
    totals: Any


class Captured(NamedTuple):
    """Captured values of a kernel's parts. score: the score mod. mask: the mask given by row ranges, or the one evaluated in listed partial
    tiles. always: the mask evaluated in every tile."""

    score: CapturedPart
    mask: CapturedPart
    always: CapturedPart


class ForwardTensors(NamedTuple):
    """Pointers of the forward kernel; what a call lacks is any pointer.

    q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv), or pools of pages. out: (B, Hq, Sq, Dv). These four may be tensor
    descriptors. lse, max_scores: float32 (B, Hq, Sq), contiguous, in nats. sink: (Hq,). entries: int32 (B, 9), ``Sequence``. order: int32
    (row tiles, 2), sequence and row tile or -1. pages: integers (B, pages of a sequence). cached, leftpad, cache_rows: integers (B,), a
    cache's tables. guard: int32 (1,), see ``addressing.is_off``.
    """

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    max_scores: Any
    sink: Any
    entries: Any
    order: Any
    pages: Any
    cached: Any
    leftpad: Any
    cache_rows: Any
    guard: Any


class ForwardStrides(NamedTuple):
    """Strides of q, k, v and out. part_out: from one split's output to the next's: int64."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    out: RowStrides
    part_out: Any


class ForwardSpans(NamedTuple):
    """part_statistics: from one split's lse and greatest scores to the next's: int64. lists: of the block lists."""

    part_statistics: Any
    lists: ListStrides


class BackwardTensors(NamedTuple):
    """Pointers of dq's kernel, and of dk's and dv's; what a call lacks is any pointer.

    q, k, v, dout, dq, dk, dv: as their tensors in the forward pass. lse, delta: float32, what ``prepare_tile`` wrote, by row tiles.
    entries: as in ``ForwardTensors``. order: int32 (programs of a head, 2), sequence and tile or -1. spans: int32, 4 numbers of each range
    of each row tile, see ``row_tile_bounds``. guard: int32 (1,).
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    dq: Any
    dk: Any
    dv: Any
    entries: Any
    order: Any
    spans: Any
    guard: Any
    delta: Any


class BackwardStrides(NamedTuple):
    """Strides of the tensors with rows."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    dout: RowStrides
    dq: RowStrides
    dk: RowStrides
    dv: RowStrides


class ListSpans(NamedTuple):
    """lists: of the block lists."""

    lists: ListStrides


class PrepareTensors(NamedTuple):
    """Pointers of ``prepare_tile``.

    Read: out, dout: (B, Hq, Sq, Dv). natural_lse, dlse: float32 (B, Hq, Sq), in nats, and its gradient. entries, order, guard: as in
    ``BackwardTensors``. Written: lse (in base 2), delta: float32, by row tiles, and spans: int32, for ``BackwardTensors``. natural_delta:
    float32 (B, Hq, Sq), delta once more where the sink wants it.
    """

    out: Any
    dout: Any
    natural_lse: Any
    dlse: Any
    lse: Any
    spans: Any
    entries: Any
    order: Any
    guard: Any
    delta: Any
    natural_delta: Any


class PrepareStrides(NamedTuple):
    """Strides of the tensors with rows."""

    out: RowStrides
    dout: RowStrides


class PrepareSpans(NamedTuple):
    """dlse: strides of the gradient of the log-sum-exp, whose last dimension is positions. lists: not read."""

    dlse: RowStrides
    lists: ListStrides


# ---- inside of a kernel


class Sequence(NamedTuple):
    """One batch entry: int32. Its queries are ``q[q_row, :, q_start : q_start + seqlen_q]``, its keys ``k[k_row, :, k_start : k_start +
    seqlen_k]``. q_first: the position of its first query, as mods count them. lists_line, lists_place: where it begins in the lists of a
    ragged batch, among counts and among flat indices. The fields of ``sequences.batch.Sequences``."""

    q_row: Any
    q_start: Any
    seqlen_q: Any
    k_row: Any
    k_start: Any
    seqlen_k: Any
    q_first: Any
    lists_line: Any
    lists_place: Any


class KeyStorage(NamedTuple):
    """Where a sequence's keys and values lie. k, v: pointers to their head's storage, or tensor descriptors. row, start: int32, the
    storage's batch entry and the first key's row there. k_strides, v_strides: of the storage. head: the K/V head."""

    k: Any
    v: Any
    row: Any
    start: Any
    k_strides: RowStrides
    v_strides: RowStrides
    head: Any


class Scales(NamedTuple):
    """float32. score: what a product is multiplied with for the score mod. base_2: what a score is multiplied with for base 2."""

    score: Any
    base_2: Any


class RowsOfParts(NamedTuple):
    """What each part of the program keeps of a tile's rows, a tuple that its own function makes and reads; see ``codegen.programs``."""

    score: Any
    mask: Any
    always: Any


class Run(NamedTuple):
    """Tiles one after the other: int32. first: the first one. tiles: how many."""

    first: Any
    tiles: Any


class Runs(NamedTuple):
    """The tiles that up to two ranges of each row visit: two runs of full tiles, and four of partial ones in ascending order."""

    full_0: Run
    full_1: Run
    partial_0: Run
    partial_1: Run
    partial_2: Run
    partial_3: Run


class TileRange(NamedTuple):
    """The tiles of one range of each row, int32: ``first`` to ``end`` are touched by a row, ``full`` to ``full_end`` filled by all."""

    first: Any
    end: Any
    full: Any
    full_end: Any


class ListedTiles(NamedTuple):
    """One line of block lists, counted in the kernel's tiles: int32. full: those that every pair is visible in. partial: the others;
    listed: how many of these are listed as partial, the rest are full ones that the sequence's end cuts. full_index, partial_index:
    pointers to the line's indices."""

    full: Any
    partial: Any
    listed: Any
    full_index: Any
    partial_index: Any


class RowRun(NamedTuple):
    """The row tiles that see a tile of keys: int32. first: the first that sees any. full: the first that sees all."""

    first: Any
    full: Any


class HeadPointers(NamedTuple):
    """One query head of one sequence. q, dout: pointers to its storage. lse, delta: pointers to float32, the sequence's first row's."""

    q: Any
    dout: Any
    lse: Any
    delta: Any


class TileOfScores(NamedTuple):
    """Where a tile of scores lies, for what its gradients are sent to: int32. q_first, k_first: its first row and key, as mods count them.
    rows, keys: how many of each there are."""

    b: Any
    h: Any
    q_first: Any
    k_first: Any
    rows: Any
    keys: Any


class LineStrides(NamedTuple):
    """Elements from one entry, row and head of a tensor to the next, whose unit is a line, one head of one row: int64."""

    entry: Any
    row: Any
    head: Any


class CachePlaces(NamedTuple):
    """Where the rows of a decoder's cache are. rows: pointer to integers (B,), each entry's row of the cache. pages: pointer to integers
    (B, pages of an entry). pages_entry: from one entry's page numbers to the next's: int64. capacity: rows of an entry. storage: rows or
    pages of the cache. page_size: rows of a page."""

    rows: Any
    pages: Any
    pages_entry: Any
    capacity: Any
    storage: Any
    page_size: Any


class Rotary(NamedTuple):
    """The rotary tables: cos, sin: pointers, (positions, half). _row, _element: their strides: int64."""

    cos: Any
    cos_row: Any
    cos_element: Any
    sin: Any
    sin_row: Any
    sin_element: Any
    half: Any
    positions: Any
