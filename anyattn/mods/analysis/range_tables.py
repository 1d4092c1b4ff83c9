"""Range-minimum and range-maximum queries on captured tensors: the extremes of whole tensors, or along one index by sparse tables,
built once per mask and dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["Extremes", "RangeTables"]

_MAX_BLOCKS = 2**15  # longer dimensions are divided into blocks of a power of two: at most 15 levels of 32,768 entries


class Extremes:
    """Answers every query on a captured tensor by the extremes of the whole tensor: two numbers, read once and kept on the CPU."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [t.detach() for t in tensors]
        self._extremes: dict[int, tuple[Tensor, Tensor]] = {}

    def lookup(self, slot: int, indices: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """As ``RangeTables.lookup``; wider bounds."""
        if slot not in self._extremes:
            numbers = _numbers(self.tensors[slot])
            ends = torch.stack(torch.aminmax(numbers)) if numbers.numel() else numbers.new_zeros(2)
            self._extremes[slot] = ends.cpu().unbind()  # type: ignore[assignment]
        return self._extremes[slot]


class RangeTables:
    """Answers range queries on the captured tensors of one mask.

    The table of a dimension of n entries takes O(n log n) memory up to 32,768 entries and O(n) beyond. Ranges of a longer dimension are
    widened to whole blocks, which keeps the bounds sound, and exact for tiles aligned to blocks.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device | str) -> None:
        self.tensors, self.device = [t.detach() for t in tensors], device
        self._tables: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}
        self._whole: dict[int, tuple[Tensor, Tensor]] = {}

    def lookup(self, slot: int, indices: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Bounds of ``tensors[slot][i0, i1, ...]`` while each index runs from its first to its
        last value; negative indices wrap as in torch."""
        tensor = _numbers(self.tensors[slot]).to(self.device)
        if tensor.numel() == 0:
            nothing = torch.zeros((), dtype=tensor.dtype, device=self.device)
            return nothing, nothing
        ranges = [_wrapped(lo, hi, n) for (lo, hi), n in zip(indices, tensor.shape, strict=True)]
        moving = [d for d, (lo, hi) in enumerate(ranges) if not bool((lo == hi).all())]
        if not moving:
            value = tensor[tuple(lo for lo, _ in ranges)] if ranges else tensor
            return value, value
        if len(moving) > 1:  # several dimensions vary: the bounds are the extremes of the whole table
            if slot not in self._whole:
                self._whole[slot] = tensor.amin(), tensor.amax()
            return self._whole[slot]
        return self._along(slot, tensor, moving[0], ranges)

    def _along(self, slot: int, tensor: Tensor, dim: int, ranges: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        if (slot, dim) not in self._tables:
            self._tables[slot, dim] = _build(tensor.movedim(dim, -1))
        least, most, block = self._tables[slot, dim]
        others = tuple(lo for d, (lo, _) in enumerate(ranges) if d != dim)
        first, last = (r // block for r in ranges[dim])
        level = torch.log2((last - first + 1).double()).floor().to(torch.int64)
        second = last - (torch.ones_like(level) << level) + 1
        at, to = (level, *others, first), (level, *others, second)
        return torch.minimum(least[at], least[to]), torch.maximum(most[at], most[to])


def _numbers(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def _wrapped(lo: Tensor, hi: Tensor, n: int) -> tuple[Tensor, Tensor]:
    negative = hi < 0
    crosses = (lo < 0) & ~negative
    lo, hi = torch.where(negative, lo + n, lo), torch.where(negative, hi + n, hi)
    return torch.where(crosses, 0, lo).clamp(0, n - 1), torch.where(crosses, n - 1, hi).clamp(0, n - 1)


def _build(rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """(least, greatest), shape (levels, *lead, blocks), where level k covers 2^k blocks from each position; and the block size."""
    n = rows.shape[-1]
    block = 1
    while ceil_div(n, block) > _MAX_BLOCKS:
        block *= 2
    blocks = ceil_div(n, block)
    if blocks * block != n:
        rows = torch.cat([rows, rows[..., -1:].expand(*rows.shape[:-1], blocks * block - n)], -1)
    grouped = rows.reshape(*rows.shape[:-1], blocks, block)
    least, most = [grouped.amin(-1)], [grouped.amax(-1)]
    span = 1
    while 2 * span <= blocks:
        for table, pick in ((least, torch.minimum), (most, torch.maximum)):
            previous = table[-1]
            merged = pick(previous[..., : blocks - span], previous[..., span:])
            table.append(torch.cat([merged, previous[..., blocks - span :]], -1))  # the last entries are never read
        span *= 2
    return torch.stack(least), torch.stack(most), block
