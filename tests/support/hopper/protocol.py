"""Simulated thread block of the Hopper kernel: the synchronisation between its roles, without their arithmetic.

Memory holds tags ("K tile 3 of row tile 1") instead of numbers, and registers hold the tags of their operands. TMA copies and products are
asynchronous: they take effect, or finish reading, at some time between their issue and the wait that covers them.

``Block`` is one block; the kernel's source accesses ``Pipe``, ``Memory`` and ``Registers``. Every access is checked when it happens, so
most mistakes are found in any schedule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.hopper.schedule import Broken, MemoryBarrier, NamedBarrier, Pipe, Schedule

__all__ = ["CLEANED", "PARTS", "Block", "BlockPipe", "Group", "Loaded", "Memory", "PieceRef", "Pieces", "Registers", "RowTile", "StageRef"]

PARTS = 2  # instructions of a product
TURN = range(1, 5)  # the barriers at which warp groups take turns
CLEANED = range(5, 9)  # and those at which each one meets after wiping


class RowTile(NamedTuple):
    """facts: those that a row tile is told by, by name. visits: (key tile, whether the partial predicate is asked, whether it must be
    masked). sources: tags of Q, and of K and of V for each visit, with pages one for each piece. room: keys of the last key tile, if a
    sequence's end cuts it."""

    facts: dict[str, int]
    visits: list[tuple[int, int, bool]]
    sources: tuple[tuple, list[tuple], list[tuple]]
    room: int | None


@dataclass
class Stage:
    """What shared memory holds: ``tag`` (None: nothing yet or being written), and by warp group who is at it."""

    tag: Any = None
    number: int = -1  # which of all tiles it is filled with
    asked: dict[int, bool] = field(default_factory=dict)  # the pieces that copies were asked for since the last tile, and whether each came
    held: set[int] = field(default_factory=set)  # waited for and not given back
    reading: list[int] = field(default_factory=list)  # products and stores under way
    used: set[int] = field(default_factory=set)  # groups that are through with it
    output: set[int] = field(default_factory=set)  # groups whose rows of Q are O's now
    wiped: dict[int, tuple[int, str]] = field(default_factory=dict)  # from which key, and how far others can see it


class StageRef(NamedTuple):
    memory: Memory
    index: int

    def __getitem__(self, key: Any) -> Any:
        return Part(self, key[2]) if len(key) == 3 else self

    @property
    def stage(self) -> Stage:
        return self.memory.stages[self.index]


class PieceRef(NamedTuple):
    """Where one copy of a tile goes."""

    memory: Memory
    index: int
    piece: int

    @property
    def stage(self) -> Stage:
        return self.memory.stages[self.index]


class Pieces:
    """A memory of K or V divided into pieces of keys: (in a piece, of the row), (in a row), pieces of keys and of the row, stages."""

    def __init__(self, memory: Memory, shape: tuple[int, int]):
        self.memory, self.at = memory, "kv".index(memory.name[0])  # which mode of both is the keys'
        if memory.block.gathers:
            raise Broken(f"{memory.name} comes row by row, and is divided for the copy engine")
        if shape[self.at] * memory.pieces != memory.keys * memory.block.blocks:
            raise Broken(f"{memory.name} is divided into pieces of {shape[self.at]} keys; wanted {memory.pieces} pieces")

    def __getitem__(self, key: tuple) -> Any:
        if len(key) == 5:
            if key[3 - self.at] != 0 or key[2 + self.at] is not None:
                raise Broken(f"{self.memory.name} is divided along its rows: {key}")
            return self
        return PieceRef(self.memory, self.memory[key].index, key[1])


class Part(NamedTuple):
    """What one instruction of a product reads."""

    of: Any
    i: int


class Memory:
    """Stages of Q (whose place O takes), K or V, or of a part of their columns; the last index says which. keys: of a tile of K or V, which
    so many copies fill."""

    def __init__(self, block: Block, name: str, stages: int, keys: int = 0, pieces: int = 1, users: set[int] | None = None):
        """users: warp groups that read it, all if None."""
        self.block, self.name, self.stages = block, name, [Stage() for _ in range(stages)]
        self.users = set(range(block.consumers)) if users is None else users
        self.keys, self.pieces = keys, pieces
        self.iterator, self.layout = self, None

    def __getitem__(self, key: Any) -> StageRef:
        if not 0 <= key[-1] < len(self.stages):
            raise Broken(f"{self.name} has no stage {key[-1]}")
        return StageRef(self, key[-1])


class Columns(NamedTuple):
    """A tile of K or V in parts, each in a memory of its own, or one of its stages."""

    parts: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.parts[0].name[0])

    def __getitem__(self, key: Any) -> Any:  # type: ignore[override]
        if len(key) == 3 and isinstance(self.parts[0], StageRef):
            return Part(self.parts[key[2]], key[2])
        return Columns(tuple(part[key] for part in self.parts))


class BlockPipe(Pipe):
    """A pipeline of the block, with a memory or with the board's slots."""

    def __init__(self, block: Block, name: str, stages: int, groups: int, memory: Memory | None):
        super().__init__(block, name, stages, groups, memory.pieces if memory else 0)
        self.memory, self.stages = memory, memory.stages if memory else [Stage() for _ in range(stages)]
        self.held = [stage.held for stage in self.stages]

    def consumer_wait(self, state: Any) -> None:
        if self.memory and self.block.group.number not in self.memory.users:  # who does not release it
            self.full[state.index].wait(state.phase)
            return
        super().consumer_wait(state)
        if self.block.gathers and self.memory:
            self.block.group.unfenced.add((self.name, state.index))

    def consumer_release(self, state: Any) -> None:
        super().consumer_release(state)
        other = self.block.other
        if other is not None and self.memory in self.block.of_tile:  # both thread blocks fill the stage
            if other.has_ended:
                raise Broken(f"{self.name} {state.index} is given back to a thread block that has ended")
            next(pipe for pipe in other.pipes if pipe.name == self.name).empty[state.index].arrive()

    def released(self, index: int) -> None:
        stage, number = self.stages[index], self.block.group.number
        if number in stage.reading:
            raise Broken(f"{self.name} {index} is given back while it is being read")
        if self.memory and self.memory.name == "v" and stage.tag and (*stage.tag[-1], number) in self.block.skipped:
            stage.used.add(number)
        if (self.name, index) in self.block.group.unfenced:
            raise Broken(f"{self.name} {index} is given back to the copy engine before a fence covers what threads wrote there")
        if self.memory and number not in stage.used:
            raise Broken(f"{self.name} {index} ({stage.tag}) is given back before it was used")


class Loaded(NamedTuple):
    """Values of registers: what they are made of, the maximum they stand in relation to, what they are or what was done to them; of
    ``numbers.Numbers`` the numbers too."""

    made_of: tuple
    epoch: int
    done: frozenset[str]
    numbers: dict[Any, Any] | None = None

    def __mul__(self, factor: Registers) -> Loaded:  # type: ignore[override]
        if factor.made_of != (self.epoch,):
            raise Broken("rescaled from another maximum than the one in use")
        return self._replace(epoch=factor.epoch)

    def __add__(self, more: Loaded) -> Loaded:  # type: ignore[override]
        if more.epoch != self.epoch or more.done != self.done:
            raise Broken(f"{more} is added to {self}")
        return self._replace(made_of=self.made_of + more.made_of)


class Registers:
    """A fragment. busy: products under way that read or write it."""

    def __init__(self, block: Block):
        self.group, self.busy = block.group, 0
        self.made_of, self.epoch, self.done = tuple[Any, ...](("nothing",)), -1, frozenset[str]()
        self.group.fresh.add(id(self))

    def __getitem__(self, key: Any) -> Any:
        return Part(self, key[2]) if isinstance(key, tuple) and len(key) == 3 else self

    def idle(self, what: str) -> None:
        if self.busy:
            raise Broken(f"registers are {what} while a product is under way")

    def fill(self, value: float) -> None:
        self.store(Loaded((), -1, frozenset({f"all {value}"})))

    def load(self) -> Loaded:
        self.idle("read")
        return Loaded(self.made_of, self.epoch, self.done)

    def store(self, values: Loaded) -> None:
        self.idle("written")
        self.made_of, self.epoch, self.done, _ = values
        self.group.fresh.add(id(self))

    def scored(self, place: tuple[int, int]) -> None:
        """A product of Q and K has ended here."""
        self.made_of, self.done, self.epoch = (place,), frozenset(), -1

    def added(self, p: Registers, place: tuple[int, int]) -> None:
        """A product of P and V has been added."""
        self.made_of, self.done = (*self.made_of, place), frozenset({"out"})


@dataclass
class _Product:
    """Instructions of one committed group: (accumulator, a, b, whether it adds)."""

    parts: list[tuple[Registers, Part, Part, bool]]
    registers: list[Registers] = field(default_factory=list)
    tags: list[tuple[Stage, Any]] = field(default_factory=list)
    tile: tuple[int, int] = (0, 0)


class Group:
    """A warp group: its products under way, and how far it is in the order that all groups follow."""

    def __init__(self, block: Block, number: int):
        self.block, self.number = block, number
        self.issued: list[tuple[Registers, Part, Part, bool]] = []
        self.flying: list[_Product] = []
        self.fresh = set[int]()  # registers written since the last fence
        self.unfenced = set[tuple[str, int]]()  # stages that threads filled, waited for since the last fence between them and products
        self.scores, self.outputs, self.finished = 0, 0, 0  # products of K, of V, row tiles
        self.votes = 0  # of its warps
        self.stores = list[bool]()  # of each store so far whether its memory has been read

    def gemm(self, atom: Any, acc: Registers, a: Part, b: Part) -> None:
        of_q = "qk" if isinstance(a.of, StageRef) else "qk of registers"
        if atom.operation != (of_q if self._is_q(a.of) else "pv"):
            raise Broken(f"a product by the layout of {atom.operation}")
        if any(id(x) in self.fresh for x in (acc, a.of)):
            raise Broken("a product of registers that no fence has covered")
        for ref in (a.of, b.of):  # when it is issued, since a product may wait between its instructions
            if isinstance(ref, StageRef) and self.number not in ref.stage.held:
                raise Broken(f"{ref.memory.name} {ref.index} is read without having been waited for")
        self.issued.append((acc, a, b, atom.adds))

    def _is_q(self, operand: StageRef | Registers) -> bool:
        return isinstance(operand, StageRef) or operand.done == {"q"}

    def commit(self) -> None:
        self.block.schedule.step()
        product = _Product(self.issued)
        self.issued = []
        acc, a, b, _ = product.parts[0]
        is_scores = self._is_q(a.of)
        first = [part.of if is_scores and self._is_q(part.of) else a.of for _, part, _, _ in product.parts]  # registers hold a part of Q
        second = [b.of] * len(first)
        if is_scores and self.block.is_wide:
            second = [StageRef(memory, b.of.index) for memory in self.block.of_tile[:PARTS]]
        wanted = [(acc, Part(of, i), Part(second[i], i), i > 0 or not is_scores) for i, of in enumerate(first)]
        if product.parts != wanted or len(first) != PARTS:
            raise Broken("a product is not the sum of its parts")
        operands = list({id(x): x for x in first}.values())
        product.registers = [x for x in (acc, *operands) if isinstance(x, Registers)]
        if is_scores:
            self._scores(product, acc, operands, list(dict.fromkeys(second)))
        else:
            self._output(product, acc, a.of, b.of)
        for x in product.registers:
            x.busy += 1
        self.flying.append(product)

    def vote(self, is_low: bool) -> None:
        """The group's warps have voted on the tile of the last scores."""
        place = t, i = self.block.order[self.scores - 1]
        if i == 0:
            raise Broken(f"the first key tile of row tile {t} may be skipped")
        if is_low:
            self.block.skipped.add((*place, self.number))

    def pass_skipped(self) -> None:
        """Counts the tiles that come next and are skipped as done."""
        while self.outputs < len(self.block.order) and (*self.block.order[self.outputs], self.number) in self.block.skipped:
            self.outputs += 1

    def _next(self, count: int) -> tuple[int, int]:
        if count >= len(self.block.order):
            raise Broken("a product of no tile")
        return self.block.order[count]

    def _scores(self, product: _Product, acc: Registers, operands: list[StageRef | Registers], parts: list[StageRef]) -> None:
        repeats = self.block.recomputes and self.scores > 0 and parts[0].stage.tag[-1] == self.block.order[self.scores - 1]
        self.scores -= repeats
        product.tile = t, i = self._next(self.scores)
        self.scores += 1
        for q in operands:
            if isinstance(q, StageRef):
                self._reads(product, q, ("q", *self.block.tiles[t].sources[0]), t)
                if self.number in q.stage.output:
                    raise Broken("Q is read where O stands")
            elif q.made_of != (t,):
                raise Broken(f"Q of {q.made_of} in registers with K of {(t, i)}")
        for k in parts:
            self._reads(product, k, (k.memory.name, *self.block.tiles[t].sources[1][i]), (t, i))
        acc.idle("overwritten")
        if self.block.takes_turns and self.block.turn != self.number and not repeats:
            raise Broken(f"group {self.number} multiplies in the turn of {self.block.turn}")

    def _output(self, product: _Product, acc: Registers, p: Registers, v: StageRef) -> None:
        self.pass_skipped()
        product.tile = t, i = self._next(self.outputs)
        self.outputs += 1
        tile = self.block.tiles[t]
        own = self.block.section(t, i)
        before = tuple((t, j) for j in range(i) if (t, j, self.number) not in self.block.skipped and self.block.section(t, j) == own)
        self._reads(product, v, (v.memory.name, *tile.sources[2][i]), (t, i))
        if p.made_of != ((t, i),) or "exponential" not in p.done or ("dropped" in p.done) is not self.block.drops:
            raise Broken(f"P of {p.made_of} with V of {(t, i)}")
        flown = tuple(x.tile for x in self.flying if x.parts[0][0] is acc)
        if acc.made_of + flown != before or not acc.done <= {"out", "all 0.0"}:
            raise Broken(f"V of {(t, i)} is added to {acc.made_of}")
        if i == 0:
            acc.epoch = p.epoch
        if acc.epoch != p.epoch:
            raise Broken("O is not rescaled to the maximum of P")
        wiped = v.stage.wiped.get(0 if self.block.is_wide else self.number)
        if i == self.block.edge(t) and tile.room is not None and wiped != (tile.room, "seen"):
            raise Broken(f"V of {(t, i)} is not wiped from {tile.room} on: {v.stage.wiped}")

    def _reads(self, product: _Product, ref: StageRef, tag: tuple, place: Any) -> None:
        stage = ref.stage
        if tag[0] != "q" and (ref.memory.name, ref.index) in self.unfenced:
            raise Broken(f"{ref.memory.name} {ref.index} was written by threads, and a product reads it without a fence")
        if stage.tag != (*tag, place):
            raise Broken(f"{ref.memory.name} {ref.index} holds {stage.tag}; wanted {(*tag, place)}")
        stage.reading.append(self.number)
        product.tags.append((stage, stage.tag))

    def wait(self, most: int) -> None:
        """All but the last ``most`` products are through."""
        self.block.schedule.step()
        while len(self.flying) > most:
            product = self.flying.pop(0)
            acc, a, _, _ = product.parts[0]
            for stage, tag in product.tags:
                if stage.tag != tag:
                    raise Broken(f"{tag} was overwritten by {stage.tag} while it was being read")
                stage.reading.remove(self.number)
                if tag[0] != "q":
                    stage.used.add(self.number)
            for x in product.registers:
                x.busy -= 1
            if self._is_q(a.of):
                acc.scored(product.tile)
            else:
                acc.added(a.of, product.tile)


class Block:
    """tiles: the row tiles that the block will get, in order. rank: its number in its cluster. takes_turns: ``Tiles.ping_pong``. other: the
    other block of a cluster of two."""

    other: Block | None = None

    def __init__(self, schedule: Schedule, config: Any, tiles: list[RowTile], rank: int = 0):
        self.schedule, self.tiles, self.takes_turns, self.gathers = schedule, tiles, config.tiles.ping_pong, config.gathers
        self.drops, self.is_wide, self.consumers, self.columns = config.has_dropout, config.is_wide, config.consumers, config.columns
        self.recomputes = config.recomputes
        self.section_tiles = config.section_tiles if config.in_order else 0
        self.order = [(t, i) for t, tile in enumerate(tiles) for i in range(len(tile.visits))]
        count, stages = config.consumers, config.tiles.stages
        self.rank, self.blocks, self.is_paged = rank, config.cluster, config.is_paged
        self.groups = {f"{self.prefix}group {i}": Group(self, i) for i in range(count)}
        keys = config.tiles.tile_n
        whole = (keys, (keys // config.piece if config.is_paged else 1) * self.blocks)
        # a tile of wide heads comes in parts: the first warp group reads K and a part of V, the second the other part of V
        users: dict[str, set[int] | None] = {"k": None, "v": None}
        if config.is_wide:
            users = {"k0": {0}, "k1": {0, 1}} if config.has_one_kv else {"k0": {0}, "k1": {0}, "v0": {0}, "v1": {1}}
        self.q = Memory(self, "q", config.q_stages)
        self.of_tile = [Memory(self, name, stages, *whole, of) for name, of in users.items()]
        shared = [1, *[self.blocks] * len(self.of_tile)]
        memories = [self.q, *self.of_tile]
        self.pipes = [BlockPipe(self, m.name, len(m.stages), len(m.users) * n, m) for m, n in zip(memories, shared, strict=True)]
        self.by_name = {m.name: (m, pipe) for m, pipe in zip(memories, self.pipes, strict=True)}
        for pipe in self.pipes[1:]:
            for barrier in pipe.full:
                barrier.may_owe = config.pairs
        work = BlockPipe(self, "work", 2, count, None)
        self.operands: tuple[Any, ...] = (self.q, *self.of_tile)
        if config.is_wide:
            self.operands = self.q, Columns(tuple(self.of_tile[:2])), Columns(tuple(self.of_tile[-2:]))
        self.pipes.append(work)
        # of wide heads the first warp group computes all scores, and writes what has no visits
        self.scored = [len(self.order) if g == 0 or not config.is_wide else 0 for g in range(count)]
        self.ends = [[t for t, tile in enumerate(tiles) if tile.visits or g == 0 or not config.is_wide] for g in range(count)]
        self.barriers: dict[int, NamedBarrier] = {}
        self.owners: dict[int, int] = {}  # of barriers for one warp group
        self.skipped = set[tuple[int, int, int]]()  # (row tile, visit, warp group)
        self.low = schedule.random.choice((0.0, 0.5, 0.5, 0.9, 1.0)) if config.has_skip else 0.0  # the probability that a tile is
        self.copied = Counter[tuple[str, int]]()  # of each piece of a tile
        self.turn: int | None = None
        self.epochs = 0
        self.loaded_at_draw: int | None = None  # key tiles, when work was drawn last
        self.written = {(t, g): 0 for g in range(count) for t in self.ends[g]}

    def edge(self, t: int) -> int:
        """The visit of a row tile's last key tile."""
        return len(self.tiles[t].visits) - 1 if self.section_tiles else 0

    def section(self, t: int, i: int) -> int:
        """The section of keys that a visit is of; 0 if keys have no sections."""
        return self.tiles[t].visits[i][0] // self.section_tiles if self.section_tiles else 0

    @property
    def prefix(self) -> str:
        """Of the names of its threads."""
        return f"block {self.rank} " if self.blocks > 1 else ""

    @property
    def has_ended(self) -> bool:
        return all(a.is_done for a in self.schedule.actors if a.name.startswith(self.prefix))

    @property
    def first_thread(self) -> int:
        """The number of the running warp group's first thread: both of wide heads have all rows, and count from 0."""
        return 0 if self.is_wide else 128 * self.group.number

    @property
    def group(self) -> Group:
        return self.groups[self.schedule.now.name]

    def copy_in(self, name: str, tag: tuple, to: StageRef | PieceRef, barrier: MemoryBarrier) -> None:
        """The copy engine fills a stage or a piece of it, some time later."""
        self.schedule.step()
        stage, pieces = to.stage, to.memory.pieces
        piece = to.piece if isinstance(to, PieceRef) else 0
        if not 0 <= piece < pieces:
            raise Broken(f"{name} has {pieces} pieces, and {piece} is copied")
        count = self.copied[name, piece]
        places: list[Any] = self.order if name != "q" else [t for t, tile in enumerate(self.tiles) if tile.visits]
        if count >= len(places):
            raise Broken(f"{name} {tag} is copied for no tile")
        place = places[count]
        whole = self.tiles[place].sources[0] if name == "q" else self.tiles[place[0]].sources["qkv".index(name[0])][place[1]]
        wanted = whole[piece // self.blocks] if self.is_paged and name != "q" else whole
        if (name, tag) != (to.memory.name, wanted):
            raise Broken(f"{name} {tag} is copied to {to.memory.name} for {place}; wanted {wanted}")
        if barrier is not self.by_name[name][1].full[to.index]:
            raise Broken(f"{name} {tag} comes to {to.index} and is told at {barrier.name}")
        if stage.number != count:
            self._is_free(to)
            stage.tag, stage.used, stage.output, stage.wiped, stage.asked, stage.number = None, set(), set(), {}, {}, count
        if piece in stage.asked or stage.tag is not None:
            raise Broken(f"piece {piece} of {name} {place} is copied twice, or to a stage of another tile")
        stage.asked[piece] = False
        self.copied[name, piece] += 1

        def came() -> None:
            if self.other is not None and self.has_ended:
                raise Broken(f"{name} {place} comes to a thread block that has ended")
            stage.asked[piece] = True
            if sum(stage.asked.values()) == pieces:
                stage.tag = (name, *whole, place)
            barrier.came()

        self.schedule.under_way.append(came)

    def draws(self) -> None:
        """Work is drawn, as late as possible: other blocks may have none before this one comes to it."""
        self.loaded_at_draw = self.copied[self.of_tile[0].name, 0]

    def _is_free(self, to: StageRef | PieceRef) -> None:
        stage = to.stage
        if stage.reading or stage.held:
            raise Broken(f"{to.memory.name} {to.index} ({stage.tag}) is overwritten while {stage.reading or stage.held} use it")
        if stage.tag is not None and stage.used != to.memory.users:
            raise Broken(f"{stage.tag} is overwritten; only {stage.used} have used it")
        if stage.tag is None and stage.number >= 0:
            raise Broken(f"{to.memory.name} {to.index} is overwritten while it is being filled")

    def copy_out(self, ref: StageRef, t: int) -> None:
        """The copy engine reads a warp group's rows of O out of Q's memory, some time later."""
        group, stage = self.group, ref.stage
        stage.output.add(group.number)
        stage.reading.append(group.number)
        group.stores.append(False)
        tag, number = stage.tag, len(group.stores) - 1

        def gone() -> None:
            if stage.tag != tag:
                raise Broken(f"O of {tag} was overwritten by {stage.tag} before it had left")
            stage.reading.remove(group.number)
            group.stores[number] = True
            self.written[t, group.number] += 1

        self.schedule.under_way.append(gone)

    def wait_for_stores(self, most: int) -> None:
        """All but the last ``most`` stores have been read."""
        stores = self.group.stores
        self.schedule.until(lambda: all(stores[: len(stores) - most]), "waits for its stores to have been read")

    def barrier(self, number: int, threads: int, waits: bool) -> None:
        group = self.group
        if number in TURN and not waits:
            if self.turn != group.number and (group.number, group.scores) != (0, 0):
                raise Broken(f"group {group.number} gives away the turn of {self.turn}")
            self.turn = None
        self.barriers.setdefault(number, NamedBarrier(self.schedule, f"barrier {number}", threads)).arrive(threads, waits)
        if threads == 128 and self.owners.setdefault(number, group.number) != group.number:
            raise Broken(f"groups {self.owners[number]} and {group.number} meet at barrier {number}, which takes one of them")
        if number in TURN and waits:
            if self.turn is not None or number != TURN[0] + group.number:
                raise Broken(f"group {group.number} takes turn {number} while {self.turn} has it")
            self.turn = group.number
        if number in CLEANED:
            self._sees_wiped(lambda how: "seen" if how == "fenced" else how)

    def wiped(self, tile: StageRef | Columns, first: int, zeros: Registers) -> None:
        group = self.group
        if zeros.done != {"all 0.0"}:
            raise Broken("wiped with something else than zeros")
        for ref in tile.parts if isinstance(tile, Columns) else (tile,):
            stage = ref.stage
            others = ref.memory.users - stage.used  # who still have to read it: till then it is not overwritten
            is_kept = group.number in stage.held or (others and group.number not in others)
            if not is_kept or stage.tag is None or group.number in stage.reading:
                raise Broken(f"{ref.memory.name} {ref.index} is wiped while others fill or read it")
            stage.wiped.setdefault(group.number, (first, "wiped"))

    def fence_written(self) -> None:
        """Between what the calling threads wrote, or saw written, and what their products read."""
        self.group.unfenced.clear()
        self._sees_wiped(lambda how: "fenced" if how == "wiped" else how)

    def _sees_wiped(self, change: Any) -> None:
        group = self.group.number
        for stage in (stage for memory in self.of_tile for stage in memory.stages):
            if group in stage.wiped:
                first, how = stage.wiped[group]
                stage.wiped[group] = (first, change(how))

    def check_end(self) -> None:
        """All is computed, written and given back."""
        if self.loaded_at_draw not in (None, self.copied[self.of_tile[0].name, 0]):
            raise Broken("work is drawn before the keys of the row tile at hand are loaded")
        for name, group in self.groups.items():
            group.pass_skipped()
            done = (group.scores, group.outputs, group.finished, len(group.flying), group.stores.count(False))
            if done != (self.scored[group.number], len(self.order), len(self.ends[group.number]), 0, 0):
                raise Broken(f"{name} ends with {done} of {len(self.order)} tiles, {len(self.tiles)} row tiles")
        if any(n != 1 for n in self.written.values()) or self.turn is not None:
            raise Broken(f"outputs written: {self.written}; turn of {self.turn}")
        if any(stage.held for pipe in self.pipes for stage in pipe.stages):
            raise Broken("something was never given back")
