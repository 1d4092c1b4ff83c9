"""Ranks of a process group: ``on_ranks`` runs a function in several processes that are joined by gloo, or by NCCL with a GPU each.

Where there are fewer GPUs than ranks, all ranks compute on the first one, and gloo copies their messages through the host.
"""

from __future__ import annotations

import atexit
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch.multiprocessing as mp

from tests.support.limits import HANG

__all__ = ["RankError", "message_of", "new_ranks", "on_ranks"]


def message_of(call: Callable[[], Any]) -> str:
    """The type and the message of the exception that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class RankError(Exception):
    """Some ranks raised; ``messages`` has each rank's, None for one that returned."""

    def __init__(self, messages: list[str | None]):
        super().__init__("\n".join(f"rank {r}: {m}" for r, m in enumerate(messages) if m))
        self.messages = messages


class Ranks:
    """Processes that are joined in one group until ``close``."""

    def __init__(self, size: int, device: str = "cpu"):
        folder = tempfile.mkdtemp()
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self.processes = [context.Process(target=_serve, args=(r, size, device, folder, pipes[r][1]), daemon=True) for r in range(size)]
        self.pipes: list[Connection] = [ours for ours, _ in pipes]
        for process in self.processes:
            process.start()

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``program(mesh, *arguments)`` returns on each rank. Raises ``RankError``; a process that has ended is named in it."""
        for pipe in self.pipes:
            pipe.send((program, arguments))
        answers: list[Any] = [(None, "has not answered")] * len(self.pipes)
        pending = dict(zip(self.pipes, range(len(self.pipes)), strict=True))
        while pending:
            ready = wait(list(pending), HANG)
            if not ready:
                break
            for pipe in ready:
                rank = pending.pop(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = (None, "its process has ended")
        if any(error for _, error in answers):
            raise RankError([error for _, error in answers])
        return [answer for answer, _ in answers]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


_known: dict[tuple[int, str], Ranks] = {}


def on_ranks(size: int, program: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """What ``program(mesh, *arguments)`` returns on each of ``size`` ranks. program: a function of a module; mesh: a ``DeviceMesh`` of one
    dimension. device: "cpu" or "cuda". The processes serve all tests of this one; after an error they are started anew."""
    key = (size, device)
    if key not in _known:
        _known[key] = Ranks(size, device)
        atexit.register(_known[key].close)
    try:
        return _known[key].run(program, *arguments)
    except RankError:
        _known.pop(key).close()
        raise


@contextmanager
def new_ranks(size: int) -> Iterator[Ranks]:
    """Processes of one test's own, which may kill them."""
    ranks = Ranks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(rank: int, size: int, device: str, folder: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    has_gpu_each = device == "cuda" and torch.cuda.device_count() >= size
    if device == "cuda":
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.cuda.set_device(rank if has_gpu_each else 0)
    dist.init_process_group("nccl" if has_gpu_each else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = init_device_mesh(device, (size,), mesh_dim_names=("cp",))
    while True:
        try:
            program, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((program(mesh, *arguments), None))
        except BaseException as error:
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
