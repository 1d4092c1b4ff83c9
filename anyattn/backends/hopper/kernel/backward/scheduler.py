"""Backward tile scheduler: the next key tile and the row tiles that see it, which the producer warp writes to shared memory.

A visit is a row tile of one of the query heads that share the keys. Unless said otherwise below, the heads are visited one after another,
each from its first row tile to its last. A visit is masked or bare: by bands and lists, all rows of a bare visit see all keys of the tile.

Query heads that share keys are interleaved under a causal mask (``BackwardConfig.interleaves_heads``): a row tile is visited for each of
them before the next row tile. Thread blocks then read the same row tiles at about the same time, and find them in the L2 cache. In even
rounds visits begin at the last row tile: thread blocks start together there, and those with later keys, whose diagonals are nearer, end
earlier. In odd rounds visits begin at the diagonal: a thread block that starts n visits later than another also starts n visits ahead of
its first row tile, so that both visit the same row tiles. With one head after another, their distance would grow with every head, because
the first key tiles have the most rows. With sequences, whose key tiles follow one another, and with deterministic sums visits always begin
at the last row tile.

Deterministic sums are added in the order in which a head's key tiles are drawn, so that no tile waits for a tile that has not started. Rows
then go from the last to the first: key tiles that start together at the last rows follow one another at a distance of one visit, and with
causal masks and windows no tile waits at the lowest rows that see it, as it would in ascending order. With one head after another, a later
tile, which sees fewer rows, would wait anew at the last rows of every head. Tiles are drawn in ascending order. Where each query head has
its own keys, a causal tile has fewer visits than the one before, by about one, so that all tiles of a head that follow one another at a
distance of one visit would end together, and the next ones would start together and wait: there tiles are drawn in folds
(``VisitsRows.folded``), whose distances grow by one visit and shrink again.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.softmax import Softmax
from anyattn.backends.hopper.kernel.tile_scheduler import Visits
from anyattn.sequences.l2_groups import fills_one_round

__all__ = ["KEY_FACTS", "VISIT_FACTS", "KeyFacts", "KeySizes", "KeyTables", "Visit", "VisitsRows"]

KEY_FACTS = 8  # numbers of one key tile on the board
VISIT_FACTS = 7  # numbers of one visit on the board
# key tiles of a fold: about as many as work on one head at a time (``_IN_TURN`` of ``backward_launches``). The same for all calls, so that
# the bits of dq depend neither on the batch nor on the device
_FOLD = 8


class KeyFacts(NamedTuple):
    """One key tile, as the producer posts it: Int32 each.

    more: 0 after the last tile. n_block: the tile's number. kv_head, entry: the head and the batch entry of the keys. total: the number of
    visits by all heads. seqlen_q, seqlen_k: rows in use.
    """

    more: Any
    n_block: Any
    kv_head: Any
    entry: Any
    total: Any
    seqlen_q: Any
    seqlen_k: Any


class Visit(NamedTuple):
    """One row tile that sees keys of the current key tile, as the producer posts it with the stage of its Q: Int32 each.

    m_block, head: the row tile. is_masked: some row does not see all keys of the tile. asks: the partial predicate is evaluated.
    left, right: row i sees keys ``i + left <= j < i + right``, for those of the bounds that the config has. turn: the number of key tiles
    that add to the row tile before this one; None unless the config ``posts_turns``.
    """

    m_block: Any
    head: Any
    is_masked: Any
    asks: Any
    left: Any
    right: Any
    turn: Any = None


class KeyTables(NamedTuple):
    """int32 tensors that determine the visits; None if the config has none.

    partial_count, full_count: (B, H, N), partial_index, full_index: (B, H, N, M): the row tiles of each key tile, in the tiles of the
    lists (``BackwardConfig.list_cut``); B and H may be 1; for sequences see ``BackwardConfig.lists``. ranks: (B, H, N, M), for
    deterministic results: the number of earlier key tiles that list a row tile; all row tiles are then in the partial list, in descending
    order, each as twice its number, plus 1 if it is partial. order: (rows + 1, 3), n_block, 0 and entry of each key tile; the first number
    of the last row is the number of key tiles; without entries, order is given with lists only, and its entries are 0. entries: (B, 9),
    k_row, k_start, seqlen_k, q_row, q_start, seqlen_q, 0 and an entry's place in ragged lists: its first key tile, its first index.
    """

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any
    ranks: Any
    order: Any
    entries: Any


class KeySizes(NamedTuple):
    """Run-time sizes. rows: the key tiles of an entry or, with ``entries``, of all entries. spread: the kv heads that have each of these
    tiles: those of all entries or, with ``entries``, of one; ``section`` of them are processed side by side. heads: an entry's kv heads.
    ratio: query heads for each kv head. parts: None, or the number of these ``heads`` for each head of K and V: each then has ``ratio`` of
    that head's query heads."""

    rows: Any
    spread: Any
    section: Any
    heads: Any
    ratio: Any
    parts: Any = None


class VisitsRows:
    """The scheduling part of ``HopperBackward``'s producer role."""

    config: Any
    band_sides: Any

    place_of_words = VISIT_FACTS  # on the board, of ``Drops.words_of_visit``
    captured = Softmax.captured
    band = Visits.band

    @property
    def visit_facts(self) -> int:
        """Numbers of one visit on the board."""
        return VISIT_FACTS + (1 + self.config.tiles.tile_m // 16) * self.config.has_dropout

    @cute.jit
    def key_tile(self, work, tables, sizes):
        """(n_block, kv head, entry) of work item ``work``, in the order of ``tables.order`` if there is one, before ``folded``. Under a
        causal mask most rows see the first key tiles, so these go first."""
        rows, spread, section, heads = sizes[:4]
        before = work // (section * rows) * section
        at_once = cutlass.min(section, spread - before)
        rest = work - before * rows
        inner = before + rest % at_once
        n_block = rest // at_once
        if const_expr(self.config.has_entries):
            return tables.order[n_block, 0], inner, tables.order[n_block, 2]
        if const_expr(self.config.lists is not None and tables.order is not None):
            n_block = tables.order[n_block, 0]
        if const_expr(self.config.has_left and not self.config.has_right and not self.config.is_deterministic):
            n_block = rows - 1 - n_block
        return n_block, inner % heads, inner // heads

    def key_tiles(self, seqlen_k: Any) -> Any:
        """The number of key tiles of so many keys."""
        return ceil_div(seqlen_k, self.config.tiles.tile_n)

    def folded(self, i: Any, seen: Any, tiles: Any, sizes: Any) -> Any:
        """The ``i``-th key tile of a head among the first ``seen`` of its ``tiles``, and the place of tile ``i`` among them, in folds of
        ``_FOLD`` tiles: the first fold is in descending order, the second in ascending order, and so on. Sequences with fewer tiles than a
        fold keep ascending order: by a simulation of turns, many short documents take 8 % longer in folds. So do all where several query
        heads share keys."""
        group = sizes.ratio if sizes.parts is None else sizes.ratio * sizes.parts
        start, is_turned = i // _FOLD * _FOLD, (group == 1) & (tiles >= _FOLD) & (i // _FOLD % 2 == 0)
        return select(is_turned, start + cutlass.min(start + _FOLD, seen) - 1 - i, i, "int")

    def folded_turn(self, m: Any, n_block: Any, right: Any, seqlen_k: Any, sizes: Any) -> Any:
        """The number of key tiles before this one, in the order of ``folded``, that row tile ``m`` sees."""
        tiles = self.key_tiles(seqlen_k)
        seen = self.key_tiles((m + 1) * self.config.tiles.tile_m + right - 1)
        return self.folded(n_block, cutlass.min(seen, tiles), tiles, sizes)

    @cute.jit
    def plan_of(self, n_block, head, entry, lengths, tables, captured, sizes):
        """(number of visits of a query head, plan from which ``visit_of`` makes them)."""
        seqlen_q, seqlen_k = lengths
        left, right = Int32(0), Int32(0)
        if const_expr(self.config.lists is None):
            left, right = self.band(entry, head, Int32(0), captured)
            span = self.row_span(n_block, seqlen_q, seqlen_k, left, right)
            visits, plan = span[1] - span[0], span
        else:
            visits, plan = self.listed_rows(n_block, self.head_of_lists(head, sizes), entry, seqlen_q, tables)
        return visits, (plan, left, right, sizes)

    @cute.jit
    def visit_of(self, i, n_block, head, lengths, planned):
        """Visit ``i`` of a query head."""
        plan, left, right, sizes = planned
        seqlen_q, seqlen_k = lengths
        turn = None
        if const_expr(self.config.lists is None):
            m, is_masked = self.span_visit(i, plan)
            asks = Int32(0)
            if const_expr(self.config.folds_keys):
                turn = self.folded_turn(m, n_block, right, seqlen_k, sizes)
        else:
            m, asks = self.listed_visit(i, plan)
            turn = self.listed_turn(m, n_block, plan)
            is_masked = asks
            tile_m, tile_n = self.config.tiles.tile_m, self.config.tiles.tile_n
            if ((m + 1) * tile_m > seqlen_q) | ((n_block + 1) * tile_n > seqlen_k):
                is_masked = Int32(1)
        return Visit(m, head, is_masked, asks, left, right, turn)

    @cute.jit
    def begins_last(self, work, sizes, workers):
        """1 if the visits of interleaved heads begin at the last row tile, as deterministic ones always do, else 0. work: the key tile's
        place in the order of all. workers: thread blocks, which draw a round of key tiles at once."""
        if const_expr(self.config.is_deterministic):
            return Int32(1)
        rows, _, section, _, ratio = sizes[:5]
        found = Int32(0)
        if ratio > 1:
            of_round = workers
            if fills_one_round(section * rows, workers):
                of_round = section * rows
            if const_expr(self.config.has_entries) or work // of_round % 2 == 0:
                found = Int32(1)
        return found

    def interleaved(self, i: Any, of_head: Any, ratio: Any, begins_last: Any) -> tuple[Any, Any]:
        """(query head of the group, visit of this head) of visit ``i`` of a key tile. of_head: the visits of each head."""
        at = i // ratio
        return i % ratio, select(begins_last != 0, of_head - 1 - at, at, "int")

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
    def span_visit(self, i, span):
        """(row tile, whether it is masked) of visit ``i``."""
        first, end, bare_first, bare_last = span
        m = first + i
        if const_expr(self.config.is_deterministic and not self.config.interleaves_heads):  # whose order is reversed already
            m = end - 1 - i
        is_masked = Int32(1)
        if (m >= bare_first) & (m < bare_last):
            is_masked = Int32(0)
        return m, is_masked

    @cute.jit
    def head_of_lists(self, head, sizes):
        """The head whose lists are those of a query head: itself, or its K/V head."""
        if const_expr(not self.config.by_kv_head):
            return head
        return head // (sizes.ratio if const_expr(sizes.parts is None) else sizes.ratio * sizes.parts)

    @cute.jit
    def listed_rows(self, n_block, head, entry, seqlen_q, tables):
        """(visits, plan for ``listed_visit``) of a query head: partial tiles first, then full ones."""
        head = head if const_expr(self.config.per_head) else Int32(0)
        if const_expr(tables.ranks is not None):
            return self.ranked_rows(n_block, head, entry, seqlen_q, tables)
        found = []
        for count, index in ((tables.partial_count, tables.partial_index), (tables.full_count, tables.full_index)):
            if const_expr(count is None):
                found.append((Int32(0), found[0][1]))
            else:
                size, entries = self.list_of(count, index, n_block, head, entry, seqlen_q, tables)
                found.append((self.rows_listed(size, entries, seqlen_q), entries))
        (partials, _), (fulls, _) = found
        return partials + fulls, (partials, found[0][1], found[1][1], None)

    @cute.jit
    def ranked_rows(self, n_block, head, entry, seqlen_q, tables):
        """``listed_rows`` for lists with ranks. The plan begins with the number of the first list tile's row tiles that are past the last
        row: they are left out."""
        cut, tile_m = self.config.list_cut[0], self.config.tiles.tile_m
        size, entries = self.list_of(tables.partial_count, tables.partial_index, n_block, head, entry, seqlen_q, tables)
        missing = Int32(0)
        if const_expr(cut > 1):
            if size > 0:
                missing = cutlass.max((entries[0] // 2 + 1) * cut - ceil_div(seqlen_q, tile_m), 0)
        per_entry = entry if const_expr(self.config.per_entry) else Int32(0)
        ranks = tables.ranks[per_entry, head, n_block // self.config.list_cut[1], None]
        return size * cut - missing, (missing, entries, None, ranks)

    @cute.jit
    def list_of(self, count, index, n_block, head, entry, seqlen_q, tables):
        """(length, list) of the row tiles that see a key tile, in the lists' tiles."""
        cut_m, cut_n = self.config.list_cut
        line = n_block // cut_n
        if const_expr(self.config.lists == "dense"):
            entry = entry if const_expr(self.config.per_entry) else Int32(0)
            return count[entry, head, line], index[entry, head, line, None]
        at = tables.entries[entry, 7] + line
        if const_expr(self.config.lists == "ragged"):
            return count[head, at], index[head, at, None]
        rows = ceil_div(seqlen_q, cut_m * self.config.tiles.tile_m)
        return count[head, at], cute.domain_offset((tables.entries[entry, 8] + line * rows,), index[head, None])

    @cute.jit
    def rows_listed(self, size, entries, seqlen_q):
        """The number of row tiles in a list's tiles, without those of the last list tile that are past the last row."""
        cut, tile_m = self.config.list_cut[0], self.config.tiles.tile_m
        rows = size * cut
        if const_expr(cut > 1):
            if size > 0:
                room = ceil_div(seqlen_q, tile_m) - entries[size - 1] * cut
                rows = (size - 1) * cut + cutlass.min(cut, room)
        return rows

    @cute.jit
    def listed_visit(self, i, plan):
        """(row tile, whether the partial predicate is evaluated) of visit ``i``."""
        cut = self.config.list_cut[0]
        partials, partial_list, full_list, ranks = plan
        m, asks = Int32(0), Int32(1)
        if const_expr(ranks is not None):
            i += partials  # the row tiles that are left out come first
            m, asks = partial_list[i // cut] // 2 * cut + cut - 1 - i % cut, partial_list[i // cut] % 2
        elif i < partials:
            m = partial_list[i // cut] * cut + i % cut
        else:
            asks = Int32(0)
            m = full_list[(i - partials) // cut] * cut + (i - partials) % cut
        return m, asks

    def listed_turn(self, m: Any, n_block: Any, plan: Any) -> Any:
        """The number of earlier key tiles that have the row tile in their lists."""
        cut_m, cut_n = self.config.list_cut
        return None if plan[3] is None else plan[3][m // cut_m] * cut_n + n_block % cut_n

    @cute.jit
    def turn_of(self, n_block, visit):
        """The number of key tiles that add to a row tile before this one: from the first that its rows see, or as the producer posts it."""
        turn = visit.turn if const_expr(self.config.posts_turns) else n_block
        if const_expr(self.config.has_left):
            turn = n_block - cutlass.max(visit.m_block * self.config.tiles.tile_m + visit.left, 0) // self.config.tiles.tile_n
        return turn
