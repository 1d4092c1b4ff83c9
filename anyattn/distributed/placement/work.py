"""Attention of a mask counted by chunks: visited and partial tiles of each (row chunk, key chunk), from the mask's block lists."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import frexp, inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from anyattn.arithmetic import ceil_div
from anyattn.distributed.placement.prefetched import is_asynchronous, keep, take
from anyattn.sparsity.lists import check_counts

__all__ = ["Work", "chunk_of", "combined", "prefetch", "work_of"]

# counts are (chunks, chunks), and are searched on one core for every new mask
_CHUNKS, _FEW_PER_RANK, _MOST_CHUNKS = 1024, 8, 4096
_PER_RANK = 32  # chunks of a rank: with 16, twelve random documents on 8 ranks leave a load of 1.05, with 32 of 1.02
_ENTRIES = 2**22  # of lists, counted at once
_BITS = 20  # below the largest count, of a count that is not a whole number


class Work(NamedTuple):
    """Attention of one or several masks over a sequence, counted by chunks of ``chunk`` positions; the last one may be short.

    visited, partial: float64 (row chunks, key chunks), tiles that are visited, and those among them in which the mask is evaluated: the
    mean over batch entries and heads, summed over masks by weights. They are multiples of a power of two, and small enough for their sums
    to be exact in any order. needs: bool of the same shape: some mask, batch entry or head sees a key of the chunk. length: of the
    sequence. tile: rows and keys of the tiles that are counted.
    """

    visited: np.ndarray
    partial: np.ndarray
    needs: np.ndarray
    chunk: int
    length: int
    tile: tuple[int, int]

    @property
    def chunks(self) -> int:
        return len(self.needs)


def chunk_of(length: int, ranks: int, block: int) -> int:
    """Positions of a chunk for a sequence of ``length`` on ``ranks``: a multiple of block, about ``length / (32 * ranks)``.

    There are fewer chunks if these would be more than 1,024, or, with more than 128 ranks, 8 a rank and 4,096. A chunk is never above
    ``length / (2 * ranks)``, unless one block is.
    block: what masks list, the least common multiple of all blocks' rows and keys. Among chunks within a third of the aim the one is taken
    with which the rank of most rows has fewest. Raises ``ValueError`` for numbers below 1.

    >>> chunk_of(262144, 8, 128), chunk_of(262144, 64, 128), chunk_of(100, 64, 16)
    (1024, 256, 16)
    """
    for name, value in (("length", length), ("ranks", ranks), ("block", block)):
        if value < 1:
            raise ValueError(f"{name}={value}; wanted at least 1")
    number = min(_PER_RANK * ranks, max(_CHUNKS, min(_FEW_PER_RANK * ranks, _MOST_CHUNKS)))
    aim = ceil_div(length, max(number, 2 * ranks))
    most = max(length // (2 * ranks) // block, 1)
    low, high = (min(max(n, 1), most) for n in (ceil_div(2 * aim, 3 * block), 4 * aim // (3 * block)))

    def rows_then_distance(blocks: int) -> tuple[int, int]:
        chunk = blocks * block
        return ceil_div(ceil_div(length, chunk), ranks) * chunk, abs(chunk - aim)

    step = max(1, (high - low) // 256)  # a block of one position over a long sequence
    return min((*range(low, high + 1, step), min(max(aim // block, low), high)), key=rows_then_distance) * block


def work_of(masks: Sequence[torch_flex.BlockMask | None], weights: Sequence[float], chunk: int, length: int | None = None) -> Work:
    """The work of masks of one sequence, summed by weights (say, each mask's layers), from their block lists alone.

    masks: of equal query and key lengths; their blocks may differ, between rows and keys too, but chunk is a multiple of all. None: no
    mask, every key is visited. length: of the sequence, for masks that are all None.

    Lists on a GPU are counted there; one copy of the counts (chunks, chunks) waits for it, unless ``prefetch`` has started it. Raises
    ``ValueError`` naming what is wrong.

    >>> from anyattn.sparsity import BlockMask
    >>> mask = BlockMask.from_block_map(torch.ones(4, 4).tril() > 0, BLOCK_SIZE=64)
    >>> work_of([mask], [1.0], 128).visited.tolist()
    [[3.0, 0.0], [4.0, 3.0]]
    """
    if len(masks) != len(weights) or not masks:
        raise ValueError(f"{len(masks)} masks and {len(weights)} weights; wanted one weight for each of at least one mask")
    lengths = {n for m in masks if m is not None for n in m.seq_lengths} | ({length} if length is not None else set())
    if len(lengths) != 1:
        what = "masks of as many rows as keys, of one sequence" if lengths else "a length, for masks that are None"
        raise ValueError(f"the masks cover {sorted(lengths)} rows and keys; wanted {what}")
    return combined([_of_mask(m, chunk, *lengths) for m in masks], weights)


def combined(works: Sequence[Work], weights: Sequence[float]) -> Work:
    """The sum of works of the same chunks by weights, in tiles of the first."""
    first = works[0]
    if any((w.chunk, w.length) != (first.chunk, first.length) for w in works):
        raise ValueError(f"works of (chunk, length) {[(w.chunk, w.length) for w in works]}; wanted the same for all")
    for weight in weights:
        if not 0 <= weight < inf:
            raise ValueError(f"weights={list(weights)}; wanted finite numbers of at least 0")
    if len(works) == 1 and weights[0] == 1:
        return first
    unit = first.tile[0] * first.tile[1]
    factors = [weight * (w.tile[0] * w.tile[1]) / unit for weight, w in zip(weights, works, strict=True)]
    visited, partial = (
        _in_steps(reduce(np.add, [getattr(w, name) * f for w, f in zip(works, factors, strict=True)])) for name in ("visited", "partial")
    )
    needs = reduce(np.logical_or, [w.needs for w in works])
    return Work(visited, partial, needs, first.chunk, first.length, first.tile)


def prefetch(mask: torch_flex.BlockMask, chunk: int) -> None:
    """Starts to copy the counts of a mask on a GPU to the host, where a later ``work_of`` of the same lists and chunk finds them."""
    if is_asynchronous(mask.kv_indices):
        keep(mask, chunk, _counts(mask, chunk, mask.seq_lengths[0]))


def _of_mask(mask: torch_flex.BlockMask | None, chunk: int, length: int) -> Work:
    chunks = ceil_div(length, chunk)
    if mask is None:
        share = np.minimum(chunk, length - chunk * np.arange(chunks)) / chunk
        every = np.ones((chunks, chunks), bool)
        return Work(_in_steps(share[:, None] * share), np.zeros((chunks, chunks)), every, chunk, length, (chunk, chunk))
    rows, keys = mask.BLOCK_SIZE
    found = take(mask, chunk)
    counts = _counts(mask, chunk, length) if found is None else found
    masked, *full = counts.to("cpu", torch.float64).numpy()
    visited = masked + full[0] if full else masked
    entries = max(mask.kv_num_blocks.numel() // ceil_div(length, rows), 1)
    needs = visited > 0
    if entries > 1:
        visited, masked = _in_steps(visited / entries), _in_steps(masked / entries)
    return Work(visited, masked, needs, chunk, length, (rows, keys))


def _counts(mask: torch_flex.BlockMask, chunk: int, length: int) -> Tensor:
    """int64 (1 or 2, chunks, chunks) on the mask's device: tiles in which the mask is evaluated, and those that are full."""
    rows, keys = mask.BLOCK_SIZE
    if chunk % rows or chunk % keys:
        raise ValueError(f"chunk={chunk} is not a multiple of the mask's blocks, {rows} rows x {keys} keys")
    grid, per_chunk = (ceil_div(length, rows), ceil_div(length, keys)), (chunk // rows, chunk // keys)
    lists = [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)]
    chunks = ceil_div(length, chunk)
    return torch.stack([_by_chunks(cnt, idx, grid, per_chunk, chunks) for cnt, idx in lists if cnt is not None and idx is not None])


def _by_chunks(cnt: Tensor, idx: Tensor, grid: tuple[int, int], per_chunk: tuple[int, int], chunks: int) -> Tensor:
    """int64 (chunks, chunks): listed tiles of each (row chunk, key chunk), summed over batch entries and heads.

    cnt: int32 (..., row tiles). idx: int32 (..., row tiles, width). Lists on a GPU are counted without waiting for it.
    """
    check_counts("the count of a row's blocks", cnt, idx)
    cnt, idx = cnt.reshape(-1), idx.reshape(cnt.numel(), idx.shape[-1])
    sees_all = _sees_all(idx)
    if not sees_all and len(cnt):  # entries beyond the longest list say nothing
        idx = idx[:, : max(int(cnt.max()), 0)]
    place, nowhere = torch.arange(idx.shape[1], device=idx.device), chunks * chunks
    row_chunk = torch.arange(len(cnt), device=idx.device) % grid[0] // per_chunk[0] * chunks
    total = torch.zeros(nowhere + 1, dtype=torch.int64, device=idx.device)
    rows = max(_ENTRIES // max(idx.shape[1], 1), 1)
    for at in range(0, len(cnt), rows):
        part, listed = idx[at : at + rows], place < cnt[at : at + rows, None]
        if sees_all:
            goal = torch.where(listed, row_chunk[at : at + rows, None] + part // per_chunk[1], nowhere).reshape(-1)
        else:
            column = part[listed]
            if len(column) and not 0 <= int(column.min()) <= int(column.max()) < grid[1]:
                named = f"{int(column.min())} to {int(column.max())}"
                raise ValueError(f"block lists name key tiles {named}; wanted 0 to {grid[1] - 1}: make them again")
            goal = row_chunk[at : at + rows].repeat_interleave(cnt[at : at + rows].clamp(min=0)) + column // per_chunk[1]
        total.scatter_add_(0, goal, torch.ones_like(goal))
    return total[:nowhere].view(chunks, chunks)


def _sees_all(idx: Tensor) -> bool:
    """Whether entries beyond a row's count are processed too: on a GPU, the number of listed ones is known only by waiting."""
    return idx.device.type != "cpu"


def _in_steps(counts: np.ndarray) -> np.ndarray:
    """The counts rounded to multiples of a power of two, ``2**-_BITS`` of the largest; whole numbers and quarters stay what they are.

    Sums of up to 2**32 such numbers are exact in float64, so that every machine finds the same, whatever the order in which it adds.
    """
    largest = float(counts.max(initial=0.0))
    if largest == 0.0:
        return counts
    step = 2.0 ** (frexp(largest)[1] - _BITS)
    return np.rint(counts / step) * step
