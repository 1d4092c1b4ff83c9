"""Backward tile scheduler: the next tile of keys and the row tiles that see it, which the producer warp writes to shared memory.

A visit is a row tile of one of the query heads that share the keys; heads come one after the other, each one's rows from the first to the
last. A visit is masked or bare: rows of a bare one see all keys of the tile, as far as bands and lists say.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.kernel.softmax import Softmax
from anyattn.backends.hopper.kernel.tile_scheduler import Visits

__all__ = ["KEY_FACTS", "KeyFacts", "KeySizes", "KeyTables", "VisitsRows"]

KEY_FACTS = 12  # numbers of one tile of keys on the board


class KeyFacts(NamedTuple):
    """One tile of keys, as the producer posts it: Int32 each.

    more: 0 says that there are no more tiles. n_block: the tile. kv_head, entry: whose keys they are. total: visits, those of all heads.
    seqlen_q, seqlen_k: rows in use. q_row, q_start, k_row, k_start: where the entry's first query and key are stored. left, right: row i
    sees keys ``i + left <= j < i + right``, as far as the config has these bounds.
    """

    more: Any
    n_block: Any
    kv_head: Any
    entry: Any
    total: Any
    seqlen_q: Any
    seqlen_k: Any
    left: Any
    right: Any


class KeyTables(NamedTuple):
    """Tensors that say what to visit, None where the config has none; int32.

    partial_count, full_count: (B, H, N), partial_index, full_index: (B, H, N, M): the row tiles of each tile of keys. order: (rows, 3),
    key tile, kv head and entry of each piece of work.
    """

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any
    order: Any


class KeySizes(NamedTuple):
    """Run-time sizes. rows: tiles of keys of an entry, each shared by ``spread`` kv heads of all entries, of which ``section`` go side by
    side. heads: an entry's kv heads. ratio: query heads for each of them."""

    rows: Any
    spread: Any
    section: Any
    heads: Any
    ratio: Any


class VisitsRows:
    """The deciding part of ``HopperBackward``'s loading role."""

    config: Any
    band_sides: Any

    captured = Softmax.captured
    band = Visits.band

    @cute.jit
    def key_tile(self, work, tables, sizes):
        """(n_block, kv head, entry) of piece of work ``work``. Of causal rows the first keys are seen by most: they go first."""
        rows, spread, section, heads, _ = sizes
        before = work // (section * rows) * section
        at_once = cutlass.min(section, spread - before)
        rest = work - before * rows
        inner = before + rest % at_once
        n_block = rest // at_once
        if const_expr(self.config.has_left and not self.config.has_right):
            n_block = rows - 1 - n_block
        return n_block, inner % heads, inner // heads

    @cute.jit
    def row_span(self, n_block, seqlen_q, seqlen_k, left, right):
        """(first, end) of the row tiles that see keys of the tile, and (first, end) of those whose rows see all of them."""
        config = self.config
        tile_m, tile_n = config.tiles.tile_m, config.tiles.tile_n
        start, end = n_block * tile_n, cutlass.min((n_block + 1) * tile_n, seqlen_k)
        first, last = Int32(0), ceil_div(seqlen_q, tile_m)
        bare_first, bare_last = Int32(0), seqlen_q // tile_m
        if const_expr(config.has_right):  # row i sees keys below i + right
            first = cutlass.max(start - right + 1, 0) // tile_m
            bare_first = ceil_div(cutlass.max(end - right, 0), tile_m)
        if const_expr(config.has_left):  # and from i + left on
            last = cutlass.min(last, ceil_div(cutlass.max(end - left, 0), tile_m))
            bare_last = cutlass.min(bare_last, cutlass.max(start - left + 1, 0) // tile_m)
        if end - start < tile_n:  # keys past the last one are hidden from all rows
            bare_last = Int32(0)
        return first, cutlass.max(last, first), bare_first, bare_last

    @cute.jit
    def span_visit(self, i, per_head, span):
        """(row tile, which of the heads, whether it is masked) of visit ``i``."""
        first, _, bare_first, bare_last = span
        m = first + i % per_head
        is_masked = Int32(1)
        if (m >= bare_first) & (m < bare_last):
            is_masked = Int32(0)
        return m, i // per_head, is_masked
