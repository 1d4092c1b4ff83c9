"""Conversions between a grid of tile classes and tile lists: per row of tiles a count and ascending indices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.sparsity.arguments import runs_kernels
from anyattn.sparsity.derived import derived
from anyattn.tensors.kinds import has_memory

__all__ = [
    "both_ways",
    "check_counts",
    "classes_of_ragged",
    "grid_of_lists",
    "has_kernels",
    "joined",
    "keep_transposed",
    "kept_classes",
    "kept_for_call",
    "kept_transposed",
    "lists_of_grid",
    "ordered",
    "ordered_ragged",
    "with_partial_tails",
]

_BATCH_TILES = 2**22  # tiles enumerated at once: their coordinates take 16 bytes each


def lists_of_grid(classes: Tensor, separate_full: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Counts and ascending indices of the partial tiles, then of the full ones (None unless ``separate_full``: all are listed as partial).

    classes: uint8 (B, H, M, N) -> int32 (B, H, M), (B, H, M, N), (B, H, M), (B, H, M, N).
    """
    if has_kernels(classes):
        from anyattn.sparsity.kernels.class_grids import lists_of_classes

        return tuple(lists_of_classes(classes, separate_full, False))  # type: ignore[return-value]
    if not separate_full:
        return *ordered(classes, (PARTIAL, FULL)), None, None
    return *ordered(classes, (PARTIAL,)), *ordered(classes, (FULL,))


def both_ways(classes: Tensor, separate_full: bool, wants_columns: bool = True) -> list[Tensor | None]:
    """``lists_of_grid`` of each row of tiles, then of each column."""
    if has_kernels(classes):
        from anyattn.sparsity.kernels.class_grids import lists_of_classes

        return lists_of_classes(classes, separate_full, wants_columns)
    grids = (classes, classes.transpose(-1, -2)) if wants_columns else (classes,)
    return [t for grid in grids for t in lists_of_grid(grid, separate_full)]


def with_partial_tails(classes: Tensor, lengths: tuple[int, int], tile: tuple[int, int]) -> Tensor:
    """The classes (B, H, M, N), with full tiles that a sequence's end cuts as partial ones."""
    if all(n % t == 0 for n, t in zip(lengths, tile, strict=True)):
        return classes
    classes = classes.clone()
    for dim in (-2, -1):
        if lengths[dim] % tile[dim] and classes.shape[dim]:
            classes.select(dim, -1).clamp_(max=PARTIAL)
    assert FULL > PARTIAL > EMPTY
    return classes


def has_kernels(t: Tensor) -> bool:
    """Whether kernels convert these lists or classes: not where the work is recorded instead of done, as torch's operations are."""
    return runs_kernels(t.device) and not torch.compiler.is_compiling() and has_memory(t)


def ordered(classes: Tensor, listed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Per row, the number of tiles of a ``listed`` class and their columns, ascending; the tail is 0. Does not wait for a GPU."""
    columns = classes.shape[-1]
    grid = classes.reshape(classes.shape[:-1].numel(), columns)
    counts = torch.zeros(len(grid), dtype=torch.int32, device=classes.device)
    indices = _zeros((len(grid), columns), classes.device)
    for part in _batches(grid):
        hit = grid[part] == listed[0] if len(listed) == 1 else grid[part] != EMPTY
        count = hit.sum(-1, dtype=torch.int32)
        if _sees_all(hit):
            indices[part] = _moved_up(hit)
        else:
            row, column = hit.nonzero().unbind(1)
            position = torch.arange(len(row), device=row.device) - (count.cumsum(0) - count)[row]
            indices[part].view(-1)[row * columns + position] = column.to(torch.int32)
        counts[part] = count
    return counts.reshape(classes.shape[:-1]), indices.reshape(classes.shape)


def check_counts(name: str, cnt: Tensor | None, idx: Tensor | None, least: int | None = None) -> None:
    """Raises ``ValueError`` if lists on a CPU have a count above their width, or below ``least``. Skipped on a GPU, where reading the
    counts would wait, and inside ``torch.compile``: the operator that takes the lists checks them when it runs."""
    if torch.compiler.is_compiling() or cnt is None or idx is None or cnt.device.type != "cpu" or cnt.numel() == 0 or not has_memory(cnt):
        return
    lowest, most = (int(n) for n in cnt.aminmax())
    if most > idx.shape[-1] or (least is not None and lowest < least):
        raise ValueError(
            f"{name} holds {lowest} to {most}; wanted 0 to {idx.shape[-1]}, the entries that a row's list has room for: correct the counts"
        )


def _sees_all(tiles: Tensor) -> bool:
    """Whether all tiles are processed instead of only the listed ones: on a GPU, the number of listed ones is known only by waiting, and a
    compiled graph has no tensors of sizes that depend on contents."""
    return tiles.is_cuda or torch.compiler.is_compiling()


def _moved_up(hit: Tensor) -> Tensor:
    """int32: the columns of each row's hits, ascending, then zeros."""
    rows, columns = hit.shape
    # misses go to an extra column
    goal = torch.where(hit, hit.cumsum(-1) - 1, columns)
    number = torch.arange(columns, dtype=torch.int32, device=hit.device).expand(rows, columns)
    return torch.zeros(rows, columns + 1, dtype=torch.int32, device=hit.device).scatter_(1, goal, number)[:, :columns]


def _marked(classes: Tensor, is_listed: Tensor, idx: Tensor, value: int) -> None:
    """Writes ``value`` at each row's listed columns. torch's scatter raises for a column out of range, on a GPU by a device assertion."""
    rows, columns = classes.shape
    goal = torch.where(is_listed, idx + (idx == columns), columns).to(torch.int64)
    wider = torch.cat((classes, classes.new_zeros(rows, 1)), 1).scatter_(1, goal, value)
    classes.copy_(wider[:, :columns])


def kept_classes(lists: Any) -> Tensor:
    """``lists.classes()``, cached by ``_kept``."""
    return _kept(lists, "classes", lists.classes)  # type: ignore[no-any-return]


def kept_transposed(lists: Any) -> Any:
    """``lists.transposed()``, cached by ``_kept``."""
    return _kept(lists, "transposed", lists.transposed)


def keep_transposed(lists: Any, transposed: Any) -> None:
    """Records what ``kept_transposed`` returns, from now on until the lists are written to; None leaves it out.

    While a CUDA graph is captured nothing is recorded, as in ``_kept``."""
    if transposed is not None:
        derived(lists)["transposed"] = transposed


def kept_for_call(lists: Any, lengths: tuple[int, int]) -> Any:
    """The lists in the form that kernels read, with room for every tile of sequences of these lengths; cached by ``_kept``.

    Raises ``ValueError`` if lists on a CPU name a tile that does not exist, or name a tile twice: its keys would count twice.
    """

    def ready() -> Any:
        wide = lists.widened(lengths)
        if lists.device.type == "cpu" and int((wide.classes() != EMPTY).sum()) != int(wide.visited().sum()):
            wide.validate()
        return wide

    return _kept(lists, lengths, ready)


def _kept(lists: Any, what: Any, make: Callable[[], Any]) -> Any:
    """A result computed from ``lists``, cached in ``derived``. While a CUDA graph is captured, which may be replayed after writes to the
    lists, it is computed in the graph."""
    if lists.mask_block_cnt.is_cuda and torch.cuda.is_current_stream_capturing():
        return make()
    known = derived(lists)
    if what not in known:
        known[what] = make()
    return known[what]


def joined(least: Tensor, most: Tensor) -> Tensor:
    """The classes of coarser tiles, from the least and the greatest class of their parts."""
    return torch.where(least == FULL, FULL, torch.where(most == EMPTY, EMPTY, PARTIAL)).to(torch.uint8)


def _batches(grid: Tensor) -> Iterator[slice]:
    step = max(1, _BATCH_TILES // max(grid.shape[-1], 1))
    return (slice(first, first + step) for first in range(0, len(grid), step))


def _zeros(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Zeros on pages that the operating system maps at the first write: most of a long mask's index tensor is never touched."""
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)


def grid_of_lists(
    mask_cnt: Tensor, mask_idx: Tensor, full_cnt: Tensor | None, full_idx: Tensor | None, columns: int | None = None
) -> Tensor:
    """uint8 classes (B, H, M, N) of lists; entries beyond a row's count are not read, and a count below 0 is an empty list.

    columns: N, by default the width of the wider list.

    Does not wait for a GPU, where kernels read a column that does not exist as nothing. Raises ``ValueError`` if lists on a CPU name such a
    column, or if a count exceeds its list's width.
    """
    check_counts("the count of a row's partial blocks", mask_cnt, mask_idx)
    check_counts("the count of a row's full blocks", full_cnt, full_idx)
    columns = max(mask_idx.shape[-1], 0 if full_idx is None else full_idx.shape[-1]) if columns is None else columns
    if has_kernels(mask_idx) and mask_idx.ndim == 4:
        from anyattn.sparsity.kernels.class_grids import classes_of_lists

        both = ((mask_cnt, mask_idx, PARTIAL), (full_cnt, full_idx, FULL))
        return classes_of_lists([(cnt, idx, value) for cnt, idx, value in both if idx is not None], columns)
    lead = mask_idx.shape[:-1]
    classes = torch.zeros(lead.numel(), columns, dtype=torch.uint8, device=mask_idx.device)
    for cnt, idx, value in ((mask_cnt, mask_idx, PARTIAL), (full_cnt, full_idx, FULL)):
        if cnt is None or idx is None:
            continue
        cnt, idx = cnt.reshape(-1), idx.reshape(lead.numel(), idx.shape[-1])
        position = torch.arange(idx.shape[-1], device=idx.device)
        for part in _batches(idx):
            is_listed = position < cnt[part, None]
            if _sees_all(idx):
                _marked(classes[part], is_listed, idx[part], value)
                continue
            row, at = is_listed.nonzero().unbind(1)
            column = idx[part][row, at].to(torch.int64)
            if bool(((column < 0) | (column >= columns)).any()):
                raise ValueError(
                    f"block lists name key tiles {int(column.min())} to {int(column.max())}; wanted 0 to {columns - 1}: make them again"
                )
            classes[part].view(-1)[row * columns + column] = value
    return classes.reshape(*lead, columns)


# ---- varlen batches, in the flat order of RaggedTiles


def ordered_ragged(classes: Tensor, tiles: RaggedTiles, listed: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``ordered`` for uint8 classes (H, total_n): int32 counts (H, total_m) and columns (H, total_n), where each row owns its own tiles.

    Does not wait for a GPU, except for facts about ``tiles`` that the host has not read yet."""
    heads = len(classes)
    counts = torch.zeros(heads, tiles.total_m, dtype=torch.int32, device=classes.device)
    indices = torch.zeros(classes.shape, dtype=torch.int32, device=classes.device)
    for window in tiles.windows(_BATCH_TILES, per_tile=max(heads, 1)):
        part = classes[:, window.tiles]
        hit = part == listed[0] if len(listed) == 1 else part != EMPTY
        begins = tiles.row_begins[window.rows.start : window.rows.stop + 1] - window.tiles.start
        before = torch.nn.functional.pad(hit.cumsum(1, dtype=torch.int32), (1, 0))
        counts[:, window.rows] = before[:, begins[1:]] - before[:, begins[:-1]]
        if _sees_all(hit):
            indices[:, window.tiles] = _moved_up_ragged(hit, before, begins)
            continue
        h, at = hit.nonzero().unbind(1)
        begin = begins[torch.searchsorted(begins, at, right=True) - 1]
        place = begin + before[h, at] - before[h, begin]
        indices[h, window.tiles.start + place] = (at - begin).to(torch.int32)
    return counts, indices


def _moved_up_ragged(hit: Tensor, before: Tensor, begins: Tensor) -> Tensor:
    """``_moved_up`` for rows of different widths: row i owns the tiles from begins[i] on. before: hits before each tile, (H, tiles + 1)."""
    heads, width = hit.shape
    at = torch.arange(width, device=hit.device)
    begin = begins[torch.searchsorted(begins, at, right=True) - 1]
    goal = torch.where(hit, begin + before[:, :-1] - before[:, begin], width)
    column = (at - begin).to(torch.int32).expand(heads, width)
    return torch.zeros(heads, width + 1, dtype=torch.int32, device=hit.device).scatter_(1, goal, column)[:, :width]


def classes_of_ragged(tiles: RaggedTiles, lists: list[tuple[Tensor, Tensor, int]]) -> Tensor:
    """uint8 classes (H, total_n) of flat lists. lists: counts (H, total_m), columns (H, total_n) and the class of the listed tiles.

    Waits as ``ordered_ragged`` does. Raises ``ValueError`` if lists on a CPU name a tile that does not exist.
    """
    classes = torch.zeros(lists[0][1].shape, dtype=torch.uint8, device=tiles.device)
    for window in tiles.windows(_BATCH_TILES, per_tile=max(len(classes), 1)):
        rows = torch.arange(window.rows.start, window.rows.stop, device=tiles.device)
        begins = tiles.row_begins[window.rows.start : window.rows.stop + 1]
        row = rows.repeat_interleave(begins.diff(), output_size=window.tiles.stop - window.tiles.start)
        position = torch.arange(window.tiles.start, window.tiles.stop, device=tiles.device) - tiles.row_begins[row]
        for counts, indices, value in lists:
            if _sees_all(indices):
                known, column = classes[:, window.tiles], indices[:, window.tiles].to(torch.int64)
                # -1 makes torch's scatter raise, as in ``_marked``
                is_outside = (column < 0) | (column >= tiles.num_n[tiles.sequence_of_row[row]])
                goal = torch.where(is_outside, -1, tiles.row_begins[row] - window.tiles.start + column)
                goal = torch.where(position < counts[:, row], goal, known.shape[1])
                known.copy_(torch.cat((known, known.new_zeros(len(known), 1)), 1).scatter_(1, goal, value)[:, :-1])
                continue
            h, at = (position < counts[:, row]).nonzero().unbind(1)
            column = indices[h, at + window.tiles.start].to(torch.int64)
            outside = (column < 0) | (column >= tiles.num_n[tiles.sequence_of_row[row[at]]])
            if bool(outside.any()):
                bad = int(outside.nonzero()[0])
                b, m = int(tiles.sequence_of_row[row[at[bad]]]), int(tiles.row_in_sequence[row[at[bad]]])
                raise ValueError(
                    f"block lists name key tile {int(column[bad])} in row tile {m} of sequence {b}, which has {int(tiles.num_n[b])} key "
                    "tiles; wanted lists of these sequences: make them again"
                )
            classes[h, tiles.row_begins[row[at]] + column] = value
    return classes
