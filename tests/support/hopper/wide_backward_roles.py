"""Simulated thread block of the backward kernels for wide heads: the text of their roles, with tags in place of numbers.

Copies and products are asynchronous, as in ``protocol.py``: they take effect at some time between their issue and the wait that covers
them. Every product has to be of the right tiles, every gradient the sum over the visits in their order, and every stage is released once,
after its last use.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from anyattn.backends.hopper.wide_backward_config import HALF, WideBackwardConfig, WideTiles, wide_tiles_for
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.schedule import Broken, NamedBarrier, Pipe, Schedule, State

__all__ = ["Case", "random_case", "run_block"]

MODULES = (
    "tile_scheduler", "backward/scheduler", "wide_backward/base", "wide_backward/once", "wide_backward/twice", "wide_backward/keys",
    "wide_backward/queries",
)  # fmt: skip
TILES = ("kept", "also_kept", "x0", "x1", "y0", "y1")


@dataclass
class Case:
    """kept: (the tile's number, its visits: (head, number of the streamed tile)) of each tile that the block keeps, in order. ratio: query
    heads that share keys; visits of dk and dv go through them one after another."""

    config: WideBackwardConfig
    kept: list[tuple[int, list[tuple[int, int]]]]
    ratio: int


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    of, head_dim, one = draw.choice(("dq", "dk", "dv")), draw.choice((512, 576)), draw.random() < 0.5
    tiles = wide_tiles_for(of, head_dim, 512, one and of != "dv")
    if of == "dv" and draw.random() < 0.5 and head_dim == 512:
        tiles = WideTiles(32, 64, (2, 2, 2, 2))
    if draw.random() < 0.5:
        tiles = replace(tiles, holds=0)
    config = WideBackwardConfig(of, head_dim, 512, True, tiles, has_one_kv=one and of != "dv")
    ratio, kept = 1 if of == "dq" else draw.choice((1, 2, 3)), []
    for n in range(draw.choice((1, 2, 3, 4))):
        rows = draw.choice((0, 1, 1, 2, 3, 5))
        kept.append((n, [(which, m) for which in range(ratio) for m in range(rows)]))
    return Case(config, kept, ratio)


@dataclass
class Stage:
    tag: Any = None
    reading: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


class Ref(NamedTuple):
    memory: Memory
    index: int
    part: int

    @property
    def iterator(self) -> Ref:
        return self

    @property
    def stage(self) -> Stage:
        return self.memory.stages[self.index]


class Memory:
    layout = None

    def __init__(self, name: str, stages: int, part: int = 0, shared: list[Stage] | None = None, columns: int = HALF):
        self.columns = columns
        self.name, self.part, self.stages = name, part, [Stage() for _ in range(stages)] if shared is None else shared

    @property
    def iterator(self) -> Memory:
        return self

    def __getitem__(self, key: Any) -> Ref:
        if not 0 <= key[-1] < len(self.stages):
            raise Broken(f"{self.name} has no stage {key[-1]}")
        return Ref(self, key[-1], self.part)


class Registers:
    def __init__(self) -> None:
        self.made, self.busy = tuple[Any, ...](("nothing",)), 0

    def load(self) -> Registers:
        self.idle("read")
        return self

    def store(self, other: Registers) -> None:
        self.idle("written")
        self.made = other.made

    def fill(self, _: float) -> None:
        self.idle("written")
        self.made = ()

    def idle(self, what: str) -> None:
        if self.busy:
            raise Broken(f"registers are {what} while a product is under way")

    def __mul__(self, _: Any) -> Registers:
        found = Registers()
        found.made = (*self.made, "scaled")
        return found


class _Pipe(Pipe):
    def __init__(self, block: Any, name: str, stages: int, groups: int, amount: int, memory: Memory | None):
        super().__init__(block, name, stages, groups, amount)
        self.memory = memory

    def released(self, index: int) -> None:
        if self.memory is None:
            return
        stage, number = self.memory.stages[index], self.block.group.number
        if (self.name, index) in self.block.group.loading:
            raise Broken(f"{self.name} {index} is given back by group {number} while it may still load numbers from there")
        if number in stage.reading or number not in stage.used:
            raise Broken(f"{self.name} {index} ({stage.tag}) is given back by group {number}, which reads it or has not used it")


@dataclass
class Group:
    """loading: pipelines and stages whose numbers are being loaded, which no use and no fence has waited for."""

    number: int
    flying: list[Any] = field(default_factory=list)
    loading: set[tuple[str, int]] = field(default_factory=set)


class _Board:
    """Slots of the board, which a group reads while it holds the slot in ``pipe``."""

    def __init__(self, block: Any, pipe: _Pipe):
        self.block, self.pipe, self.values = block, pipe, dict[tuple, Any]()

    def __getitem__(self, key: tuple) -> Any:
        if self.block.group.number not in self.pipe.held[key[1]]:
            raise Broken(f"the board's slot {key[1]} of {self.pipe.name} is read without having been waited for")
        return self.values[key]

    def __setitem__(self, key: tuple, value: Any) -> None:
        if self.pipe.held[key[1]]:
            raise Broken(f"the board's slot {key[1]} of {self.pipe.name} is written while groups hold it")
        self.values[key] = value


class _Statistics(Memory):
    def __init__(self, name: str, stages: int, pipe: _Pipe, block: Any):
        super().__init__(name, stages)
        self.pipe, self.block = pipe, block


class View(NamedTuple):
    """A tensor in global memory, or a tile of it: its name, and what it was indexed by."""

    name: str
    tag: tuple = ()

    def __getitem__(self, key: tuple) -> View:
        return View(self.name, (*self.tag, *(i for i in key if i is not None)))

    @property
    def iterator(self) -> View:
        return self


class Mma:
    def get_slice(self, _: int) -> Mma:
        return self

    partition_A = partition_B = make_fragment_A = make_fragment_B = lambda self, x: x


class Block:
    """The thread block: memories, pipelines and what has been seen to be right."""

    def __init__(self, schedule: Schedule, case: Case):
        self.schedule, self.case, config = schedule, case, case.config
        self.groups = {"first": Group(0), "second": Group(1)}
        stages = dict(zip(TILES, (1, 1, *config.tiles.stages), strict=True))
        self.memories = {name: Memory(name, n) for name, n in stages.items()}
        self.memories["x1"].columns = config.head_dim - HALF
        if config.keeps_one:
            self.memories["also_kept"] = Memory("also_kept", 1, shared=self.memories["kept"].stages)
        of_each = (1, 1, 1, 1, 1, 1) if config.of == "dv" else (1 + config.keeps_one, 1, 1 + config.streams_one, 2, 1, 1)
        users = dict(zip(TILES, of_each, strict=True))
        amounts = dict.fromkeys(TILES, 1) | {"x0": 1 + (config.of != "dq"), "y0": 1 + (config.of == "dk")}
        self.pipes = {n: _Pipe(self, n, stages[n], users[n], amounts[n], self.memories[n]) for n in TILES}
        if config.streams_one:
            for one, other in (("y0", "x0"), ("y1", "x1")):
                self.memories[one], self.pipes[one] = self.memories[other], self.pipes[other]
        self.work = _Pipe(self, "work", 2, 2, 0, None)
        self.passed: Any = ("nothing", ())
        self.barriers = {at: NamedBarrier(schedule, f"barrier {at}", 256) for at in range(16)}
        self.stored = list[tuple]()

    visit: Any  # ``backward.scheduler.Visit``

    @property
    def group(self) -> Group:
        return self.groups[self.schedule.now.name]

    def copied(self, source: View, to: Ref, barrier: Any) -> None:
        self.schedule.step()
        stage = to.stage
        if stage.reading or self.pipes[to.memory.name].held[to.index]:
            raise Broken(f"{to.memory.name} {to.index} ({stage.tag}) is overwritten by {source} while it is in use")
        if barrier is not self.pipes[to.memory.name].full[to.index]:
            raise Broken(f"{source} comes to {to.memory.name} {to.index} and is told at {barrier.name}")
        stage.tag = None

        def lands() -> None:
            stage.tag, stage.used = source, set()
            barrier.came()

        self.schedule.under_way.append(lands)

    def multiplied(self, acc: Registers, a: Any, b: Ref, first: int, from_zero: bool) -> None:
        self.schedule.step()
        reads, number = [b, a] if isinstance(a, Ref) else [b], self.group.number
        for ref in reads:
            pipe = self.pipes["kept" if ref.stage is self.memories["kept"].stages[0] else ref.memory.name]
            if number not in pipe.held[ref.index] or ref.stage.tag is None:
                raise Broken(f"{ref.memory.name} {ref.index} is multiplied by group {number} without having been waited for")
            ref.stage.reading.append(number)
        if isinstance(a, Ref) and a.memory.name == "also_kept" and b.memory.columns != HALF:
            raise Broken(f"dP is multiplied from {b.memory.columns} columns of {b.memory.name}; wanted {HALF}")
        what = (a.stage.tag if isinstance(a, Ref) else a.made, b.stage.tag, first, b.part)
        acc.busy += 1
        if isinstance(a, Registers):
            a.idle("multiplied again") if a.busy > 1 else None
            a.busy += 1
        self.group.flying.append((acc, a, [(r, r.stage.tag) for r in reads], what, from_zero))

    def wait(self, most: int) -> None:
        self.schedule.step()
        flying, number = self.group.flying, self.group.number
        while len(flying) > most:
            acc, a, reads, what, from_zero = flying.pop(0)
            for ref, tag in reads:
                if ref.stage.tag != tag:
                    raise Broken(f"{tag} was overwritten by {ref.stage.tag} while it was being read")
                ref.stage.reading.remove(number)
                ref.stage.used.add(number)
            acc.busy -= 1
            acc.made = (what,) if from_zero else (*acc.made, what)
            if isinstance(a, Registers):
                a.busy -= 1

    def barrier(self, at: int, threads: int, waits: bool) -> None:
        self.barriers[at].arrive(threads, waits)


class _Stubs:
    """The kernel's methods whose work is arithmetic or scheduling."""

    block: Block
    config: Any
    dtype = "dtype"

    @property
    def widths(self) -> tuple[int, ...]:
        return HALF, self.config.head_dim - HALF, HALF, self.config.head_dim_v - HALF

    def multiplied(self, mma: Any, acc: Registers, a: Registers, b: Ref) -> None:
        self.block.multiplied(acc, a, b, 0, False)

    def scored(self, mma: Any, acc: Registers, kept: tuple[Any, Ref], b: Ref, first: int) -> None:
        held, whole = kept
        if held is not None and held.made != (whole.stage.tag,):
            raise Broken(f"the columns held are of {held.made}; wanted {whole.stage.tag}")
        self.block.multiplied(acc, whole, b, first, first == 0)

    def held(self) -> Registers | None:
        return Registers() if self.config.tiles.holds else None

    def hold(self, held: Registers | None, tile: Memory, _: Any) -> None:
        if held is not None:
            held.idle("written")
            if self.block.group.number not in self.block.pipes["kept" if self.config.keeps_one else tile.name].held[0]:
                raise Broken(f"{tile.name} is held without having been waited for")
            held.made = (tile.stages[0].tag,)

    def given(self, values: Registers, to: str, _: Any) -> None:
        self.block.schedule.step()
        values.idle("read")
        self.block.passed = (to, values.made)

    def taken(self, values: Registers, of: str, _: Any) -> None:
        self.block.schedule.step()
        values.idle("written")
        kind, made = self.block.passed
        if kind != of:
            raise Broken(f"{of} are taken where {kind} are: {made}")
        values.made = made

    def _partition(self, atom: str, in_smem: Memory, source: View) -> tuple[View, Memory]:
        if not atom == in_smem.name:
            raise Broken(f"{source} is copied by {atom} to {in_smem.name}")
        return source, in_smem

    def _post(self, board: _Board, pipe: Any, state: State, facts: tuple) -> None:
        pipe.producer_acquire(state)
        for i, value in enumerate(facts):
            board[i, state.index] = value
        pipe.producer_commit(state)

    def positions(self, *_: Any) -> None:
        return None

    def shape_of(self, *_: Any) -> None:
        return None

    def deltas_held(self, _: Any) -> int:
        return 1

    def stored(self, acc: Registers, mma: Any, thread: Any, width: int, column: int, own: Any, rows: Any) -> None:
        acc.idle("stored")
        self.block.stored.append((self.block.group.number, own, column, width, acc.made))

    def rows_of(self, block: Any, facts: Any) -> tuple[Any, Any]:
        return (facts.m_block if self.config.of == "dq" else facts.n_block), None

    def of_rows(self, ref: Ref, _: Any, *more: Any) -> Registers:
        memory: Any = ref.memory
        if self.block.group.number not in memory.pipe.held[ref.index]:
            raise Broken(f"{memory.name} {ref.index} is read without having been waited for")
        self.block.group.loading.add((memory.pipe.name, ref.index))
        found = Registers()
        found.made = (ref.stage.tag,)
        return found

    # what scheduling decides

    def _drawn(self, counter: Any, total: int, workers: int) -> int:
        self.drawn = getattr(self, "drawn", 0) + 1
        return self.drawn

    def _left(self, *_: Any) -> None: ...

    def row_tile(self, work: int, *_: Any) -> tuple[int, int, int]:
        return self.block.case.kept[work][0], 0, 0

    def key_tile(self, work: int, *_: Any) -> tuple[int, int, int]:
        return self.block.case.kept[work][0], 0, 0

    def storage(self, *_: Any) -> tuple[int, ...]:
        return (0,) * 7

    def band(self, *_: Any) -> tuple[int, int]:
        return 0, 0

    def band_visits(self, m_block: int, *_: Any) -> tuple[int, ...]:
        return len(self.block.case.kept[m_block][1]), 0, 0, 0, m_block

    def _visit(self, i: int, plan: int) -> tuple[int, int]:
        return self.block.case.kept[plan][1][i][1], 0

    def plan_of(self, n_block: int, head: int, *_: Any) -> tuple[int, Any]:
        own = [visit for visit in self.block.case.kept[n_block][1] if visit[0] == head]
        return len(own), own

    def visit_of(self, i: int, n_block: int, head: int, lengths: Any, own: list) -> Any:
        return self.block.visit(own[i][1], head, 1, 0, 0, 0)

    def begins_last(self, *_: Any) -> int:
        return 0

    # arithmetic

    def factors_of(self, scores: Registers, positions: Any, lse: Registers, slots: Any, block: Any) -> None:
        visit, facts = slots
        self._scored(scores, "kept", "x", facts.n_block, (visit.head, visit.m_block))
        self.block.group.loading.clear()
        if lse.made != (View("lse", (0, visit.head, visit.m_block)),):
            raise Broken(f"lse of {lse.made} for {visit}")
        scores.made = (("P", facts.n_block, visit.head, visit.m_block),)

    def score_gradients(self, p: Registers, dp: Registers, delta: Registers) -> None:
        ((_, n, head, m),) = p.made
        self._scored(dp, "also_kept", "y", n, (head, m))
        self.block.group.loading.clear()
        if delta.made != (View("delta", (0, head, m)),):
            raise Broken(f"delta of {delta.made} for {p.made}")
        dp.made = (("dS", n, head, m),)

    def _scored(self, scores: Registers, kept: str, stream: str, n: int, at: tuple[int, int]) -> None:
        scores.idle("read")
        kept = "kept" if self.config.keeps_one else kept
        stream = "x" if self.config.streams_one else stream
        wanted = tuple((View(kept, (0, 0, n)), View(f"{stream}{i}", (at[0], 0, i * HALF, at[1])), i * HALF // 16, 0) for i in (0, 1))
        if scores.made != wanted:
            raise Broken(f"scores are of {scores.made}; wanted {wanted}")


class _Queries:
    """Those of dq, whose statistics are read once for the rows that are kept."""

    block: Block

    def begun(self, block: Any, facts: Any, positions: Any, statistic: Registers, is_first: bool) -> None:
        statistic.made = (facts.m_block, is_first)

    def deltas(self, *_: Any) -> None: ...

    def factors(self, scores: Registers, positions: Any, lse: Registers, block: Any, state: Any, facts: Any) -> None:
        n = block.board[1][0, state.index]
        self._scored(scores, "kept", "x", facts.m_block, (0, n))  # type: ignore[attr-defined]
        if lse.made != (facts.m_block, True):
            raise Broken(f"lse of {lse.made} for row tile {facts.m_block}")
        scores.made = (("P", facts.m_block, 0, n),)

    def differences(self, p: Registers, dp: Registers, delta: Registers) -> None:
        ((_, m, _, n),) = p.made
        self._scored(dp, "also_kept", "y", m, (0, n))  # type: ignore[attr-defined]
        if delta.made != (m, False):
            raise Broken(f"delta of {delta.made} for row tile {m}")
        dp.made = (("dS", m, 0, n),)


def _stand_ins(block: Block) -> dict[str, Any]:
    def local_tile(x: Any, shape: Any, at: Any) -> Any:
        if isinstance(x, Memory):
            return Memory(x.name, 0, at[0] or at[1], x.stages, shape[1])
        return View(x.name, (*x.tag, at[0]))

    def narrowed(x: Registers, _: Any) -> Registers:
        found = Registers()
        found.store(x.load())
        return found

    def load_bytes(target: Ref, source: View, size: int, barrier: Any) -> None:
        def lands() -> None:
            target.stage.tag = source
            barrier.came()

        block.schedule.step()
        block.schedule.under_way.append(lands)

    arch = SimpleNamespace(
        block_idx=lambda: (0, 0, 0),
        grid_dim=lambda: (1, 1, 1),
        shuffle_sync=lambda x, _: x,
        elect_one=contextlib.nullcontext,
        barrier=lambda barrier_id, number_of_threads: block.barrier(barrier_id, number_of_threads, True),
        barrier_arrive=lambda barrier_id, number_of_threads: block.barrier(barrier_id, number_of_threads, False),
        fence_proxy=lambda *_, **__: block.group.loading.clear(),
    )
    cute = SimpleNamespace(
        arch=arch,
        copy=lambda atom, source, to, tma_bar_ptr: block.copied(source, to, tma_bar_ptr),
        domain_offset=lambda by, view: View(view.name, (*view.tag, by[1])),
        local_tile=local_tile,
        make_tensor=lambda of, _: of,
        select=lambda *_, **__: None,
        make_rmem_tensor=lambda *_: Registers(),
        recast_tensor=lambda x, _: x,
        size=lambda *_, **__: 1,
    )
    missing = dict.fromkeys(("_partition", "_post", "_drawn", "_left", "_visit", "rows_stored", "captured", "band"))
    states = SimpleNamespace(Producer=1, Consumer=0)
    return {
        "cute": cute,
        "cutlass": SimpleNamespace(range=lambda *n, **_: range(*n), range_constexpr=range, min=min, Constexpr=None),
        "const_expr": bool,
        "Int32": int,
        "Float32": float,
        "pipeline": SimpleNamespace(PipelineUserType=states, make_pipeline_state=lambda kind, n: State(n, 0, kind)),
        "warpgroup": SimpleNamespace(wait_group=block.wait),
        "narrowed": narrowed,
        "load_bytes": load_bytes,
        "LOG2E": 1.0,
        **{name: type(name, (), missing) for name in ("Softmax", "Scores", "Loads", "LoadsRows", "Packed", "KernelOfConfig")},
    }


def run_block(case: Case, seed: int, changes: Changes = ()) -> None:
    """One thread block of ``case`` by the kernels' text with ``changes``; raises ``Broken``."""
    codes, texts = compiled(MODULES, changes)
    schedule = Schedule(seed, texts)
    block = Block(schedule, case)
    names = _stand_ins(block)
    for code in codes:
        exec(code, names)
    of, block.visit = case.config.of, names["Visit"]
    own = (_Queries,) if of == "dq" else ()
    role = {"dq": "HopperQueryGradient", "dk": "HopperKeyGradient", "dv": "HopperValueGradient"}[of]
    kernel = type("Kernel", (*own, _Stubs, names[role]), {})()
    kernel.block, kernel.config = block, case.config
    pipes = names["Pipes"](*(block.pipes[name] if name != "also_kept" or not case.config.keeps_one else None for name in TILES))
    board = (_Board(block, block.work), _Board(block, block.pipes["x0"]))
    stages = case.config.tiles.stages
    statistics = tuple(_Statistics(n, stages[at], block.pipes[x], block) for n, at, x in (("lse", 0, "x0"), ("delta", 2, "y0")))
    smem = names["Pipes"](*(block.memories[name] for name in TILES))
    shared = names["Block"](pipes, block.work, smem, ("floats", "words"), board, statistics, None, (1.0, 1.0), ((), ()))
    copies = names["Pipes"](*((name, View(name)) for name in TILES))
    mmas = tuple(Mma() for _ in range(2 + (case.config.head_dim > 2 * HALF and of != "dv")))
    sizes = (len(case.kept), 1, 1, 1, case.ratio, *((0,) if of == "dq" else (None,)))
    tables = (None,) * 7

    def loads() -> None:
        kernel.load(copies, shared, (View("lse"), View("delta")), tables, None, (1, 1), sizes)

    schedule.add("loader", loads)
    schedule.add("first", lambda: kernel.multiply_first(0, mmas, shared))
    schedule.add("second", lambda: kernel.multiply_second(0, mmas, shared))
    schedule.run()
    _check(case, block)


def _check(case: Case, block: Block) -> None:
    """Every gradient is stored once, as the sum over its visits in their order."""
    of, wanted = case.config.of, []
    stream, kind = ("y", "P") if of == "dv" else ("x", "dS")
    past = case.config.head_dim - 2 * HALF if of != "dv" else 0
    for n, visits in case.kept:
        for group, column, width, part in ((0, 0, HALF, 0), (1, HALF, HALF, 0), *(((1, 2 * HALF, past, HALF // past),) if past else ())):
            i = min(group, 1)
            made = tuple((((kind, n, h, m),), View(f"{stream}{i}", (h, 0, i * HALF, m)), 0, part) for h, m in visits)
            scaled = ("scaled",) if of != "dv" and visits else ()
            wanted.append((group, n, column, width, (*made, *scaled)))
    for found, own in itertools.zip_longest(sorted(block.stored, key=str), sorted(wanted, key=str)):
        if found != own:
            raise Broken(f"stored {found}; wanted {own}")
    for name, pipe in block.pipes.items():
        if any(pipe.held) or any(stage.reading for stage in block.memories[name].stages):
            raise Broken(f"{name} is not given back at the end")
