"""Grids of tiles and the form of their lists. Lists are stacked: one allocation for all counts and one for all indices of a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["BLOCK_MASK", "BLOCK_SPARSE", "ListForm", "TileGrid", "lists_of_memory", "lists_of_stacks", "stacked"]


class TileGrid(NamedTuple):
    """The tiles of sequences of equal lengths. lengths: queries and keys. tile: rows and keys of a tile. batch: batch entries and heads."""

    lengths: tuple[int, int]
    tile: tuple[int, int]
    batch: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        return ceil_div(self.lengths[0], self.tile[0]), ceil_div(self.lengths[1], self.tile[1])


class ListForm(NamedTuple):
    """The lists that a caller wants of a grid.

    separate_full: full tiles have lists of their own; else they are listed as partial ones. wants_columns: lists of each column of tiles
    too. has_full_tails: a tail tile is full if its pairs inside the sequences are visible. broadcasts: B and H are 1 if the mask ignores b
    or h. room: the entries that a row's list has room for; None: one for each column.
    """

    separate_full: bool
    wants_columns: bool
    has_full_tails: bool
    broadcasts: bool
    room: int | None = None

    def stack_shapes(self, batch: tuple[int, int], shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
        """The shapes of each stack's counts and indices: (stacked, B, H, lines) and (stacked, B, H, lines, most).

        batch: B and H. shape: rows and columns of tiles. Columns share the rows' stack if there are as many columns as rows, and the rows'
        lists have room for all columns.
        """
        is_joint = self.wants_columns and self.room is None and shape[0] == shape[1]
        many = (1 + is_joint) * (1 + self.separate_full)
        rows = shape if self.room is None else (shape[0], self.room)
        sides = (rows, shape[::-1])[: 1 + (self.wants_columns and not is_joint)]
        return tuple([one for side in sides for one in ((many, *batch, side[0]), (many, *batch, *side))])


BLOCK_MASK, BLOCK_SPARSE = ListForm(True, True, False, False), ListForm(True, False, True, False)


def lists_of_stacks(stacks: Sequence[Tensor], classes: int) -> list[Tensor | None]:
    """Views of stacks, counts and indices alternating, in the order of a block mask's fields; None for full tiles if classes is 1."""
    tensors: list[Tensor | None] = []
    for counts, indices in zip(stacks[::2], stacks[1::2], strict=True):
        for at in range(0, len(counts), classes):
            one = [stack.select(0, at + of_class) for of_class in range(classes) for stack in (counts, indices)]
            tensors += one if classes > 1 else [*one, None, None]
    return tensors


def lists_of_memory(stacks: Sequence[Tensor], classes: int) -> list[Tensor | None]:
    """``lists_of_stacks`` outside of compiled graphs: one ``unbind`` makes all views of a stack in a third of the time."""
    tensors: list[Tensor | None] = []
    for counts, indices in zip(stacks[::2], stacks[1::2], strict=True):
        for count, index in zip(counts.unbind(), indices.unbind(), strict=True):
            tensors += (count, index) if classes > 1 else (count, index, None, None)
    return tensors


def stacked(lists: Sequence[Tensor | None], form: ListForm, grid: TileGrid) -> list[Tensor]:
    """The inverse of ``lists_of_memory``: copies of the lists in stacks."""
    counts, indices = ([t for t in lists[at::2] if t is not None] for at in (0, 1))
    width = 2 * len(counts) // len(form.stack_shapes(grid.batch, grid.shape))
    return [torch.stack(part[at : at + width]) for at in range(0, len(counts), width) for part in (counts, indices)]
