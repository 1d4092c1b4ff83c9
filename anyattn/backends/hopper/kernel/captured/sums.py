"""Gradients of captured tensors in the backward kernel: sums over a tile's pairs that share an entry, added to global memory.

In a fragment of S transposed lane 4 g + t of a warp holds keys g and g + 8 of the warp's 16, and query rows 8 j + 2 t and the next.
"""

from collections.abc import Iterator
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.captured_sums import diagonals_of, scratch_of_warp
from anyattn.backends.hopper.codegen.emit import emit, emit_at, select, wrapped
from anyattn.backends.hopper.kernel.captured.global_add import add_to, always_add_to, moved, store_to
from anyattn.backends.hopper.kernel.fragment import rows_and_columns

__all__ = ["SumsCaptured"]

_WARPS_BEFORE = 4  # warps of the warp group that loads and adds


class SumsCaptured:
    """The part of ``HopperBackward`` that adds to the gradients of captured tensors. ``captured`` holds numbers, tensors, the totals and
    the warps' shared memory for diagonals. The code has no branch, because products are in flight."""

    config: Any
    read_slots: Any
    captured: Any
    _first: Any
    _places: Any

    @cute.jit
    def begin_scratch(self, captured):
        """Zeroes a warp's shared memory for diagonals: places to which no tile stores stay 0."""
        if const_expr(captured[3] is not None):
            size = scratch_of_warp(self.config.tiles.tile_m)
            first = (cute.arch.warp_idx() - _WARPS_BEFORE) * size + cute.arch.lane_idx()
            for i in cutlass.range_constexpr(size // 32):
                captured[3][first + 32 * i] = Float32(0.0)
            cute.arch.sync_warp()

    def late_parts(self, shape: Any) -> tuple:
        """For each sum with a ``late`` factor a fragment for the products, or the running sums of a thread's keys."""
        late = [s for s in self.config.sums if s.late is not None]
        return tuple(_Running() if s.is_running else cute.make_rmem_tensor(shape, Float32) for s in late)

    def late_views(self, late: tuple) -> tuple:
        """``late_parts`` viewed by key and query row."""
        return tuple(x if isinstance(x, _Running) else rows_and_columns(x) for x in late)

    def add_sums(self, ds: Any, late: tuple, positions: Any, slots: Any, captured: Any) -> None:
        """Adds the sums of one row tile. ds: the gradients of scores; late: see ``late_parts``; all 0 where a row does not see a key."""
        visit, facts = self.read_slots(slots)
        places, behind = self._places(positions, visit, facts), 0
        ways = {
            "head": self._add_head, "key": self._add_keys, "row": self._add_rows, "diagonal": self._add_diagonals, "pair": self._add_pairs,
            "alone": self._store_pairs, "any": self._add_each,
        }  # fmt: skip
        for total in self.config.sums:
            parts = late[behind] if total.late is not None else ds
            behind += total.late is not None
            if total.is_running:
                values = [[value] for value in parts.by_key]
            else:
                values = self._parts_of(total, rows_and_columns(parts), places, captured)
            ways[total.kind](total, values, positions, visit, facts, captured)

    def _parts_of(self, total: Any, parts: Any, places: dict[str, Any], captured: Any) -> Any:
        """The contribution of each pair, by key and query row of the fragment."""
        keys, rows = cute.size(parts, mode=[0]), cute.size(parts, mode=[1])
        if total.factor is None:
            return [[parts[r, c] for c in range(rows)] for r in range(keys)]
        found: list[list[Any]] = [[None] * rows for _ in range(keys)]

        def store(c: int, r: int, factor: Any) -> None:
            value = parts[r, c] * Float32(factor)
            found[r][c] = select(parts[r, c] == 0.0, Float32(0.0), value, "float") if total.is_guarded else value

        numbers, tensors = self.captured(captured, 0)
        emit(total.factor, numbers, tensors, places, None, store)
        return found

    def _add_head(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds one value per warp."""
        value = _over_lanes(_sum([_sum(line) for line in values]), (1, 2, 4, 8, 16))
        target = self._entry(total, captured, facts.entry, visit.head, Int32(0), Int32(0))
        add_to(target, select(cute.arch.lane_idx() == 0, value, Float32(0.0), "float"))

    def _add_keys(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds one value per key. Of the four lanes of a key t = 0 sends the first key's sum, t = 1 that of the key 8 further on."""
        low, high = (_over_lanes(_sum(line), (1, 2)) for line in values)
        side = cute.arch.lane_idx() % 4
        _, key = self._first(positions, visit, facts)
        key = cutlass.min(key + select(side == 1, Int32(8), Int32(0), "int"), facts.seqlen_k - 1)
        value = select(side < 2, select(side == 0, low, high, "float"), Float32(0.0), "float")
        add_to(self._entry(total, captured, facts.entry, visit.head, Int32(0), key), value)

    def _add_rows(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds one value per row. In three exchanges lanes g halve the rows between them; then each holds the sums of its own rows."""
        own, lane = [low + high for low, high in zip(*values, strict=True)], cute.arch.lane_idx()
        apart = [c // 2 * 8 + c % 2 for c in range(len(own))]
        row, _ = self._first(positions, visit, facts)
        for bit in (16, 8, 4):
            half = len(own) // 2
            is_upper = (lane & bit) != 0
            sent = [select(is_upper, low, high, "float") for low, high in zip(own[:half], own[half:], strict=True)]
            kept = [select(is_upper, high, low, "float") for low, high in zip(own[:half], own[half:], strict=True)]
            own = [mine + cute.arch.shuffle_sync_bfly(other, bit) for mine, other in zip(kept, sent, strict=True)]
        row = row + lane // 4 * (len(apart) // 2)
        for a, value in zip(apart, own, strict=False):
            target = self._entry(total, captured, facts.entry, visit.head, cutlass.min(row + a, facts.seqlen_q - 1), Int32(0))
            always_add_to(target, value)

    def _add_diagonals(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds one value per diagonal. Each lane g writes a line of its two keys' pairs, shifted by one place,
        so that columns are diagonals."""
        tiles, lane, scratch = self.config.tiles, cute.arch.lane_idx(), captured[3]
        count, width = diagonals_of(tiles.tile_m)
        group, first = lane // 4, (cute.arch.warp_idx() - _WARPS_BEFORE) * scratch_of_warp(tiles.tile_m)
        mine = first + group * width + group // 4 + 7 + lane % 4 * 2 - group
        columns = len(values[0]) // 2
        for j in range(columns + 1):
            for c in range(2):
                parts = [values[r][2 * (j - 1 + r) + c] for r in range(2) if 0 <= j - 1 + r < columns]
                scratch[mine + (8 * j + c)] = _sum(parts)
        cute.arch.sync_warp()
        found = []
        for i in range(ceil_div(count, 32)):
            value = _sum([scratch[first + lane + (32 * i + g * width + g // 4)] for g in range(8)])
            found.append(value if 32 * i + 32 <= count else select(lane < count - 32 * i, value, Float32(0.0), "float"))
        cute.arch.sync_warp()
        row, key = self._first(positions, visit, facts)
        least = (row - lane % 4 * 2) - (key - group) - 15 + lane
        for i, value in enumerate(found):  # the index is evaluated at one pair of each diagonal
            distance = cutlass.max(cutlass.min(least + 32 * i, facts.seqlen_q - 1), 1 - facts.seqlen_k)
            q_idx, kv_idx = cutlass.max(distance, 0), cutlass.max(-distance, 0)
            add_to(self._entry(total, captured, facts.entry, visit.head, q_idx, kv_idx), value)

    def _add_pairs(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds every pair. Rows and keys past the last add zeros to the entries of the last ones."""
        _, key = self._first(positions, visit, facts)
        goal = captured[2][total.total]
        for c, target in enumerate(self._row_entries(total, len(values[0]), positions, visit, facts, captured)):
            other = moved(target, goal.stride[-1] * 8 * (goal.element_type.width // 8), key + 8, facts.seqlen_k)
            always_add_to(target, values[0][c])
            always_add_to(other, values[1][c])

    def _store_pairs(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Stores every pair. For rows and keys past the last every value is 0, which is not stored."""
        for c, target in enumerate(self._row_entries(total, len(values[0]), positions, visit, facts, captured)):
            for r in range(len(values)):
                store_to(target, values[r][c], captured[2][total.total].element_type, 8 * r)

    def _row_entries(self, total: Any, count: int, positions: Any, visit: Any, facts: Any, captured: Any) -> Iterator[Any]:
        """The addresses of the entries of a thread's first key and each of its rows; rows past the last have the last row's."""
        goal, (row, key) = captured[2][total.total], self._first(positions, visit, facts)
        places = [total.place.nodes[at].attr for at in total.place.outputs]
        step = goal.stride[places.index("q_idx")] * (goal.element_type.width // 8)
        first = cutlass.min(row, facts.seqlen_q - 1), cutlass.min(key, facts.seqlen_k - 1)
        target = self._entry(total, captured, facts.entry, visit.head, *first)
        for c in range(count):
            if c > 0:
                target = moved(target, step if c % 2 == 1 else step * 7, row + (c // 2 * 8 + c % 2), facts.seqlen_q)
            yield target

    def _add_each(self, total: Any, values: Any, positions: Any, visit: Any, facts: Any, captured: Any) -> None:
        """Adds the pairs of a thread in order; consecutive ones with the same entry are added together."""
        goal, waiting, first = captured[2][total.total], list[Any](), [0]
        numbers, tensors = self.captured(captured, 0)

        def store(c: int, r: int, *place: Any) -> None:
            value = values[r][first[0] + c]
            if waiting:
                before, pending = waiting.pop()
                is_same = _same(place, before)
                add_to(self._address(total, goal, before), select(is_same, Float32(0.0), pending, "float"))
                value = select(is_same, pending + value, value, "float")
            waiting.append((place, value))

        whole, count = self._places(positions, visit, facts), len(values[0])
        for first[0] in range(0, count, 4):  # few rows at a time: registers hold their indices
            rows = slice(first[0], first[0] + 4)
            places = whole | {"q_idx": whole["q_idx"][rows], "apart": whole["apart"][rows]}
            emit(total.place, numbers, tensors, places, None, store)
        add_to(self._address(total, goal, waiting[0][0]), waiting[0][1])

    def _entry(self, total: Any, captured: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """The address of a pair's entry in its total."""
        goal, place = captured[2][total.total], ()
        if total.place is not None:
            numbers, tensors = self.captured(captured, 0)
            place = emit_at(total.place, numbers, tensors, b, h, q_idx, kv_idx)
        return self._address(total, goal, place)

    def _address(self, total: Any, goal: Any, place: Any) -> Any:
        whole = [Int32(0)] if total.place is None else list(wrapped(total.place, place, goal))
        if total.has_copies:  # each warp adds to its own copy, and each lane beside it
            block, _, _ = cute.arch.block_idx()
            place = 4 * self.config.tiles.warp_groups * block + cute.arch.warp_idx()
            place = place if total.kind == "head" else cute.arch.lane_idx() + 32 * place
            whole.append(place & (goal.shape[len(whole)] - 1))
        return (goal.iterator + cute.crd2idx(tuple(whole) if len(whole) > 1 else whole[0], goal.layout)).toint()


class _Running:
    """Running sums of a thread's two keys, which replace a fragment."""

    def __init__(self) -> None:
        self.by_key: list[Any] = [Float32(0.0), Float32(0.0)]

    def __setitem__(self, place: tuple[int, int], value: Any) -> None:
        self.by_key[place[0]] = self.by_key[place[0]] + value


def _sum(values: Any) -> Any:
    found = values[0]
    for value in values[1:]:
        found = found + value
    return found


def _over_lanes(value: Any, bits: tuple[int, ...]) -> Any:
    for bit in bits:
        value = value + cute.arch.shuffle_sync_bfly(value, bit)
    return value


def _same(place: Any, other: Any) -> Any:
    found: Any = None
    for a, b in zip(place, other, strict=True):
        if not (isinstance(a, int) and isinstance(b, int)):
            found = a == b if found is None else found & (a == b)
    return found
