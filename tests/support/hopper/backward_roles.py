"""Source of the Hopper backward roles, run as Python on real numbers in the simulated machine of ``backward_machine.py``.

There is one thread that loads, one or two that add, and one per warp group that multiplies. CuTe DSL is not needed: ``cute`` and the other
modules are stand-ins.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import itertools
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from anyattn.backends.hopper.config import sides, slots
from tests.support.hopper.backward_machine import LANES, Acc, Block, Box, Group, Held, Mma, Regs, Run, Shared, View, narrow
from tests.support.hopper.backward_packed_roles import FLOAT, NARROW, PackedCall, Rows, with_single_threads
from tests.support.hopper.backward_packed_roles import moved as moved_rows
from tests.support.hopper.backward_totals import Scratch, across, add_to, always_add_to, index_of, moved, store_to
from tests.support.hopper.emitted import Array, divisions, least, mask_words, most, run_source
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.roles import Counter
from tests.support.hopper.schedule import Broken, Schedule, State

__all__ = ["MODULES", "Call", "Table", "captured_of", "fold", "run_grid", "vectorised"]

MODULES = (
    "softmax", "tile_scheduler", "producer", "mma", "backward/scheduler", "backward/packed", "backward/producer", "backward/adder",
    "dropout", "backward/scores", "backward/epilogue", "captured/sums", "backward/mma", "backward/wide_mma", "backward/halved_mma",
    "backward/alone_mma",
    "operand", "backward/rows",
)  # fmt: skip


class Call:
    """Operands of one call on the CPU, float32 numbers that bfloat16 holds: q, k, v, dout (B, H, S, D), and what its kernels write.

    lse, delta: (B, Hq, M, tile_m). counter: as the launch has it. parts: of each kv head in dk and dv, whose heads are counted by part.
    """

    order: Any = None
    entries: Any = None
    factor: float = 1.0  # of the weights that dropout keeps

    def __init__(
        self,
        config: Any,
        tensors: tuple[np.ndarray, ...],
        lse: np.ndarray,
        delta: np.ndarray,
        scale: float,
        lists: tuple = (),
        parts: int = 1,
    ):
        self.config, self.scale, self.parts = config, scale, parts if config.stores_float32 else None
        self.q, self.k, self.v, self.dout = tensors
        tiles = config.tiles
        self.batch, self.heads, self.kv_heads = self.q.shape[0], self.q.shape[1], self.k.shape[1] * parts
        self.rows, self.keys = self.q.shape[2], self.k.shape[2]
        row_tiles = -(-self.rows // tiles.tile_m)
        shape = (self.batch, self.heads, row_tiles, tiles.tile_m)
        self.lse, self.delta = (np.full(shape, fill, dtype=np.float32) for fill in (np.inf, 0.0))
        for own, given in ((self.lse, lse), (self.delta, delta)):
            own.reshape(self.batch, self.heads, -1)[..., : self.rows] = given
        if config.stores_dq:  # dq itself, which the host clears where rows may see no key
            self.sums = np.full_like(self.q, 0.0 if config.bands or config.lists is not None else np.nan)
        else:
            self.sums = np.zeros((*shape[:3], tiles.tile_m * config.head_dim), dtype=np.float32)
        self.turns = np.zeros(shape[:3], dtype=np.int32) if config.is_deterministic else None
        self.dk, self.dv = (np.full_like(t, np.nan).repeat(parts, 1) for t in (self.k, self.v))
        self.lists = lists or (None,) * 5

    @property
    def work(self) -> tuple[int, int]:
        """(tiles of keys, heads that share them)."""
        return -(-self.keys // self.config.tiles.tile_n), self.batch * self.kv_heads

    def gradients_of_rows(self, rows: Any, tiles: np.ndarray, table: Any) -> np.ndarray:
        """dq from (B, Hq, M, tile_m, D)."""
        return tiles.reshape(self.batch, self.heads, -1, tiles.shape[4])[:, :, : self.rows, : self.q.shape[3]]


def captured_of(mods: list, config: Any) -> tuple[tuple, tuple]:
    """The numbers and tensors that the mods capture, as ``config.exprs`` take them, one after the other."""
    numbers, tensors = [], []
    for mod, expr in zip(mods, config.exprs, strict=True):
        count, tensor_count = slots(expr)
        numbers += [int(x) if isinstance(x, int) else np.float32(x) for x in mod.scalars[:count]]
        tensors += [Array(t.reshape(t.shape or (1,))) for t in mod.tensors[:tensor_count]]
    return tuple(numbers), tuple(tensors)


class _Flat:
    """Numbers of a row of global memory from some place on."""

    def __init__(self, of: np.ndarray, at: int = 0):
        self.of, self.at = of, at
        self.iterator = self

    def __add__(self, offset: Any) -> _Flat:
        return _Flat(self.of, self.at + int(offset))


class Table:
    """A tensor in global memory; the last index None leaves a row."""

    def __init__(self, values: np.ndarray, element_type: Any = NARROW):
        self.values, self.shape, self.element_type = values, values.shape, element_type

    def sizes(self) -> tuple[int, ...]:  # (rows, columns, heads, entries)
        return tuple(self.shape[i] for i in (2, 3, 1, 0))

    def __getitem__(self, key: tuple) -> Any:
        if key[-1] is None:
            return _List(self.values[tuple(int(i) for i in key[:-1])])
        if key[0] is None:  # (rows, columns, head, entry) of a tensor for the copy engine
            return Rows(self.values[int(key[3]), int(key[2])], element_type=self.element_type)
        return self.values[tuple(int(i) for i in key)]


class _List(_Flat):
    def __getitem__(self, i: int) -> int:
        return int(self.of[self.at + i])


class _Thread:
    """The thread's number in a multiplying role: one object for all 128 of a warp group."""

    def __init__(self, group: int):
        self.group = group

    def __floordiv__(self, by: int) -> Any:
        return self.group if by == 128 else _First()

    def __mod__(self, by: int) -> Any:
        if by != 128:
            raise Broken(f"a thread's number modulo {by}")
        return _First()


class _First:
    """A warp's or a thread's number within its warp group, which the group's first has as 0."""

    def __mod__(self, by: int) -> _First:
        return self

    def __eq__(self, other: object) -> bool:
        return other == 0

    __hash__ = None  # type: ignore[assignment]


def _either(name: str) -> Any:
    function, plain = getattr(np, f"{name}imum"), getattr(builtins, name)
    return lambda a, b: function(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else plain(a, b)


class _Device:
    """``cute``, ``cutlass``, ``pipeline``, ``warpgroup`` and the rest, for whichever actor runs."""

    def __init__(self, schedule: Schedule, counter: Counter, workers: int):
        self.schedule, self.counter, self.workers = schedule, counter, workers
        self.blocks: dict[Any, Block] = {}  # by actor

    @property
    def block(self) -> Block:
        return self.blocks[self.schedule.now]

    @property
    def group(self) -> Group:
        return self.block.group

    @property
    def multiplies(self) -> bool:
        return 0 <= self.group.number < self.block.groups

    def sync_warp(self) -> None:
        if self.multiplies and self.block.scratch is not None:
            self.block.scratch.met()

    def names(self) -> dict[str, Any]:
        arch = SimpleNamespace(
            make_warp_uniform=lambda x: x, block_idx=lambda: (self.block.number, 0, 0), grid_dim=lambda: (self.workers, 1, 1),
            lane_idx=lambda: LANES % 32 if self.multiplies else 0, shuffle_sync=lambda x, lane: x, sync_warp=self.sync_warp,
            warp_idx=lambda: 4 + 4 * self.group.number + LANES // 32, shuffle_sync_bfly=across, elect_one=contextlib.nullcontext,
            barrier=lambda barrier_id, number_of_threads: self.block.barrier(barrier_id, number_of_threads, True),
            barrier_arrive=lambda barrier_id, number_of_threads: self.block.barrier(barrier_id, number_of_threads, False),
            fence_proxy=self.fence, fence_acq_rel_gpu=lambda: None, atomic_add=self.atomic_add, load=self.load,
            cp_async_bulk_commit_group=lambda: self.group.committed(),
            cp_async_bulk_wait_group=lambda most, read=False: self.group.wait_for_copies(most, read),
            rcp_approx=lambda x: np.float32(1) / np.float32(x), fmin=least, fmax=most,
        )  # fmt: skip
        plain = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "floor", "ceil", "trunc", "tanh", "sinh", "cosh")
        functions: dict[str, Any] = {name: _unary(getattr(np, name)) for name in plain}
        functions |= {"rsqrt": _unary(lambda x: 1 / np.sqrt(x)), "erf": None, "roundeven": _unary(np.rint), "absf": _unary(np.abs)}
        functions |= {"copysign": np.copysign, "fma": _fma, "atan": _unary(np.arctan), "atan2": np.arctan2}
        cute = SimpleNamespace(
            arch=arch, math=SimpleNamespace(**functions), size=_size, make_rmem_tensor=_registers, copy=self.copy, autovec_copy=self.vector,
            make_rmem_tensor_like=lambda x, dtype: Acc(x.values.shape[2]), make_layout=_layout,
            make_identity_tensor=lambda shape: shape, make_tensor=_tensor, select=lambda x, mode: ("select", tuple(mode)),
            make_copy_atom=lambda *x: None,
            make_tiled_copy_C=lambda atom, mma: _Threads(mma), make_tiled_copy_A=lambda atom, mma: _Threads(mma),
            make_mma_atom=lambda mma: _Atom(),
            gemm=self.gemm, local_tile=_tile_of, group_modes=lambda x, *_: x, logical_divide=lambda x, _: _Pairs(x),
            crd2idx=index_of, domain_offset=moved_rows,
        )  # fmt: skip
        cutlass = SimpleNamespace(
            min=_either("min"), max=_either("max"), range=_range, range_constexpr=_range, select_=np.where, Constexpr=None
        )
        given = {
            "cute": cute, "cutlass": cutlass, "Float32": _Number, "Int32": _Whole, "Int64": _Long, "Boolean": np.bool_,
            "const_expr": lambda x: x, "dsl_user_op": lambda f: f, "call_native": None, "_rest": np.fmod,
        }  # fmt: skip
        below = run_source("codegen/device_math", given)
        below |= divisions(operator.floordiv)
        made = run_source("codegen/emit", given | {name: below[name] for name in below["__all__"]})
        made["_UNARY"] |= {"tanh": functions["tanh"], "sigmoid": _unary(lambda x: 1 / (1 + np.exp(-x)))}
        made["product"] = operator.mul
        words = mask_words(made)
        parity = SimpleNamespace(Producer=1, Consumer=0)
        pipeline = SimpleNamespace(PipelineUserType=parity, make_pipeline_state=lambda who, n: State(n, 0, who))
        warpgroup = SimpleNamespace(
            fence=lambda: None, commit_group=lambda: self.group.commit(), wait_group=lambda n: self.group.wait(n),
            Field=SimpleNamespace(ACCUMULATE=0),
        )  # fmt: skip
        return given | {
            **{name: made[name] for name in ("emit", "emit_rows", "emit_at", "wrapped")},
            **{name: words[name] for name in words["__all__"]},
            "add_to": add_to, "always_add_to": always_add_to, "moved": moved, "store_to": store_to,
            "select": below["select"], "slots": slots,
            "rows_and_columns": lambda x: x, "columns_of": Acc.columns,
            "narrowed": _narrowed, "pipeline": pipeline, "warpgroup": warpgroup,
            "warp": SimpleNamespace(StMatrix8x8x16bOp=lambda *x: None, LdMatrix8x8x16bOp=lambda *x: None),
            "cpasync": SimpleNamespace(tma_partition=lambda atom, a, b, smem, gmem: (smem, gmem)), "load_bytes": self.load_bytes,
            "add_floats": self.add_floats, "negative": np.negative, "LANES": 32, "Facts": None,
        }  # fmt: skip

    def fence(self, *_: Any, **__: Any) -> None:
        for memory in self.block.memory.values():
            memory.unfenced = {(group, stage) for group, stage in memory.unfenced if group != self.group.number}
            memory.unwiped.discard(self.group.number)

    def atomic_add(self, at: Any, value: int, **_: Any) -> int:
        self.schedule.step()
        if isinstance(at, int):
            return self.counter.add(at, value)
        before = int(at.of[at.at])
        at.of[at.at] += value
        return before

    def load(self, at: _Flat, dtype: Any, **_: Any) -> int:
        self.schedule.until(lambda: True, "asks for its turn")
        return int(at.of[at.at])

    def gemm(self, atom: Any, acc: Acc, a: tuple, b: tuple, _: Acc) -> None:
        self.group.issued.append((acc, a[0], b[0], a[1] if a[1] == b[1] else -1, atom.adds))

    def load_bytes(self, target: View, source: _Flat, size: int, barrier: Any) -> None:
        def come() -> None:
            target.write(source.of[source.at : source.at + size // 4])
            barrier.came(size)

        self.schedule.under_way.append(come)

    def add_floats(self, target: _Flat, source: View, size: int) -> None:
        def add() -> Any:
            # chunk by chunk, thread by thread, 4 numbers each: the order of shared memory
            values = source.read("the adding copy").transpose(2, 1, 0).reshape(-1)
            if 4 * len(values) != size:
                raise Broken(f"{size} bytes are added of {4 * len(values)}")

            def written() -> None:
                target.of[target.at : target.at + len(values)] += values

            return written

        self.group.copies.append(add)

    def copy(self, atom: Any, source: Any, target: Any, tma_bar_ptr: Any = None) -> None:
        if tma_bar_ptr is not None:  # by the copy engine, from global memory

            def come() -> None:
                target.write(source.read())
                tma_bar_ptr.came(2 * source.shape[0] * source.shape[1])

            self.schedule.under_way.append(come)
        elif isinstance(target, Held):
            self.schedule.step()
            target.values[:] = source
        elif isinstance(target, Box):  # to it, 64 rows of a tile
            part, at, _ = source
            rows = slice(64 * at[0], 64 * (at[0] + 1))
            writer = None if self.block.config.tiles.shares_keys else at[0]
            self.group.copies.append(lambda: target.write(part.read("a copy to global memory", writer)[rows]))
            self.group.has_tiles = True
        else:  # a warp group's part of an accumulator into shared memory
            self.schedule.step()
            whole, part = (target.of, target.slices()) if isinstance(target, _Part) else (target, ...)
            whole.of.values[whole.index()][part][atom.mma.part()] = source.matrix()
            whole.of.unfenced.add((self.group.number, whole.key[-1]))
            whole.of.written()

    def vector(self, source: Any, target: Any) -> None:
        if isinstance(source, Regs) and isinstance(target, View):
            _, _, chunk, group = target.key
            target.of.values[:, :, chunk, group] = source.values.T
            target.of.unfenced.add((self.group.number, group))
            target.of.written()
        elif isinstance(target, _Part):  # zeros of one thread
            target.of.of.values[target.of.index()][target.slices()] = source.values[0, 0]
        elif isinstance(source, Regs):  # two numbers of one thread, to a row in global memory
            target.row.values[2 * target.at : 2 * target.at + 2] = source.values[0]
        else:  # two numbers of a row's statistics
            target.values[:, :2] = source


def _size(x: Any, mode: list[int] | None = None) -> int:
    sizes = x[0].sizes() if isinstance(x, tuple) else x.sizes()
    return int(sizes[mode[0]]) if mode else int(np.prod(sizes))


def _registers(shape: Any, dtype: Any) -> Any:
    return Regs(shape, dtype) if isinstance(shape, int) else Acc(shape[1])


def _tensor(iterator: Any, layout: Any) -> Any:
    if isinstance(iterator, Run):
        return Run(iterator.of, iterator.rows, iterator.columns, layout == ("select", (1, 0, 2)))
    if isinstance(iterator, Shared):
        return View(iterator, (None, None, None), is_transposed=layout == ("select", (1, 0, 2)))
    return iterator


class _Pairs:
    """Statistics of rows in shared memory, pair by pair."""

    def __init__(self, of: View):
        self.of = of

    def __getitem__(self, key: tuple) -> np.ndarray:
        values = self.of.read("threads")
        return np.stack([values[2 * key[1]], values[2 * key[1] + 1]], 1)


class _Threads:
    """A copy between the threads of a product and shared memory."""

    def __init__(self, mma: Mma):
        self.mma = mma

    def get_slice(self, thread: Any) -> _Threads:
        return self

    def retile(self, x: Any) -> Any:
        return x

    def partition_S(self, source: _Part) -> np.ndarray:
        """A warp group's rows of the first columns of a tile."""
        rows, columns = source.shape
        return source.of.read("threads")[self.mma.part_of("rows", rows), :columns]

    def partition_D(self, target: View) -> View:
        return target


def _layout(size: Any, **_: Any) -> Any:
    return _Layout(size) if isinstance(size, int) else size


class _Layout(int):
    """A layout of so many; of warp groups it names a group by itself."""

    def __call__(self, group: int) -> int:
        return group


class _Atom:
    adds = True

    def set(self, _: Any, adds: bool) -> None:
        self.adds = adds


def _tile_of(x: Any, shape: tuple, place: tuple) -> Any:
    if len(shape) == 1:  # of a row
        return _OfRow(x, place[0])
    if isinstance(x, Shared):
        return Run(x, *(slice(at * size, (at + 1) * size) for at, size in zip(place[:2], shape[:2], strict=True)))
    return _Part(x, place, shape) if isinstance(x, View) else Box(x, shape, place)


class _OfRow(NamedTuple):
    """Two numbers of a row in global memory, and their address."""

    row: Any
    at: int

    @property
    def iterator(self) -> _OfRow:
        return self

    def align(self, by: int) -> _OfRow:
        return self


class _Part(NamedTuple):
    """A tile of a tile in shared memory."""

    of: View
    place: tuple[int, int]
    shape: tuple[int, int]

    def __getitem__(self, key: Any) -> _Part:  # type: ignore[override]
        return self

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at * size, (at + 1) * size) for at, size in zip(self.place, self.shape, strict=True))


def _narrowed(x: Acc, dtype: Any) -> _Operand:
    return _Operand(narrow(x.matrix()))


class _Operand:
    """The first operand of a product in registers."""

    def __init__(self, values: np.ndarray):
        self.values = values

    def __getitem__(self, key: tuple) -> tuple:
        return (self, key[2])

    def sizes(self) -> tuple[int, int, int]:
        return (0, 0, self.values.shape[1] // 16)

    def matrix(self) -> np.ndarray:
        return self.values


def _unary(function: Any) -> Any:
    return lambda x, fastmath=False: _quiet(function, np.asarray(x, dtype=np.float32))


def _quiet(function: Any, x: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(function(x), dtype=np.float32)[()]


def _fma(a: Any, b: Any, c: Any) -> Any:
    with np.errstate(all="ignore"):
        return np.asarray(np.float64(a) * np.float64(b) + np.float64(c), dtype=np.float32)[()]


class _Kind(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, (np.ndarray, np.generic)) and x.dtype == cls.dtype  # type: ignore[attr-defined]


class _Number(metaclass=_Kind):
    dtype, inf = np.dtype(np.float32), np.float32(np.inf)

    def __new__(cls, x: Any) -> Any:
        return np.asarray(x).astype(cls.dtype)[()]


class _Whole(metaclass=_Kind):
    dtype = np.dtype(np.int32)

    def __new__(cls, x: Any) -> Any:
        found = np.asarray(x).astype(cls.dtype)
        return found if found.ndim else int(found)


class _Long(_Whole):
    dtype = np.dtype(np.int64)


def _range(*args: Any, **_: Any) -> range:
    return builtins.range(*(int(a) for a in args))


def vectorised() -> dict[str, Any]:
    """The names that the roles' text is run with, outside of any launch: numbers may be a warp group's, one for each thread."""
    return _Device(Schedule(0, {}), Counter([], 0), 1).names()


def fold(a: Any, b: Any) -> Any:
    """What ``kernel.dropout.fold`` writes as instructions."""
    product = np.multiply(*(np.asarray(x).astype(np.int64) & 0xFFFFFFFF for x in (a, b)), dtype=np.uint64, casting="unsafe")
    return _Whole(product ^ (product >> np.uint64(32)))


def run_grid(
    call: Call | PackedCall,
    seed: int,
    workers: int,
    changes: Changes = (),
    scalars: tuple = (),
    tensors: tuple = (),
    totals: tuple = (),
    begins_late: Callable[[int], bool] = lambda number: False,
) -> np.ndarray:
    """Runs all thread blocks of a launch together; dk, dv and the sums of dq, or dq, are left in ``call``. totals: of captured tensors'
    gradients. begins_late: which blocks, by number, begin when the others have ended. Returns dq as the last kernel has it."""
    codes, lines = compiled(MODULES, changes)
    config, schedule = call.config, Schedule(seed, lines)
    counter = Counter([], 0)
    device = _Device(schedule, counter, workers)
    names = device.names()
    for code in codes:
        exec(code, names)
    names["fold"] = fold
    tiles = config.tiles
    multiplies = "MultipliesWide" if tiles.shares_keys else "MultipliesHalves" if tiles.halves_dp else "MultipliesBack"
    multiplies = "MultipliesAlone" if tiles.blocks > 1 else multiplies
    parts = ("VisitsRows", "LoadsRows", multiplies, "Scores", "SumsCaptured", "Drops", "Adds", "StoresKeys", "Packed")
    kernel = with_single_threads(type("Roles", tuple(names[n] for n in parts), {}))()
    kernel.config, kernel.dtype = config, lambda x: narrow(np.float32(x))
    by_rows = 1 if tiles.shares_keys else tiles.warp_groups
    kernel.scores_from_registers = lambda: Mma(device.block, tiles.tile_n, tiles.tile_m, by_rows)
    kernel.half_of_dp = lambda: Mma(device.block, tiles.tile_n, tiles.tile_m // 2, by_rows)
    at = 1 if config.score is not None else 0
    kernel.band_sides = [(at + i, sides(band)) for i, band in enumerate(config.bands)]
    asked = ((config.partial,) if config.partial else ()) + config.always
    kernel.asked = [(at + len(config.bands) + i, ask) for i, ask in enumerate(asked)]
    gmem = [Table(t) for t in (call.q, call.dout, call.k, call.v)]
    tables = names["KeyTables"](*(None if t is None else Table(t) for t in (*call.lists, call.order, call.entries)))
    key_tiles, spread = call.work
    sizes = names["KeySizes"](key_tiles, spread, min(2, spread), call.kv_heads, call.heads // call.kv_heads, call.parts)
    captured = (scalars, tensors, totals)
    for number in range(workers):
        block = Block(schedule, config, number, workers)
        _add_roles(kernel, names, device, block, call, gmem, tables, counter, sizes, captured)
    late = [actor for actor in schedule.actors if begins_late(device.blocks[actor].number)]
    for actor in late:
        actor.condition = lambda: all(a.is_done for a in schedule.actors if a not in late)
    schedule.run()
    if counter.values != [0, 0]:
        raise Broken(f"the counter is left as {counter.values}")
    return _after(names, call)


def _add_roles(
    kernel: Any, names: dict, device: _Device, block: Block, call: Any, gmem: list, tables: Any, counter: Any, sizes: Any, captured: Any
) -> None:
    schedule, config, memory = block.schedule, call.config, block.memory
    if config.scratch:
        block.scratch = Scratch(config.scratch // 4, lambda: block.group.number)
    tiles = config.tiles
    smem = tuple(memory[name] for name in ("q", "dout", "k", "v", "ds"))
    board = tuple(dict[Any, Any]() for _ in range(3))
    statistics = Table(call.lse), Table(call.delta)
    in_smem = memory["lse"], memory["delta"]
    keys_apart = tiles.tile_n // 64
    shape_of_dq = (config.head_dim, tiles.tile_m) if tiles.transposes_dq else (tiles.tile_m, config.head_dim // tiles.dq_parts)
    mmas = (
        Mma(block, tiles.tile_n, tiles.tile_m, keys_apart), Mma(block, tiles.tile_n, config.head_dim_v, keys_apart),
        Mma(block, tiles.tile_n, config.head_dim, keys_apart), Mma(block, *shape_of_dq, shape_of_dq[0] // 64),
    )  # fmt: skip
    turns = None if call.turns is None else Table(call.turns)
    plain = tuple(Table(t, FLOAT if config.stores_float32 else NARROW) for t in (call.dk, call.dv))
    keys = (*(() if config.stores_float32 else ((None, t) for t in plain)), *(plain if config.has_entries or config.stores_float32 else ()))
    leaving = tuple(memory[name][None, None, 0] for name in (("leaving k", "leaving v") if config.frees_keys else ("k", "v")))
    scales = (np.float32(call.scale * call.factor), np.float32(call.scale * 1.4426950408889634))
    lengths = (call.rows, call.keys)
    copies = [(None, t) for t in gmem]

    def load() -> None:
        kernel.load(copies, smem, statistics, in_smem, block.pipes, board, tables, counter, lengths, sizes, captured)

    def add(warp: int) -> None:
        kernel.add(warp, memory["dq"], board[2], Table(call.sums), turns, keys[:2], leaving, sizes[4])

    bodies = [(-1, "loader", load)]
    bodies += [(-2 - i, f"adder {i}", functools.partial(add, i)) for i in range(config.adding_warps)]
    for g in range(block.groups):
        of_dq = memory["dq"], Table(call.sums)
        work = (mmas, smem, leaving, in_smem, of_dq, block.pipes, board, keys, scales, (*captured, block.scratch))
        bodies.append((g, f"group {g}", lambda g=g, work=work: kernel.multiply(_Thread(g), *work)))  # type: ignore[misc]
    for number, name, body in bodies:
        schedule.add(f"block {block.number} {name}", body)
        actor = schedule.actors[-1]
        block.of_actor[actor], device.blocks[actor] = Group(block, number), block


def _after(names: dict, call: Call | PackedCall) -> np.ndarray:
    """dq by the places that the last kernel reads its numbers at."""
    config = call.config
    if config.stores_dq:
        return call.sums
    about = SimpleNamespace(head_dim=config.head_dim, head_dim_v=config.head_dim_v, is_bf16=True, tile_m=config.tiles.tile_m)
    names |= {"BFloat16": None, "Float16": None}
    rows = names["RowsAfter"](about)
    found = np.full((*call.sums.shape[:3], config.tiles.tile_m, config.head_dim), np.nan, dtype=np.float32)
    place_of, each = (rows.place_of_pair, 32) if config.tiles.transposes_dq else (rows.place_of, 16)
    pieces = range(config.tiles.tile_m * config.head_dim // each)
    row, column, first = (np.array(x) for x in zip(*map(place_of, pieces), strict=True))
    if config.tiles.transposes_dq:
        for pair, half, j in itertools.product(range(2), range(2), range(8)):
            found[..., row + pair, column + 8 * half + j] = call.sums[..., first + 16 * j + 2 * half + pair]
    else:
        for half, j in itertools.product(range(2), range(8)):
            found[..., row + 8 * half, column + j] = call.sums[..., first + j // 2 * 4 + 2 * half + j % 2]
    table = None if call.entries is None else Table(call.entries)
    return call.gradients_of_rows(rows, found, table) * np.float32(call.scale * call.factor)
