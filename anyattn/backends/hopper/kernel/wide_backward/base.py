"""``WideGradient``: what the three backward kernels for wide heads have in common: tiles in shared memory, copies, MMA atoms and roles.

A thread block keeps tiles of 64 rows and streams tiles of the other side, each in two parts: its first 256 columns and the others. Two warp
groups multiply, each with half of the gradient's columns in registers. Scores are computed with the rows that are kept as rows: S^T for dk
and dv, S for dq.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.utils import SmemAllocator

from anyattn.backends.hopper.kernel.backward.packed import Packed
from anyattn.backends.hopper.kernel.backward.scheduler import VISIT_FACTS
from anyattn.backends.hopper.kernel.base import KernelOfConfig
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.backends.hopper.kernel.operand import to_registers
from anyattn.backends.hopper.kernel.producer import Loads
from anyattn.backends.hopper.kernel.tile_scheduler import FACTS
from anyattn.backends.hopper.wide_backward_config import HALF, HELD, REGISTERS

__all__ = ["BOTH", "PASSED", "RETURNED", "Block", "Pipes", "Roles", "WideGradient"]

PASSED, RETURNED = 11, 12  # named barriers: the first warp group has passed something on; the second has answered, or has taken it
BOTH = 256  # threads of both warp groups


class Pipes(NamedTuple):
    """Pipelines, or whatever there is one of for each. kept: the tile that the first warp group multiplies. also_kept: the other group's,
    None where it is the same or there is none. x0, x1: the two parts of the stream that is multiplied to scores; y0, y1: of the other,
    with the same pipelines if it lies in the first."""

    kept: Any
    also_kept: Any
    x0: Any
    x1: Any
    y0: Any
    y1: Any


class Block(NamedTuple):
    """What the roles of a thread block share. pipes: ``Pipes``. work_pipe: of the board. smem: the tiles, as ``Pipes``. passed: (as floats,
    as words) the memory through which warp groups pass registers on, thread by thread. board: facts and visits. statistics: lse and delta:
    in shared memory for dk and dv, else in global memory. target: the gradient. scales: the softmax scale, and that times log2(e)."""

    pipes: Any
    work_pipe: Any
    smem: Any
    passed: Any
    board: Any
    statistics: Any
    target: Any
    scales: Any
    captured: Any


class Roles:
    """What the MMA roles of the three kernels use of ``WideGradient`` and of what differs between queries and keys."""

    config: Any
    dtype: Any
    positions: Any
    shape_of: Any
    multiplied: Any
    scored: Any
    held: Any
    hold: Any
    given: Any
    taken: Any
    read: Any
    stored: Any
    facts_of: Any  # (board, state of the work pipeline) -> the facts of what is kept, with ``total`` visits
    rows_of: Any  # (block, facts) -> (rows of the gradient in global memory, (the first that is kept, the end))
    factors: Any  # replaces scores by P times the derivative

    def transposed(self, x: Any) -> Any:
        """Tiles in shared memory with columns first."""
        return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[1, 0, 2]))


class WideGradient(KernelOfConfig):
    """The common part of ``HopperQueryGradient``, ``HopperKeyGradient`` and ``HopperValueGradient``."""

    _partition, _post = Loads._partition, Loads._post
    rows_stored = Packed.rows_stored
    multiply_first: Any
    multiply_second: Any
    load: Any

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Columns of the parts of the streams."""
        return HALF, self.config.head_dim - HALF, HALF, self.config.head_dim_v - HALF

    def users(self) -> Pipes:
        """How many warp groups read each tile."""
        if self.config.of == "dv":
            return Pipes(1, 0, 1, 1, 1, 1)
        if self.config.streams_one:
            return Pipes(1, 1, 2, 2, 0, 0)
        return Pipes(2 if self.config.keeps_one else 1, 1, 1, 2, 1, 1)

    def _tile(self, rows: int, columns: int, stages: int) -> Any:
        """The layout of a tile in shared memory: row-major, 64 columns of all rows after another, with a last mode for the stage."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, stages), order=(0, 1, 2))

    def _layouts(self) -> Pipes:
        rows, of_stream = self.config.tiles.streamed, []
        for width, stages in zip(self.widths, self.config.tiles.stages, strict=True):
            of_stream.append(self._tile(rows, width, stages))
        of_values = self._tile(HELD, self.config.head_dim_v, 1)
        return Pipes(self._tile(HELD, self.config.head_dim, 1), of_values, *of_stream)

    def launched(self, kept: tuple, streamed: tuple, about: tuple, layouts: Pipes, workers: Any, stream: Any) -> None:
        """Makes the copies of the tensors, rows first, and launches the kernel. kept: the tensor of one tile or of both. streamed: X and Y.
        about: the kernel's other arguments."""
        one = Pipes(*(cute.slice_(layout, (None, None, 0)) for layout in layouts))
        x, y = streamed
        tensors = Pipes(*kept, *(() if len(kept) == 2 else (None,)), x, x, y, y)
        shapes = Pipes(
            (HELD, self.config.head_dim), (HELD, self.config.head_dim_v), *((self.config.tiles.streamed, w) for w in self.widths)
        )
        read, copies = cpasync.CopyBulkTensorTileG2SOp(), []
        for tensor, layout, shape in zip(tensors, one, shapes, strict=True):
            copies.append((None, None) if tensor is None else cpasync.make_tiled_tma_atom(read, tensor, layout, shape))
        atoms, gmem = zip(*copies)
        self.bytes = Pipes(*(cute.size_in_bytes(self.dtype, layout) for layout in one))
        self.storage_of_block = self._shared(layouts)
        self.kernel(tuple(atoms), tuple(gmem), about, tuple(layouts), self._products()).launch(
            grid=(workers, 1, 1), block=[128 * (self.config.consumers + 1), 1, 1], stream=stream, min_blocks_per_mp=1
        )

    def _products(self) -> tuple[Any, ...]:
        """The tiled MMAs of a warp group: of scores, of 256 columns of the gradient, and of those past 512."""
        along, across, in_registers = OperandMajorMode.K, OperandMajorMode.MN, warpgroup.OperandSource.RMEM
        scores = helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, (1, 1, 1), (64, self.config.tiles.streamed))
        widths = (HALF, self.config.head_dim - 2 * HALF) if self.config.of != "dv" else (HALF, 0)
        own = [
            helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, across, Float32, (1, 1, 1), (64, width), in_registers)
            for width in widths
            if width
        ]
        return scores, *own

    def _shared(self, layouts: Pipes) -> Any:
        dtype, tiles = self.dtype, self.config.tiles
        stages = tiles.stages
        sizes = [cute.cosize(layout) for layout in layouts]
        words = tiles.streamed // (4 if self.config.of == "dv" else 2)  # that a thread passes on

        @cute.struct
        class Storage:
            kept_barriers: cute.struct.MemRange[cutlass.Int64, 4]
            x0_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages[0]]
            x1_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages[1]]
            y0_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages[2]]
            y1_barriers: cute.struct.MemRange[cutlass.Int64, 2 * stages[3]]
            work_barriers: cute.struct.MemRange[cutlass.Int64, 4]
            work: cute.struct.Align[cute.struct.MemRange[Int32, 2 * FACTS], 16]
            visit: cute.struct.MemRange[Int32, VISIT_FACTS * stages[0]]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, stages[0] * tiles.streamed], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, stages[2] * tiles.streamed], 128]
            kept: cute.struct.Align[cute.struct.MemRange[dtype, sizes[0]], 1024]
            also_kept: cute.struct.Align[cute.struct.MemRange[dtype, 0 if self.config.keeps_one else sizes[1]], 1024]
            x0: cute.struct.Align[cute.struct.MemRange[dtype, sizes[2]], 1024]
            x1: cute.struct.Align[cute.struct.MemRange[dtype, sizes[3]], 1024]
            y0: cute.struct.Align[cute.struct.MemRange[dtype, 0 if self.config.streams_one else sizes[4]], 1024]
            y1: cute.struct.Align[cute.struct.MemRange[dtype, 0 if self.config.streams_one else sizes[5]], 1024]
            passed: cute.struct.Align[cute.struct.MemRange[Float32, 128 * words], 1024]

        return Storage

    def _pipes(self, storage: Any) -> tuple[Pipes, Any]:
        users, stages, size = self.users(), self.config.tiles.stages, self.bytes
        of_row = 4 * self.config.tiles.streamed  # bytes of lse or delta, which arrive at the barriers of the first parts
        with_lse, with_delta = of_row * (self.config.of != "dq"), of_row * (self.config.of == "dk")
        kept = storage.kept_barriers.data_ptr()
        also = None if self.config.keeps_one else self._pipe(kept + 2, 1, size.also_kept, groups=users.also_kept)
        x0 = self._pipe(storage.x0_barriers.data_ptr(), stages[0], size.x0 + with_lse, groups=users.x0)
        x1 = self._pipe(storage.x1_barriers.data_ptr(), stages[1], size.x1, groups=users.x1)
        y0, y1 = x0, x1
        if not self.config.streams_one:
            y0 = self._pipe(storage.y0_barriers.data_ptr(), stages[2], size.y0 + with_delta, groups=users.y0)
            y1 = self._pipe(storage.y1_barriers.data_ptr(), stages[3], size.y1, groups=users.y1)
        pipes = Pipes(self._pipe(kept, 1, size.kept, groups=users.kept), also, x0, x1, y0, y1)
        return pipes, self._work_pipe(storage.work_barriers.data_ptr())

    @cute.kernel
    def kernel(self, atoms, gmem, about, layouts, mmas):
        tiles = self.config.tiles
        statistics, target, scales, tables, counter, lengths, sizes, captured = about
        thread, _, _ = cute.arch.thread_idx()
        number = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if number == 0:
            for atom in atoms:
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.storage_of_block)
        pipes, work_pipe = self._pipes(storage)
        kept = storage.kept if const_expr(self.config.keeps_one) else storage.also_kept
        y = (storage.x0, storage.x1) if const_expr(self.config.streams_one) else (storage.y0, storage.y1)
        ranges = (storage.kept, kept, storage.x0, storage.x1, *y)
        smem = Pipes(*(part.get_tensor(layout.outer, swizzle=layout.inner) for part, layout in zip(ranges, layouts, strict=True)))
        passed = (
            storage.passed.get_tensor(cute.make_layout((4, 128, tiles.streamed // 8))),
            storage.passed.get_tensor(cute.make_layout((4, 128, tiles.streamed // 16)), dtype=Int32),
        )
        board = (
            storage.work.get_tensor(cute.make_layout((FACTS, 2))),
            storage.visit.get_tensor(cute.make_layout((VISIT_FACTS, tiles.stages[0]))),
        )
        in_smem = (
            storage.lse.get_tensor(cute.make_layout((tiles.streamed, tiles.stages[0]))),
            storage.delta.get_tensor(cute.make_layout((tiles.streamed, tiles.stages[2]))),
        )
        found = in_smem if const_expr(self.config.of != "dq") else statistics
        block = Block(pipes, work_pipe, smem, passed, board, found, target, scales, captured)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        if number < 4:
            cute.arch.setmaxregister_decrease(REGISTERS[1])
            if number == 0:
                copies = Pipes(*zip(atoms, gmem))
                self.load(copies, block, statistics, tables, counter, lengths, sizes)
        elif number < 8:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.multiply_first(thread - 128, mmas, block)
        else:
            cute.arch.setmaxregister_increase(REGISTERS[0])
            self.multiply_second(thread - 256, mmas, block)

    def positions(self, mma: Any, thread: Any) -> Any:
        """The rows and columns of a thread's scores in their tile."""
        tile = cute.make_identity_tensor((HELD, self.config.tiles.streamed))
        return rows_and_columns(mma.get_slice(thread).partition_C(tile))

    def shape_of(self, mma: Any, thread: Any, columns: int) -> Any:
        return mma.get_slice(thread).partition_shape_C((HELD, columns))

    # ---- copies

    @cute.jit
    def part_loaded(self, copy, in_smem, source, pipe, state):
        """Loads one tile, or one part of a streamed tile, when its stage is free."""
        source, target = self._partition(copy[0], in_smem, source)
        pipe.producer_acquire(state)
        cute.copy(copy[0], source, target[None, state.index], tma_bar_ptr=pipe.producer_get_barrier(state))

    def part_of(self, rows: Any, part: int, at: Any) -> Any:
        """Tile ``at`` of a part of a stream. rows: (positions, head dimension) in global memory. part: 0 to 3, as ``widths``."""
        first = HALF * (part % 2)
        return cute.local_tile(cute.domain_offset((0, first), rows), (self.config.tiles.streamed, self.widths[part]), (at, 0))

    def read(self) -> None:
        """Waits for the thread's own loads from shared memory, so that the stage they are from may be released: a warp that arrives at a
        barrier does not wait for them, and while the other warp group's products keep shared memory busy they can be later than the next
        copy into the stage. Numbers that are used before the release need no such wait."""
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- what passes from one warp group to the other

    def given(self, values: Any, to: Any, thread: Any) -> None:
        """Writes a thread's registers, 4 at a time, for the thread of the same number."""
        flat = cute.make_tensor(values.iterator, cute.make_layout((4, cute.size(values) // 4)))
        for i in range(cute.size(flat, mode=[1])):
            cute.autovec_copy(flat[None, i], to[None, thread, i])

    def taken(self, values: Any, of: Any, thread: Any) -> None:
        """Reads what ``given`` has written."""
        flat = cute.make_tensor(values.iterator, cute.make_layout((4, cute.size(values) // 4)))
        for i in range(cute.size(flat, mode=[1])):
            cute.autovec_copy(of[None, thread, i], flat[None, i])

    # ---- products

    def scores_from_registers(self) -> Any:
        """The tiled MMA of scores for the columns of a kept tile that are held in registers."""
        along, source, shape = OperandMajorMode.K, warpgroup.OperandSource.RMEM, (64, self.config.tiles.streamed)
        return helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, (1, 1, 1), shape, source)

    def held(self) -> Any:
        """Registers for the held columns of a kept tile; None if there are none."""
        if not self.config.tiles.holds:
            return None
        mma = self.scores_from_registers()
        return mma.make_fragment_A(mma.partition_shape_A((HELD, self.config.tiles.holds)))

    def hold(self, held: Any, tile: Any, thread: Any) -> None:
        """Reads the held columns of a kept tile."""
        if held is not None:
            part = cute.local_tile(tile[None, None, 0], (HELD, self.config.tiles.holds), (0, 0))
            to_registers(self.scores_from_registers(), held, part, thread, self.dtype)

    @cute.jit
    def scored(self, mma, acc, kept, b, first: cutlass.Constexpr):
        """Issues the product of scores over one part of a streamed tile. kept: (held columns, the whole tile). first: as in
        ``multiplied``; the first part sets ``acc``."""
        held, whole = kept
        warpgroup.fence()
        for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
            is_held = 16 * (first + i) < self.config.tiles.holds
            atom = cute.make_mma_atom((self.scores_from_registers() if is_held else mma).op)
            atom.set(warpgroup.Field.ACCUMULATE, first + i > 0)
            cute.gemm(atom, acc, (held if is_held else whole)[None, None, first + i], b[None, None, i], acc)
        warpgroup.commit_group()

    @cute.jit
    def multiplied(self, mma, acc, a, b):
        """Issues acc += A B. A: in registers."""
        warpgroup.fence()
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, True)
        for i in cutlass.range_constexpr(cute.size(b, mode=[2])):
            cute.gemm(atom, acc, a[None, None, i], b[None, None, i], acc)
        warpgroup.commit_group()

    def stored(self, acc: Any, mma: Any, thread: Any, width: int, column: int, own: Any, rows: tuple) -> None:
        """Stores columns of the gradient from ``column`` on. own: the gradient's rows in global memory. rows: (the tile's first row, the
        end of those that are stored)."""
        columns = cute.size(own, mode=[1]) - column
        self.rows_stored(acc, mma, (HELD, width), (cute.domain_offset((0, column), own), columns), rows, thread)
