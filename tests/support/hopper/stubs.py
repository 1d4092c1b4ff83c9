"""What the Hopper forward roles call of softmax, masks, dropout and epilogue, in the simulated block of ``protocol.py``."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tests.support.hopper.protocol import Block, Columns, Loaded, Memory, PieceRef, Registers, RowTile, StageRef
from tests.support.hopper.schedule import Broken

__all__ = ["ALL_0", "Lanes", "SkippingStubs", "Stubs", "TiledMma", "Turned", "View"]

_LOWEST, ALL_0, _OUT, _MAX, _SUM, _TOPS = (frozenset({what}) for what in ("all -inf", "all 0.0", "out", "max", "sum", "tops"))
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


class TiledMma:
    """A tiled product of Q and K or of P and V, and a thread's or a warp group's part of it."""

    def __init__(self, block: Block, op: str, thread: int | None = None):
        self.block, self.op, self.thread = block, op, thread

    def get_slice(self, thread: int) -> TiledMma:
        if thread != self.block.first_thread:
            raise Broken(f"group {self.block.group.number} multiplies what thread {thread} does")
        return TiledMma(self.block, self.op, thread)

    def _of(self, memory: Any, wanted: str) -> Any:
        operand = self.block.operands["qkv".index(wanted)]
        own = operand.parts[self.block.group.number] if wanted == "v" and isinstance(operand, Columns) else operand
        if memory != own:
            raise Broken(f"{memory.name} is an operand of {self.op} in the place of {wanted}")
        return memory

    def partition_A(self, memory: Any) -> Any:
        return self._of(memory, self.op[0])

    def partition_B(self, memory: Any) -> Any:
        return self._of(memory, self.op[1])

    make_fragment_A, make_fragment_B = partition_A, partition_B

    def partition_C(self, _: Any) -> None: ...

    partition_shape_C = partition_C


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

    def part_in_smem(self, tile: Columns, part: Any) -> Memory:
        columns, width = self.config.columns, self.config.head_dim_v if part.are_values else self.config.head_dim
        found: Memory = tile.parts[int(part.first > 0)]
        wanted = {"k0": (False, 0, columns), "k1": (False, columns, width), "v0": (True, 0, columns), "v1": (True, columns, width)}
        if tuple(part) != wanted[found.name]:
            raise Broken(f"{found.name} takes {part}")
        return found

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
        top, total = row_max.load(), Loaded((), -1, ALL_0) if first else row_sum.load()
        if (highest is not None) is (first or not self.config.has_skip) or (highest is not None and highest.made_of != made_of):
            raise Broken(f"exponentials of {made_of} with the highest scores of {highest}, first: {first}")
        if (top.done, total.done) != ((_LOWEST, ALL_0) if first else (_MAX, _SUM)) or lifts != "lifts" or top.made_of != total.made_of:
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
        for x, kinds in ((row_max, (_MAX, _LOWEST)), (row_sum, (_SUM, ALL_0)), *([(row_excess, (_SUM, ALL_0))] if is_masked else [])):
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
