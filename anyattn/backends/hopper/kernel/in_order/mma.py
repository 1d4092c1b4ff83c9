"""MMA role of the kernel in the order of keys: the numbers of ``backends.triton.kernels.softmax``, operation by operation."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.in_order import columns_of_q_held
from anyattn.backends.hopper.kernel.fragment import narrowed, narrowed_to, rows_and_columns
from anyattn.backends.hopper.kernel.in_order.arithmetic import difference, power_of_2, product, quotient, total
from anyattn.backends.hopper.kernel.mma import VOTE, Multiplies, all_of_group
from anyattn.backends.hopper.kernel.operand import to_registers
from anyattn.sequences.sections import KEYS_IN_ORDER, LAG, SECTION

__all__ = ["MultipliesInOrder"]

_LOWEST = -1.7014118e38  # a row maximum before the first key, in base 2: minus it, -inf stays -inf
_TILES = SECTION // KEYS_IN_ORDER  # of a section
_FAR = 2  # the number of the place in global memory
_AT_ONCE = 8  # loads of earlier output under way, four numbers each
_PARTS = 2  # sums of a row that a thread has: those of its even and odd columns
_MOST = 2.0 ** (LAG - 1)  # a bound of these sums of a tile's weights, by which no exponent is near LAG


class _Sections(NamedTuple):
    """Registers of a thread. q: its part of Q's first columns, in the order of a product's first operand. tile: the number of the key tile
    at hand. sums: of the rows' weights in the section at hand, (row, part). total, highest: the sum and the maximum, in base 2, of the
    rows' earlier sections; earlier: 1 if there are any, whose output is stored. factors: by which a row's earlier output and that of the
    section that has ended are multiplied. tops: the rows' highest scores over this thread's columns; None if the call wants none."""

    q: Any
    tile: Any
    sums: Any
    total: Any
    highest: Any
    earlier: Any
    factors: Any
    tops: Any


class MultipliesInOrder(Multiplies):
    """The MMA role of ``HopperInOrderForward``.

    Keys are visited from the first to the last, and every ``SECTION`` keys have an output, a sum and a maximum of their own, which
    are merged in ascending order; the output of earlier sections is stored (``of_sections``). A row's maximum moves by one rule, no weight
    is computed by other instructions than in Triton's kernel, and no product is fused into a sum by the compiler: for a row, all numbers
    are those of that kernel, whatever tile the row is in. Columns of Q for which registers have room are read into them once: tiles of 64
    keys take as much of shared memory's bandwidth for Q as for K.

    The rule lets a maximum lag behind by ``LAG``, so that tiles without a mask can be guessed at, as in ``speculative_softmax``: weights by
    the held maximum whose sums are small prove that no exponent is above ``LAG``, so that no maximum moves, and are then the very numbers
    of the rule. Prefill of 8,192 rows so took 1.11 instead of 1.31 times the default's time (H200, causal, D 128). Four warp groups, whose
    registers do not hold a tile's scores and weights, guess in the place of scores; if any of a group's rows was guessed wrongly, the group
    computes the scores again, for which K is kept. So D 64 took 1.09 times the default's time, three groups 1.15.
    """

    dtype: Any
    masked: Any
    highest_of: Any
    heads: Any
    stored: Any
    fours_of_sections: Any

    def _columns_held(self) -> int:
        return columns_of_q_held(self.config.tiles.tile_m, self.config.head_dim)

    def _from_registers(self) -> Any:
        """The tiled MMA of scores with Q in registers."""
        along, tiles = OperandMajorMode.K, self.config.tiles
        groups, source = (tiles.warp_groups, 1, 1), warpgroup.OperandSource.RMEM
        return helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, groups, (64, tiles.tile_n), source)

    def tops_of(self, acc: Any) -> Any:
        rows, mma = cute.size(rows_and_columns(acc), mode=[0]), self._from_registers()
        q = mma.make_fragment_A(mma.partition_shape_A((self.config.tiles.tile_m, self._columns_held())))
        tile, earlier = (cute.make_rmem_tensor(1, Int32) for _ in range(2))
        sums, of_total, highest, factors = (cute.make_rmem_tensor(shape, Float32) for shape in ((rows, _PARTS), rows, rows, (rows, 2)))
        return _Sections(q, tile, sums, of_total, highest, earlier, factors, super().tops_of(acc))

    def _lowest(self, rate: Any) -> Any:
        """A row maximum before the first key, of raw products."""
        return Float32(_LOWEST) * cute.arch.rcp_approx(cute.arch.fmax(rate, Float32(1.0)))

    @cute.jit
    def _first(self, fixed, sums, p, given, q_state, k_state, v_state):
        _, _, shape_s, positions, pipes, board, group, thread, in_smem = fixed
        acc, row_max, _, _, sections = sums
        facts, _, rate, captured, limits = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        acc.fill(0.0)
        row_max.fill(self._lowest(rate))
        for x, value in ((sections.total, 0.0), (sections.highest, _LOWEST)):
            x.fill(value)
        sections.earlier[0] = Int32(0)
        if const_expr(sections.tops is not None):
            sections.tops.fill(-Float32.inf)
        mma, tile = self._from_registers(), in_smem[0][None, None, q_state.index]
        to_registers(mma, sections.q, tile, self._again(thread), self.dtype, self._columns_held())
        pipes[1].consumer_wait(k_state)
        n = sections.tile[0] = board[1][k_state.index] // 2
        self._my_turn(group)
        self._scores(fixed, scores, q_state, k_state, self._q_held(sections))
        self._next_turn(group)
        warpgroup.wait_group(0)
        self._keys_read(pipes, k_state)
        self.masked(scores, positions, n, facts, captured, limits, Int32(1), True)
        if const_expr(sections.tops is not None):
            self.raise_tops(sections.tops, scores, None)
        self._weights(scores, sums, rate, True)
        p.store(narrowed(scores, self.dtype).load())

    def _q_held(self, sections: Any) -> tuple[Any, Any, int]:
        """The columns of Q in registers, for ``_scores``."""
        return self._from_registers(), sections.q, self._columns_held()

    @cute.jit
    def _steps(self, fixed, sums, p, given, q_state, k_state, v_state):
        """The tiles after the first: masked at a window's left end, bare, masked at the right end, of which the last may be cut."""
        pipes, facts, thread, group, in_smem = fixed[4], given[0], fixed[7], fixed[6], fixed[8]
        left, bare, right = facts.behind, facts.bare, facts.masked + 1
        if left > 0:  # what is first of these has been visited
            left -= 1
        elif bare > 0:
            bare -= 1
        else:
            right -= 1
        if const_expr(self.config.has_left):
            for _ in cutlass.range(left, unroll=1):
                self._step(fixed, sums, p, given, q_state, k_state, v_state, True)
                k_state.advance()
                v_state.advance()
        for _ in cutlass.range(bare, unroll=1):
            self._step(fixed, sums, p, given, q_state, k_state, v_state, False)
            k_state.advance()
            v_state.advance()
        for _ in cutlass.range(right, unroll=1):
            self._step(fixed, sums, p, given, q_state, k_state, v_state, True)
            k_state.advance()
            v_state.advance()
        if const_expr(self.config.has_entries):
            room = facts.seqlen_k - sums[4].tile[0] * self.config.tiles.tile_n
            self._wiped(in_smem[2], pipes, v_state, room, thread, group)
        self._last(fixed, sums, p, v_state)
        pipes[2].consumer_release(v_state)
        v_state.advance()
        return k_state, v_state

    @cute.jit
    def _step(self, fixed, sums, p, given, q_state, k_state, v_state, is_masked: cutlass.Constexpr):
        _, _, shape_s, positions, pipes, _, group, _, _ = fixed
        acc, _, _, _, sections = sums
        facts, _, _, captured, limits = given
        scores = cute.make_rmem_tensor(shape_s, Float32)
        n = sections.tile[0] = sections.tile[0] + 1
        pipes[1].consumer_wait(k_state)
        self._my_turn(group)
        self._scores(fixed, scores, q_state, k_state, self._q_held(sections))
        self._second(fixed, acc, p, v_state)
        self._next_turn(group)
        self._scored(pipes, k_state, v_state)
        if const_expr(is_masked):
            self.masked(scores, positions, n, facts, captured, limits, Int32(1), True)
        if const_expr(sections.tops is not None):
            self.raise_tops(sections.tops, scores, None)
        self._weighed(fixed, sums, p, given, (scores, n % _TILES == 0, v_state, q_state, k_state), is_masked, True)

    @cute.jit
    def _scored(self, pipes, k_state, v_state):
        """Waits for the scores. K is released unless a guess may need it again."""
        warpgroup.wait_group(1)
        if const_expr(not self.config.recomputes):
            self._keys_read(pipes, k_state)

    @cute.jit
    def _weighed(self, fixed, sums, p, given, of_tile, is_masked: cutlass.Constexpr, asks: cutlass.Constexpr):
        """The weights of a tile, which it stores in ``p``, and the merging of a section that has ended. of_tile: the scores, whether the
        tile is the first of its section, and the states of the pipelines of V, at the tile before, of Q and of K."""
        _, _, shape_s, _, pipes, _, group, thread, in_smem = fixed
        acc, _, _, row_scale, sections = sums
        _, _, rate, captured, _ = given
        scores, is_new, v_state, q_state, k_state = of_tile
        powers = scores if const_expr(self.config.recomputes) else cute.make_rmem_tensor(shape_s, Float32)
        added = cute.make_rmem_tensor((cute.size(row_scale), _PARTS), Float32)
        is_right = Boolean(False)
        if const_expr(not is_masked):
            if not is_new:
                is_right = self._guessed_at(scores, powers, added, sums, rate, group)
                if const_expr(self.config.recomputes):
                    if not is_right:
                        self._scores(fixed, scores, q_state, k_state, self._q_held(sections))
                        warpgroup.wait_group(0)
        if const_expr(self.config.recomputes):
            self._keys_read(pipes, k_state)
        self._values_read(pipes[2], v_state)
        if is_right:
            narrowed_to(p, powers, self.dtype)
            for r in cutlass.range_constexpr(cute.size(row_scale)):
                for part in cutlass.range_constexpr(_PARTS):
                    sections.sums[r, part] = total(added[r, part], sections.sums[r, part])
        else:
            if is_new:
                self._kept(sums, rate)
                self._weights(scores, sums, rate, True)
                self._merged(acc, sections, self.of_sections(in_smem, q_state, captured), self._again(thread), False)
            else:
                self._rescaled(acc, row_scale, self._weights(scores, sums, rate, False))
            p.store(narrowed(scores, self.dtype).load())

    @cute.jit
    def _rescaled(self, acc, row_scale, rescales):
        if rescales:
            out = rows_and_columns(acc)
            for r in cutlass.range_constexpr(cute.size(row_scale)):
                for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                    out[r, c] = product(out[r, c], row_scale[r])

    def _kept(self, sums: Any, rate: Any) -> None:
        """Merges the sums and maxima of the section that has ended with those of earlier ones; the maxima of the next begin anew."""
        _, row_max, _, _, sections = sums
        for r in range(cute.size(row_max)):
            found = total(sections.sums[r, 0], sections.sums[r, 1])
            for offset in (2, 1):
                found = total(found, cute.arch.shuffle_sync_bfly(found, offset=offset))
            top = select(found == 0.0, Float32(_LOWEST), product(row_max[r], rate), "float")
            highest = cute.arch.fmax(sections.highest[r], top)
            for i, x in enumerate((sections.highest[r], top)):
                sections.factors[r, i] = power_of_2(difference(x, highest))
            sections.total[r] = cute.math.fma(sections.total[r], sections.factors[r, 0], product(found, sections.factors[r, 1]))
            sections.highest[r] = highest
            row_max[r] = self._lowest(rate)

    def _guessed_at(self, scores, powers, added, sums, rate, group):
        """Computes a tile's weights, and their sums, by the maxima held. Returns whether they are those of ``_weights``."""
        row_max = sums[1]
        s, to, right = rows_and_columns(scores), rows_and_columns(powers), Boolean(True)
        for r in range(cute.size(row_max)):
            self._weights_by(s, to, r, product(row_max[r], rate), rate)
            for part in range(_PARTS):
                added[r, part] = self._added(to, r, part)
                right = right & (added[r, part] <= _MOST)
        if const_expr(self.config.recomputes):  # all of a group must take part in a product
            right = all_of_group(right, VOTE + group)
        return cute.arch.vote_all_sync(right)  # by which the compiler knows that a warp agrees: else 64 bytes go to local memory

    def _weights_by(self, scores: Any, to: Any, r: int, base: Any, rate: Any) -> None:
        """Writes a row's weights, powers of 2, from its scores and what is subtracted from them."""
        for c in range(cute.size(scores, mode=[1])):
            to[r, c] = power_of_2(cute.math.fma(scores[r, c], rate, -base))

    def _added(self, weights: Any, r: int, part: int) -> Any:
        """The sum of a thread's even or odd columns of a row."""
        found = weights[r, part]
        for c in range(part + _PARTS, cute.size(weights, mode=[1]), _PARTS):
            found = total(found, weights[r, c])
        return found

    @cute.jit
    def _weights(self, scores, sums, rate, is_first: cutlass.Constexpr):
        """Replaces a tile's scores by weights, and updates maxima and sums. is_first: of its section. Returns whether earlier output must
        be rescaled."""
        _, row_max, _, row_scale, sections = sums
        s, moves = rows_and_columns(scores), Boolean(False)
        for r in cutlass.range_constexpr(cute.size(row_max)):
            held = row_max[r]
            top = self.highest_of(s, r, None, -Float32.inf)
            has_moved = cute.math.fma(top, rate, -product(held, rate)) > LAG  # of the exponent that a guess would have
            top = select(has_moved, top, held, "float")
            base = product(top, rate)
            self._weights_by(s, s, r, base, rate)
            if const_expr(not is_first):
                row_scale[r] = power_of_2(select(has_moved, difference(product(held, rate), base), Float32(0.0), "float"))
                moves = moves | has_moved
            for part in cutlass.range_constexpr(_PARTS):
                found = self._added(s, r, part)
                if const_expr(not is_first):
                    found = total(found, product(sections.sums[r, part], row_scale[r]))
                sections.sums[r, part] = found
            row_max[r] = top
        return cute.arch.vote_any_sync(moves)

    def _portions(self) -> list[tuple[int, int, int]]:
        """(place, first, number) of the fours of a thread's output that are loaded at once, the first columns' first."""
        found = []
        for place, fours in enumerate(self.fours_of_sections()):
            count = next(n for n in range(_AT_ONCE, 0, -1) if fours % n == 0)
            found += [(place, first, count) for first in range(0, fours, count)]
        return found

    @cute.jit
    def _merged(self, acc, sections, stored, thread, is_last: cutlass.Constexpr):
        """Merges the output of a section, after ``_kept``, with that of the sections before. stored: ``of_sections``. is_last: the result
        stays in ``acc``; else it is stored, and ``acc`` is 0."""
        out, earlier, factors = rows_and_columns(acc), sections.earlier[0] != 0, sections.factors
        portions, before = self._portions(), 0
        for portion in cutlass.range_constexpr(len(portions)):
            number, at, count = portions[portion]
            fours = [cute.make_rmem_tensor(4, Float32) for _ in range(count)]
            if const_expr(number == _FAR):  # a row tile's first section has nothing to wait for
                for i in cutlass.range_constexpr(count):
                    fours[i].fill(0.0)
                if earlier:
                    for i in cutlass.range_constexpr(count):
                        cute.autovec_copy(stored[number][None, thread, at + i], fours[i])
            else:
                for i in cutlass.range_constexpr(count):
                    cute.autovec_copy(stored[number][None, thread, at + i], fours[i])
                    for j in cutlass.range_constexpr(4):
                        fours[i][j] = select(earlier, fours[i][j], Float32(0.0), "float")
            for i in cutlass.range_constexpr(count):
                four = fours[i]
                for j in cutlass.range_constexpr(4):
                    r, c = j // 2, 2 * (before + i) + j % 2
                    four[j] = cute.math.fma(four[j], factors[r, 0], product(out[r, c], factors[r, 1]))
                    out[r, c] = four[j] if const_expr(is_last) else Float32(0.0)
                if const_expr(not is_last):
                    cute.autovec_copy(four, stored[number][None, thread, at + i])
            before += count
        sections.earlier[0] = Int32(1)

    @cute.jit
    def _ended(self, fixed, sums, given, outputs, sink, q_state, work_state):
        (_, mma_pv), _, _, positions, _, board, group, thread, in_smem = fixed
        acc, row_max, row_sum, _, sections = sums
        facts, thread = self._facts(board[0], work_state), self._again(thread)
        self._kept(sums, given[1])
        self._merged(acc, sections, self.of_sections(in_smem, q_state, given[2]), thread, True)
        if const_expr(self.config.sums.in_q > 0):  # where the copy engine writes the next rows
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.sync_warp()  # one lane gives the memory back
        out, heads, tops = rows_and_columns(acc), self.heads(positions, facts), self.highest(sections.tops, given[1])
        for r in cutlass.range_constexpr(cute.size(row_max)):
            weight, top, rescale = sections.total[r], sections.highest[r], Float32(1.0)
            if const_expr(tops is not None):
                tops[r] = select(weight == 0.0, -Float32.inf, tops[r], "float")
            if const_expr(self.config.has_sink):
                logit = product(Float32(sink[heads[r]]), Float32(LOG2E))
                highest = cute.arch.fmax(top, logit)
                rescale = power_of_2(difference(top, highest))
                weight = total(product(weight, rescale), power_of_2(difference(logit, highest)))
                top = highest
            is_blind = weight == 0.0
            divisor = select(is_blind, Float32(1.0), weight, "float")
            natural = total(product(top, Float32(LN2)), cute.math.log(divisor))
            row_sum[r] = select(is_blind, -Float32.inf, natural, "float")
            inverse = quotient(Float32(1.0), divisor)
            for c in cutlass.range_constexpr(cute.size(out, mode=[1])):
                x = product(out[r, c], rescale) if const_expr(self.config.has_sink) else out[r, c]
                out[r, c] = product(x, inverse)
        self.stored(acc, tops, row_sum, mma_pv, thread, group, outputs, in_smem[3][None, None, q_state.index], facts)
