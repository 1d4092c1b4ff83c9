"""What the Hopper forward roles in the order of keys call, with exact numbers (``numbers.py``)."""

from __future__ import annotations

import functools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar

from anyattn.arithmetic import LN2, LOG2E
from anyattn.sequences.sections import LAG
from tests.support.hopper import numbers
from tests.support.hopper.protocol import Block, Loaded, Part, Registers, StageRef
from tests.support.hopper.schedule import Broken
from tests.support.hopper.stubs import ALL_0, Stubs, TiledMma

__all__ = ["InOrderStubs", "Sink", "hold_q"]


class _MmaOfRegisters(TiledMma):
    """The tiled product of Q, in registers, and K."""

    def __init__(self, block: Block, *_: Any):
        super().__init__(block, "qk of registers")

    def partition_shape_A(self, shape: tuple[int, int]) -> int:
        return shape[1] // 16

    def make_fragment_A(self, parts: int) -> _HeldQ:  # type: ignore[override]
        return _HeldQ(self.block, parts)


class _HeldQ(Registers):
    """Registers of the first ``parts`` instructions' part of Q."""

    def __init__(self, block: Block, parts: int):
        super().__init__(block)
        self.block, self.tiles = block, dict[int, int | None].fromkeys(range(parts))

    def __getitem__(self, key: Any) -> Part:
        if key[2] not in self.tiles:
            raise Broken(f"registers hold {len(self.tiles)} parts of Q, not part {key[2]}")
        return Part(self, key[2])

    def read(self, i: int, t: int) -> None:
        """Part ``i`` becomes that of row tile ``t``."""
        self.tiles[i] = t
        self.store(Loaded(tuple(dict.fromkeys(self.tiles.values())), -1, frozenset({"q"})))


class _PartsOfQ:
    """A thread's part of Q's tile, by instructions of a product."""

    def __init__(self, thread: int | None, tile: StageRef):
        self.thread, self.tile = thread, tile

    def __getitem__(self, key: Any) -> Part:
        return Part(self, key[2])


class _CopyOfQ:
    """The tiled copy of Q from shared memory to registers, and a thread's part of it."""

    def __init__(self, block: Block, thread: int | None = None):
        self.block, self.thread = block, thread

    def get_slice(self, thread: int) -> _CopyOfQ:
        return _CopyOfQ(self.block, thread)

    def partition_S(self, tile: StageRef) -> _PartsOfQ:
        return _PartsOfQ(self.thread, tile)

    def retile(self, q: Registers) -> Registers:
        return q

    def copied(self, of: Part, to: Part) -> None:
        block, thread, stage = self.block, of.of.thread, of.of.tile.stage
        block.schedule.step()
        if of.i != to.i:
            raise Broken(f"part {of.i} of Q is read as part {to.i}")
        if thread != block.first_thread or block.group.number not in stage.held - stage.output or stage.tag is None:
            raise Broken(f"thread {thread} reads {stage.tag}, held by {stage.held}, as Q")
        to.of.read(to.i, stage.tag[-1])


class InOrderStubs(Stubs):
    """The same of the kernel in the order of keys, whose numbers are exact: what enters the sums of which section is told by them."""

    _RATE = Fraction(2)
    outcomes: ClassVar[set[bool]] = set()  # how guesses have ended

    def rate(self, *_: Any) -> Fraction:  # type: ignore[override]
        return self._RATE

    def heads(self, positions: Any, facts: Any) -> tuple[int, ...]:  # type: ignore[override]
        return (int(facts.head),) * numbers.ROWS

    def of_sections(self, in_smem: tuple, q_state: Any, captured: Any) -> tuple[numbers.Sums, ...]:
        near, in_q, far = in_smem[4]
        return near, in_q.at(in_smem[0][None, None, q_state.index]), far

    def fours_of_sections(self) -> tuple[int, ...]:
        return self.fours_of(self.config)

    @staticmethod
    def fours_of(config: Any) -> tuple[int, ...]:
        return (0, 1, 1) if config.head_dim > 128 else (numbers.COLUMNS // 2, 0, 0)

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

    def _highest(self, t: int, i: int, r: int) -> Any:
        """The highest score of a visit, in base 2."""
        return max(self._score(t, i, r, c) for c in range(numbers.COLUMNS)) * self._RATE

    def _held(self, t: int, seen: list[int], r: int) -> Any:
        """What is subtracted after these visits of a section, in base 2: a maximum that a later one exceeds by ``LAG`` at most."""
        held = numbers.LOWEST
        for i in seen:
            held = found if (found := self._highest(t, i, r)) - held > LAG else held
        return held

    def highest_of(self, scores: Any, r: int, lifts: None, held: Any) -> Any:
        return max(held, *(scores[r, c] for c in range(numbers.COLUMNS)))

    def raise_tops(self, tops: Any, scores: Any, lifts: None) -> None:
        scores.idle("read")
        ((t, i),) = scores.made_of
        if (self._must_be_masked(t, i) and "masked" not in scores.done) or "exponential" in scores.done:
            raise Broken(f"highest scores of {(t, i)}, {set(scores.done)}")
        for r in range(numbers.ROWS):
            tops[r] = max(tops[r], *(scores[r, c] for c in range(numbers.COLUMNS)))

    def highest(self, tops: Any, rate: Any) -> Any:
        for r in range(0 if tops is None else numbers.ROWS):
            tops[r] = tops[r] * rate * Fraction(LN2) if tops[r] > -math.inf else -math.inf
        return tops

    def _of_section(self, t: int, i: int) -> list[int]:
        return [j for j in range(i + 1) if self.block.section(t, j) == self.block.section(t, i)]

    def _guessed_at(self, scores: Any, powers: Any, added: Any, sums: tuple, rate: Any, group: int) -> bool:
        """A guess is right only where no maximum moves."""
        scores.idle("read")
        ((t, i),) = scores.made_of
        if len(self._of_section(t, i)) == 1 or self._must_be_masked(t, i) or scores.done:
            raise Broken(f"a guess at {(t, i)}, {set(scores.done)}")
        votes = self.block.group.votes
        is_right: bool = super()._guessed_at(scores, powers, added, sums, rate, group)  # type: ignore[misc]
        if is_right and any(self._highest(t, i, r) - sums[1][r] * rate > LAG for r in range(numbers.ROWS)):
            raise Broken(f"a guess at {(t, i)} is taken although a maximum moves")
        self.outcomes.add(is_right)
        powers.made_of, powers.done = scores.made_of, frozenset({"exponential"})
        if self.block.group.votes - votes != int(self.config.recomputes):
            raise Broken("each warp decides for itself whether a product is repeated, or a vote is of no use")
        return is_right

    def _weights_by_held(self, scores: Any, sums: tuple, rate: Any) -> None:
        """Only where no maximum moves."""
        scores.idle("read")
        ((t, i),) = scores.made_of
        if any(self._highest(t, i, r) - sums[1][r] * rate > LAG for r in range(numbers.ROWS)):
            raise Broken(f"weights of {(t, i)} are by the maxima held although one moves")
        super()._weights_by_held(scores, sums, rate)  # type: ignore[misc]
        self._have_weights(scores, sums, rate)

    def _weights(self, scores: Any, sums: tuple, rate: Any, is_first: bool) -> bool:
        """A section's maximum and sums are of its tiles alone, so far."""
        scores.idle("read")
        ((t, i),) = scores.made_of
        seen = self._of_section(t, i)
        if is_first is not (len(seen) == 1) or (self._must_be_masked(t, i) and "masked" not in scores.done):
            raise Broken(f"weights of {(t, i)}, {set(scores.done)}; first of a section: {is_first}")
        moves: bool = super()._weights(scores, sums, rate, is_first)  # type: ignore[misc]
        self._have_weights(scores, sums, rate)
        return moves

    def _have_weights(self, scores: Any, sums: tuple, rate: Any) -> None:
        ((t, i),) = scores.made_of
        seen = self._of_section(t, i)
        for r in range(numbers.ROWS):
            top = self._held(t, seen, r)
            wanted = [sum(self._weight(t, j, r, c, top) for j in seen for c in range(part, numbers.COLUMNS, 2)) for part in range(2)]
            if sums[1][r] * rate != top or [sums[4].sums[r, part] for part in range(2)] != wanted:
                raise Broken(f"a section has the sums of other tiles than {seen} of {t}")
        scores.done |= {"exponential"}

    def _merged(self, acc: Any, sections: Any, in_smem: Any, thread: int, is_last: bool) -> None:
        """Sections are merged one after the other, each once and whole."""
        own, before, block = acc.load().made_of, sections.total.load().made_of, self.block
        (t, first), (_, last) = own[0], own[-1]
        visits = len(block.tiles[t].visits)
        ends = last + 1 == visits if is_last else last + 1 < visits and block.section(t, last + 1) > block.section(t, last)
        if (*before, *own) != tuple((t, i) for i in range(last + 1)) or not ends:
            raise Broken(f"{own} is merged as a section, after {before}, the last: {is_last}")
        super()._merged(acc, sections, in_smem, thread, is_last)  # type: ignore[misc]
        sections.total.made_of = (*before, *own)
        if not is_last:
            if any(acc.cells.values()):
                raise Broken(f"O of the section after {first} to {last} of {t} begins with other numbers than 0")
            acc.made_of, acc.done = (), ALL_0

    def stored(self, acc: Any, tops: Any, lse: Any, mma: Any, thread: int, number: int, _: Any, place: Any, facts: Any) -> None:
        t = self._tile(facts)
        seen = list(range(len(self.block.tiles[t].visits)))
        sections = [self._of_section(t, i) for i in seen if i + 1 == len(seen) or self.block.section(t, i + 1) > self.block.section(t, i)]
        for r in range(numbers.ROWS):
            highest = max(self._highest(t, i, r) for i in seen)
            held = top = max(self._held(t, section, r) for section in sections)
            weights = {(i, c): self._weight(t, i, r, c, top) for i in seen for c in range(numbers.COLUMNS)}
            weight, rescale = numbers.QUAD * sum(weights.values()), Fraction(1)
            has_seen = weight > 0
            if self.config.has_sink:
                logit = Sink.base_2(int(facts.head))
                top = max(held, logit)
                rescale = numbers.power_of_2(held - top)
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


def hold_q(names: dict[str, Any], block: Block) -> None:
    """Adds what copies Q to registers to the names that the kernel's modules import."""
    cute, copy = names["cute"], names["cute"].copy
    cute.make_copy_atom = lambda operation, _: operation
    cute.make_tiled_copy_A = lambda *_: _CopyOfQ(block)
    cute.copy = lambda atom, of, to, **given: atom.copied(of, to) if isinstance(atom, _CopyOfQ) else copy(atom, of, to, **given)
    names["warp"] = SimpleNamespace(LdMatrix8x8x16bOp=lambda *_: None)
    names["helpers"] = SimpleNamespace(make_trivial_tiled_mma=functools.partial(_MmaOfRegisters, block))
    names["OperandMajorMode"], names["warpgroup"].OperandSource = SimpleNamespace(K="K"), SimpleNamespace(RMEM="RMEM")
