"""Runner of a small CuTe DSL kernel's source as Python: every thread of a block is a Python thread, barriers and shuffles are real.

It is slow, and so for few threads. It shows that the kernel's source itself, not a copy, computes the right results in any schedule.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.limits import HANG

__all__ = ["run_block", "runnable"]


class _Barrier:
    """``threading.Barrier`` with a lock of its own for each thread that waits: those that wake do not queue for one lock."""

    def __init__(self, threads: int):
        self.threads, self.lock, self.is_broken = threads, threading.Lock(), False
        self.waiting: list[threading.Lock] = []

    def wait(self) -> None:
        gate = _here.gate
        with self.lock:
            is_last = len(self.waiting) == self.threads - 1
            if is_last:
                self._open()
            else:
                self.waiting.append(gate)
        if self.is_broken or not (is_last or gate.acquire(timeout=HANG)) or self.is_broken:
            raise threading.BrokenBarrierError

    def abort(self) -> None:
        with self.lock:
            self.is_broken = True
            self._open()

    def _open(self) -> None:
        for gate in self.waiting:
            gate.release()
        self.waiting = []


class _Block:
    """What the threads of one block share. seen: what each thread gives to others, of odd and of even exchanges: none overwrites what
    another of its warp still reads."""

    def __init__(self, threads: int):
        self.barrier = _Barrier(threads)
        self.warps = [_Barrier(32) for _ in range(threads // 32)]
        self.lock, self.seen = threading.Lock(), ([0] * threads, [0] * threads)
        self.shared: dict[str, np.ndarray] = {}


_here = threading.local()


class Memory:
    """A tensor of the kernel's; indexing outside it is an error, and negative indices are outside."""

    def __init__(self, values: np.ndarray):
        self.values, self.shape = values, values.shape
        self.element_type = values.dtype.type

    def _inside(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        assert len(parts) == len(self.shape) and all(0 <= i < n for i, n in zip(parts, self.shape, strict=True)), (index, self.shape)
        return index

    def __getitem__(self, index: Any) -> Any:
        return self.values[self._inside(index)].item()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[self._inside(index)] = value

    @property
    def iterator(self) -> _Pointer:
        return _Pointer(self, 0)


class _Pointer:
    def __init__(self, memory: Memory, at: int):
        self.memory, self.at = memory, at

    def __add__(self, more: int) -> _Pointer:
        return _Pointer(self.memory, self.at + more)


def _atomic_add(pointer: _Pointer, value: int) -> int:
    with _here.block.lock:
        before = pointer.memory[pointer.at]
        pointer.memory[pointer.at] = before + value
    return before


def _exchanged(value: int, source: Callable[[int], int]) -> int:
    """The value of another lane of the warp."""
    block, thread = _here.block, _here.thread
    _here.is_odd = not _here.is_odd
    seen = block.seen[_here.is_odd]
    seen[thread] = value
    block.warps[thread // 32].wait()
    lane = source(thread % 32)
    found: int = seen[thread // 32 * 32 + lane] if 0 <= lane < 32 else value
    return found


class _Allocator:
    def allocate(self, storage: dict[str, int]) -> Any:
        with _here.block.lock:
            for name, size in storage.items():
                # what stands in shared memory at first is anything
                _here.block.shared.setdefault(name, np.full(size, -12345, dtype=np.int32))
        parts = {name: SimpleNamespace(get_tensor=lambda _, x=x: Memory(x)) for name, x in _here.block.shared.items()}
        return SimpleNamespace(**parts)


def _arch() -> SimpleNamespace:
    return SimpleNamespace(
        thread_idx=lambda: (_here.thread, 0, 0),
        block_idx=lambda: (*_here.place, 0),
        grid_dim=lambda: (*_here.grid, 1),
        sync_threads=lambda: _here.block.barrier.wait(),
        atomic_add=_atomic_add,
        griddepcontrol_launch_dependents=lambda: None,
        shuffle_sync=lambda value, lane: _exchanged(value, lambda _: lane),
        shuffle_sync_up=lambda value, by: _exchanged(value, lambda lane: lane - by),
    )


def _range(*args: int, **_: Any) -> range:
    return builtins.range(*args)


def runnable(kernel: type, **constants: Any) -> type:
    """The class as plain Python, without the DSL; ``constants`` stand in for the module's own."""
    tree = ast.increment_lineno(ast.parse(textwrap.dedent(inspect.getsource(kernel))), inspect.getsourcelines(kernel)[1] - 1)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
    inner = SimpleNamespace(arch=_arch(), make_layout=lambda n: n)
    cutlass = SimpleNamespace(min=min, max=max, range=_range, range_constexpr=_range)
    number = SimpleNamespace(inf=float("inf"))
    module = vars(inspect.getmodule(kernel)).copy()
    module.update(cute=inner, cutlass=cutlass, const_expr=bool, Int32=int, Float32=number, SmemAllocator=_Allocator, **constants)
    exec(compile(tree, inspect.getsourcefile(kernel) or "kernel", "exec"), module)
    return module[kernel.__name__]


def run_block(call: Callable[[], None], threads: int, place: tuple[int, int], grid: tuple[int, int]) -> None:
    """One block of the grid: ``call`` in each of its threads."""
    block, failed = _Block(threads), []

    def body(thread: int) -> None:
        _here.block, _here.thread, _here.place, _here.grid = block, thread, place, grid
        _here.is_odd, _here.gate = False, threading.Lock()
        _here.gate.acquire()
        try:
            call()
        except BaseException as error:
            failed.append(error)
            for barrier in (block.barrier, *block.warps):
                barrier.abort()

    running = [threading.Thread(target=body, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if failed:
        raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
