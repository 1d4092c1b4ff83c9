"""Exact numbers in the simulated block of ``protocol.py``: those of one thread that stands for a quad, four with the same columns."""

from __future__ import annotations

import functools
import math
import random
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from tests.support.hopper.protocol import Block, Group, Loaded, Part, Registers, StageRef
from tests.support.hopper.schedule import Broken

__all__ = ["COLUMNS", "LOWEST", "QUAD", "ROWS", "Numbers", "Sums", "exact", "power_of_2", "score", "stand_ins", "value"]

ROWS, COLUMNS = 2, 4  # of a thread's fragments
QUAD = 4
LOWEST = Fraction(-1.7014118e38)
_MOST = 1000  # exponents from which on powers of 2 are 0 or infinite


@functools.lru_cache(maxsize=4096)
def score(t: int, i: int, is_cut: bool, group: int, r: int, c: int) -> int | float:
    """What row ``r`` of a warp group gives column ``c`` in visit ``i`` of row tile ``t``: -inf for some of a tile that is cut."""
    draw = random.Random(f"{t} {i} {group} {r}")
    level, hides_all = draw.randint(-3, 3), draw.random() < 0.3
    found = [(level + draw.randint(-2, 2), draw.random() < 0.4) for _ in range(COLUMNS)][c]
    return -math.inf if is_cut and (hides_all or found[1]) else found[0]


@functools.lru_cache(maxsize=4096)
def value(t: int, i: int, key: int, column: int) -> int:
    return random.Random(f"{t} {i} {key} {column}").randint(-9, 9)


def power_of_2(x: Any) -> Any:
    if x != x or x > _MOST:
        return math.inf if x > _MOST else math.nan
    if x < -_MOST:
        return Fraction(0)
    return Fraction(2) ** int(x) if x == int(x) else 2.0 ** float(x)


def exact(x: Any) -> Any:
    """The same number, with which nothing is rounded."""
    return Fraction(x) if isinstance(x, float) and math.isfinite(x) else x


class _Float32:
    inf = math.inf

    def __new__(cls, x: Any) -> Any:
        return exact(x)


class Numbers(Registers):
    """A fragment with numbers, by (row, column), or by one of them. What was never written is no number."""

    def __init__(self, block: Block, shape: int | tuple[int, ...] | None):
        super().__init__(block)
        self.block, self.shape = block, (ROWS, COLUMNS) if shape is None else (shape,) if isinstance(shape, int) else shape
        self.cells: dict[Any, Any] = {}

    def _checked(self, key: Any) -> Any:
        places = key if isinstance(key, tuple) else (key,)
        if len(places) != len(self.shape) or not all(0 <= at < n for at, n in zip(places, self.shape)):
            raise Broken(f"{key} of registers of shape {self.shape}")
        return places

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) == 3:
            return Part(self, key[2])
        self.idle("read")
        return self.cells.get(self._checked(key), math.nan)

    def __setitem__(self, key: Any, number: Any) -> None:
        self.idle("written")
        self.group.fresh.add(id(self))
        self.cells[self._checked(key)] = exact(number)

    def fill(self, value: Any) -> None:
        super().fill(float(value))
        places = [(i,) for i in range(self.shape[0])]
        for n in self.shape[1:]:
            places = [(*at, i) for at in places for i in range(n)]
        self.cells = dict.fromkeys(places, exact(value))

    def load(self) -> Loaded:
        return super().load()._replace(numbers=dict(self.cells))

    def store(self, values: Loaded) -> None:
        super().store(values)
        if values.numbers is not None:
            self.cells = dict(values.numbers)

    def scored(self, place: tuple[int, int]) -> None:
        super().scored(place)
        number = self.group.number
        self.cells = {(r, c): Fraction(score(*place, False, number, r, c)) for r in range(ROWS) for c in range(COLUMNS)}

    def added(self, p: Registers, place: tuple[int, int]) -> None:
        super().added(p, place)
        assert isinstance(p, Numbers)
        for r, c in list(self.cells):
            self.cells[r, c] += QUAD * sum(p.cells[r, key] * value(*place, key, c) for key in range(COLUMNS))


class Sums:
    """Output of earlier sections: of each thread, ``fours`` times four numbers. What was never written is no number."""

    def __init__(self, fours: int) -> None:
        self.cells, self.fours = dict[tuple[int, int], list](), fours

    def used(self, group: Group) -> None:
        """Judges that these numbers are read or written now."""

    def __getitem__(self, key: tuple) -> _Four:
        if not 0 <= key[2] < self.fours:
            raise Broken(f"four numbers at {key[2]} of {self.fours} times four")
        return _Four(self, (key[1], key[2]))

    def at(self, tile: StageRef) -> Sums:
        """The same numbers in the memory of a tile of Q."""
        found = _SumsInQ(self.fours, tile)
        found.cells = self.cells
        return found


class _SumsInQ(Sums):
    def __init__(self, fours: int, tile: StageRef) -> None:
        super().__init__(fours)
        self.tile = tile

    def used(self, group: Group) -> None:
        stage, row_tiles = self.tile.stage, group.block.ends[group.number]
        if group.number not in stage.held - stage.output or stage.tag is None or stage.tag[-1] != row_tiles[group.finished]:
            raise Broken(f"sums are where {stage.tag} is, held by {stage.held}")
        group.unfenced.add((self.tile.memory.name, self.tile.index))


class _Four:
    def __init__(self, of: Sums, at: tuple[int, int]):
        self.of, self.at = of, at

    def copied(self, registers: Numbers, is_read: bool) -> None:
        block = registers.block
        block.schedule.step()
        self.of.used(block.group)
        if self.at[0] != block.first_thread:
            raise Broken(f"sums of thread {self.at[0]} are taken by {block.first_thread}")
        if is_read:
            for j, number in enumerate(self.of.cells.get(self.at, [math.nan] * 4)):
                registers[j] = number
        else:
            self.of.cells[self.at] = [registers[j] for j in range(4)]


def _copied(of: Any, to: Any, others: Any) -> None:
    if isinstance(of, _Four):
        of.copied(to, True)
    elif isinstance(to, _Four):
        to.copied(of, False)
    else:
        others(of, to)


def _sized(x: Any, mode: list[int] | None, others: Any) -> int:
    if not isinstance(x, Numbers) or mode == [2]:
        return others(x, mode)
    return x.shape[mode[0]] if mode else math.prod(x.shape)


def _narrowed(x: Numbers) -> Numbers:
    out = Numbers(x.block, x.shape)
    out.store(x.load())
    return out


def stand_ins(names: dict[str, Any], block: Block) -> None:
    """Changes the names that the kernel's modules import, so that registers hold numbers. Lanes of a quad have the same."""
    cute, others = names["cute"], SimpleNamespace(**names["cute"].__dict__)
    cute.make_rmem_tensor = lambda shape, _: Numbers(block, shape)
    cute.size = lambda x, mode=None: _sized(x, mode, others.size)
    cute.autovec_copy = lambda of, to: _copied(of, to, others.autovec_copy)
    cute.math = SimpleNamespace(fma=lambda a, b, c: a * b + c, log=math.log)
    cute.arch.rcp_approx, cute.arch.fmax = lambda x: 1 / Fraction(x), max
    cute.arch.shuffle_sync_bfly = lambda x, offset: x
    names.update(
        Float32=_Float32,
        Boolean=bool,
        narrowed=lambda x, _: _narrowed(x),
        select=lambda condition, a, b, _: a if condition else b,
        total=lambda a, b: a + b,
        difference=lambda a, b: a - b,
        product=lambda a, b: a * b,
        quotient=lambda a, b: a / b,
        power_of_2=power_of_2,
    )
