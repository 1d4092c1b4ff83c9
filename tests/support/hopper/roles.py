"""Source of the Hopper forward roles, run as Python in the simulated block of ``protocol.py``.

One thread loads, one per warp group multiplies. CuTe DSL is not needed: ``cute``, ``pipeline`` and ``warpgroup`` are stand-ins.
"""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple

from anyattn.arithmetic import LN2, LOG2E
from tests.support.hopper import numbers
from tests.support.hopper.cases import Case
from tests.support.hopper.protocol import PARTS, Block, BlockPipe, Loaded, Memory, PieceRef, Pieces, Registers, RowTile, StageRef
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.schedule import Broken, Schedule, State

__all__ = ["MODULES", "Counter", "View", "run_block"]

MODULES = (
    "tile_scheduler", "producer", "paged_gather", "mma", "wide/mma", "wide/producer", "skipping/mma", "skipping/producer",
    "in_order/mma", "in_order/producer",
)  # fmt: skip
_STATES = ("q_state", "k_state", "v_state", "work_state")
_LOWEST, _ALL_0, _OUT, _MAX, _SUM, _TOPS = (frozenset({what}) for what in ("all -inf", "all 0.0", "out", "max", "sum", "tops"))
_ALL_1, _INVERSE = frozenset({"all 1.0"}), frozenset({"inverse"})


class View:
    """A tensor in global memory; the tag says what was chosen of it."""

    def __init__(self, name: str, tag: tuple = ()):
        self.name, self.tag = name, tag

    def __getitem__(self, key: tuple) -> View:
        return View(self.name, self.tag + tuple(i for i in key if i is not None))


class Turned:
    """V, or a stage of it, with its keys first."""

    def __init__(self, of: Any):
        self.of = of

    def __getitem__(self, key: tuple) -> Turned:
        return Turned(self.of[key])


class Lanes(list):
    """A number that differs from lane to lane."""

    def __mod__(self, by: int) -> Lanes:
        return Lanes(x % by for x in self)


class Counter:
    """From which blocks draw work. jumps: how many pieces others take after each of this block's; left: blocks that have left before."""

    def __init__(self, jumps: list[int], left: int):
        self.values, self.jumps, self.iterator = [0, left], list(jumps), 0

    def __setitem__(self, i: int, value: int) -> None:
        self.values[i] = value

    def add(self, at: int, value: int, **_: Any) -> int:
        before = self.values[at]
        self.values[at] += value + (self.jumps.pop(0) if at == 0 and self.jumps else 0)
        return before


class _Board:
    """Shared memory that the loader writes; a slot is written when nobody holds it, read by who holds it."""

    def __init__(self, block: Block, pipe: BlockPipe, names: str):
        self.block, self.pipe, self.names = block, pipe, names
        self.values: dict[Any, int] = {}

    def _held(self, key: Any) -> set[int]:
        """The warp groups that hold the slot."""
        slot = key[1] if isinstance(key, tuple) else key
        if not 0 <= slot < len(self.pipe.stages):
            raise Broken(f"{self.names} has no slot {slot}")
        return self.pipe.stages[slot].held

    def __getitem__(self, key: Any) -> int:
        self.block.schedule.step()
        if self.block.group.number not in self._held(key) or key not in self.values:
            raise Broken(f"{self.names} {key} is read by who does not hold it, or before it was written")
        return self.values[key]

    def __setitem__(self, key: Any, value: int) -> None:
        if self._held(key):
            raise Broken(f"{self.names} {key} is written while {self._held(key)} hold it")
        self.values[key] = value


class _Atom:
    def __init__(self, operation: str):
        self.operation, self.adds = operation, True

    def set(self, _: str, adds: bool) -> None:
        self.adds = adds


class _Mma:
    """A tiled product of Q and K or of P and V, and a thread's or a warp group's part of it."""

    def __init__(self, block: Block, op: str, thread: int | None = None):
        self.block, self.op, self.thread = block, op, thread

    def get_slice(self, thread: int) -> _Mma:
        if thread != self.block.first_thread:
            raise Broken(f"group {self.block.group.number} multiplies what thread {thread} does")
        return _Mma(self.block, self.op, thread)

    def _of(self, memory: Memory, wanted: str) -> Memory:
        if memory.name != wanted and not (wanted == "v" and memory is self.block.memories[2]):
            raise Broken(f"{memory.name} is an operand of {self.op} in the place of {wanted}")
        return memory

    def partition_A(self, memory: Memory) -> Memory:
        return self._of(memory, self.op[0])

    def partition_B(self, memory: Memory) -> Memory:
        return self._of(memory, self.op[1])

    make_fragment_A, make_fragment_B = partition_A, partition_B

    def partition_C(self, _: Any) -> None: ...

    partition_shape_C = partition_C


class _MmaOfRegisters(_Mma):
    """The tiled product of Q, in registers, and K."""

    def __init__(self, block: Block, *_: Any):
        super().__init__(block, "qk")

    def partition_shape_A(self, _: Any) -> None: ...

    def make_fragment_A(self, _: None) -> Registers:  # type: ignore[override]
        return Registers(self.block)


class _CopyOfQ:
    """The tiled copy of Q from shared memory to registers, and a thread's part of it."""

    def __init__(self, block: Block, thread: int | None = None):
        self.block, self.thread = block, thread

    def get_slice(self, thread: int) -> _CopyOfQ:
        return _CopyOfQ(self.block, thread)

    def partition_S(self, tile: StageRef) -> tuple[int | None, StageRef]:
        return self.thread, tile

    def retile(self, q: Registers) -> Registers:
        return q

    def copied(self, of: tuple[int | None, StageRef], to: Registers) -> None:
        block, (thread, ref) = self.block, of
        block.schedule.step()
        stage = ref.stage
        if thread != block.first_thread or block.group.number not in stage.held - stage.output or stage.tag is None:
            raise Broken(f"thread {thread} reads {stage.tag}, held by {stage.held}, as Q")
        to.store(Loaded((stage.tag[-1],), -1, frozenset({"q"})))


class Stubs:
    """What the roles call of softmax and epilogue: it keeps the tags and checks what it is given."""

    block: Block
    config: Any
    bands: list[tuple[int, int]]
    foresees: bool
    guesses: bool
    shortens: bool
    holds_thread = False
    dtype = "dtype"
    arch: Any

    def _pieces(self, n: int) -> list[Lanes]:
        """What the text says in each lane."""
        found = []
        for self.arch.lane in range(32):
            found.append(super()._pieces(n))  # type: ignore[misc]
        self.arch.lane = 0
        return [Lanes(of_lanes) for of_lanes in zip(*found, strict=True)]

    def _page(self, at: Lanes, *given: Any) -> Lanes:
        return Lanes(super(Stubs, self)._page(i, *given) for i in at)  # type: ignore[misc]

    def gather(self, source: View, target: Any, pages: tuple[Lanes, ...], places: tuple[Lanes, ...], barrier: Any) -> None:
        """``hopper_threads`` looks into it; for all others its copies are like the copy engine's, of a row each."""
        if isinstance(target, Turned) is not (source.name == "v"):
            raise Broken(f"{source.name} is gathered along the wrong side of its tile")
        target = target.of if isinstance(target, Turned) else target
        for key in range(target.memory.keys):
            page, place = (x[key // 32][key % 32] for x in (pages, places))
            to = PieceRef(target.memory, target.index, key)
            self.block.copy_in(source.name, (*source.tag, 0, place, page), to, barrier)

    def band(self, entry: int, *_: Any) -> tuple[int, int]:
        return self.bands[entry]

    def rate(self, *_: Any) -> str:
        return "rate"

    def factor(self, *_: Any) -> str:
        return "factor"

    def row_limits(self, positions: Any, facts: Any, _: Any) -> Any:
        return facts

    def limits_again(self, limits: Any, positions: Any, facts: Any, _: Any) -> Any:
        if limits != facts:
            raise Broken(f"limits of {limits} are computed again for {facts}")
        return facts

    def words_of_rows(self, positions: Any, facts: Any, _: Any) -> tuple[str, int]:
        return "rows", self._tile(facts)

    def words_ahead(self, rows: tuple[str, int], n: int) -> tuple | None:
        return None if self.config.tiles.warp_groups == 3 else ("words", rows, n)

    def narrowed_apart(self, powers: Registers, dropping: tuple) -> Loaded:
        """Probabilities without the dropped ones, if the words are those of their row tile and key tile."""
        powers.idle("read")
        value, (rows, n, ahead) = powers.load(), dropping
        if value.made_of != ("a wrong guess",):
            ((t, i),) = value.made_of
            if rows != ("rows", t) or n != self.block.tiles[t].visits[i][0] or ahead not in (None, ("words", rows, n)):
                raise Broken(f"{value.made_of} is dropped by {dropping}")
        return value._replace(done=value.done | {"dropped"})

    def keep(self, p: Registers, apart: Loaded) -> None:
        p.store(apart)

    def _tile(self, facts: Any) -> int:
        t = next((t for t, tile in enumerate(self.block.tiles) if tile.facts.items() <= facts._asdict().items()), None)
        if t is None:
            raise Broken(f"facts of no row tile: {facts}")
        return t

    def _visited(self, scores: Registers, facts: Any, n: int | None, is_edge: bool) -> tuple[RowTile, int]:
        """The row tile and the number of the visit that the scores are of, if all else agrees."""
        scores.idle("read")
        ((t, i),) = scores.made_of
        tile = self.block.tiles[t]
        if self._tile(facts) != t or (n is not None and n != tile.visits[i][0]) or is_edge != (i == 0):
            raise Broken(f"scores of {(t, i)} are taken for key tile {n} of {facts}, first: {is_edge}")
        return tile, i

    def foreseen(self, positions: Any, n: int, facts: Any, _: Any) -> tuple:
        return "ahead", n, self._tile(facts)

    def modified(self, scores: Registers, ahead: Any, positions: Any, n: int, facts: Any, scale: Any, _: Any, is_edge: bool) -> str:
        self._visited(scores, facts, n if self.config.score else None, is_edge)
        if ahead != (("ahead", n, self._tile(facts)) if self.foresees and not is_edge else None) or scores.done:
            raise Broken(f"{scores.made_of} with what was read ahead for {ahead}")
        scores.done |= {"modified"}
        return "lifts"

    def masked(self, scores: Registers, _: Any, n: int, facts: Any, __: Any, limits: Any, is_partial: int, is_edge: bool) -> None:
        tile, i = self._visited(scores, facts, n, is_edge)
        if limits != facts or scores.done != {"modified"}:
            raise Broken(f"{scores.made_of} is masked by {limits}, {scores.done}")
        if self.config.lists and self.config.partial and is_partial != tile.visits[i][1]:
            raise Broken(f"{scores.made_of} is masked as partial={is_partial}; wanted {tile.visits[i]}")
        scores.done |= {"masked"}

    def _softened(self, scores: Registers, may_be_blind: bool) -> tuple:
        scores.idle("read")
        ((t, i),) = scores.made_of
        if "modified" not in scores.done or "exponential" in scores.done or (self._must_be_masked(t, i) and "masked" not in scores.done):
            raise Broken(f"{scores.made_of}: exponentials of {set(scores.done)} scores")
        if "masked" in scores.done and not may_be_blind:
            raise Broken(f"{scores.made_of}: masked rows are taken to see something")
        scores.done |= {"exponential"}
        return scores.made_of

    def _must_be_masked(self, t: int, i: int) -> bool:
        return i == 0 or self.block.tiles[t].visits[i][2] or bool(self.config.always)

    def exponentials(
        self,
        scores: Registers,
        lifts: str,
        row_max: Registers,
        row_sum: Registers,
        row_scale: Registers,
        rate: Any,
        first: bool,
        blind: bool,
        highest: Any = None,
    ) -> bool:
        made_of, block = self._softened(scores, blind), self.block
        rises = first or block.schedule.random.random() < 0.5
        top, total = row_max.load(), Loaded((), -1, _ALL_0) if first else row_sum.load()
        if (highest is not None) is (first or not self.config.has_skip) or (highest is not None and highest.made_of != made_of):
            raise Broken(f"exponentials of {made_of} with the highest scores of {highest}, first: {first}")
        if (top.done, total.done) != ((_LOWEST, _ALL_0) if first else (_MAX, _SUM)) or lifts != "lifts" or top.made_of != total.made_of:
            raise Broken(f"exponentials with a maximum of {top} and a sum of {total}, first: {first}")
        block.epochs += rises
        epoch = block.epochs if rises else top.epoch
        row_scale.store(Loaded((top.epoch,), epoch, frozenset({"scale"})))
        row_max.store(Loaded(top.made_of + made_of, epoch, _MAX))
        row_sum.store(Loaded(total.made_of + made_of, epoch, _SUM))
        scores.epoch = epoch
        return rises

    def unshifted(self, scores: Registers, sums: tuple, rate: Any, is_masked: bool) -> None:
        made_of = self._softened(scores, is_masked)
        _, row_max, row_sum, row_excess, _ = sums
        for x, kinds in ((row_max, (_MAX, _LOWEST)), (row_sum, (_SUM, _ALL_0)), *([(row_excess, (_SUM, _ALL_0))] if is_masked else [])):
            before = x.load()
            if before.done not in kinds:
                raise Broken(f"exponentials are added to {before}")
            x.store(Loaded(before.made_of + made_of, -1, kinds[0]))

    def guessed(
        self, scores: Registers, lifts: str | None, powers: Registers, sums: Registers, row_max: Registers, _: Any, facts: Any, *__: Any
    ) -> bool:
        self._visited(scores, facts, None, False)
        ((t, i),), top = scores.made_of, row_max.load()
        wanted = (None, frozenset()) if self.shortens else ("lifts", {"modified"})
        if (lifts, scores.done) != wanted or self._must_be_masked(t, i) or top.done != _MAX:
            raise Broken(f"a guess at {scores.made_of}, {set(scores.done)}, with {lifts} and a maximum of {top}")
        is_right = self.block.schedule.random.random() < 0.6
        made_of = scores.made_of if is_right else ("a wrong guess",)
        powers.store(Loaded(made_of, top.epoch, frozenset({"exponential"})))
        sums.store(Loaded(made_of, top.epoch, _SUM))
        if is_right:
            row_max.store(Loaded(top.made_of + made_of, top.epoch, _MAX))
        return is_right

    def heads(self, positions: Any, facts: Any) -> tuple[int]:
        return (int(facts.head),)

    def finished(
        self,
        acc: Registers,
        row_max: Registers,
        row_sum: Registers,
        excess: Registers | None,
        rate: Any,
        sink: Any,
        heads: tuple[int],
        factor: Any,
        inverses: Registers | None,
    ) -> None:
        if factor != ("factor" if self.config.has_dropout else None):
            raise Broken(f"weights that are kept have the factor {factor}")
        out, top, total = values = acc.load(), row_max.load(), row_sum.load()
        if tuple(x.done for x in values) != (_OUT, _MAX, _SUM) or len({(x.made_of, x.epoch) for x in values}) > 1:
            raise Broken(f"O of {out} is divided by sums of {total} over {top}")
        if (excess is not None) != self.config.is_bounded:
            raise Broken(f"bounded scores: {self.config.is_bounded}, and an excess of {excess}")
        if excess is not None:
            rounded = excess.load()
            if rounded.done != _SUM or any(self._must_be_masked(*tile) and tile not in rounded.made_of for tile in total.made_of):
                raise Broken(f"sums of {total} are divided with an excess of {rounded}")
        if heads != (self.block.tiles[self.block.group.finished].facts["head"],):
            raise Broken("the sink of another head")
        acc.done, row_sum.done = frozenset({"finished"}), frozenset({"lse"})
        if inverses is not None:
            inverses.store(Loaded(out.made_of, out.epoch, _INVERSE))

    def factors_of(self, row_scale: Registers, rescales: bool | None) -> Registers:
        factors = Registers(self.block)
        factors.store(row_scale.load() if rescales and not self.config.is_bounded else Loaded((), -1, _ALL_1))
        return factors

    def rescales(self, factors: Registers) -> bool:
        return factors.load().done != _ALL_1

    def rescaled(self, acc: Registers, factors: Registers) -> None:
        value, factor = acc.load(), factors.load()
        if factor.done != _INVERSE:
            acc.store(value * factors if value.made_of else value)
        elif (factor.made_of, factor.epoch, value.done) != (value.made_of, value.epoch, _OUT):
            raise Broken(f"O of {value} is divided by sums of {factor}")
        else:
            acc.done = frozenset({"finished"})

    def raise_tops(self, tops: Registers, scores: Registers, lifts: str | None) -> None:
        """Before exponentials take the scores' place, and after what is hidden is."""
        scores.idle("read")
        ((t, i),) = scores.made_of
        is_ready = "modified" in scores.done and (not self._must_be_masked(t, i) or "masked" in scores.done)
        if lifts != "lifts" or not is_ready or "exponential" in scores.done:
            raise Broken(f"highest scores of {scores.made_of}, {set(scores.done)}, with {lifts}")
        self._raised(tops, scores)

    def raise_tops_under_cap(self, tops: Registers, scores: Registers, positions: Any, facts: Any, *_: Any) -> None:
        """Of raw products, and so only where the score mod is a cap and nothing hides a key."""
        self._visited(scores, facts, None, False)
        ((t, i),) = scores.made_of
        if not self.shortens or scores.done or self._must_be_masked(t, i):
            raise Broken(f"highest products of {scores.made_of}, {set(scores.done)}")
        self._raised(tops, scores)

    def _raised(self, tops: Registers, scores: Registers) -> None:
        before = tops.load()
        if before.done not in (_LOWEST, _TOPS):
            raise Broken(f"highest scores of {scores.made_of} after {before}")
        tops.store(Loaded(before.made_of + scores.made_of, -1, _TOPS))

    def highest(self, tops: Registers | None, rate: Any) -> Registers | None:
        if tops is not None:
            tops.done = frozenset({"highest"})
        return tops

    def stored(self, acc: Registers, tops: Any, lse: Registers, mma: Any, thread: int, number: int, _: Any, place: Any, facts: Any) -> None:
        """The row tile's output is made of all its key tiles, and takes the place of its own Q."""
        t, group = self._ends(thread, facts), self.block.group
        tile, is_second = self.block.tiles[t], self.block.is_wide and number == 1
        done = [what for x in (acc, lse) if x is not None for what in x.load().done]
        seen = tuple((t, i) for i in range(len(tile.visits)))
        if number != group.number or acc.made_of != tuple(x for x in seen if (*x, number) not in self.block.skipped) or not seen:
            raise Broken(f"group {number} stores {acc.made_of} as row tile {t}, which has {len(tile.visits)} visits")
        if done != ["finished", "lse"][: 2 - is_second]:
            raise Broken(f"row tile {t} is stored as {done}")
        if (tops is None) is (self.config.has_max and not is_second) or (
            tops is not None and (tops.made_of, tops.done) != (seen, {"highest"})
        ):
            raise Broken(f"row tile {t} is stored with the highest scores of {None if tops is None else tops.load()}")
        stage, first = place.stage, next(iter(self.block.groups.values()))
        if is_second and any(isinstance(product.parts[0][1].of, StageRef) for product in first.flying):
            raise Broken(f"half of O of {t} is stored where the first warp group still reads Q")
        if group.number not in stage.held or stage.tag != ("q", *tile.sources[0], t) or group.number in stage.reading:
            raise Broken(f"O of {t} goes where {stage.tag} is, held by {stage.held}, read by {stage.reading}")
        stage.used.add(group.number)
        end = facts.m_block * self.config.own_q + (number + 1 - is_second) * 64 // self.config.own_heads
        if self.config.is_split or (self.config.has_entries and end > facts.seqlen_q):
            self.block.written[t, group.number] += 1
        else:
            self.block.copy_out(place, t)

    def blank(self, mma: Any, thread: int, outputs: Any, sink: Any, facts: Any) -> None:
        t = self._ends(thread, facts)
        if self.block.tiles[t].visits:
            raise Broken(f"row tile {t} is left blank")
        self.block.written[t, self.block.group.number] += 1

    def _ends(self, thread: int, facts: Any) -> int:
        """The row tile whose turn it is to end, if it is the one that the facts tell of."""
        block, t, group = self.block, self._tile(facts), self.block.group
        block.schedule.step()
        if (t, thread) != (block.ends[group.number][group.finished], block.first_thread):
            raise Broken(f"row tile {t} is stored by thread {thread} after {group.finished} others")
        group.finished += 1
        return t


class SkippingStubs(Stubs):
    """The same of a kernel that skips: whether a tile is low is drawn at random."""

    def tops_of(self, acc: Registers) -> SkippingTops:
        return SkippingTops(Registers(self.block), Registers(self.block), [0], [0])

    def _start_rows(self, tops: SkippingTops, *_: Any) -> None:
        tops.rows.fill(-math.inf)

    def raise_tops(self, tops: SkippingTops, scores: Registers, lifts: str | None) -> None:  # type: ignore[override]
        self._are_low(tops, scores, lifts, None)

    def _are_low(self, tops: SkippingTops, scores: Registers, lifts: str | None, _: Any) -> bool:
        super().raise_tops(tops.rows, scores, lifts)
        tops.of_tile.store(Loaded(scores.made_of, -1, _TOPS))
        return self.block.schedule.random.random() < self.block.low

    def highest(self, tops: SkippingTops, rate: Any) -> Registers | None:  # type: ignore[override]
        return super().highest(tops.rows if self.config.has_max else None, rate)


class SkippingTops(NamedTuple):
    rows: Registers
    of_tile: Registers
    pending: list[int]
    skipped: list[int]


class InOrderStubs(Stubs):
    """The same of the kernel in the order of keys, whose numbers are exact: what enters the sums of which section is told by them."""

    _RATE = Fraction(2)

    def rate(self, *_: Any) -> Fraction:  # type: ignore[override]
        return self._RATE

    def heads(self, positions: Any, facts: Any) -> tuple[int, ...]:  # type: ignore[override]
        return (int(facts.head),) * numbers.ROWS

    def _must_be_masked(self, t: int, i: int) -> bool:
        return i == self.block.edge(t) or self.block.tiles[t].visits[i][2]

    def masked(self, scores: Any, _: Any, n: int, facts: Any, __: Any, limits: Any, is_partial: int, is_edge: bool) -> None:
        scores.idle("read")
        ((t, i),) = scores.made_of
        if (self._tile(facts), n, limits, is_partial, is_edge) != (t, self.block.tiles[t].visits[i][0], facts, 1, True) or scores.done:
            raise Broken(f"scores of {(t, i)} are masked as those of key tile {n} of {facts} by {limits}")
        for r, c in list(scores.cells):
            if self._score(t, i, r, c) == -math.inf:
                scores[r, c] = -math.inf
        scores.done = frozenset({"masked"})

    def _score(self, t: int, i: int, r: int, c: int) -> Any:
        return numbers.score(t, i, self._must_be_masked(t, i), self.block.group.number, r, c)

    def _weight(self, t: int, i: int, r: int, c: int, top: Any) -> Any:
        return numbers.power_of_2(self._score(t, i, r, c) * self._RATE - top)

    def _highest(self, t: int, seen: list[int], r: int) -> Any:
        """In base 2, as the kernel has it before the first key."""
        found = [self._score(t, i, r, c) for i in seen for c in range(numbers.COLUMNS)]
        return max(found) * self._RATE if max(found) > -math.inf else numbers.LOWEST

    def highest_of(self, scores: Any, r: int, lifts: None, held: Any) -> Any:
        return max(held, *(scores[r, c] for c in range(numbers.COLUMNS)))

    def _weights(self, scores: Any, sums: tuple, rate: Any, is_new: bool) -> bool:
        """A section's maximum and sums are of its tiles alone, so far."""
        scores.idle("read")
        ((t, i),), block = scores.made_of, self.block
        begins = i > 0 and block.section(t, i) != block.section(t, i - 1)
        if is_new is not begins or (self._must_be_masked(t, i) and "masked" not in scores.done):
            raise Broken(f"weights of {(t, i)}, {set(scores.done)}; first of a section: {is_new}")
        moves: bool = super()._weights(scores, sums, rate, is_new)  # type: ignore[misc]
        seen = [j for j in range(i + 1) if block.section(t, j) == block.section(t, i)]
        for r in range(numbers.ROWS):
            top = self._highest(t, seen, r)
            wanted = [sum(self._weight(t, j, r, c, top) for j in seen for c in range(part, numbers.COLUMNS, 2)) for part in range(2)]
            if sums[1][r] * rate != top or [sums[4].sums[r, part] for part in range(2)] != wanted:
                raise Broken(f"a section has the sums of other tiles than {seen} of {t}")
        scores.done |= {"exponential"}
        return moves

    def _merged(self, acc: Any, sections: Any, rate: Any, in_smem: Any, thread: int, is_last: bool) -> None:
        """Sections are merged one after the other, each once and whole."""
        own, before, block = acc.load().made_of, sections.total.load().made_of, self.block
        (t, first), (_, last) = own[0], own[-1]
        visits = len(block.tiles[t].visits)
        ends = last + 1 == visits if is_last else last + 1 < visits and block.section(t, last + 1) > block.section(t, last)
        if (*before, *own) != tuple((t, i) for i in range(last + 1)) or not ends:
            raise Broken(f"{own} is merged as a section, after {before}, the last: {is_last}")
        super()._merged(acc, sections, rate, in_smem, thread, is_last)  # type: ignore[misc]
        sections.total.made_of = (*before, *own)
        if not is_last:
            if any(acc.cells.values()):
                raise Broken(f"O of the section after {first} to {last} of {t} begins with other numbers than 0")
            acc.made_of, acc.done = (), _ALL_0

    def stored(self, acc: Any, tops: Any, lse: Any, mma: Any, thread: int, number: int, _: Any, place: Any, facts: Any) -> None:
        t = self._tile(facts)
        seen = list(range(len(self.block.tiles[t].visits)))
        for r in range(numbers.ROWS):
            highest = top = self._highest(t, seen, r)
            weights = {(i, c): self._weight(t, i, r, c, top) for i in seen for c in range(numbers.COLUMNS)}
            weight, rescale = numbers.QUAD * sum(weights.values()), Fraction(1)
            has_seen = weight > 0
            if self.config.has_sink:
                logit = Sink.base_2(int(facts.head))
                top = max(highest, logit)
                rescale = numbers.power_of_2(highest - top)
                weight = weight * rescale + numbers.power_of_2(logit - top)
            out = [
                numbers.QUAD * rescale * sum(w * numbers.value(t, i, key, c) for (i, key), w in weights.items()) / (weight or 1)
                for c in range(numbers.COLUMNS)
            ]
            if [acc[r, c] for c in range(numbers.COLUMNS)] != out:
                raise Broken(f"O of row tile {t} is {acc.cells}; wanted {out} in row {r}")
            if lse[r] != (top * Fraction(LN2) + math.log(weight) if weight else -math.inf):
                raise Broken(f"lse of row tile {t} is {lse.cells}")
            if tops is not None and tops[r] != (highest * Fraction(LN2) if has_seen else -math.inf):
                raise Broken(f"the highest scores of row tile {t} are {tops.cells}")
        acc.made_of, acc.done, lse.done = tuple((t, i) for i in seen), frozenset({"finished"}), frozenset({"lse"})
        if tops is not None:
            tops.made_of, tops.done = acc.made_of, frozenset({"highest"})
        super().stored(acc, tops, lse, mma, thread, number, _, place, facts)


class Sink:
    """A logit per head, whose product with log2(e) is a whole number."""

    def __getitem__(self, head: int) -> Fraction:
        return self.base_2(head) / Fraction(LOG2E)

    @staticmethod
    def base_2(head: int) -> Fraction:
        return Fraction(head % 7 - 3)


def _hold_q(names: dict[str, Any], block: Block) -> None:
    """Adds what copies Q to registers to the names that the kernel's modules import."""
    cute, copy = names["cute"], names["cute"].copy
    cute.make_copy_atom = lambda operation, _: operation
    cute.make_tiled_copy_A = lambda *_: _CopyOfQ(block)
    cute.copy = lambda atom, of, to, **given: atom.copied(of, to) if isinstance(atom, _CopyOfQ) else copy(atom, of, to, **given)
    names["warp"] = SimpleNamespace(LdMatrix8x8x16bOp=lambda *_: None)
    names["helpers"] = SimpleNamespace(make_trivial_tiled_mma=functools.partial(_MmaOfRegisters, block))
    names["OperandMajorMode"], names["warpgroup"].OperandSource = SimpleNamespace(K="K"), SimpleNamespace(RMEM="RMEM")


def _vote(block: Block, is_low: bool, barrier: int) -> bool:
    block.barrier(barrier, 128, True)
    block.group.vote(is_low)
    return is_low


def _arch(block: Block, work: tuple[int, int], counter: Counter) -> SimpleNamespace:
    arch = SimpleNamespace(lane=0)
    arch.__dict__.update(
        block_idx=lambda: (work[0] * block.blocks + block.rank, 0, 0),
        grid_dim=lambda: (work[1] * block.blocks, 1, 1),
        block_idx_in_cluster=lambda: block.rank,
        lane_idx=lambda: arch.lane,
        shuffle_sync=lambda value, lane: value[lane] if isinstance(value, Lanes) else value,
        atomic_add=counter.add,
        make_warp_uniform=int,
        cp_async_bulk_wait_group=lambda most, read: block.wait_for_stores(most),
        fence_proxy=lambda *_, **__: block.fence_written(),
        barrier=lambda barrier_id, number_of_threads: block.barrier(barrier_id, number_of_threads, True),
        vote_any_sync=bool,
        barrier_arrive=lambda barrier_id, number_of_threads: block.barrier(barrier_id, number_of_threads, False),
    )
    return arch


def _stand_ins(block: Block, work: tuple[int, int], counter: Counter) -> dict[str, Any]:
    """The names that the kernel's modules import."""

    def copy(atom: str, source: View, to: StageRef | PieceRef, tma_bar_ptr: Any, mcast_mask: int = 0) -> None:
        if not atom == source.name == to.memory.name:
            raise Broken(f"{source.name} is copied by {atom} to {to.memory.name}")
        if block.other is None or atom == "q":
            block.copy_in(source.name, source.tag, to, tma_bar_ptr)
            return
        if mcast_mask != 3:
            raise Broken(f"half of {source.name} is copied to {mcast_mask}; wanted both thread blocks")
        at = ("q", "k", "v").index(atom)
        if tma_bar_ptr is not block.pipes[at].full[to.index]:
            raise Broken(f"{source.name} comes to {to.index} and is told at {tma_bar_ptr.name}")
        half = 2 * (to.piece if isinstance(to, PieceRef) else 0) + block.rank
        for each in (block, block.other):
            each.copy_in(source.name, source.tag, PieceRef(each.memories[at], to.index, half), each.pipes[at].full[to.index])

    def partition(atom: str, part: int, _: Any, in_smem: Any, in_gmem: Any) -> tuple[Any, Any]:
        if part != (block.rank if atom != "q" else 0):
            raise Broken(f"block {block.rank} copies part {part} of {atom}")
        return in_smem, in_gmem

    cute = SimpleNamespace(
        arch=_arch(block, work, counter),
        copy=copy,
        domain_offset=lambda by, view: View(view.name, (*view.tag, by if isinstance(by[0], tuple) else sum(by))),
        local_tile=_local_tile,
        flat_divide=Pieces,
        make_tensor=lambda of, _: Turned(of),
        select=lambda *_, **__: None,
        group_modes=lambda x, *_: x,
        make_layout=lambda _, stride=1: lambda i: i * stride,
        make_identity_tensor=lambda _: None,
        size=lambda _, mode=None: 1 if mode is None else PARTS,
        make_mma_atom=_Atom,
        gemm=lambda atom, acc, a, b, _: block.group.gemm(atom, acc, a, b),
        make_rmem_tensor=lambda *_: Registers(block),
        recast_tensor=lambda x, _: x,
        logical_divide=lambda x, _: x,
        autovec_copy=lambda of, to: _copied(block, of, to),
    )
    cutlass = SimpleNamespace(min=min, max=max, Boolean=bool, range=lambda *n, **_: range(*n), range_constexpr=range)
    states = SimpleNamespace(Producer=1, Consumer=0)
    return {
        "cute": cute,
        "cutlass": cutlass,
        "const_expr": bool,
        "LANES": 32,
        "Int32": _integer,
        "Uint32": _integer,
        "Float32": SimpleNamespace(inf=math.inf),
        "pipeline": SimpleNamespace(PipelineUserType=states, make_pipeline_state=lambda kind, n: State(n, 0, kind)),
        "cpasync": SimpleNamespace(tma_partition=partition),
        "Int16": int,
        "warpgroup": SimpleNamespace(
            fence=lambda: block.group.fresh.clear(),
            commit_group=lambda: block.group.commit(),
            wait_group=lambda most: block.group.wait(most),
            Field=SimpleNamespace(ACCUMULATE="accumulate"),
        ),
        "again": lambda x: x,
        "narrowed": functools.partial(_narrowed, block),
        "narrowed_to": lambda out, x, _: out.store(x.load()),
        "rows_and_columns": lambda x: x,
    }


def _integer(x: Any) -> Any:
    return x if isinstance(x, Lanes) else int(x)


class Exchange:
    """Shared memory through which a warp group passes registers to the same threads of another, in ``PARTS`` or 1 instructions."""

    def __init__(self, name: str):
        self.name, self.parts = name, dict[int, Loaded]()

    def __getitem__(self, key: tuple) -> _PassedPart:
        if key[1] != 0:
            raise Broken(f"{self.name} of thread {key[1]}")
        return _PassedPart(self, key[2] if len(key) > 2 else 0)


class _PassedPart(NamedTuple):
    of: Exchange
    i: int


def _copied(block: Block, of: Any, to: Any) -> None:
    if isinstance(to, _Cells):
        block.wiped(to.of, to.key, of)
        return
    block.schedule.step()
    if isinstance(to, _PassedPart):
        if block.group.number != 0:
            raise Broken(f"group {block.group.number} passes {to.of.name} on")
        to.of.parts[to.i] = of.load()
        return
    value = of.of.parts.get(of.i)
    if value is None or (of.i > 0 and value != to.load()):
        raise Broken(f"part {of.i} of {of.of.name} is {value}")
    to.store(value)


class _Cells:
    """Some of a stage's keys, from ``key`` on."""

    def __init__(self, of: StageRef, key: int):
        self.of, self.key = of, key

    def __getitem__(self, _: Any) -> _Cells:
        return self


def _local_tile(x: Any, _: tuple, at: tuple) -> Any:
    if isinstance(x, Memory):  # the columns of V that a warp group multiplies
        if at[0] != x.block.group.number:
            raise Broken(f"group {x.block.group.number} multiplies part {at[0]} of {x.name}")
        return x
    return _Cells(x, at[1]) if isinstance(x, StageRef) else x[at]


def _narrowed(block: Block, x: Registers, _: str) -> Registers:
    out = Registers(block)
    out.store(x.load())
    return out


def run_block(case: Case, seed: int, changes: Changes = ()) -> int:
    """One block of ``case``, or a cluster of two, by the kernel's text with ``changes``; raises ``Broken``. Returns a number that says who
    went on when."""
    codes, texts = compiled(MODULES, changes, _STATES)
    schedule, counter = Schedule(seed, texts), Counter(case.jumps, case.left)
    blocks = [Block(schedule, case.config, tiles, rank) for rank, tiles in enumerate((case.tiles, case.others)[: case.config.cluster])]
    if len(blocks) > 1:
        blocks[0].other, blocks[1].other = blocks[1], blocks[0]
    for block in blocks:
        _add_threads(schedule, block, case, counter, codes)
    schedule.run()
    for block in blocks:
        block.check_end()
    is_last = case.left == case.workers - 1
    draws = case.draws and not case.config.pairs
    if draws and (counter.values[1] != (0 if is_last else case.left + 1) or (counter.values[0] == 0) is not is_last):
        raise Broken(f"the counter is left at {counter.values}")
    return schedule.turns


def _add_threads(schedule: Schedule, block: Block, case: Case, counter: Counter, codes: list) -> None:
    """The threads of a block: one loads, one per warp group multiplies."""
    names = _stand_ins(block, (case.worker, case.workers), counter)
    for code in codes:
        exec(code, names)
    names["_all_of_group"] = functools.partial(_vote, block)
    roles = ("Visits", "LoadsWide", "MultipliesWide") if case.config.is_wide else ("Visits", "Loads", "Multiplies")
    stubs, rest, sink = Stubs, (Exchange("P"), Exchange("factors")), None
    if case.config.has_skip:
        stubs, roles = SkippingStubs, ("Visits", "LoadsSkipping", "MultipliesSkipping")
    if case.config.in_order:
        stubs, roles = InOrderStubs, ("Visits", "LoadsInOrder", "MultipliesInOrder")
        numbers.stand_ins(names, block)
        _hold_q(names, block)
        names["_TILES"], rest, sink = case.config.section_tiles, numbers.Sums(), Sink()
    kernel = type("Kernel", (stubs, *(names[name] for name in roles)), {})()
    tables = names["Tables"](**case.tables)
    kernel.block, kernel.config, kernel.bands = block, case.config, case.bands
    kernel.foresees, kernel.guesses, kernel.shortens = case.foresees, case.guesses, case.shortens
    kernel.arch = names["cute"].arch
    board = (_Board(block, block.pipes[3], "facts"), _Board(block, block.pipes[1], "visit"))
    in_smem = (*block.memories, block.memories[0], rest)
    copies = tuple((name, View(name)) for name in ("q", "k", "v"))

    def loads() -> None:
        kernel.load(copies, in_smem, block.pipes, board, tables, counter, case.lengths, case.sizes, ((), ()))

    def multiplies(number: int) -> None:
        mmas = (_Mma(block, "qk"), _Mma(block, "pv"))
        if case.config.is_wide and number == 1:
            kernel.multiply_rest(0, mmas, in_smem, block.pipes, board, (None,) * 5)
            return
        kernel.multiply(128 * number, mmas, in_smem, block.pipes, board, None, sink, None, ((), ()))

    schedule.add(f"{block.prefix}loader", loads)
    for name, group in block.groups.items():
        schedule.add(name, functools.partial(multiplies, group.number))
