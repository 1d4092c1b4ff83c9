"""A group of ranks: messages, agreement on what every rank must have alike, and the names of ranks that fail."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "channel_of"]

_PATIENCE = 10.0  # seconds of waiting before the others' failures are looked up
_POLL = 1e-4
_TIMEOUT = dist.default_pg_timeout.total_seconds()


class Channel:
    """The messages of one process group. Every rank calls its methods in the same order, as torch's collectives want it.

    rank: this process among the ``size`` ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.PrefixStore(f"anyattn/{group.group_name}", dist.distributed_c10d._get_default_store())
        self._questions = 0
        self._has_failed = False
        self._is_cuda = dist.get_backend(group) == "nccl"

    def agree(self, what: str, number: int, cure: str) -> None:
        """Raises ``ValueError`` on every rank unless all of them pass the same 64-bit number. what: names it in the message.

        The numbers travel through the group's store, not over the device: no stream waits.
        """
        self._forget_failure()
        name = f"agree/{self._questions}"
        if self._questions > 1:  # every rank has asked the last question, so all have read the answers to the one before
            self._store.delete_key(f"agree/{self._questions - 2}/{self.rank}")
        self._questions += 1
        self._store.set(f"{name}/{self.rank}", f"{number}")
        self._awaited([f"{name}/{r}" for r in range(self.size)], what)
        numbers = [self._store.get(f"{name}/{r}").decode() for r in range(self.size)]
        if len(set(numbers)) > 1:
            common = max(dict.fromkeys(numbers), key=numbers.count)
            others = ", ".join(str(r) for r, n in enumerate(numbers) if n != common)
            raise ValueError(f"{what} differs between the {self.size} ranks of the group: rank {others} has another; wanted {cure}")

    def exchange(self, sent: Tensor, sent_sizes: Sequence[int], received: Tensor, received_sizes: Sequence[int]) -> Any:
        """Starts to send ``sent`` and to fill ``received``, both of one dimension: per rank, in order, the sizes that are named. Returns
        what ``finish`` takes."""
        self._forget_failure()
        to, source = ([n * sent.element_size() for n in sizes] for sizes in (received_sizes, sent_sizes))
        # bytes: gloo cannot send every dtype
        return dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), to, source, self.group, async_op=True)

    def sum(self, t: Tensor, what: str) -> None:
        """Replaces ``t`` by its sum over the ranks."""
        self._forget_failure()
        self.finish(dist.all_reduce(t, group=self.group, async_op=True), what)

    def finish(self, work: Any, what: str) -> None:
        """Waits for an exchange: the stream on NCCL; else the host, which raises ``RuntimeError`` if another rank has failed."""
        start = time.monotonic()
        while not self._is_cuda and not work.is_completed():
            if time.monotonic() - start > _PATIENCE:
                self._raise_failure(what)
                time.sleep(0.1)
            time.sleep(_POLL)
        work.wait()

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """An exception inside is told to the ranks that wait for this one, and raised."""
        try:
            yield
        except Exception as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks that this one has raised ``error``."""
        self._store.set(f"failed/{self.rank}", f"rank {self.rank}: {type(error).__name__}: {error}"[:2000])
        self._has_failed = True

    def _forget_failure(self) -> None:
        """A rank that goes on after an error has not failed."""
        if self._has_failed:
            self._store.delete_key(f"failed/{self.rank}")
            self._has_failed = False

    def _awaited(self, names: list[str], what: str) -> None:
        """Waits until the store has all names, which end with the ranks' numbers."""
        start = time.monotonic()
        while not self._store.check(names):
            waited = time.monotonic() - start
            if waited > _PATIENCE:
                self._raise_failure(what)
                if waited > _TIMEOUT:
                    late = ", ".join([n.rsplit("/", 1)[1] for n in names if not self._store.check([n])])
                    raise RuntimeError(f"{what}: rank {late} has not answered in {waited:.0f} s; wanted the same call on every rank")
                time.sleep(0.1)
            time.sleep(_POLL)

    def _raise_failure(self, what: str) -> None:
        failed = [f"failed/{r}" for r in range(self.size) if r != self.rank and self._store.check([f"failed/{r}"])]
        if failed:
            told = "; ".join([self._store.get(name).decode() for name in failed])
            raise RuntimeError(f"{what} waits for a rank that has failed: {told}")


_channels: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The one ``Channel`` of a process group."""
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]
