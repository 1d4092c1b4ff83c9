"""Tile scheduler: the next row tile and the key tiles that it visits, which the producer warp writes to shared memory for all roles.

All roles take their trip counts from there. A visit is masked or bare; masked ones come first and last, bare ones between: a row tile's
first visit (the only one that may reach past the last key), ``masked`` more, ``bare`` ones and ``behind`` masked ones.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.emit import emit_rows
from anyattn.sequences.block_info import BlockInfo
from anyattn.sequences.integers import maximum, minimum
from anyattn.sequences.seqlen_info import SeqlenInfoQK
from anyattn.sequences.split_kv import split_range

__all__ = ["FACTS", "Facts", "Sizes", "Tables", "Visits"]

FACTS = 16  # numbers per row tile on the board


class Facts(NamedTuple):
    """One row tile, as the producer posts it in shared memory (the board): Int32 each.

    more: the tile's number of query heads, 1 unless heads are packed; 0 ends the row tiles. head: the first of these heads.
    total: visits; masked, bare, behind: those after the first. seqlen_q, seqlen_k: rows in use. q_row, q_start: the entry's queries are
    ``q[q_row, :, q_start:]``. q_first: the position of its first query. left, right: row i sees keys ``i + left <= j < i + right``, as far
    as the config has these bounds. With ``Config.is_split`` q_row is the row of the split's results.
    """

    more: Any
    m_block: Any
    head: Any
    entry: Any
    total: Any
    masked: Any
    bare: Any
    behind: Any
    seqlen_q: Any
    seqlen_k: Any
    q_row: Any
    q_start: Any
    q_first: Any
    left: Any
    right: Any


class Tables(NamedTuple):
    """Tables of the visits, None if the config has none; int32 tensors.

    partial_count, partial_index, full_count, full_index: lists of tiles. order: (rows, 3), m_block (-1: no row tile), head and entry of
    each row tile, and with ``Config.has_count`` one row more, whose first number is the number of valid rows. entries: (B, 9), q_row,
    q_start, seqlen_q, k_row, k_start, seqlen_k, q_first and an entry's place in ragged lists: its first row tile, its first index; or
    without an order (B,), seqlen_k, also int64: an entry's queries and keys are a row of storage each, and it has one row tile.
    pages: (B, largest number of pages of an entry); those after the page of an entry's last key may be any number.
    """

    partial_count: Any
    partial_index: Any
    full_count: Any
    full_index: Any
    order: Any
    entries: Any
    pages: Any


class Sizes(NamedTuple):
    """Run-time sizes. rows: row tiles, each shared by ``spread`` heads, of which ``section`` run side by side. heads: those of an entry. A
    head here is a query head, or the group of heads that share a row tile. With ``Config.is_split`` each head counts once per split in
    ``spread``.

    ratio: query heads per K/V head. pieces_in_page: pieces of ``Config.piece`` rows; 0 without pages.
    """

    rows: Any
    spread: Any
    section: Any
    heads: Any
    ratio: Any
    pieces_in_page: Any


class Visits:
    """The scheduling part of ``HopperForward``'s loading role."""

    config: Any

    @cute.jit
    def counted(self, tables, sizes):
        """The sizes with the true number of rows; the launch passes the capacity of the order."""
        if const_expr(self.config.has_count):
            return Sizes(tables.order[sizes.rows, 0], *sizes[1:])
        return sizes

    def next_in_turn(self, work: Any, workers: Any) -> Any:
        """The work item after ``work`` of a worker, without a counter: workers take items by turns, first to last, then last to first, so
        that the first one's are not all the longest."""
        return (work // workers + 1) * workers + (workers - 1 - work % workers)

    @cute.jit
    def row_tile(self, work, tables, sizes):
        """(m_block, head, entry) of work item ``work``."""
        rows, spread, section, heads, _, _ = sizes
        # heads whose K and V fit the L2 cache together run side by side
        before = work // (section * rows) * section
        at_once = minimum(section, spread - before)
        rest = work - before * rows
        row, inner = rest // at_once, before + rest % at_once
        if const_expr(self.config.has_order):
            m_block, head, entry = (tables.order[row, i] for i in range(3))
        elif const_expr(self.config.has_entries):
            m_block, head, entry = Int32(0), Int32(0), row
        else:
            # if a row sees keys up to its own position, the last rows see most: they go first
            m_block = rows - 1 - row if const_expr(self.config.has_right) else row
            head, entry = Int32(0), Int32(0)
        if const_expr(self.config.spread == "all"):
            entry, head = inner // heads, inner % heads
        elif const_expr(self.config.spread == "heads"):
            head = inner
        return m_block, head, entry

    @cute.jit
    def packed(self, group, sizes):
        """(number, first) of the query heads that share row tiles: a K/V head's are divided into groups, the last may be smaller."""
        most = self.config.heads_per_tile
        groups = ceil_div(sizes.ratio, most)
        before = group % groups * most
        return minimum(sizes.ratio - before, most), group // groups * sizes.ratio + before

    @cute.jit
    def storage(self, entry, tables, lengths):
        """(q_row, q_start, seqlen_q, k_row, k_start, seqlen_k, q_first) of a batch entry."""
        if const_expr(self.config.has_entries and self.config.has_order):
            return tuple(tables.entries[entry, i] for i in range(7))
        seqlen_k = lengths[1]
        if const_expr(self.config.has_entries):  # no more than there is room for, even if the number is wrong
            room = seqlen_k * tables.pages.shape[1] if const_expr(self.config.is_paged) else seqlen_k
            seqlen_k = maximum(minimum(Int32(tables.entries[entry]), room), 0)
        return entry, Int32(0), lengths[0], entry, Int32(0), seqlen_k, Int32(0)

    @cute.jit
    def band(self, entry, head, q_first, captured):
        """(left, right) of the intersection of all bands, relative to an entry's rows, the first of which is at position ``q_first``."""
        left, right = Int32(-(2**30)), Int32(2**30)
        for at, (has_left, has_right) in self.band_sides:
            scalars, tensors = self.captured(captured, at)
            low, high = emit_rows(self.config.exprs[at], scalars, tensors, entry, head, [Int32(0)])[0]
            if const_expr(has_left):
                left = cutlass.max(left, Int32(low) + q_first)
            if const_expr(has_right):
                right = cutlass.min(right, Int32(high) + q_first)
        return left, right

    @cute.jit
    def band_visits(self, m_block, seqlen_q, seqlen_k, left, right):
        """(total, masked, bare, behind, last key tile) of a row tile whose rows see bands of keys."""
        config = self.config
        tile_m, tile_n = config.tile_q, config.tiles.tile_n
        info = SeqlenInfoQK.create(0, seqlen_q, seqlen_k, tile_m=tile_m, tile_n=tile_n)
        if const_expr(not (config.has_left or config.has_right)):
            total = ceil_div(seqlen_k, tile_n)
            return total, Int32(0), cutlass.max(total - 1, 0), Int32(0), total - 1
        # BlockInfo counts relative to i + seqlen_k - seqlen_q for row i
        offset = seqlen_k - seqlen_q
        window_left = offset - left if const_expr(config.has_left) else None
        window_right = right - 1 - offset if const_expr(config.has_right) else None
        blocks = BlockInfo(tile_m, tile_n, False, True, False, window_left, window_right)
        n_min, n_max = blocks.get_n_block_min_max(info, m_block)
        n_left = maximum(blocks.get_n_block_min_before_local_mask(info, m_block, n_min), n_min)
        n_right = maximum(blocks.get_n_block_min_causal_local_mask(info, m_block, n_min), n_min)
        total = maximum(n_max - n_min, 0)
        after = minimum(n_max - 1, n_right)  # the lowest masked tile at the upper end
        masked = n_max - 1 - after
        bare = maximum(after - n_left, 0)
        return total, masked, bare, maximum(total - 1 - masked - bare, 0), n_max - 1

    @cute.jit
    def share(self, split, splits, visits):
        """The visits of part ``split`` of a row tile's, as ``band_visits`` has them: equal shares in the order of the visits, the last ones
        may be shorter or empty."""
        total, masked, bare, _, last = visits
        begin, end = split_range(0, total, split, splits)
        size, after = end - begin, begin + 1  # the first visit of a part is masked like that of the whole
        own_masked = maximum(minimum(end, 1 + masked) - after, 0)
        own_bare = maximum(minimum(end, 1 + masked + bare) - maximum(after, 1 + masked), 0)
        return size, own_masked, own_bare, maximum(size - 1 - own_masked - own_bare, 0), last - begin

    @cute.jit
    def list_visits(self, m_block, entry, head, seqlen_k, tables):
        """(total, masked, bare, behind), and the plan for ``listed``: (partial tiles, whether a full one is first, lists, sizes, skips)."""
        cut_m, cut_n = self.config.list_cut
        row = m_block // cut_m
        partial, full = self._lists(row, entry, head, seqlen_k, tables)
        (partial_size, partial_list), (full_size, full_list) = partial, full
        partial_skip, _ = self._past_the_end(partial_size, partial_list, seqlen_k)
        full_skip, full_is_cut = self._past_the_end(full_size, full_list, seqlen_k)
        partials, fulls = partial_size * cut_n - partial_skip, full_size * cut_n - full_skip
        total = partials + fulls
        # a full tile that the last key cuts must be the first visit, the only one that checks for the last key
        full_first = Int32(1) if full_is_cut else Int32(0)
        masked = partials if full_is_cut else cutlass.max(partials - 1, 0)
        if const_expr(self.config.partial is None):  # then partial tiles are full ones
            masked = Int32(0)
        bare = cutlass.max(total - 1 - masked, 0)
        lists, sizes, skips = (partial_list, full_list), (partial_size, full_size), (partial_skip, full_skip)
        return (total, masked, bare, Int32(0)), (partials, full_first, lists, sizes, skips)

    @cute.jit
    def head_of_lists(self, head, sizes):
        """The head whose lists a query head's row tiles visit: itself, or its K/V head."""
        return head // sizes.ratio if const_expr(self.config.by_kv_head) else head

    @cute.jit
    def _lists(self, row, entry, head, seqlen_k, tables):
        kind = self.config.lists
        found = []
        head = head if const_expr(self.config.per_head) else Int32(0)
        for count, index in ((tables.partial_count, tables.partial_index), (tables.full_count, tables.full_index)):
            if const_expr(count is None):
                found.append((Int32(0), found[0][1]))
            elif const_expr(kind == "dense"):
                listed = entry if const_expr(self.config.per_entry) else Int32(0)
                found.append((count[listed, head, row], index[listed, head, row, None]))
            else:
                at = tables.entries[entry, 7] + row
                if const_expr(kind == "ragged"):
                    entries = index[head, at, None]
                else:
                    columns = ceil_div(seqlen_k, self.config.list_cut[1] * self.config.tiles.tile_n)
                    entries = cute.domain_offset((tables.entries[entry, 8] + row * columns,), index[head, None])
                found.append((count[head, at], entries))
        return found

    @cute.jit
    def _past_the_end(self, size, entries, seqlen_k):
        """For a list's last tile: how many of the kernel's tiles in it lie wholly past the last key, and whether the last key cuts one."""
        cut, tile_n = self.config.list_cut[1], self.config.tiles.tile_n
        skip, is_cut = Int32(0), cutlass.Boolean(False)
        if size > 0:
            room = seqlen_k - entries[size - 1] * (cut * tile_n)
            if const_expr(cut > 1):
                skip = cut - cutlass.min(ceil_div(room, tile_n), cut)
            is_cut = (room < cut * tile_n) & (room % tile_n != 0)
        return skip, is_cut

    @cute.jit
    def listed(self, i, plan):
        """(key tile, whether the partial predicate is evaluated) of visit ``i``; lists are traversed backwards. plan: ``list_visits``."""
        cut = self.config.list_cut[1]
        partials, full_first, lists, sizes, skips = plan
        in_partial = (i >= full_first) & (i < partials + full_first)
        place = i - full_first if in_partial else cutlass.max(i - partials, 0)
        n = Int32(0)
        if in_partial:
            n = self._at(place + skips[0], lists[0], sizes[0], cut)
        else:
            n = self._at(place + skips[1], lists[1], sizes[1], cut)
        return n, Int32(1) if in_partial else Int32(0)

    @cute.jit
    def _at(self, place, entries, size, cut: cutlass.Constexpr):
        if const_expr(cut == 1):
            return entries[cutlass.max(size - 1 - place, 0)]
        return entries[cutlass.max(size - 1 - place // cut, 0)] * cut + cut - 1 - place % cut
