"""Epilogue of a row tile: adds the sink, divides the output by the row sums and stores it through shared memory."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass.cute.nvgpu import cpasync, warp

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.fragment import rows_and_columns

__all__ = ["MEETING", "Epilogue"]

MEETING = 5  # first of the named barriers, one per consumer warp group, at which its warps meet: when V is cleared, and O stored


class Epilogue:
    """The part of ``HopperForward`` that finishes a row tile."""

    config: Any

    @cute.jit
    def finished(self, acc, row_max, row_sum, row_excess, rate, sink, heads, factor, inverses=None):
        """Divides ``acc`` by the row sums; leaves the natural log-sum-exp in ``row_sum``. row_excess: what ``acc``'s weights sum to beyond
        ``row_sum``, or None. heads: of the rows. factor: of the weights that dropout keeps, None without it. inverses: gets what rows are
        multiplied by."""
        out = rows_and_columns(acc)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            total = row_sum[r]
            for offset in (2, 1):
                total += cute.arch.shuffle_sync_bfly(total, offset=offset)
            top, rescale = row_max[r] * rate, Float32(1.0)
            if const_expr(self.config.has_sink):
                logit = Float32(sink[heads[r]]) * Float32(LOG2E)
                higher = cute.arch.fmax(top, logit)
                rescale = select(top == -Float32.inf, Float32(0.0), cute.math.exp2(top - higher, fastmath=True), "float")
                total = total * rescale + cute.math.exp2(logit - higher, fastmath=True)
                top = higher
            weight = total
            if const_expr(row_excess is not None):
                excess = row_excess[r]
                for offset in (2, 1):
                    excess += cute.arch.shuffle_sync_bfly(excess, offset=offset)
                weight = total + excess * rescale
            inverse = rescale * cute.arch.rcp_approx(weight) if total > 0.0 else Float32(0.0)
            if const_expr(factor is not None):
                inverse = inverse * factor
            out[r, None].store(out[r, None].load() * inverse)
            if const_expr(inverses is not None):
                inverses[r] = inverse
            found = (top + cute.math.log2(total, fastmath=True)) * Float32(LN2)
            row_sum[r] = select(total > 0.0, found, -Float32.inf, "float")

    def highest(self, tops: Any, rate: Any) -> Any:
        """The rows' highest scores, reduced over the four threads that hold a row; None if the call does not want them."""
        if tops is None:
            return None
        for r in range(cute.size(tops)):
            for offset in (2, 1):
                tops[r] = cute.arch.fmax(tops[r], cute.arch.shuffle_sync_bfly(tops[r], offset=offset))
            tops[r] = tops[r] * rate * Float32(LN2)
        return tops

    @cute.jit
    def blank(self, mma, thread, outputs, sink, facts):
        """Writes a row tile without visits: zeros, -inf, and as lse the sink's logit if there is a sink. A split without visits writes
        its lse alone, by which its output has no weight."""
        tile_m, head_dim_v = self.config.tiles.tile_m, self.config.head_dim_v
        _, _, out, lse, highest = outputs
        positions = rows_and_columns(mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, head_dim_v))))
        first_row, first_column = self.first_row(positions, facts), positions[0, 0][1]
        heads, ends = self.heads(positions, facts), self.rows_ends(positions, facts)
        nothing = self._per_head(heads, lambda head: self.of_nothing(Float32(sink[head])) if self.config.has_sink else -Float32.inf)
        rests = self._per_head(heads, lambda head: cute.domain_offset((facts.q_start, 0), out[None, None, head, facts.q_row]))
        head_dim = 0 if const_expr(self.config.is_split) else cute.size(out, mode=[1])
        pair = cute.make_rmem_tensor(2, self.dtype)
        pair.fill(0.0)
        for r in cutlass.range_constexpr(cute.size(positions, mode=[0])):
            row = first_row + self.apart(r)
            if row < ends[r]:
                if const_expr(not self.config.is_split):
                    for column in cutlass.range(first_column, head_dim, 8, unroll=1):
                        cute.autovec_copy(pair, cute.local_tile(rests[r][row, None], (2,), (column // 2,)))
                if first_column == 0:  # the first of the four threads that hold a row
                    if const_expr(lse is not None):
                        lse[row + facts.q_start, heads[r], facts.q_row] = nothing[r]
                    if const_expr(highest is not None):
                        highest[row + facts.q_start, heads[r], facts.q_row] = -Float32.inf

    def of_nothing(self, logit: Any) -> Any:
        """The log-sum-exp of a row that sees no key, of its sink."""
        return logit

    def _per_head(self, heads: tuple[Any, ...], found: Callable[[Any], Any]) -> tuple[Any, ...]:
        """``found`` of the head of each of a thread's rows, computed once if it is the same."""
        values = [found(heads[0])]
        for before, head in pairwise(heads):
            values.append(values[-1] if head is before else found(head))
        return tuple(values)

    @cute.jit
    def stored(self, acc, tops, lse_rows, mma, thread, group, outputs, out_in_smem, facts):
        """Writes a row tile's output and statistics. tops: the rows' highest scores or None. outputs: (copy atom, its target, out, lse,
        highest scores)."""
        tile_m, columns = self.config.tiles.tile_m, self.config.columns
        atom, target, out, lse, highest = outputs
        positions = rows_and_columns(mma.get_slice(thread).partition_C(cute.make_identity_tensor((tile_m, columns))))
        first_row, heads, ends = self.first_row(positions, facts), self.heads(positions, facts), self.rows_ends(positions, facts)
        for statistic, rows in ((lse, lse_rows), (highest, tops)):
            if const_expr(statistic is not None):
                if positions[0, 0][1] == 0:  # the first of the four threads that hold a row
                    for r in cutlass.range_constexpr(cute.size(rows)):
                        row = first_row + self.apart(r)
                        if row < ends[r]:
                            statistic[row + facts.q_start, heads[r], facts.q_row] = rows[r]
        if const_expr(self.config.is_split):
            self._rows_stored(acc, positions, first_row, out, facts, self._part(group)[1] * columns)
        elif const_expr(self.config.has_entries):
            # the next rows belong to another sequence, so a row tile that the sequence's end cuts is written row by row
            if facts.m_block * self.config.own_q + (self._part(group)[0] + 1) * (64 // self.config.own_heads) > facts.seqlen_q:
                self._rows_stored(acc, positions, first_row, out, facts, self._part(group)[1] * columns)
            else:
                self._tile_stored(acc, mma, thread, group, atom, target, out_in_smem, facts)
        else:
            self._tile_stored(acc, mma, thread, group, atom, target, out_in_smem, facts)

    def _part(self, group: Any) -> tuple[Any, int]:
        """A warp group's part of a row tile: its number among those of 64 rows, and among those of its columns."""
        return group, 0

    @cute.jit
    def _rows_stored(self, acc, positions, first_row, out, facts, first_column: cutlass.Constexpr):
        rows = rows_and_columns(acc)
        rests = self._per_head(
            self.heads(positions, facts), lambda head: cute.domain_offset((facts.q_start, 0), out[None, None, head, facts.q_row])
        )
        head_dim, ends = cute.size(out, mode=[1]), self.rows_ends(positions, facts)
        pair = cute.make_rmem_tensor(2, out.element_type)
        for r in cutlass.range_constexpr(cute.size(rows, mode=[0])):
            if first_row + self.apart(r) < ends[r]:
                row = rests[r][first_row + self.apart(r), None]
                for c in cutlass.range_constexpr(0, cute.size(rows, mode=[1]), 2):
                    column = positions[0, c][1] + first_column  # and the next column: head_dim is even
                    if column < head_dim:
                        for i in cutlass.range_constexpr(2):
                            pair[i] = out.element_type(rows[r, c + i])
                        cute.autovec_copy(pair, cute.local_tile(row, (2,), (column // 2,)))

    @cute.jit
    def _tile_stored(self, acc, mma, thread, group, atom, target, out_in_smem, facts):
        """Stores a warp group's rows through shared memory by TMA, which skips those past the tensor's last one."""
        columns, groups, (rows_of, columns_of) = self.config.columns, self.config.tiles.warp_groups, self._part(group)
        narrow = cute.make_rmem_tensor_like(acc, self.dtype)
        narrow.store(acc.load().to(self.dtype))
        # the rows of Q whose memory the output reuses are read by this warp group alone
        cute.arch.barrier(barrier_id=MEETING + group, number_of_threads=128)
        copy = cute.make_tiled_copy_C(cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.dtype), mma)
        mine = copy.get_slice(thread)
        own = cute.local_tile(out_in_smem, (64 * groups, columns), (0, columns_of))
        cute.copy(copy, mine.retile(narrow), mine.partition_D(own))
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=MEETING + group, number_of_threads=128)
        packed = self.config.own_heads
        if const_expr(packed > 1):
            ratio = target.shape[0][0]
            rows = cute.domain_offset(((facts.head % ratio, facts.q_start), 0), target[None, None, facts.head // ratio, facts.q_row])
            goal = cute.local_tile(rows, ((packed, 64 // packed), columns), ((0, facts.m_block * groups + rows_of), columns_of))
        else:
            rows = cute.domain_offset((facts.q_start, 0), target[None, None, facts.head, facts.q_row])
            goal = cute.local_tile(rows, (64, columns), (facts.m_block * groups + rows_of, columns_of))
        source = cute.local_tile(own, (64, columns), (rows_of, 0))
        source, goal = cpasync.tma_partition(atom, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(goal, 0, 2))
        if cute.arch.make_warp_uniform(thread // 32) % 4 == 0:
            cute.copy(atom, source, goal)
            cute.arch.cp_async_bulk_commit_group()
