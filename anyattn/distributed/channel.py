"""A group of ranks: messages, agreement on what every rank must have alike, and the names of ranks that fail."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "channel_of", "node_size_of"]

_PATIENCE = 10.0  # seconds of waiting before the others' failures are looked up
_POLL = 1e-4
_TIMEOUT = dist.default_pg_timeout.total_seconds()


class _WaitError(RuntimeError):
    """A wait for another rank has ended without it."""


class Channel:
    """The messages of one process group. Every rank calls its methods in the same order, as torch's collectives want it.

    rank: this process among the ``size`` ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._store = dist.PrefixStore(f"anyattn/{group.group_name}", dist.distributed_c10d._get_default_store())
        self._local_size = os.environ.get("LOCAL_WORLD_SIZE", "")  # from torchrun: processes of this node
        self._store.set(f"node/{self.rank}", self._local_size)
        self._questions: list[str] = []
        self._steps = 0  # agreements and messages that this rank has begun
        self._messages = 0  # of them, exchanges
        self._exchange = 0  # the step of the last one
        self.started: Any = None  # ``early_keys.Started``: an exchange whose call must be the next thing that the group does
        self._doubts = 0  # times that the ranks have compared their steps after an error
        self._is_in_doubt = False
        self._device = torch.device("cpu")  # of the latest message
        self._waits_on_host: dict[str, bool] = {}  # by type of device

    @cached_property
    def node_size(self) -> int | None:
        """How many ranks, neighbours in the group, share a node, as torchrun's variables say on all ranks; None if they do not say so."""
        if not self._local_size.isdecimal():
            return None
        names = [f"node/{r}" for r in range(self.size)]
        self._awaited(names, "the sizes of nodes")
        return node_size_of(dist.get_process_group_ranks(self.group), [self._store.get(name).decode() for name in names])

    def agree(self, what: str, number: int, cure: str) -> None:
        """Raises ``ValueError`` on every rank unless all of them pass the same 64-bit number. what: names it in the message.

        The numbers travel through the group's store, not over the device: no stream waits.
        """
        self._begin()
        name, last = f"agree/{self._steps}", self._questions
        if len(last) > 1:  # every rank has asked the last question, so all have read the answers to the one before
            self._store.delete_key(f"{last.pop(0)}/{self.rank}")
        last.append(name)
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
        self._begin()
        self._messages += 1
        self._exchange = self._steps
        self._device = sent.device
        to, source = ([n * sent.element_size() for n in sizes] for sizes in (received_sizes, sent_sizes))
        # bytes: gloo cannot send every dtype
        return dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), to, source, self.group, async_op=True)

    def sum(self, t: Tensor, what: str) -> None:
        """Replaces ``t`` by its sum over the ranks."""
        self._begin()
        self._device = t.device
        self.finish(dist.all_reduce(t, group=self.group, async_op=True), what)

    def finish(self, work: Any, what: str) -> None:
        """Waits for an exchange: the stream on NCCL; else the host, which raises ``RuntimeError`` if another rank has failed."""
        start = time.monotonic()
        while self._is_waiting_on_host and not work.is_completed():
            if time.monotonic() - start > _PATIENCE:
                self._raise_failure(what)
                time.sleep(0.1)
            time.sleep(_POLL)
        work.wait()

    @property
    def _is_waiting_on_host(self) -> bool:
        """Whether the latest message ends when the host sees it. A group without a named backend has one for each type of device."""
        kind = self._device.type
        if kind not in self._waits_on_host:
            self._waits_on_host[kind] = self.group._get_backend(self._device).name() != "nccl"
        return self._waits_on_host[kind]

    @contextmanager
    def reporting_failure(self, messages: int, asks: bool) -> Iterator[None]:
        """An exception inside is told to the ranks that wait for this one, and raised.

        messages: how many the code inside begins on every rank. asks: whether it begins with an agreement. Where this rank ends before, the
        ranks compare what they have begun before the next one: the others may not have had the error.
        """
        steps, goal = self._steps, self._messages + messages
        try:
            yield
        except Exception as error:
            is_early = self._messages < goal or (asks and self._steps == steps)
            if is_early or isinstance(error, _WaitError):
                self._store.set(f"failed/{self.rank}", f"rank {self.rank}: {type(error).__name__}: {error}"[:2000])
                self._is_in_doubt = True
            raise

    def end_started(self) -> None:
        """Waits for the started exchange, which no call will take."""
        started, self.started = self.started, None
        self.finish(started.work, "the exchange of anyattn.distributed.start")

    def _begin(self) -> None:
        """Counts an agreement or message. After an error, which another rank may not have had, the ranks compare their counts first.

        Raises ``RuntimeError`` on all of them if these differ: a message would reach a rank that waits for another one. And if an exchange
        was started for a call that did not come.
        """
        if self.started is not None:
            self.end_started()
            raise RuntimeError(
                "anyattn.distributed.start(k, v, plan) was not followed by its call, and its exchange is lost; wanted flex_attention of "
                "the same k and v with the plan's mask as the next thing that the group does, outside of dispatch modes and compiled code"
            )
        if self._is_in_doubt:
            names = [f"doubt/{self._doubts}/{r}" for r in range(self.size)]
            self._store.set(names[self.rank], f"{self._steps - self._messages} + {self._messages}")
            self._awaited(names, "a call after an error", looks_for_failures=False)
            steps = [self._store.get(name).decode() for name in names]
            if len(set(steps)) > 1:
                raise RuntimeError(
                    f"after an error the ranks have begun {' and '.join(steps)} comparisons and messages, and none can know whose the next "
                    "one is; wanted a new process group (torch.distributed.new_group) and plans for it, or the error raised on every rank"
                )
            self._doubts += 1
            self._is_in_doubt = False
            self._store.delete_key(f"failed/{self.rank}")
        self._steps += 1

    def _awaited(self, names: list[str], what: str, looks_for_failures: bool = True) -> None:
        """Waits until the store has all names, which end with the ranks' numbers."""
        start = time.monotonic()
        while not self._store.check(names):
            waited = time.monotonic() - start
            if waited > _PATIENCE:
                if looks_for_failures:
                    self._raise_failure(what)
                if waited > (_TIMEOUT if looks_for_failures else 6 * _PATIENCE):
                    late = ", ".join([n.rsplit("/", 1)[1] for n in names if not self._store.check([n])])
                    raise _WaitError(f"{what}: rank {late} has not answered in {waited:.0f} s; wanted the same call on every rank")
                time.sleep(0.1)
            time.sleep(_POLL)

    def _raise_failure(self, what: str) -> None:
        failed = [f"failed/{r}" for r in range(self.size) if r != self.rank and self._store.check([f"failed/{r}"])]
        if failed:
            told = "; ".join([self._store.get(name).decode() for name in failed])
            raise _WaitError(f"{what} waits for a rank that has failed: {told}")
        asking = [r for r in range(self.size) if r != self.rank and self._store.check([f"agree/{self._exchange}/{r}"])]
        if asking and self._exchange == self._steps:
            raise _WaitError(
                f"{what} waits for rank {', '.join(map(str, asking))}, which compares its calls with the others' instead; wanted the same "
                "calls on every rank, those of anyattn.distributed.start too"
            )


def node_size_of(ranks: Sequence[int], local_sizes: Sequence[str]) -> int | None:
    """How many ranks of a group share a node, None unless that is clear: each node has as many of them, and they are neighbours.

    ranks: their numbers among all processes, which torchrun counts node after node. local_sizes: the processes of each one's node, as text.
    """
    if len(set(local_sizes)) > 1 or not local_sizes[0].isdecimal() or int(local_sizes[0]) < 1:
        return None
    nodes = [rank // int(local_sizes[0]) for rank in ranks]
    size = nodes.count(nodes[0])
    firsts = nodes[::size]
    is_even = len(set(firsts)) == len(firsts) and nodes == [node for node in firsts for _ in range(size)]
    return size if is_even else None


_channels: WeakKeyDictionary[Any, Channel] = WeakKeyDictionary()


def channel_of(group: dist.ProcessGroup) -> Channel:
    """The one ``Channel`` of a process group."""
    if group not in _channels:
        _channels[group] = Channel(group)
    return _channels[group]
