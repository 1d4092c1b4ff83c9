"""Source of the Hopper forward roles, run as Python in the simulated block of ``protocol.py``.

One thread loads, one per warp group multiplies. CuTe DSL is not needed: ``cute``, ``pipeline`` and ``warpgroup`` are stand-ins.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.support.hopper import numbers
from tests.support.hopper.cases import Case
from tests.support.hopper.in_order_stubs import InOrderStubs, Sink, hold_q
from tests.support.hopper.protocol import CLEANED, PARTS, Block, BlockPipe, Columns, Loaded, PieceRef, Pieces, Registers, StageRef
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.schedule import Broken, Schedule, State
from tests.support.hopper.stubs import Lanes, SkippingStubs, Stubs, TiledMma, Turned, View

__all__ = ["MODULES", "Counter", "run_block"]

MODULES = (
    "tile_scheduler", "producer", "paged_gather", "operand", "mma", "wide/mma", "wide/producer", "skipping/mma", "skipping/producer",
    "in_order/mma", "in_order/in_place", "in_order/producer",
)  # fmt: skip
_STATES = ("q_state", "k_state", "v_state", "work_state")


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


def _vote(block: Block, skips: bool, holds: bool, barrier: int) -> bool:
    block.barrier(barrier, 128, True)
    block.group.votes += 1
    if skips:
        block.group.vote(holds)
    return holds


def _added(block: Block, counter: Counter, at: int, value: int, **_: Any) -> int:
    if at == 0:
        block.draws()
    return counter.add(at, value)


def _arch(block: Block, work: tuple[int, int], counter: Counter) -> SimpleNamespace:
    arch = SimpleNamespace(lane=0)
    arch.__dict__.update(
        block_idx=lambda: (work[0] * block.blocks + block.rank, 0, 0),
        grid_dim=lambda: (work[1] * block.blocks, 1, 1),
        block_idx_in_cluster=lambda: block.rank,
        lane_idx=lambda: arch.lane,
        shuffle_sync=lambda value, lane: value[lane] if isinstance(value, Lanes) else value,
        atomic_add=functools.partial(_added, block, counter),
        make_warp_uniform=int,
        cp_async_bulk_wait_group=lambda most, read: block.wait_for_stores(most),
        fence_proxy=lambda *_, **__: block.fence_written(),
        sync_warp=lambda: None,
        barrier=lambda barrier_id, number_of_threads: block.barrier(barrier_id, number_of_threads, True),
        vote_any_sync=bool,
        vote_all_sync=bool,
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
        if tma_bar_ptr is not block.by_name[atom][1].full[to.index]:
            raise Broken(f"{source.name} comes to {to.index} and is told at {tma_bar_ptr.name}")
        half = 2 * (to.piece if isinstance(to, PieceRef) else 0) + block.rank
        for each in (block, block.other):
            memory, pipe = each.by_name[atom]
            each.copy_in(source.name, source.tag, PieceRef(memory, to.index, half), pipe.full[to.index])

    def partition(atom: str, part: int, _: Any, in_smem: Any, in_gmem: Any) -> tuple[Any, Any]:
        if part != (block.rank if atom != "q" else 0):
            raise Broken(f"block {block.rank} copies part {part} of {atom}")
        return in_smem, in_gmem

    cute = SimpleNamespace(
        arch=_arch(block, work, counter),
        copy=copy,
        domain_offset=functools.partial(_moved, block.columns),
        prefetch=lambda atom, source: None,
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
        "MEETING": CLEANED[0],
        "Int32": _integer,
        "Uint32": _integer,
        "Float32": SimpleNamespace(inf=math.inf),
        "math": math,
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

    def __init__(self, of: StageRef | Columns, key: int):
        self.of, self.key = of, key

    def __getitem__(self, _: Any) -> _Cells:
        return self


def _local_tile(x: Any, _: tuple, at: tuple) -> Any:
    if isinstance(x, Columns):
        return _Cells(x, at[1]) if isinstance(x.parts[0], StageRef) else x.parts[at[0]]  # the columns of V that a warp group multiplies
    return _Cells(x, at[1]) if isinstance(x, StageRef) else x[at]


def _moved(columns: int, by: tuple, view: View) -> View:
    """A view that begins at other rows, or a whole tensor, (rows, columns, ...) of K and (columns, rows, ...) of V, at the columns of a
    part."""
    if len(by) == 4:
        at = {"k": (0, columns, 0, 0), "v": (columns, 0, 0, 0)}[view.name]
        if by not in ((0, 0, 0, 0), at):
            raise Broken(f"a part of {view.name} begins at {by}")
        return View(f"{view.name}{int(any(by))}", view.tag)
    return View(view.name, (*view.tag, by if isinstance(by[0], tuple) else sum(by)))


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
    names["all_of_group"] = functools.partial(_vote, block, case.config.has_skip)
    roles = ("Visits", "LoadsWide", "MultipliesWide") if case.config.is_wide else ("Visits", "Loads", "Multiplies")
    stubs, rest, sink = Stubs, (Exchange("P"), Exchange("factors")), None
    if case.config.has_skip:
        stubs, roles = SkippingStubs, ("Visits", "LoadsSkipping", "MultipliesSkipping")
    if case.config.in_order:
        role = "MultipliesInPlace" if case.config.head_dim_v > 128 else "MultipliesInOrder"
        stubs, roles = InOrderStubs, ("Visits", "LoadsInOrder", role)
        numbers.stand_ins(names, block)
        hold_q(names, block)
        names["_TILES"], rest, sink = case.config.section_tiles, tuple(map(numbers.Sums, InOrderStubs.fours_of(case.config))), Sink()
        names["columns_of_q_held"] = lambda tile_m, head_dim: 16 * (PARTS - int(tile_m > 192 or head_dim > 128))
    kernel = type("Kernel", (stubs, *(names[name] for name in roles)), {})()
    tables = names["Tables"](**case.tables)
    kernel.block, kernel.config, kernel.bands = block, case.config, case.bands
    kernel.foresees, kernel.guesses, kernel.shortens = case.foresees, case.guesses, case.shortens
    kernel.arch = names["cute"].arch
    board = (_Board(block, block.pipes[-1], "facts"), _Board(block, block.pipes[1], "visit"))
    in_smem = (*block.operands, block.q, rest)
    copies = tuple((name, View(name[0])) for name in block.by_name)

    pipes = [block.pipes] * (1 + len(block.groups))  # of the loader, and of each warp group
    if case.config.is_wide:
        pipes = kernel.pipes_of_roles(block.pipes[0], tuple(block.pipes[1:-1]), block.pipes[-1])

    def loads() -> None:
        if case.config.is_wide and kernel.readers() != tuple(memory.users for memory in block.of_tile):
            raise Broken(f"parts are released by {kernel.readers()}")
        kernel.load(copies, in_smem, pipes[0], board, tables, counter, case.lengths, case.sizes, ((), ()))

    def multiplies(number: int) -> None:
        mmas = (TiledMma(block, "qk"), TiledMma(block, "pv"))
        if case.config.is_wide and number == 1:
            kernel.multiply_rest(0, mmas, in_smem, pipes[2], board, (None,) * 5)
            return
        kernel.multiply(128 * number, mmas, in_smem, pipes[1 + number], board, None, sink, None, ((), ()))

    schedule.add(f"{block.prefix}loader", loads)
    for name, group in block.groups.items():
        schedule.add(name, functools.partial(multiplies, group.number))
