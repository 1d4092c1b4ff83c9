"""Simulated machine for the backward roles: memory, copies, products and barriers with real numbers.

The 128 threads of a warp group are the first axis of every register. Memory is addressed by rows and columns; the swizzle of shared memory
is not modelled. Asynchronous operations take effect as late as possible: a product's operands, in registers or in shared memory, are read
when it is waited for, and so is a copy's source, so that overwriting them too early shows in the numbers.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from tests.support.hopper.schedule import Broken, NamedBarrier, Pipe, Schedule

__all__ = ["LANES", "Acc", "Block", "Box", "Group", "Held", "Mma", "Regs", "Run", "Shared", "View", "narrow"]

LANES = np.arange(128, dtype=np.int32)
ROW = LANES // 32 * 16 + LANES % 32 // 4  # of a wgmma accumulator's 64 rows, the first that a thread holds; the other lies 8 below
COLUMN = LANES % 4 * 2  # and the first column; then the next one, and the same pair 8 further on


def narrow(x: np.ndarray) -> np.ndarray:
    """float32 numbers rounded to bfloat16."""
    return torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32)).bfloat16().float().numpy()


class Values(np.ndarray):
    """Numbers of registers, with the compiler's way of converting them."""

    def to(self, dtype: Any) -> np.ndarray:
        return narrow(np.asarray(self))


@functools.lru_cache(maxsize=64)
def _places(columns: int, width: int) -> np.ndarray:
    """Where, in 64 rows of ``width`` numbers one after the other, each thread's two rows of so many columns lie: (128, 2, columns)."""
    r, c = np.arange(2)[:, None], np.arange(columns)
    return (ROW[:, None, None] + 8 * r) * width + COLUMN[:, None, None] + c // 2 * 8 + c % 2


class Acc:
    """A fragment of 64 rows of a thread's two rows and its columns: (128, 2, columns), as ``rows_and_columns`` shows it."""

    element_type = np.float32

    def __init__(self, columns: int):
        self.values = np.full((128, 2, columns), np.nan, dtype=np.float32)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple) and len(key) == 3:  # what one instruction of a product reads of it as its first operand
            return (self, key[2])
        return self.values[:, key[0], key[1]]

    def __setitem__(self, key: tuple[int, int], value: Any) -> None:
        self.values[:, key[0], key[1]] = value

    def columns(self, part: int, parts: int) -> Acc:
        """One of ``parts`` runs of columns."""
        found, count = Acc.__new__(Acc), self.values.shape[2] // parts
        found.values = self.values[:, :, part * count : (part + 1) * count]
        return found

    def fill(self, value: float) -> None:
        self.values[:] = value

    def load(self) -> Values:
        return self.values.copy().view(Values)

    def store(self, values: Any) -> None:
        self.values[:] = values

    def sizes(self) -> tuple[int, int, int]:
        return (2, self.values.shape[2], self.values.shape[2] // 8)

    def matrix(self) -> np.ndarray:
        """The 64 rows that the threads hold together."""
        columns = self.values.shape[2]
        found = np.empty((64, columns * 4), dtype=np.float32)
        found.reshape(-1)[_places(columns, columns * 4)] = self.values
        return found

    def add(self, product: np.ndarray, from_zero: bool) -> None:
        part = np.ascontiguousarray(product).reshape(-1)[_places(self.values.shape[2], product.shape[1])]
        self.values[:] = part if from_zero else self.values + part


class Positions:
    """Rows and columns of a tile that a thread's fragment stands for."""

    def __init__(self, rows: slice, columns: slice):
        self.rows, self.columns = rows, columns

    def sizes(self) -> tuple[int, int]:
        return (2, (self.columns.stop - self.columns.start) // 4)

    def __getitem__(self, key: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        r, c = key
        return self.rows.start + ROW + 8 * r, self.columns.start + COLUMN + c // 2 * 8 + c % 2


class Regs:
    """So many numbers of each thread."""

    def __init__(self, count: int, element_type: Any):
        self.values, self.element_type = np.full((128, count), np.nan, dtype=np.float32), element_type
        if getattr(element_type, "dtype", np.float32) != np.float32:  # a kernel's own type is a function that rounds
            self.values = np.zeros((128, count), dtype=element_type.dtype)
        self.iterator, self.start = self, 0

    def __add__(self, offset: int) -> Regs:
        found = Regs.__new__(Regs)
        found.values, found.start = self.values[:, offset:], 0
        found.iterator = found
        return found

    def __getitem__(self, i: int) -> np.ndarray:
        return self.values[:, i].copy()

    def __setitem__(self, i: int, value: Any) -> None:
        self.values[:, i] = value

    def fill(self, value: float) -> None:
        self.values[:] = value

    def sizes(self) -> tuple[int]:
        return (self.values.shape[1],)


class Shared:
    """A tile in shared memory with a last axis for its stages."""

    def __init__(self, block: Block, name: str, shape: tuple[int, ...]):
        self.block, self.name = block, name
        self.values = np.full(shape, np.nan, dtype=np.float32)
        self.unfenced = set[tuple[int, Any]]()  # (group, stage) that have been written and not ordered before asynchronous reads
        self.unwiped = set[int]()  # likewise, groups that have written zeros where all of them write zeros
        self.iterator, self.layout = self, "as stored"
        self.same_place: Shared | None = None  # what else is stored there

    def __getitem__(self, key: Any) -> View:
        return View(self, key)

    def written(self) -> None:
        """Nothing is left of what else was stored there."""
        if self.same_place is not None:
            self.same_place.values[:] = np.nan


class View:
    """A part of shared memory."""

    def __init__(self, of: Shared, key: Any, is_transposed: bool = False):
        self.of, self.key, self.is_transposed = of, key, is_transposed
        self.iterator = self

    def index(self) -> tuple:
        # a tile whose rows and columns are one mode has one index less
        missing = self.of.values.ndim - len(self.key)
        return (slice(None),) * missing + tuple(slice(None) if k is None else k for k in self.key)

    def read(self, what: str, of_group: int | None = None) -> np.ndarray:
        """of_group: whose part alone is read."""
        late = {group for group, stage in self.of.unfenced if stage == self.key[-1] and of_group in (None, group)}
        if late:
            raise Broken(f"{self.of.name} is read by {what} before the writes of groups {late} are fenced")
        if self.of.block.group.number in self.of.unwiped:
            raise Broken(f"{self.of.name} is read by {what} before the zeros of its own group are fenced")
        found = self.of.values[self.index()]
        return found.T if self.is_transposed else found

    def write(self, values: Any) -> None:
        self.of.values[self.index()] = values


class Run:
    """A run of rows and columns of a tile in shared memory, in all its stages."""

    def __init__(self, of: Shared, rows: slice, columns: slice, is_transposed: bool = False):
        self.of, self.rows, self.columns, self.is_transposed = of, rows, columns, is_transposed
        self.iterator, self.layout = self, "as stored"

    def read(self, stage: Any) -> np.ndarray:
        found = View(self.of, (None, None, stage)).read("a product")[self.rows, self.columns]
        return found.T if self.is_transposed else found


class Box:
    """A tile of a tensor in global memory, (rows, columns), as the copy engine sees it."""

    def __init__(self, of: Any, shape: tuple[int, int], place: tuple[int, int]):
        self.of, self.shape = of.values, shape
        first, column = of.first + place[0] * shape[0], place[1] * shape[1]
        if first < 0:
            raise Broken(f"a tile begins at row {first}")
        self.rows, self.columns = slice(first, first + shape[0]), slice(column, column + shape[1])

    def read(self) -> np.ndarray:
        found = np.zeros(self.shape, dtype=np.float32)
        part = self.of[self.rows, self.columns]
        found[: part.shape[0], : part.shape[1]] = part
        return found

    def write(self, values: np.ndarray) -> None:
        part = self.of[self.rows, self.columns]
        part[:] = values[: part.shape[0], : part.shape[1]]


class BlockPipe(Pipe):
    def released(self, index: int) -> None:
        if self.block.group.reads(self.name, index):
            raise Broken(f"{self.name} {index} is given back while a product reads it")


class Mma:
    """A tiled product: of ``groups`` warp groups so many divide its rows, the others its columns."""

    def __init__(self, block: Block, rows: int, columns: int, by_rows: int):
        self.block, self.shape, self.by_rows, self.op = block, (rows, columns), by_rows, self
        self.by_columns = block.groups // by_rows

    def get_slice(self, thread: Any) -> Mma:
        return self

    def partition_A(self, tile: Any) -> tuple:
        return tile, "rows", self

    def partition_B(self, tile: Any) -> tuple:
        return tile, "columns", self

    def partition_shape_A(self, shape: tuple[int, int]) -> tuple:
        return ((shape[0] // self.by_rows, shape[1]),)

    def make_fragment_A(self, part: tuple) -> Any:
        return Operand(*part) if len(part) == 3 else Held(*part)

    make_fragment_B = make_fragment_A

    def partition_C(self, shape: tuple[int, int]) -> Positions:
        if shape != self.shape:
            raise Broken(f"positions of {shape} by a product of {self.shape}")
        return Positions(*self.part())

    def partition_shape_C(self, shape: tuple[int, int]) -> tuple[str, int]:
        if shape != self.shape or shape[0] != 64 * self.by_rows:
            raise Broken(f"an accumulator of {shape} by a product of {self.shape}")
        return ("accumulator", shape[1] // self.by_columns // 4)

    def part(self) -> tuple[slice, slice]:
        """The rows and columns that this warp group makes."""
        return self.part_of("rows", self.shape[0]), self.part_of("columns", self.shape[1])

    def part_of(self, side: str, size: int) -> slice:
        """What this warp group multiplies of one side of a tile."""
        number = self.block.group.number
        count = self.by_rows if side == "rows" else self.by_columns
        at = number % count if count > 1 else 0
        return slice(at * size // count, (at + 1) * size // count)


class Operand:
    """Shared memory as an operand of a product, with a last index for the stage."""

    def __init__(self, tile: Any, side: str, mma: Mma, stage: int | None = None):
        self.tile, self.side, self.mma, self.stage = tile, side, mma, stage

    def __getitem__(self, key: tuple) -> Any:
        if len(key) == 4:
            return Operand(self.tile, self.side, self.mma, key[3])
        return (self, key[2])

    @property
    def of(self) -> Shared:
        found: Shared = self.tile.of if isinstance(self.tile, (View, Run)) else self.tile
        return found

    def sizes(self) -> tuple[int, int, int]:
        return (0, 0, self._tile().shape[1] // 16)

    def _tile(self) -> np.ndarray:
        if isinstance(self.tile, Run):
            return self.tile.read(self.stage)
        is_transposed = isinstance(self.tile, View) and self.tile.is_transposed
        return View(self.of, (None, None, self.stage), is_transposed).read("a product")

    def matrix(self) -> np.ndarray:
        """(rows or columns of the product, what is summed over)."""
        tile = self._tile()
        return tile[self.mma.part_of(self.side, tile.shape[0])]


class Held:
    """The first columns of a first operand in registers."""

    def __init__(self, shape: tuple[int, int]):
        self.values = np.full(shape, np.nan, dtype=np.float32)

    def __getitem__(self, key: tuple) -> Any:
        return (self, key[2])

    def sizes(self) -> tuple[int, int, int]:
        return (0, 0, self.values.shape[1] // 16)

    def matrix(self) -> np.ndarray:
        return self.values


class Group:
    """A warp group, or a warp: its products and copies under way."""

    def __init__(self, block: Block, number: int):
        self.block, self.number = block, number
        self.issued: list[tuple] = []
        self.flying: list[list[tuple]] = []
        self.copies: list[Any] = []  # not committed yet
        self.sent: list[Any] = []
        self.writes: list[Any] = []  # of sent copies whose source has been read, what they write
        self.has_tiles = False  # whether tiles are among them

    def commit(self) -> None:
        self.block.schedule.step()
        self.flying.append(self.issued)
        self.issued = []

    def reads(self, name: str, stage: int) -> bool:
        return any(isinstance(x, Operand) and x.of.name == name and x.stage == stage for p in self.flying for part in p for x in part[1:3])

    def wait(self, most: int) -> None:
        self.block.schedule.step()
        while len(self.flying) > most:
            parts = self.flying.pop(0)
            acc, last, b = parts[-1][:3]
            firsts = [x[1] for x in parts]
            held = next((i for i, a in enumerate(firsts) if not isinstance(a, Held)), len(firsts))  # the first columns of its first operand
            known = {id(a) for a in firsts[:held]}, {id(a) for a in firsts[held:]}
            sides_are_one = len(known[0]) <= 1 and len(known[1]) <= 1 and (not held or firsts[0].sizes()[2] == held)
            if not sides_are_one or [(x[0] is acc, x[2] is b, x[3]) for x in parts] != [(True, True, i) for i in range(b.sizes()[2])]:
                raise Broken("a product is not the sum of its parts")
            if any(not adds for *_, adds in parts[1:]):
                raise Broken("a part of a product does not add to the others")
            left, right = last.matrix(), b.matrix()
            if 0 < held < len(firsts):
                left = np.concatenate([firsts[0].matrix(), left[:, 16 * held :]], 1)
            with np.errstate(invalid="ignore", over="ignore"):
                acc.add(left @ right.T, not parts[0][4])

    def committed(self) -> None:
        self.sent.append(self.copies)
        self.copies = []

    def wait_for_copies(self, most: int, is_read: bool) -> None:
        """They are made as late as can be, some of a whole tile long after that. is_read: their sources have been read, which is all."""
        schedule = self.block.schedule
        if len(self.sent) > most and self.has_tiles:
            for _ in range(schedule.random.choice((0, 0, 150))):
                schedule.step()
        while len(self.sent) > most:
            self.writes += [write for copy in self.sent.pop(0) if (write := copy()) is not None]
        if not is_read:
            while self.writes:
                self.writes.pop(0)()
        self.has_tiles &= bool(self.sent)


class Block:
    """One thread block: its memory, pipelines and roles."""

    def __init__(self, schedule: Schedule, config: Any, number: int, workers: int):
        self.schedule, self.config, self.number, self.workers = schedule, config, number, workers
        tiles, d, dv = config.tiles, config.head_dim, config.head_dim_v
        self.groups, self.of_actor = tiles.warp_groups, dict[Any, Group]()
        m, n, g = tiles.tile_m, tiles.tile_n, tiles.warp_groups
        shapes = {
            "q": (m, d, tiles.q_stages), "dout": (m, dv, tiles.do_stages), "k": (n, d, 1), "v": (n, dv, 1), "ds": (n, m, tiles.exchanged),
            "leaving k": (n, d, 1), "leaving v": (n, dv, 1), "lse": (m, tiles.q_stages), "delta": (m, tiles.do_stages),
            "dq": (4, 128, config.dq_numbers // (512 * g), g),
        }  # fmt: skip
        self.memory = {name: Shared(self, name, shape) for name, shape in shapes.items()}
        if config.frees_keys:  # dK leaves from the place of dQ, dV from that of dS
            for names in (("leaving k", "dq"), ("leaving v", "ds")):
                first, second = (self.memory[name] for name in names)
                first.same_place, second.same_place = second, first
        self.pipes = tuple(
            BlockPipe(self, name, stages, g, size)
            for name, stages, size in (
                ("q", tiles.q_stages, 2 * m * d + 4 * m), ("dout", tiles.do_stages, 2 * m * dv + 4 * m), ("k", 1, 2 * n * d),
                ("v", 1, 2 * n * dv), ("work", 2, 0),
            )
        )  # fmt: skip
        self.barriers = dict[int, NamedBarrier]()
        self.scratch: Any = None  # for diagonals

    @property
    def group(self) -> Group:
        return self.of_actor[self.schedule.now]

    def barrier(self, number: int, threads: int, waits: bool) -> None:
        found = self.barriers.setdefault(number, NamedBarrier(self.schedule, f"block {self.number}, barrier {number}", threads))
        actor = self.group
        # a warp of 32 beside warp groups of 128
        size = 128 if 0 <= actor.number < self.groups else 32
        found.arrive(threads, waits, size)
