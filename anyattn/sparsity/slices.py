"""Slices of block masks: the picked positions, and a ``mask_mod`` that counts b, h and q_idx from the slice's beginning; wider lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.algebra import Derived
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.pickling import Recipe
from anyattn.mods.tracing.trace import name_of
from anyattn.sparsity.arguments import length

__all__ = ["as_map", "positions_of", "sliced", "take", "widened"]


def positions_of(name: str, size: int, item: Any, device: torch.device) -> Tensor:
    """The positions that one index picks, int64."""
    everything = torch.arange(size, device=device)
    if isinstance(item, slice):
        return everything[item]
    if isinstance(item, Tensor):
        return everything[item if item.dtype is torch.bool else item.to(device=device, dtype=torch.int64)].reshape(-1)
    if isinstance(item, (list, range)):
        return everything[torch.tensor(list(item), dtype=torch.int64, device=device)]
    at = length(f"{name} index", item, -size)
    if at >= size:
        raise IndexError(f"{name} index is {at}, but this BlockMask has {size}; wanted {-size} to {size - 1}")
    return everything[at].reshape(1)


def take(tensor: Tensor, picks: list[Tensor]) -> Tensor:
    for dim, pick in enumerate(picks):
        if len(pick) != tensor.shape[dim] or not torch.equal(pick, torch.arange(len(pick), device=pick.device)):
            tensor = tensor.index_select(dim, pick)
    return tensor


@without_default_device
def widened(fields: tuple, rows: tuple[Tensor | None, ...], width: int) -> tuple:
    """The fields, with zeros after the entries of those that are ``rows``, up to ``width`` entries."""

    def wide(t: Any) -> Any:
        is_narrow = t is not None and any(t is own for own in rows) and t.shape[-1] < width
        return torch.nn.functional.pad(t, (0, width - t.shape[-1])) if is_narrow else t

    return tuple([wide(t) for t in fields])


def as_map(picked: Tensor | None) -> tuple[int, int] | Tensor | None:
    """The map from positions in the slice to positions in the whole mask: (start, step), a table, or None for the identity."""
    if picked is None or len(picked) == 0:
        return None
    start = int(picked[0])
    step = int(picked[1]) - start if len(picked) > 1 else 1
    if not torch.equal(picked, start + step * torch.arange(len(picked), device=picked.device)):
        return picked
    return None if (start, step) == (0, 1) else (start, step)


def sliced(mask_mod: Callable, b_map: Any, h_map: Any, block_map: Any, block: int) -> Callable:
    """``mask_mod`` with b, h and q_idx counted from a slice's beginning; indices that the slice leaves unchanged are not remapped."""
    for place, mapping in enumerate((b_map, h_map)):
        if mapping is not None:
            mask_mod = _derived(_remapped, mask_mod, place, mapping)
    if block_map is None:
        return mask_mod
    if isinstance(block_map, tuple) and (block_map[1] == 1):
        return _derived(_shifted_rows, mask_mod, block_map[0] * block)
    return _derived(_chosen_rows, mask_mod, block_map, block)


def _derived(make: Callable[..., Callable], mask_mod: Callable, *settings: Any) -> Derived:
    """``make(mask_mod, *settings)``, which can be pickled if ``mask_mod`` can."""
    return Derived(make(mask_mod, *settings), Recipe(_derived, (make, mask_mod, *settings)), name_of(mask_mod))


def _remapped(mask_mod: Callable, place: int, mapping: tuple[int, int] | Tensor) -> Callable:
    if isinstance(mapping, Tensor):
        table = mapping
        if place == 0:
            return lambda b, h, q_idx, kv_idx: mask_mod(table[b], h, q_idx, kv_idx)
        return lambda b, h, q_idx, kv_idx: mask_mod(b, table[h], q_idx, kv_idx)
    start, step = mapping
    if place == 0:
        return lambda b, h, q_idx, kv_idx: mask_mod(b * step + start, h, q_idx, kv_idx)
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h * step + start, q_idx, kv_idx)


def _shifted_rows(mask_mod: Callable, offset: int) -> Callable:
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h, q_idx + offset, kv_idx)


def _chosen_rows(mask_mod: Callable, block_map: tuple[int, int] | Tensor, block: int) -> Callable:
    if isinstance(block_map, Tensor):
        table = block_map
        return lambda b, h, q_idx, kv_idx: mask_mod(b, h, table[q_idx // block] * block + q_idx % block, kv_idx)
    start, step = block_map
    return lambda b, h, q_idx, kv_idx: mask_mod(b, h, (q_idx // block * step + start) * block + q_idx % block, kv_idx)
