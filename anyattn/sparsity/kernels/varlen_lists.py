"""Block lists of a mask over a varlen batch on a CUDA device: launches the kernels of ``classify`` without waiting for the device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.sparsity.kernels.arguments import Lists, SequenceTables, VarlenTileSizes
from anyattn.sparsity.kernels.block_lists import MODULES, OF_HULLS, OF_TILES, as_tuple, constants_of, mask_of, power_of_2, slots_of, way_of
from anyattn.sparsity.kernels.interval_codegen import mask_source
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.jit_source import group
from anyattn.triton_tools.launch import current_device, launch

__all__ = ["Capacity", "Listed", "list_ragged"]

_OF_PLACES = ("TILE_M", "TILE_N", "CHUNK")  # constants of the kernel ``store_places``
_PLACES_CHUNK = 1024  # sequences that ``store_places`` handles at once


class Capacity(NamedTuple):
    """Upper bounds of a batch that the host knows. rows, columns: on all row tiles and key tiles. bound_q, bound_k: on a sequence's queries
    and keys."""

    rows: int
    columns: int
    bound_q: int
    bound_k: int


class Listed(NamedTuple):
    """The result of ``list_ragged``. places: int64 (7, B), ``SequenceTables``. lists: int32 counts (H, rows), indices (H, rows * width)."""

    places: Tensor
    lists: Lists


class _Kernels(NamedTuple):
    """The kernels of one mask over varlen batches."""

    list_tiles: Any
    list_tiles_at_once: Any
    store_hulls: Any


@lru_cache(maxsize=1024)
def _kernels(expr: Expr) -> _Kernels:
    module = jit_source.load("\n\n".join([mask_source(expr).text, *_entries(*slots_of(expr))]), f"ragged_mask_{expr.key}", *MODULES)
    return _Kernels(module.list_ragged_tiles, module.list_ragged_tiles_at_once, module.store_ragged_hulls)


def _entries(scalar_slots: tuple[int, ...], ranks: dict[int, int]) -> list[str]:
    """The source of the kernels to launch, as in ``block_lists``: every captured value is a separate argument."""
    scalars = [f"s{slot}" for slot in scalar_slots]
    tensors = {f"t{slot}": [f"t{slot}_{i}" for i in range(2 * rank)] for slot, rank in ranks.items()}
    strides = [name for names in tensors.values() for name in names]
    sizes = VarlenTileSizes._fields
    captured = ", ".join([*(f"{n}: tl.int32" for n in sizes), *(f"{n}: tl.int64" for n in (*scalars, *strides)), *tensors])
    packed = f"{as_tuple(scalars)}, {as_tuple(as_tuple([t, *names]) for t, names in tensors.items())}, {group(VarlenTileSizes, sizes)}"
    lists_source = group(Lists, Lists._fields)
    plain = [*Lists._fields, "places", "hulls", *sizes, *scalars, *strides, *tensors]
    head = f"_PLAIN = {plain!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\ndef "
    sources = [
        f"{head}store_ragged_hulls(hulls, places, {captured}, {constants_of(OF_HULLS)}):\n"
        f"    classify.store_ragged_hulls(hulls, places, {packed}, store_row_hulls, store_column_hulls, {', '.join(OF_HULLS)})\n"
    ]
    for name, verdict in (("list_ragged_tiles", "verdict"), ("list_ragged_tiles_at_once", "verdict_at_once")):
        sources.append(
            f"{head}{name}({', '.join(Lists._fields)}, places, hulls, {captured}, {constants_of(OF_TILES)}):\n"
            f"    classify.list_ragged_tiles({lists_source}, places, hulls, {packed}, value, {verdict}, {', '.join(OF_TILES)})\n"
        )
    return sources


def list_ragged(mod: TracedMod, lengths: tuple[Tensor, Tensor, Tensor], most: Capacity, tile: tuple[int, int], heads: int) -> Listed:
    """The partial and full tiles of each row of tiles of each sequence.

    lengths: int64 (B,) each, queries, keys and the position of the first query; B is at least 1. most: at least one row and one column.
    heads: 1 if the mask ignores h. The caller has checked ``block_lists.can_list``, and that there are less than 2 ** 31 indices.
    """
    batch, device = len(lengths[0]), lengths[0].device
    width = ceil_div(most.bound_k, tile[1])
    places = torch.empty((len(SequenceTables._fields), batch), dtype=torch.int64, device=device)
    counts = torch.empty((2, heads, most.rows), dtype=torch.int32, device=device).unbind(0)
    indices = torch.empty((2, heads, most.rows * width), dtype=torch.int32, device=device).unbind(0)
    lists = Lists(counts[0], indices[0], counts[1], indices[1])
    with current_device(places.device):
        constants = dict(zip(_OF_PLACES, (*tile, _PLACES_CHUNK), strict=True))
        arguments = [places, *lengths, batch, most.rows, width, most.bound_q, most.bound_k]
        launch(_store_places(), (1, 1, 1), arguments, device, constants, tuple([t.dtype for t in lengths]))
        _launch(mod, places, lists, most, width, tile, heads)
    return Listed(places, lists)


@lru_cache(maxsize=1)
def _store_places() -> Any:
    numbers = ("batch: tl.int32", "most_rows: tl.int32", "width: tl.int32", "bound_q: tl.int32", "bound_k: tl.int32")
    names = ["places", "seqlens_q", "seqlens_k", "q_first", *(n.split(":")[0] for n in numbers)]
    source = (
        f"_PLAIN = {names!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\n"
        f"def store_places({', '.join([*names[:4], *numbers])}, {constants_of(_OF_PLACES)}):\n"
        f"    classify.store_places({', '.join([*names, *_OF_PLACES])})\n"
    )
    return jit_source.load(source, "places", *MODULES).store_places


def _launch(mod: TracedMod, places: Tensor, lists: Lists, most: Capacity, width: int, tile: tuple[int, int], heads: int) -> None:
    mask, kernels, batch = mask_of(mod.expr), _kernels(mod.expr), places.shape[1]
    tensors = [t.detach() if t.requires_grad else t for t in (mod.tensors[slot] for slot in mask.tensor_slots)]
    strides = [n for t in tensors for pair in zip(t.stride(), t.shape, strict=True) for n in pair]
    numbers = (batch, most.rows, most.columns, width, 2 * mask.row_leaves * heads * most.rows)
    captured = (*numbers, *bits_of_numbers([mod.scalars[slot] for slot in mask.scalar_slots]), *strides, *tensors)
    known = tuple([t.dtype for t in tensors])  # Triton specialises on no number and on no alignment
    kernel, hulls = kernels.list_tiles, places
    chunk, is_at_once = way_of(mask, tile, width)
    if is_at_once:
        kernel = kernels.list_tiles_at_once
    elif mask.row_leaves + mask.column_leaves:
        size = numbers[-1] + 2 * mask.column_leaves * heads * most.columns
        hulls = torch.empty(size, dtype=torch.int64, device=places.device)
        constants = dict(zip(OF_HULLS, (*tile, power_of_2(max(tile), 1024)), strict=True)) | mask.options
        grid = (most.rows + most.columns, heads, 1)
        launch(kernels.store_hulls, grid, [hulls, places, *captured], places.device, constants, known)
    values = (*tile, chunk, power_of_2(tile[0], 32), power_of_2(tile[1], 128))
    constants = dict(zip(OF_TILES, values, strict=True)) | mask.options
    launch(kernel, (most.rows, heads, 1), [*lists, places, hulls, *captured], places.device, constants, known)
