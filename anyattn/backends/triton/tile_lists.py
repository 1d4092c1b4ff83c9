"""The door to ``tile_classes``: the lists of a mask's tiles on a CUDA device, without a wait for it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.backends.triton import generated
from anyattn.backends.triton.emit import packed_scalars, packed_tensors
from anyattn.backends.triton.spans import MOST_INDEX_BITS, MOST_SCALAR_BITS, mask_source
from anyattn.mods.dependence import dependence
from anyattn.mods.ir import Expr
from anyattn.mods.trace import TracedMod

__all__ = ["can_list", "list_tiles"]

_MOST_CHUNK = 1024


class _Mask(NamedTuple):
    """A mask's functions, and what its lists depend on."""

    functions: Any
    row_leaves: int
    column_leaves: int
    sees_b: bool
    sees_h: bool


@lru_cache(maxsize=1024)
def _mask(expr: Expr) -> _Mask:
    source = mask_source(expr)
    deps = dependence(expr)
    functions = generated.load(source.text, f"mask_{expr.key}")
    return _Mask(functions, source.row_leaves, source.column_leaves, any(d.b for d in deps), any(d.h for d in deps))


def can_list(mod: TracedMod, lengths: tuple[int, int]) -> bool:
    """Whether the numbers of this call are of the sizes that the kernels' bounds were written for."""
    limit = 2**MOST_SCALAR_BITS
    return max(lengths) < 2**MOST_INDEX_BITS and all(not isinstance(s, int) or -limit < s < limit for s in mod.scalars)


def list_tiles(
    mod: TracedMod,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    batch: tuple[int, int],
    device: torch.device,
    *,
    wants_columns: bool,
    separate_full: bool,
    has_full_tails: bool,
) -> list[Tensor | None]:
    """Counts and indices of the partial tiles of each row of tiles, then of the full ones, then the same four of each column if wanted.

    int32, (B', H', M) and (B', H', M, N), where B' and H' are 1 if the mask ignores b or h. Ascending; 0 beyond a count. separate_full:
    False lists full tiles as partial ones and leaves their own lists None. has_full_tails: see ``tile_classes.list_tiles``.
    """
    mask = _mask(mod.expr)
    sizes = (batch[0] if mask.sees_b else 1, batch[1] if mask.sees_h else 1)
    tile = (min(tile[0], max(lengths[0], 1)), min(tile[1], max(lengths[1], 1)))
    rows, columns = -(-lengths[0] // tile[0]), -(-lengths[1] // tile[1])
    found = _empty_lists(sizes, rows, columns, device, separate_full)
    if wants_columns:
        found += _empty_lists(sizes, columns, rows, device, separate_full)
    if min(*sizes, rows, columns) == 0:
        return [None if t is None else t.zero_() for t in found]
    _launch(mask, mod, found, lengths, tile, sizes, (rows, columns), has_full_tails)
    return found


def _empty_lists(sizes: tuple[int, int], lines: int, length: int, device: torch.device, separate_full: bool) -> list[Tensor | None]:
    shapes = ((*sizes, lines), (*sizes, lines, length))
    return [torch.empty(s, dtype=torch.int32, device=device) if i < 2 or separate_full else None for i, s in enumerate(shapes * 2)]


def _launch(
    mask: _Mask,
    mod: TracedMod,
    found: list[Tensor | None],
    lengths: tuple[int, int],
    tile: tuple[int, int],
    sizes: tuple[int, int],
    grid: tuple[int, int],
    has_full_tails: bool,
) -> None:
    from anyattn.backends.triton.tile_classes import list_tiles as kernel
    from anyattn.backends.triton.tile_classes import store_hulls

    (rows, columns), count, first = grid, sizes[0] * sizes[1], found[0]
    assert first is not None
    scalars, tensors = packed_scalars(mod.scalars), packed_tensors(tuple(t.detach() for t in mod.tensors))
    numbers = (*lengths, rows, columns, sizes[1], 2 * mask.row_leaves * count * rows)
    hulls = first
    if mask.row_leaves or mask.column_leaves:
        hulls = torch.empty(numbers[-1] + 2 * mask.column_leaves * count * columns, dtype=torch.int64, device=first.device)
        stores = mask.functions.store_row_hulls, mask.functions.store_column_hulls
        store_hulls[rows + columns, count](hulls, scalars, tensors, *numbers, *stores, *tile, _power_of_2(max(tile), 1024))
    lists = [t if t is not None else first for t in found]
    chunk = _power_of_2(max(rows, columns), _MOST_CHUNK)
    block = _power_of_2(tile[0], 32), _power_of_2(tile[1], 128)
    options = (found[2] is not None, has_full_tails)
    functions = (mask.functions.value, mask.functions.verdict)
    kernel[rows + (columns if len(lists) > 4 else 0), count](
        tuple(lists[:4]), tuple(lists[-4:]), hulls, scalars, tensors, *numbers, *functions, *tile, chunk, *block, *options
    )


def _power_of_2(size: int, most: int) -> int:
    """The least power of two that is not less than ``size``, ``most`` at the most."""
    return min(1 << (size - 1).bit_length(), most)
