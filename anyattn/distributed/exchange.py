"""What travels: messages of keys and values, and of their gradients, back; and the moves of rows into and out of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from anyattn.distributed.channel import Channel
from anyattn.distributed.layout import Interval, Source
from anyattn.distributed.relay import Route
from anyattn.distributed.row_moves import Move, Part, RowMoves, part_of, summed
from anyattn.distributed.share import LocalCalls, Share, is_interval

__all__ = ["Hulls", "KeyMoves", "Pending", "Piece", "awaited", "exchanged", "key_moves"]


class Pending(NamedTuple):
    """An exchange that has been started. The tensors must live until it is finished."""

    work: Any
    sent: Tensor
    received: Tensor


def exchanged(
    flat: Tensor, sent: Sequence[int], received: Sequence[int], width: int, channel: Channel, to: Tensor | None = None
) -> Pending:
    """Starts an exchange. sent, received: keys to and from each rank, of ``width`` elements. to: the memory of the received message."""
    if to is None:
        to = torch.empty(sum(received) * width, dtype=flat.dtype, device=flat.device)
    return Pending(channel.exchange(flat, [n * width for n in sent], to, [n * width for n in received]), flat, to)


def awaited(pending: Pending, channel: Channel, what: str) -> Tensor:
    """The received message."""
    channel.finish(pending.work, f"attention's exchange of {what}")
    return pending.received


class Piece(NamedTuple):
    """Gradients of the keys and values of intervals, (B, Hkv, length, D) and (B, Hkv, length, Dv), that lie one behind the other."""

    spans: tuple[Interval, ...]
    dk: Tensor
    dv: Tensor

    def parts(self, number: int, which: int) -> list[tuple[Interval, Part]]:
        """The intervals, and where their gradients lie: of keys (which: 0), tensor ``2 * number``, or of values, the next."""
        whole, found, first = part_of(2 * number + which, self.dv if which else self.dk), [], 0
        for start, stop in self.spans:
            found.append(((start, stop), whole.after(first)))
            first += stop - start
        return found


class Hulls(NamedTuple):
    """Keys and values of segments that lie in memory of their own, all made in one launch.

    size: elements of that memory. places: for each segment, shape, strides and offset of its keys, and of its values. moves: from k, v and
    the received message.
    """

    size: int
    places: dict[int, tuple[tuple, tuple]]
    moves: RowMoves

    def made(self, k: Tensor, v: Tensor, message: Tensor | None) -> dict[int, tuple[Tensor, Tensor]]:
        """For each segment its keys and values. message: None if no segment needs it."""
        if not self.places:
            return {}
        memory = torch.empty(self.size, dtype=k.dtype, device=k.device)
        self.moves.run((k, v) if message is None else (k, v, message), (memory,))
        return {at: (memory.as_strided(*of_k), memory.as_strided(*of_v)) for at, (of_k, of_v) in self.places.items()}


class KeyMoves:
    """The moves of a share's keys for tensors k (B, Hkv, rows, D) and v (B, Hkv, rows, Dv) of these shapes and strides.

    A message has for each interval its keys, (B, Hkv, length, D), and then its values.
    """

    def __init__(self, share: Share, calls: LocalCalls, k: Tensor, v: Tensor):
        self._route, self._rows, self._calls = share.route, share.rows, calls  # not the share, which keeps this object
        self._batch, self._heads = k.shape[:2]
        self._widths = k.shape[3], v.shape[3]
        self._own = part_of(0, k), part_of(1, v)
        self._is_row_first = k.stride(2) > k.stride(1), v.stride(2) > v.stride(1)
        self._packing = self._moves(self._packed(share.route))
        self._passing = self._moves(self._passed(share.route))
        self.local, self.remote = self._hulls(True), self._hulls(False)
        self._sums: dict[tuple, RowMoves] = {}

    @property
    def width(self) -> int:
        """Elements of one key and its value, over batch entries and heads."""
        return self._batch * self._heads * sum(self._widths)

    def send(self, k: Tensor, v: Tensor, channel: Channel) -> Pending:
        """Starts to send each rank the rows of k and v that it needs, or passes on."""
        route = self._route
        sizes = sum(route.sent[0]) * self.width, sum(map(sum, route.received)) * self.width
        flat, message = (torch.empty(size, dtype=k.dtype, device=k.device) for size in sizes)
        self._packing.run((k, v), (flat,))
        to = message[: sum(route.received[0]) * self.width]
        return exchanged(flat, route.sent[0], route.received[0], self.width, channel, to)._replace(received=message)

    def keys(self, pending: Pending, channel: Channel) -> Tensor:
        """The message of ``Route.keys``, after ``send``: what has come is passed on, and what others pass on awaited."""
        route, message = self._route, awaited(pending, channel, "keys")
        if len(route.sent) > 1:
            flat = message.new_empty(sum(route.sent[1]) * self.width)
            self._passing.run((message,), (flat,))
            to = message[sum(route.received[0]) * self.width :]
            awaited(exchanged(flat, route.sent[1], route.received[1], self.width, channel, to), channel, "keys inside nodes")
        return message

    def return_gradients(self, pieces: Sequence[Piece], like: Tensor, dtype: torch.dtype, channel: Channel) -> Pending:
        """Starts to send the gradients of received keys home: sums of ``pieces``. like: a tensor on their device. dtype: of the sums.

        Those of keys that were passed on go to the ranks that did so, and are added there to the rank's own, in the order of the ranks.
        """
        route, came = self._route, None
        for at in reversed(range(len(route.sent))):
            flat = torch.empty(sum(route.received[at]) * self.width, dtype=dtype, device=like.device)
            self._sum_received(at, pieces, came, flat)
            pending = exchanged(flat, route.received[at], route.sent[at], self.width, channel)
            if at > 0:
                came = awaited(pending, channel, "gradients inside nodes").to(torch.promote_types(like.dtype, torch.float32))
        return pending

    def _sum_received(self, at: int, pieces: Sequence[Piece], came: Tensor | None, flat: Tensor) -> None:
        """Writes the gradients of keys that were received in an exchange: sums of ``pieces`` and, in the order of the ranks, of what has
        come back from where they were passed on to."""
        route = self._route
        sources = [t for piece in pieces for t in (piece.dk, piece.dv)] + ([] if came is None else [came])
        key = ("return", at, *[(piece.spans, piece.dk.stride(), piece.dv.stride()) for piece in pieces])
        if key not in self._sums:
            back = [] if came is None else self._in_message(route.passed, 2 * len(pieces))
            given = [_parts_of(pieces, which) + [(passed, parts[which]) for passed, *parts in back] for which in range(2)]
            moves = []
            for interval, *targets in self._in_message(route.arriving[at], 0):
                for which, target in enumerate(targets):
                    moves += summed(target, interval, given[which], self._widths[which])
            self._sums[key] = self._moves(moves)
        self._sums[key].run(sources, (flat,))

    def home(self, pieces: Sequence[Piece], returned: Tensor | None, grads: tuple[Tensor, Tensor]) -> None:
        """Writes the gradients of k and v: the sums of ``pieces`` and, in the order of the ranks, of what other ranks return, rounded
        once."""
        sources = [t for piece in pieces for t in (piece.dk, piece.dv)] + ([] if returned is None else [returned])
        key = ("home", *[(piece.spans, piece.dk.stride(), piece.dv.stride()) for piece in pieces], *[g.stride() for g in grads])
        if key not in self._sums:
            come = [] if returned is None else list(self._in_message(self._route.rows, 2 * len(pieces)))
            parts_of_pieces = [_parts_of(pieces, which) for which in range(2)]
            moves, first = [], 0
            for interval in self._rows:
                local = (first, first + interval[1] - interval[0])
                for which, grad in enumerate(grads):
                    shift = interval[0] - first  # rows of a message are local ones
                    back = [((a + shift, b + shift), parts[which]) for (a, b), *parts in come if local[0] <= a and b <= local[1]]
                    moves += summed(part_of(which, grad, first), interval, parts_of_pieces[which] + back, self._widths[which])
                first = local[1]
            self._sums[key] = self._moves(moves)
        self._sums[key].run(sources, grads)

    def _moves(self, moves: list[Move]) -> RowMoves:
        return RowMoves(moves, self._batch, self._heads)

    def _in_message(self, intervals: Sequence[Interval], number: int) -> list[tuple[Interval, Part, Part]]:
        """Each interval, and where its keys and its values lie in a message, tensor ``number``."""
        found, at = [], 0
        for start, stop in intervals:
            parts = []
            for width in self._widths:
                of_head = (stop - start) * width
                parts.append(Part(number, at, (self._heads * of_head, of_head, width)))
                at += self._batch * self._heads * of_head
            found.append(((start, stop), parts[0], parts[1]))
        return found

    def _packed(self, route: Route) -> list[Move]:
        return [
            Move(target, (own.after(start),), stop - start, width)
            for (start, stop), *targets in self._in_message(route.rows, 0)
            for target, own, width in zip(targets, self._own, self._widths)
        ]

    def _passed(self, route: Route) -> list[Move]:
        came = self._in_message(route.arriving[0], 0) if route.passed else []
        return [
            move
            for interval, *targets in self._in_message(route.passed, 0)
            for which, target in enumerate(targets)
            for move in summed(target, interval, [(span, parts[which]) for span, *parts in came], self._widths[which])
        ]

    def _hulls(self, is_local: bool) -> Hulls:
        """The hulls of segments that do, or do not, run before messages have come, where these are no view of the rank's own keys.

        A hull's gap may lie in what other segments receive; where nothing has come it is 0, since a tile of a kernel may reach into keys
        that no row needs.
        """
        received = [parts for _, *parts in self._in_message(self._route.keys, 2)]
        places, moves, size = {}, [], 0
        for at, (segment, hull) in enumerate(zip(self._calls.segments, self._calls.hulls)):
            if segment.is_local is not is_local or is_interval(hull):
                continue
            found = []
            for which, (width, rows_first) in enumerate(zip(self._widths, self._is_row_first)):
                of_head = segment.key_length * width
                strides = (self._heads * of_head, *((width, self._heads * width) if rows_first else (of_head, width)))
                target = Part(0, size, strides)
                given: list[tuple[Interval, Part]] = []
                for source in cast(tuple[Source, ...], hull):
                    if source.message is None:
                        given.append((source.at, self._own[which].after(source.rows[0])))
                    elif not is_local:
                        given.append((source.at, received[source.message][which].after(source.rows[0])))
                moves += summed(target, (0, segment.key_length), given, width)
                found.append(((self._batch, self._heads, segment.key_length, width), (*strides, 1), size))
                size += self._batch * self._heads * of_head
            places[at] = found[0], found[1]
        return Hulls(size, places, self._moves(moves))


def _parts_of(pieces: Sequence[Piece], which: int) -> list[tuple[Interval, Part]]:
    """``Piece.parts`` of all pieces, whose tensors are numbered in their order."""
    return [part for i, piece in enumerate(pieces) for part in piece.parts(i, which)]


def key_moves(share: Share, calls: LocalCalls, k: Tensor, v: Tensor) -> KeyMoves:
    """The moves of these tensors, made once for equal shapes and strides."""
    key = "keys", calls.name, k.shape, k.stride(), v.shape, v.stride()
    found = share.kept.get(key)
    if found is None:
        found = share.keep(key, KeyMoves(share, calls, k, v))
    return found  # type: ignore[no-any-return]
