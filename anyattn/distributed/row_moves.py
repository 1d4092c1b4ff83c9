"""Rows that are moved between tensors, or summed into others: all of a step in one launch.

A call on a shard packs keys into a message, puts own and received ones where a local call reads them, sums gradients of segments and of
other ranks, and joins results. Torch needs a kernel and a few views for every part of these: with two segments that took 1.9 ms of a
host's time, 0.5 of which were attention's (an H200's host).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.distributed.layout import Interval, overlap
from anyattn.sparsity.compute import runs_kernels

__all__ = ["Move", "Part", "RowMoves", "Uploaded", "part_of", "summed"]

_MOST_TENSORS = 16  # of the sources, and of the targets, of one launch
_NUMBERS = 5  # of a ``Part`` in the table
_ELEMENTS = 8192  # that a program moves, about


class Part(NamedTuple):
    """Where rows (B, H, rows, width) lie: the number of a tensor, an offset from its first element, and strides of B, H and rows, in
    elements. The width is contiguous."""

    tensor: int
    offset: int
    strides: tuple[int, int, int]

    def after(self, rows: int) -> Part:
        """The same without its first ``rows`` rows."""
        return self._replace(offset=self.offset + rows * self.strides[2])


class Move(NamedTuple):
    """``rows`` rows of ``width`` elements of a target that get the sum of their sources, in this order; without sources, 0."""

    target: Part
    sources: tuple[Part, ...]
    rows: int
    width: int


def part_of(number: int, t: Tensor, first: int = 0) -> Part:
    """The rows of ``t`` (B, H, rows, width) from row ``first`` on, as tensor ``number``."""
    of_batch, of_head, of_row, _ = t.stride()
    return Part(number, first * of_row, (of_batch, of_head, of_row))


def summed(target: Part, interval: Interval, sources: Iterable[tuple[Interval, Part]], width: int) -> list[Move]:
    """The moves that give the target, the rows of ``interval``, the sum of all sources, each with the interval of its own rows.

    >>> for move in summed(Part(0, 0, (0, 0, 4)), (10, 16), [((8, 13), Part(0, 0, (0, 0, 4))), ((12, 20), Part(1, 0, (0, 0, 4)))], 4):
    ...     print(move.rows, move.target.offset, [(s.tensor, s.offset) for s in move.sources])
    2 0 [(0, 8)]
    1 8 [(0, 16), (1, 0)]
    3 12 [(1, 4)]
    """
    cuts = [(*cut[0], part.after(cut[0][0] - span[0])) for span, part in sources if (cut := overlap((span,), interval))]
    edges = sorted({*interval, *[edge for start, stop, _ in cuts for edge in (start, stop)]})
    places = {edge: at for at, edge in enumerate(edges)}
    covering: list[list[Part]] = [[] for _ in edges[1:]]
    for start, stop, part in cuts:
        for at in range(places[start], places[stop]):
            covering[at].append(part.after(edges[at] - start))
    moves: list[Move] = []
    for (start, stop), parts in zip(itertools.pairwise(edges), covering, strict=True):
        last = moves[-1] if moves else None
        if last is not None and tuple([part.after(last.rows) for part in last.sources]) == tuple(parts):
            moves[-1] = last._replace(rows=last.rows + stop - start)
        else:
            moves.append(Move(target.after(start - interval[0]), tuple(parts), stop - start, width))
    return moves


class RowMoves:
    """Moves between tensors with these batch entries and heads. Built once, for tensors whose strides are the same at every ``run``."""

    def __init__(self, moves: Sequence[Move], batch: int, heads: int):
        self._moves = tuple([m for m in moves if m.rows and m.width])
        self._batch, self._heads = batch, heads
        self._launch: _Launch | None = None

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """sources, targets: by number; each of them of one dtype, no target among the sources. Sums are of float32 (float64)."""
        if not self._moves or not self._batch * self._heads:
            return
        device, given = targets[0].device, sources or targets
        if runs_kernels(device) and len(given) <= _MOST_TENSORS and len(targets) <= _MOST_TENSORS and given[0].element_size() > 1:
            if self._launch is None:
                self._launch = _Launch(self._moves, self._batch, self._heads, device)
            self._launch.run(given, targets)
            return
        for move in self._moves:
            self._run(move, sources, targets)

    def _run(self, move: Move, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        target = self._view(targets, move.target, move)
        parts = [self._view(sources, part, move) for part in move.sources]
        if not parts:
            target.zero_()
        elif len(parts) == 1:
            target.copy_(parts[0])
        else:
            total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
            for part in parts[1:]:
                total += part
            target.copy_(total)

    def _view(self, tensors: Sequence[Tensor], part: Part, move: Move) -> Tensor:
        t = tensors[part.tensor].detach()
        return t.as_strided((self._batch, self._heads, move.rows, move.width), (*part.strides, 1), t.storage_offset() + part.offset)


class Uploaded:
    """Numbers of the host on a device, to which they are copied without a wait of the host."""

    def __init__(self, numbers: Tensor, device: torch.device):
        self._is_written: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._there = numbers.to(device)
            return
        self._numbers = numbers.pin_memory()  # kept, since a captured graph copies them again at every replay
        self._there = self._numbers.to(device, non_blocking=True)
        self._is_written, self._streams = torch.cuda.Event(), {self._stream}
        self._is_written.record(torch.cuda.current_stream(device))

    @property
    def _stream(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._there.device.index)

    def there(self) -> Tensor:
        """The numbers on the device, for the current stream: one that has not copied them waits for them, once."""
        if self._is_written is not None and (stream := self._stream) not in self._streams:
            if torch.cuda.is_current_stream_capturing():  # which begins when all streams are done
                return self._there
            torch.cuda.current_stream(self._there.device).wait_event(self._is_written)
            self._streams.add(stream)
        return self._there


class _Launch:
    """The table of the kernel, int64 on the device, and what its launches have in common."""

    def __init__(self, moves: Sequence[Move], batch: int, heads: int, device: torch.device):
        most = max(len(m.sources) for m in moves)
        lines = [
            [*_numbers(m.target), m.rows, m.width, len(m.sources)]
            + [n for i in range(most) for n in (_numbers(m.sources[i]) if i < len(m.sources) else (0,) * _NUMBERS)]
            for m in moves
        ]
        self._table = Uploaded(torch.tensor(lines, dtype=torch.int64, device="cpu"), device)
        self._heads, self._device = heads, device
        width = 1 << (max(m.width for m in moves) - 1).bit_length()
        rows = max(_ELEMENTS // width, 1)
        rows = 1 << (rows.bit_length() - 1)
        self._grid = (-(-max(m.rows for m in moves) // rows), batch * heads, len(moves))
        self._options = {"STEP": len(lines[0]), "ROWS": rows, "WIDTH": width, "num_warps": 4 if rows * width > 2048 else 1}
        of_targets = [n for m in moves for n in (m.width, m.target.offset, *m.target.strides)]
        of_sources = [n for m in moves for n in (m.width, *[x for s in m.sources for x in (s.offset, *s.strides)])]
        self._divisible = tuple([all(n % unit == 0 for n in given) for given in (of_sources, of_targets) for unit in (2, 4, 8)])

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        from anyattn.distributed.row_moves_kernel import move_rows
        from anyattn.triton_tools.launch import current_device, launch

        given: list = [self._table.there(), sources[0].detach(), targets[0].detach()]
        units = []
        for tensors, divisible in ((sources, self._divisible[:3]), (targets, self._divisible[3:])):
            size, first = tensors[0].element_size(), tensors[0].data_ptr()
            is_aligned = not first % 16
            for t in tensors:
                is_aligned = is_aligned and not t.data_ptr() % 16
                given.append((t.data_ptr() - first) // size)
            given += [0] * (_MOST_TENSORS - len(tensors))
            unit = 16 // size
            units.append(unit if is_aligned and divisible[unit.bit_length() - 2] else 1)
        options = {**self._options, "UNIT_FROM": units[0], "UNIT_TO": units[1]}
        given.append(self._heads)
        firsts = sources[0], targets[0]  # on whose alignment Triton specialises
        known = (*[t.dtype for t in firsts], *units, *[t.data_ptr() % 16 == 0 for t in firsts])
        with current_device(self._device):
            launch(move_rows, self._grid, given, self._device, options, known)


def _numbers(part: Part) -> tuple[int, ...]:
    return part.tensor, part.offset, *part.strides
