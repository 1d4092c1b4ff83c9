"""Argument groups of the Triton kernels, and the groups of values that their functions pass on: one NamedTuple each.

This module needs neither triton nor a tensor: the host takes the order of a launch's arguments from the same classes. In a kernel every
field is a scalar, a pointer or a block, so their types are ``Any``; a field with a class of its own is a nested group. Kernels construct
groups by keyword: Triton's disk cache is keyed by a kernel's text, which does not contain the order of a class's fields.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from anyattn.sparsity.kernels.arguments import Lists

__all__ = [
    "BackwardSizes", "BackwardStrides", "BackwardTensors", "BandConstants", "BlockConstants", "CacheSizes", "DkdvConstants", "DqConstants",
    "ForwardConstants", "ForwardSpans", "ForwardStrides", "ForwardTensors", "HeadGroups", "KeyFactors", "KeyStorage", "ListSpans",
    "ListStrides", "ListedTiles", "Lists", "Mod", "Mods", "PairConstants", "PairSizes", "PairSpans", "PairTensors", "PrepareConstants",
    "PrepareSpans", "PrepareStrides", "PrepareTensors", "Reduced", "ReductionConstants", "ReductionStrides", "ReductionTensors",
    "RowStrides", "RowsOfParts", "Run", "Runs", "Scales", "Sequence", "Shares", "Sizes", "TileOfScores", "TileRange",
]  # fmt: skip

NO_FACTOR, OF_HEAD, OF_KEY = 0, 1, 2  # of 8-bit keys and values


# ---- arguments of a launch


class RowStrides(NamedTuple):
    """Elements from one batch entry, head and position of a tensor to the next: int64. The last dimension is contiguous."""

    rows: Any
    head: Any
    position: Any


class ListStrides(NamedTuple):
    """Strides of block ``Lists``, in elements: int64. The lists are (batch, heads, tiles), or those of a varlen batch.

    entry, head: between the counts of batch entries and of heads, 0 if they share lists. row: number of indices per row of tiles, 0 for
    flat indices. flat: between the flat indices of heads. group: the query heads that share a head of the lists.
    """

    entry: Any
    head: Any
    row: Any
    flat: Any
    group: Any


class Sizes(NamedTuple):
    """Sizes of the problem: int32.

    seqlen_q, seqlen_k: the greatest of all entries. heads: query heads. positions: per row of statistics. row_tiles: programs per head.
    splits: number of splits of the keys. pages_each: stride between sequences in the page table. ratio: query heads per K/V head.
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
    """``Sizes`` and two more: int32. slots: number of row tile slots per head, see ``addressing.slot_of``. together: heads that programs
    process at a time."""

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
    """Sizes of a decoder's cache: int32. new: rows that the step appends. capacity: rows per entry. storage: entries of the cache.
    last_page: number of the last page in the pool."""

    new: Any
    capacity: Any
    storage: Any
    last_page: Any


class HeadGroups(NamedTuple):
    """The division of query heads among programs: int32.

    packed: query heads that share a tile. padded: the least power of two that is not less. together: heads that programs compute at a time;
    0 is no grouping, -1 is explained in ``addressing.work_of``. groups: groups of such heads per entry.
    tiles_each: tiles for the query heads of a K/V head.
    """

    packed: Any
    padded: Any
    together: Any
    groups: Any
    tiles_each: Any


class Shares(NamedTuple):
    """Even shares of all key tiles (``kernels.even_shares``): int32. items: row tiles per query head, of all batch entries. most: most key
    tiles that a row tile visits. least: fewest key tiles of a program that has any. merged: tiles read in the time of adding one more
    part. spared: tiles read in the time of merging. saturating: programs that together read at the memory's rate."""

    items: Any
    most: Any
    least: Any
    merged: Any
    spared: Any
    saturating: Any


class Mod(NamedTuple):
    """One part of the program: its functions, and its captured values. exists: whether the kernel has the part; else functions are None.
    rows, value: the functions of ``codegen.programs``. terms: the terms of sums over batch entries (``codegen.programs.by_entry``), else
    None. scatter: adds to the captured tensors' gradients; None if none is needed. is_padded: whether ``value`` may be called with keys
    beyond the end. sure: the limits of keys that a row sees whatever ``value`` is (``mods.analysis.sure_keys``); None if none are known.
    after, before: the ``Mod`` that replaces a score mod where queries are far after or far before their keys, if has_after or has_before.
    reach: of such a ``Mod``, the distance from which on it does. band: the derivative by a table's entry where ``bands.keep`` keeps it, or
    None. side: 1 for ``after``, 2 for ``before``, else 0. scalars: int64, the bits of its numbers. tensors: (pointer, stride 0, size 0,
    ...) per tensor. totals: the same per gradient sum. An empty one is replaced by a number: Triton has no empty tuple."""

    exists: Any
    rows: Any
    value: Any
    terms: Any
    scatter: Any
    is_padded: Any
    sure: Any
    reach: Any
    band: Any
    side: Any
    has_after: Any
    has_before: Any
    after: Any
    before: Any
    scalars: Any
    tensors: Any
    totals: Any


class Mods(NamedTuple):
    """The parts of a kernel's program. score: the score mod. mask: the mask that row ranges replace, or the one evaluated in listed partial
    tiles. always: the mask evaluated in every tile. dropout: the mask of the weights that are kept, and their factor."""

    score: Mod
    mask: Mod
    always: Mod
    dropout: Mod


# The constants of each kernel. Those that are not obvious:
# RANGES: number of the mask's row ranges, 0 if lists select the tiles to visit. LIST_M, LIST_N: the lists' tiles, 0 without lists.
# HAS_FOURS: dropout decides four pairs by one word, see ``dropout.places``. IS_PACKED: a tile may have several query heads, which share
# keys. IS_CACHE: entries come from the cache's tables. PAGES_FIT: tiles begin where pages begin, or lie inside them. IS_RAW: the greatest
# product has the greatest score (the scale is positive), or there is a score mod, so maxima are taken before the conversion to base 2.
# IS_LATE: a full tile's second product overlaps the next one's exponentials. IS_DESCRIBED: a ``tile_config.TmaUse``. SUMS: see
# ``tile_config.row_sums``. IS_NEAR: see ``addressing.tile_offsets``. SLOT_M: positions of a slot, see ``addressing.slot_of``. SEES_ALL: no
# mask hides a key from a row, so that no row tile is looked for. IS_CUT: a tile may reach beyond the sequences' ends. TERMS: number of sums
# over entries, see ``codegen.programs.summed_over_entries``. IS_SHARED: programs take even shares of all key tiles. K_SCALE, V_SCALE:
# factors of 8-bit keys and values: ``NO_FACTOR``, ``OF_HEAD`` (one for each batch entry and K/V head) or ``OF_KEY``. Q_BYTES, KV_BYTES:
# what addresses of rows of q, and of k and v, are multiples of, where their strides do not say so; 0 elsewhere. BLOCK_ROWS, BLOCK_KEYS: of
# a block whose sum is stored. HAS_PAIRS: see ``key_tiles.pairs_at``. IS_NVIDIA: 8 bits are converted by NVIDIA's instructions. IS_HALVED:
# see ``eight_bits.halved``. WRAP: see ``wrapped_rows``. JOINS: listed tiles that one tile of keys gathers; 0 if it is one of them or a
# part of one. GROUP: rows per position of a tile with a K/V head's query heads, or 0. SECTION, IS_PART: ``softmax.sections``. TAIL_DIM:
# columns of q and k behind HEAD_DIM, multiplied apart; BLOCK_TAIL: padded. ONE_KV: values are keys' columns. IS_DIVIDED: ``first_product``.
_OF_TILES = (  # of the kernels that visit tiles of scores
    "RANGES", "LIST_M", "LIST_N", "HAS_FULL", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "HAS_ENTRIES", "HAS_GUARD", "PRECISION",
    "HAS_FOURS", "TILE_M", "TILE_N", "JOINS", "TAIL_DIM", "BLOCK_TAIL", "ONE_KV", "IS_DIVIDED",
)  # fmt: skip


def _constants(name: str, *more: str) -> Any:
    return namedtuple(name, (*_OF_TILES, *more))  # type: ignore[misc]  # mypy wants every name written out


ForwardConstants = _constants(
    "ForwardConstants", "IS_PACKED", "IS_CACHE", "HAS_LEFTPAD", "HAS_ROWS", "PAGE_SIZE", "PAGES_FIT", "HAS_SINK", "HAS_LSE", "HAS_MAX",
    "IS_RAW", "IS_LATE", "IS_DESCRIBED", "IS_JOINED", "IS_RISING", "SUMS", "IS_SHARED", "K_SCALE", "V_SCALE", "Q_BYTES", "KV_BYTES",
    "HAS_PAIRS", "IS_HALVED", "IS_NVIDIA", "WRAP", "HAS_SKIP", "COUNTS_SKIPS", "SECTION", "IS_PART",
)  # fmt: skip
DqConstants = _constants("DqConstants", "IS_NEAR", "SLOT_M", "HAS_DQ", "GROUP")
PairConstants = _constants("PairConstants", "IS_NEAR", "IS_CUT", "HAS_DQ", "HAS_DK", "HAS_DV", "HAS_DLSE", "HAS_DELTA", "TERMS")
DkdvConstants = _constants("DkdvConstants", "IS_NEAR", "IS_GROUPED", "IS_NVIDIA", "IS_JOINED", "SEES_ALL", "HAS_DK", "HAS_DV", "GROUP")
ReductionConstants = _constants("ReductionConstants", "IS_NEAR", "IS_NVIDIA", "SEES_ALL", "IS_GROUPED", "HAS_FIRST")
BlockConstants = _constants("BlockConstants", "IS_NEAR", "HAS_SUMS", "HAS_MAX", "BLOCK_ROWS", "BLOCK_KEYS")
PrepareConstants = namedtuple(
    "PrepareConstants", ("RANGES", "TILE_M", "HEAD_DIM_V", "BLOCK_DV", "HAS_ENTRIES", "HAS_DLSE", "HAS_GUARD", "HAS_SINK", "HAS_DELTA")
)
BandConstants = namedtuple("BandConstants", ("STEP", "BY_KEY"))


class ForwardTensors(NamedTuple):
    """Pointers of the forward kernel; for absent tensors any pointer.

    q: (B, Hq, Sq, D). k: (B, Hkv, Sk, D). v: (B, Hkv, Sk, Dv). k and v may be pools of pages. out: (B, Hq, Sq, Dv). These four may be
    tensor descriptors. lse, max_scores: float32 (B, Hq, Sq), contiguous, in nats. sink: (Hq,). entries: int32 (B, 9), ``Sequence``. order:
    int32 (row tiles, 2), sequence and row tile or -1. pages: integers (B, pages per sequence). cached, leftpad, cache_rows: integers (B,),
    a cache's tables. guard: int32 (1,), see ``addressing.is_off``. k_factors, v_factors: float32, see ``KeyFactors``. Of
    ``even_shares.store_part``, parts and part_sums: float32 (programs, 2, TILE_M, BLOCK_DV) and (programs, 2, TILE_M, 2); part_rows: int64
    (programs, TILE_M + 1). skip_below, skip_counts: of ``problem.Skip``.
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
    k_factors: Any
    v_factors: Any
    parts: Any
    part_sums: Any
    part_rows: Any
    skip_below: Any
    skip_counts: Any


class ForwardStrides(NamedTuple):
    """Strides of q, k, v and out. part_out: between the outputs of splits: int64."""

    q: RowStrides
    k: RowStrides
    v: RowStrides
    out: RowStrides
    part_out: Any


class ForwardSpans(NamedTuple):
    """part_statistics: between the lse and greatest scores of splits: int64. lists: of the block lists. k_factors, v_factors: of factors of
    keys, or with batch entries as rows and 0 for the position."""

    part_statistics: Any
    lists: ListStrides
    k_factors: RowStrides
    v_factors: RowStrides


class BackwardTensors(NamedTuple):
    """Pointers of the dq kernel, and of the dk and dv kernel; for absent tensors any pointer.

    q, k, v, dout, dq, dk, dv: shaped as in the forward pass. lse, delta: float32, the outputs of ``prepare_tile``, by row tiles.
    entries: as in ``ForwardTensors``. order: int32 (programs per head, 2), sequence and tile or -1. spans: int32, 4 numbers per range of
    each row tile, see ``row_tile_bounds``. guard: int32 (1,).
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
    lists: ListStrides


class PairTensors(NamedTuple):
    """Pointers of ``pair_tile``; for absent tensors any pointer.

    q, k, v, dout, dq, dk, dv: as in ``BackwardTensors``. lse, dlse: float32 (B, Hq, Sq), the log-sum-exp in nats and its gradient. delta:
    the same shape, an output if the sink needs it. lse and delta are contiguous.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    dlse: Any
    delta: Any
    dq: Any
    dk: Any
    dv: Any


class PairSpans(NamedTuple):
    """dlse: strides of the gradient of the log-sum-exp, whose last dimension is positions."""

    dlse: RowStrides


class PairSizes(NamedTuple):
    """Sizes of a dense problem: int32. heads: each with keys of its own. entries: batch entries of a program."""

    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    heads: Any
    entries: Any


class PrepareTensors(NamedTuple):
    """Pointers of ``prepare_tile``.

    Inputs: out, dout: (B, Hq, Sq, Dv). natural_lse, dlse: float32 (B, Hq, Sq), in nats, and its gradient. entries, order, guard: as in
    ``BackwardTensors``. Outputs: lse (in base 2), delta: float32, by row tiles, and spans: int32, for ``BackwardTensors``. natural_delta:
    float32 (B, Hq, Sq), a second copy of delta if the sink needs it.
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
    out: RowStrides
    dout: RowStrides


class PrepareSpans(NamedTuple):
    """dlse: strides of the gradient of the log-sum-exp, whose last dimension is positions. lists: not used."""

    dlse: RowStrides
    lists: ListStrides


class ReductionTensors(NamedTuple):
    """Pointers of the kernels of reductions. q, k: as in the forward pass. lse: float32, by row tiles as ``prepare_tile`` stores it for
    sums per key, in nats (B, Hq, Sq) for blocks. spans: of ``prepare_tile``. sums, maxima: float32 outputs, (B, Hq, Sk) or of blocks."""

    q: Any
    k: Any
    lse: Any
    spans: Any
    sums: Any
    maxima: Any


class ReductionStrides(NamedTuple):
    q: RowStrides
    k: RowStrides


class Reduced(NamedTuple):
    """int32. first: the first query that counts. rows, columns: numbers of blocks of a head."""

    first: Any
    rows: Any
    columns: Any


# ---- inside a kernel


class Sequence(NamedTuple):
    """One batch entry: int32. Its queries are ``q[q_row, :, q_start : q_start + seqlen_q]``, its keys ``k[k_row, :, k_start : k_start +
    seqlen_k]``. q_first: the position of its first query for mods. lists_line, lists_place: its begin in the lists of a varlen batch, in
    the counts and in the flat indices. The other fields are those of ``sequences.batch.Sequences``."""

    q_row: Any
    q_start: Any
    seqlen_q: Any
    k_row: Any
    k_start: Any
    seqlen_k: Any
    q_first: Any
    lists_line: Any
    lists_place: Any


class KeyFactors(NamedTuple):
    """Factors of each 8-bit key and value. k, v: pointers to float32, of their head's keys. k_strides, v_strides: of factors, like keys."""

    k: Any
    v: Any
    k_strides: RowStrides
    v_strides: RowStrides


class KeyStorage(NamedTuple):
    """The storage of a sequence's keys and values. k, v: pointers to their head's storage, or tensor descriptors. row, start: int32, the
    storage's batch entry and the first key's row in it. k_strides, v_strides: of the storage. head: the K/V head. factors: ``KeyFactors``,
    0 in the backward pass. k_wrap, v_wrap: see ``wrapped_rows.wrap_of``; 0 if WRAP is."""

    k: Any
    v: Any
    row: Any
    start: Any
    k_strides: RowStrides
    v_strides: RowStrides
    head: Any
    factors: Any
    k_wrap: Any
    v_wrap: Any


class Scales(NamedTuple):
    """Factors, float32. score: of a product, to get the score that the score mod receives. base_2: of a score, to get base 2. rows: of the
    rows' products, [rows, 1], see ``eight_bits.halved``. output: of a section's output, if ``V_SCALE`` is ``OF_HEAD``."""

    score: Any
    base_2: Any
    rows: Any
    output: Any = 1.0


class RowsOfParts(NamedTuple):
    """The row values of each part for a tile: a tuple that the part's own functions make and read; see ``codegen.programs``. sure: the
    least and the end of the keys that ``always`` shows to all rows; unread without any."""

    score: Any
    mask: Any
    always: Any
    dropout: Any
    sure: Any


class Run(NamedTuple):
    """Consecutive tiles: int32. first: the first tile. tiles: their number."""

    first: Any
    tiles: Any


class Runs(NamedTuple):
    """The tiles that up to two ranges per row visit: two runs of full tiles, and four runs of partial tiles in ascending order."""

    full_0: Run
    full_1: Run
    partial_0: Run
    partial_1: Run
    partial_2: Run
    partial_3: Run


class TileRange(NamedTuple):
    """The tiles of one range per row, int32: some row has keys in ``first`` to ``end``; all rows cover ``full`` to ``full_end``."""

    first: Any
    end: Any
    full: Any
    full_end: Any


class ListedTiles(NamedTuple):
    """One line of block lists, counted in the kernel's tiles: int32. full: number of tiles whose pairs are all visible. partial: number of
    other tiles; listed: how many of these are listed as partial; the rest are full tiles that the sequence's end cuts. full_index,
    partial_index: pointers to the line's indices. If a tile gathers listed ones (JOINS), listed, and the rest's number, count these."""

    full: Any
    partial: Any
    listed: Any
    rest: Any
    full_index: Any
    partial_index: Any


class TileOfScores(NamedTuple):
    """The place of a tile of scores in captured totals: int32. q_first, k_first: its first row and key for mods. rows, keys: how many."""

    b: Any
    h: Any
    q_first: Any
    k_first: Any
    rows: Any
    keys: Any
