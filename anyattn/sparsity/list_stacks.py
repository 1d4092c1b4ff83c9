"""Stacked tile lists: one allocation for all counts and one for all indices of a shape, by class (partial, full) and direction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["lists_of_memory", "lists_of_stacks", "stack_shapes"]


def stack_shapes(
    sizes: tuple[int, int], grid: tuple[int, int], classes: int, wants_columns: bool
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The shapes (counts, indices) of each stack: (stacked, B, H, lines) and (stacked, B, H, lines, most).

    sizes: B and H. grid: rows and columns of tiles. classes: 2 if full tiles have their own lists. wants_columns: whether each column of
    tiles has lists too; they share the rows' stack if there are as many columns as rows.
    """
    is_joint = wants_columns and grid[0] == grid[1]
    many = (1 + is_joint) * classes
    sides = (grid, grid[::-1])[: 1 + (wants_columns and not is_joint)]
    return [((many, *sizes, lines), (many, *sizes, lines, most)) for lines, most in sides]


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
